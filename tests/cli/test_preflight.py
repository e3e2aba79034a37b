"""`penstock preflight` from the outside: what it prints, its exit codes, and ranks that find each other or do not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.cli import preflight
from penstock.tune.preflight.host import PreflightCheck, read_disk
from tests.cli import answers


@pytest.fixture(autouse=True)
def a_small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file, and as much room on every machine."""
    monkeypatch.setattr(preflight, "read_disk", lambda folder: replace(read_disk(folder, 1 << 20), free_bytes=10**12))


printed = partial(answers.printed, "preflight --processes 1")
answer = partial(answers.told_as_json, "preflight --processes 1")


def test_every_area_is_looked_at_and_nothing_is_left_behind() -> None:
    found = answer()
    assert {one["area"] for one in found["checks"]} == {
        "versions", "environment", "host", "disk", "devices", "transfers",
    }  # fmt: skip
    assert found["passed"]
    assert sum(found["counts"].values()) == len(found["checks"])
    assert set(found["checks"][0]) == {"area", "name", "status", "got", "expected", "fix"}
    assert list(Path().iterdir()) == []
    *lines, last, proposed = printed().splitlines()
    assert any(line.startswith("ok       versions     Python") for line in lines)
    assert " 0 failed on " in last and proposed == "next:  penstock train debug"
    assert "\x1b" not in "".join(lines)


def test_what_failed_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = PreflightCheck(area="disk", name="room", status="failed", got="none", expected="some", fix="buy a disk")
    monkeypatch.setattr(preflight, "judge_disk", lambda *_: [bad])
    text = printed(code=1)
    assert "failed   disk         room             none\n" in text
    assert f"\n{' ' * 39}expected: some\n{' ' * 39}fix: buy a disk\n" in text


def test_a_variable_that_hurts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    (found,) = (one for one in answer()["checks"] if one["name"] == "NCCL_P2P_DISABLE")
    assert (found["status"], found["fix"]) == ("warning", "unset NCCL_P2P_DISABLE")


def test_a_run_that_is_named_says_how_much_room_its_checkpoints_need() -> None:
    found = answer("deepseek-v3", "checkpoint.keep=9", code=1)
    (room,) = (one for one in found["checks"] if one["name"] == "room")
    # 671 B parameters and a layer of multi-token prediction, 12 bytes each
    assert room["expected"].endswith("10 checkpoints of 8,191.6 GB")


@pytest.mark.slow
def test_ranks_find_each_other_and_are_compared_with_a_file() -> None:
    """The whole of it, in a process of its own: two ranks over gloo, and a file that promises too much."""
    file = Path(preflight.__file__).parents[1] / "base/hardware_data/h200.toml"
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "preflight", "--hardware", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert found["sums over ranks"]["got"] == "right on all 2"
    assert found["all-gather"]["status"] == "failed", "gloo is slower than the links of an H200"
    assert "times that" in found["all-gather"]["expected"]
    assert done.returncode == 1


def test_ranks_that_do_not_come_to_an_end_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "run_processes", lambda *_: 1)  # the exit code of a lost rank
    found = answers.told_as_json("preflight --processes 2", code=1)
    (broken,) = (one for one in found["checks"] if one["status"] == "failed")
    assert (broken["area"], broken["name"]) == ("transfers", "ranks together")
