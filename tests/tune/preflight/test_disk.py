"""The disk where runs are kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.tune.preflight.host import DiskFacts, judge_disk, read_disk

GOOD = DiskFacts(folder=Path("/runs"), free_bytes=10**12, written=2e9, read=4e9)


def wrong(facts: DiskFacts, checkpoint_bytes: int = 0, kept: int = 0) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.expected) for one in judge_disk(facts, checkpoint_bytes, kept) if one.fix}


def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_will_be(tmp_path: Path) -> None:
    facts = read_disk(tmp_path / "runs" / "deep", size=1 << 20)
    assert facts.folder == tmp_path
    assert (facts.trouble, facts.ahead_seconds) == ("", pytest.approx(0, abs=1))
    assert min(facts.free_bytes, facts.written, facts.read) > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind, and nothing is made"


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("penstock.tune.preflight.host.tempfile.NamedTemporaryFile", refuse)
    (check,) = judge_disk(read_disk(tmp_path))
    assert (check.status, check.got) == ("failed", "Permission denied")


def test_a_good_disk_passes() -> None:
    assert wrong(GOOD) == {}
    assert wrong(GOOD, checkpoint_bytes=10**11, kept=3) == {}


def test_room_is_asked_for_what_is_kept_and_what_is_written() -> None:
    assert wrong(GOOD, checkpoint_bytes=4 * 10**11, kept=2) == {
        "room": ("warning", ">= 1,200 GB: 3 checkpoints of 400.0 GB")
    }
    assert wrong(GOOD, checkpoint_bytes=2 * 10**12, kept=1)["room"][0] == "failed"
    assert wrong(replace(GOOD, free_bytes=10**9))["room"] == ("warning", ">= 10 GB")


def test_the_time_of_a_checkpoint_is_told() -> None:
    (speed,) = (one for one in judge_disk(GOOD, checkpoint_bytes=10**11, kept=1) if one.name == "speed")
    assert speed.got.endswith("a checkpoint of 100.0 GB by one writer in 50 s")


def test_a_slow_disk_is_a_warning() -> None:
    assert wrong(replace(GOOD, written=20e6))["speed"] == ("warning", ">= 100 MB/s")


@pytest.mark.parametrize(("seconds", "way"), [(30.0, "ahead of"), (-30.0, "behind")])
def test_a_file_server_with_another_time_is_a_warning(seconds: float, way: str) -> None:
    (check,) = (one for one in judge_disk(replace(GOOD, ahead_seconds=seconds)) if one.name == "its clock")
    assert check.got == f"30.0 s {way} this machine's"
