"""The machine around the GPUs, by trees of files as Linux shows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.tune.preflight.host import DiskFacts, HostFacts, judge_disk, judge_host, read_disk, read_host

GIB = 1 << 30
EIGHT_GPUS = HostFacts(
    gpus=8,
    gpu_bytes=8 * 140 * GIB,
    cores=192,
    numa_nodes=2,
    numa_balancing=False,
    free_bytes=2000 * GIB,
    open_files=1 << 20,
    locked_bytes=None,  # unlimited
    has_infiniband=True,
    shared_bytes=64 * GIB,
    governor="performance",
    clock_is_kept=True,
)
LAPTOP = replace(EIGHT_GPUS, gpus=0, gpu_bytes=0, cores=4, numa_nodes=1, free_bytes=6 * GIB, open_files=1024)
LAPTOP = replace(LAPTOP, locked_bytes=8 << 20, has_infiniband=False, shared_bytes=4 * GIB, governor="powersave")


def test_a_good_node_and_a_laptop_pass() -> None:
    without_infiniband = replace(EIGHT_GPUS, locked_bytes=64 << 10, has_infiniband=False)  # which alone needs it
    for facts in (EIGHT_GPUS, LAPTOP, without_infiniband):
        assert [one for one in judge_host(facts) if one.status != "ok"] == []
    assert read_host(0, 0).cores >= 1, "this machine can be read"


@pytest.mark.parametrize(
    ("name", "changes", "status"),
    [
        ("cores", {"cores": 4}, "failed"),
        ("NUMA balancing", {"numa_balancing": True}, "warning"),
        ("memory", {"free_bytes": 100 * GIB}, "warning"),  # less than half of the GPUs'
        ("memory", {"free_bytes": GIB // 2}, "failed"),
        ("open files", {"open_files": 256}, "failed"),
        ("locked memory", {"locked_bytes": 64 << 10}, "failed"),
        ("shared memory", {"shared_bytes": 2 * GIB}, "warning"),
        ("shared memory", {"shared_bytes": 64 << 20}, "failed"),
        ("clock of cores", {"governor": "powersave"}, "warning"),
        ("time", {"clock_is_kept": False}, "warning"),
    ],
)
def test_what_a_node_lacks_is_told_with_how_to_mend_it(name: str, changes: dict[str, object], status: str) -> None:
    (check,) = (one for one in judge_host(replace(EIGHT_GPUS, **changes)) if one.status != "ok")  # type: ignore[arg-type]
    assert (check.name, check.status) == (name, status) and check.expected and check.fix


def test_what_is_not_known_is_left_out() -> None:
    unknown = replace(LAPTOP, free_bytes=None, shared_bytes=None, governor="", clock_is_kept=None, numa_nodes=0)
    assert {one.name for one in judge_host(replace(unknown, open_files=None))} == {"cores", "open files"}


def test_facts_are_read_from_the_system(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:  100 kB\nMemAvailable:    8388608 kB\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node1/cpulist": "2-3\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
        "sys/class/infiniband/mlx5_0/board_id": "x\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",  # one core
        "dev/shm/x": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = read_host(8, 3 * GIB, tmp_path)
    assert (facts.gpus, facts.gpu_bytes, facts.cores, facts.numa_nodes) == (8, 3 * GIB, 1, 2)
    assert (facts.numa_balancing, facts.free_bytes, facts.governor) == (True, 8 * GIB, "schedutil")
    assert facts.has_infiniband and facts.shared_bytes


GOOD = DiskFacts(folder=Path("/runs"), free_bytes=10**12, written=2e9, read=4e9)


def wrong_disk(facts: DiskFacts, checkpoint_bytes: int = 0, kept: int = 0) -> dict[str, tuple[str, str]]:
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


def test_room_is_asked_for_what_is_kept_and_what_is_written() -> None:
    assert wrong_disk(GOOD) == wrong_disk(GOOD, checkpoint_bytes=10**11, kept=3) == {}
    assert wrong_disk(replace(GOOD, written=20e6))["speed"] == ("warning", ">= 100 MB/s")
    assert wrong_disk(GOOD, checkpoint_bytes=4 * 10**11, kept=2) == {
        "room": ("warning", ">= 1,200 GB: 3 checkpoints of 400.0 GB")
    }
    assert wrong_disk(GOOD, checkpoint_bytes=2 * 10**12, kept=1)["room"][0] == "failed"
    assert wrong_disk(replace(GOOD, free_bytes=10**9))["room"] == ("warning", ">= 10 GB")
    (speed,) = (one for one in judge_disk(GOOD, checkpoint_bytes=10**11, kept=1) if one.name == "speed")
    assert speed.got.endswith("a checkpoint of 100.0 GB by one writer in 50 s")


@pytest.mark.parametrize(("seconds", "way"), [(30.0, "ahead of"), (-30.0, "behind")])
def test_a_file_server_with_another_time_is_a_warning(seconds: float, way: str) -> None:
    (check,) = (one for one in judge_disk(replace(GOOD, ahead_seconds=seconds)) if one.name == "its clock")
    assert check.got == f"30.0 s {way} this machine's"
