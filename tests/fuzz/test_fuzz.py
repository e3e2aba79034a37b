"""Damaged files are read or refused with one line, whatever is damaged; benchmarks/fuzz.py runs 10,000 cases."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.fuzz.harness import Ended, cases, make_material, run, undamaged
from tests.fuzz.readers import READERS, WEIGHTS, Reader

SEED = 1


def judged(readers: str, count: int, folder: Path) -> list[Ended]:
    """So many cases of one of `SETS`, by a process without threads, which may fork."""
    done = warm.run(print_cases, readers, count, folder, folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


def print_cases(readers: str, count: int, folder: Path) -> int:
    """Print how cases ended, a line each: first one of each reader without damage, then damaged ones."""
    chosen = SETS[readers]
    make_material(chosen, folder)
    for some, number in ((undamaged(chosen), len(chosen)), (chosen, count)):
        for one in run(some, cases(some, number, SEED), folder):
            sys.stdout.write(json.dumps([one.reader, one.seed, one.how]) + "\n")
    return 0


@pytest.mark.parametrize(
    ("readers", "count"),
    [("READERS", len(READERS)), pytest.param("READERS", 10_000, marks=pytest.mark.slow), ("WEIGHTS", 30)],
)
@pytest.mark.timeout(3600)
def test_damaged_files_are_read_or_refused_with_one_line(readers: str, count: int, tmp_path: Path) -> None:
    ended, whole = judged(readers, count, tmp_path), sorted(SETS[readers])
    assert len(ended) == len(whole) + count
    assert [one for one in ended if one.is_fault] == []
    assert [one.reader for one in ended[: len(whole)] if one.how == "read"] == whole, "without damage"
    assert 0.1 * count < sum(one.how == "read" for one in ended[len(whole) :]) < 0.9 * count


def _abort(folder: Path) -> None:
    os.abort()


def _exhaust(folder: Path) -> None:
    bytearray(5 * 10**9)


def _fail(folder: Path) -> None:
    raise KeyError(folder)


BROKEN = {
    name: Reader(lambda folder: None, lambda folder, draw: None, read)
    for name, read in {"abort": _abort, "exhaust": _exhaust, "fail": _fail, "read": lambda folder: None}.items()
}
SETS = {"READERS": READERS, "WEIGHTS": WEIGHTS, "BROKEN": BROKEN}


def test_the_harness_sees_aborts_exceptions_and_large_memory_and_goes_on(tmp_path: Path) -> None:
    ended = judged("BROKEN", 4, tmp_path)
    found = [(one.reader, one.how.partition(" at ")[0]) for one in ended]
    assert found == 2 * [
        ("abort", "fault: its process ended with -6"),
        ("exhaust", "fault: MemoryError: "),
        ("fail", "fault: KeyError: PosixPath('.')"),
        ("read", "read"),
    ]
