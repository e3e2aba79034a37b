"""What a search looks at before its first trial, with commands that are made up."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.base.errors import DeviceError
from penstock.cli.preflight import print_checks
from penstock.parallel.launch.environment import read_environment
from penstock.plan.hardware_file import load_hardware, write_hardware
from penstock.tune.look import FRESH_SECONDS, Ground, cluster_here, faults
from penstock.tune.preflight.host import PreflightCheck, fine
from penstock.tune.trial_ranks import RunningRanks
from tests.cli import answers


def said(*checks: PreflightCheck) -> str:
    """What `preflight --json` prints of its checks, below a line of another program."""
    environment = read_environment({})
    return "a warning of NCCL\n" + answers.written(partial(print_checks, checks, environment, as_json=True))


SAID = said(
    fine("host", "cores", "2"),
    PreflightCheck("transfers", "sums over ranks", "failed", "wrong on 1 of 2", "right on all"),
    PreflightCheck("host", "time", "warning", "not synchronized"),
)


class Ended:
    """Ranks that have ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def end(self) -> None:
        """Nothing runs."""


class Starter:
    """Says what it is asked for, and writes a hardware file if that is a calibration."""

    def __init__(self, said: str, code: int) -> None:
        self.said, self.code, self.asked = said, code, list[tuple[str, int]]()

    def start(self, arguments: Sequence[str], processes: int, output: Path) -> RunningRanks:
        self.asked.append((arguments[0], processes))
        output.write_text(self.said, encoding="utf-8")
        if arguments[0] == "calibrate" and not self.code:
            write_hardware(Path(arguments[arguments.index("--output") + 1]), load_hardware("H200"), [])
        return Ended(self.code)


def ground(folder: Path, starter: Starter, ranks: int = 4, local: int = 4) -> Ground:
    return Ground(starter=starter, cache=folder / "cache", ranks=ranks, local_ranks=local, on_gpu=False)


def test_checks_that_failed_are_told_and_believed_for_some_time(tmp_path: Path) -> None:
    starter = Starter(SAID, 1)
    there = ground(tmp_path, starter)
    for _ in range(2):
        assert faults(there) == ("transfers sums over ranks wrong on 1 of 2",)
    assert starter.asked == [("preflight", 4)]
    (found,) = (tmp_path / "cache").glob("preflight-*.json")
    old = time.time() - FRESH_SECONDS - 60
    os.utime(found, (old, old))
    assert faults(there) == ("transfers sums over ranks wrong on 1 of 2",)
    assert len(starter.asked) == 2


def test_a_preflight_that_breaks_is_a_fault_and_is_not_believed(tmp_path: Path) -> None:
    starter = Starter("error: no such device\n", 2)
    for _ in range(2):
        assert faults(ground(tmp_path, starter)) == ("preflight ended with exit code 2: error: no such device",)
    assert len(starter.asked) == 2


def test_a_machine_is_calibrated_once_with_all_of_its_ranks(tmp_path: Path) -> None:
    starter = Starter("", 0)
    there = ground(tmp_path, starter, ranks=4, local=2)
    for _ in range(2):
        cluster = cluster_here(there, None)
        assert (cluster.devices, cluster.nodes, cluster.hardware.node.devices) == (4, 2, 2)
    assert starter.asked == [("calibrate", 4)]
    assert (tmp_path / "cache").glob("hardware-*-2x2.toml")


def test_a_named_chip_is_not_calibrated(tmp_path: Path) -> None:
    starter = Starter("", 0)
    assert cluster_here(ground(tmp_path, starter), "H200").hardware.name == "H200"
    assert starter.asked == []


def test_a_calibration_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="calibration failed: error: no room; fix: penstock calibrate --output"):
        cluster_here(ground(tmp_path, Starter("error: no room\n", 2)), None)


@pytest.mark.parametrize(("driver", "kept"), [(85_000_000_000, True), (150_100_000_000, False), (0, False)])
def test_no_device_has_more_memory_than_its_driver_says(tmp_path: Path, driver: int, kept: bool) -> None:
    there = replace(ground(tmp_path, Starter("", 0)), memory_bytes=driver)
    named = load_hardware("H200").memory.capacity_bytes
    assert cluster_here(there, "H200").hardware.memory.capacity_bytes == (driver if kept else named)


@pytest.mark.parametrize(("host", "kept"), [(512 * 10**9, True), (2**41, False), (0, False)])
def test_no_device_has_more_of_the_host_than_there_is(tmp_path: Path, host: int, kept: bool) -> None:
    there = replace(ground(tmp_path, Starter("", 0), ranks=4, local=4), host_bytes=host)
    named = load_hardware("H200").host_link.memory_bytes
    assert cluster_here(there, "H200").hardware.host_link.memory_bytes == (host // 4 if kept else named)
