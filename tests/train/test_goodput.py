"""Where the wall clock of a run goes, over processes that end, are killed, and make steps again."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.base.errors import RunFolderError
from penstock.train import goodput as goodput_module
from penstock.train import loop
from penstock.train.checkpoint import CheckpointStore
from penstock.train.goodput import BEAT, EVERY, KINDS, GoodputLedger, goodput, process_begin, wall_seconds
from penstock.train.loop import Progress, RunHooks, open_store, train_run
from penstock.train.metrics import record
from penstock.train.run_folder import RunFolder
from penstock.train.setup import prepare
from penstock.train.step import StopRequest
from tests.train.tiny_run import ENVIRONMENT, Recorder, step_report, tiny_run

BEGIN = 1_000_000.0
NAMES = ("time", "monotonic", "clock_gettime", "CLOCK_BOOTTIME")


class Clock:
    """The time of a run that is played; the clock of the system is `ahead` of it."""

    CLOCK_BOOTTIME = 7

    def __init__(self) -> None:
        self.now = BEGIN
        self.ahead = 0.0

    def time(self) -> float:
        return self.now + self.ahead

    def monotonic(self) -> float:
        return self.now - BEGIN + 7

    def clock_gettime(self, clock: int) -> float:
        del clock
        return self.up()

    def up(self) -> float:
        return self.now - BEGIN + 50


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(goodput_module, "time", SimpleNamespace(**{name: getattr(found, name) for name in NAMES}))
    return found


def play(ledger: GoodputLedger, clock: Clock, kind: Any, seconds: float) -> None:
    ledger.enter(kind)
    clock.now += seconds


def step(ledger: GoodputLedger, clock: Clock, number: int, training: float = 1.0) -> None:
    play(ledger, clock, "data", 0.125)
    play(ledger, clock, "training", training)
    ledger.enter("other")
    ledger.stepped(number)


def save(ledger: GoodputLedger, clock: Clock) -> None:
    play(ledger, clock, "checkpoint", 0.5)
    ledger.enter("other")
    ledger.flush()


def first_process(path: Path, clock: Clock) -> GoodputLedger:
    """Eight steps, of which the first compiles; a checkpoint after the fifth."""
    ledger = GoodputLedger(path, 0, begin=clock.time())
    clock.now += 20
    for number in range(1, 9):
        step(ledger, clock, number, training=5.0 if number == 1 else 1.0)
        if number == 5:
            play(ledger, clock, "evaluation", 2.0)
            save(ledger, clock)
    return ledger


FIRST = {"start": 20.0, "data": 1.0, "training": 8.0, "compile": 4.0, "evaluation": 2.0, "checkpoint": 0.5}


def test_each_moment_of_a_process_has_one_kind(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "goodput.jsonl"
    ledger = first_process(path, clock)
    assert ledger.seconds() == FIRST
    ledger.close()
    assert wall_seconds(path) == FIRST
    assert sum(FIRST.values()) == clock.now - BEGIN
    assert goodput(FIRST) == 8.0 / 35.5
    assert goodput({}) is None


def test_steps_that_are_made_again_are_lost_and_time_between_processes_is_queued_or_down(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "goodput.jsonl"
    first_process(path, clock)
    killed = clock.now  # three steps after its checkpoint
    os.utime(path, (killed, killed))
    clock.now += 100
    ledger = GoodputLedger(path, 5, job_begin=killed + 60, begin=clock.now - 10)
    for number in range(6, 11):
        step(ledger, clock, number)
    told = ledger.seconds()
    expected = {
        "training": 5.0 + 5.0,
        "data": 5 * 0.125 + 5 * 0.125,  # of the lost steps it is in `lost`
        "compile": 4.0,
        "evaluation": 2.0,
        "checkpoint": 0.5,
        "start": 30.0,
        "lost": 3 * 1.125,
        "queued": 60.0,
        "down": 30.0,
    }
    assert told == pytest.approx(expected)
    assert list(told) == [kind for kind in KINDS if kind in told], "in the order of the table"
    assert sum(told.values()) == pytest.approx(clock.now - BEGIN)
    ledger.close()
    assert wall_seconds(path) == pytest.approx(expected)


@pytest.mark.parametrize("later", [1e-3, EVERY + 1, 1e6, -5.0])
def test_the_time_of_a_copy_or_of_a_write_is_no_lost_time(later: float, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "goodput.jsonl"
    first_process(path, clock).close()
    os.utime(path, (clock.now + later, clock.now + later))
    clock.now += 100
    assert GoodputLedger(path, 8, begin=clock.now).seconds() == FIRST | {"down": 100.0}


def test_lost_steps_may_be_those_of_several_processes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "goodput.jsonl"
    first_process(path, clock).close()
    for number in (6, 7):  # a restart that loses its step, too
        second = GoodputLedger(path, 5, begin=clock.now)
        step(second, clock, 6, training=1.0 + number / 1e3)
        second.close()
    third = GoodputLedger(path, 2, begin=clock.now)  # the checkpoint of step 5 was damaged
    assert third.seconds()["lost"] == pytest.approx(6.0 + 1.006 + 1.007)
    assert third.seconds()["training"] == 2.0


@pytest.mark.parametrize("boots", ["same", "other", "unknown"])
def test_a_clock_that_was_ahead_for_a_while_changes_nothing(
    boots: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "right.jsonl", tmp_path / "ahead.jsonl"]
    for path, year in zip(paths, (0.0, 3e7), strict=True):
        clock.now = BEGIN
        for process, ahead in enumerate((0.0, year, 0.0, 0.0)):
            names = {"same": "boot", "other": f"boot {process}", "unknown": ""}
            monkeypatch.setattr(goodput_module, "_boot", lambda name=names[boots]: name)
            clock.ahead = ahead
            ledger = GoodputLedger(path, 4 * process, begin=clock.time())
            clock.now += 2
            for number in range(1, 5):
                step(ledger, clock, 4 * process + number)
                clock.ahead += year / 8  # while it trains, too
            told = ledger.seconds()
            ledger.close()
            os.utime(path, (clock.now, clock.now))
            clock.now += 100
    right, found = map(wall_seconds, paths)
    assert right == told == {"training": 16.0, "data": 2.0, "start": 8.0, "down": 300.0}
    assert found == pytest.approx(right)


def test_a_clock_that_is_set_once_matters_to_no_run_on_the_same_boot(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "goodput.jsonl"
    clock.ahead = -1e6  # of a machine that has not asked for the time yet
    first_process(path, clock).close()
    clock.now, clock.ahead = clock.now + 100, 0.0
    assert GoodputLedger(path, 8, begin=clock.now).seconds() == FIRST | {"down": 100.0}


def test_a_step_that_an_error_ended_is_lost(tmp_path: Path, clock: Clock) -> None:
    ledger = first_process(tmp_path / "goodput.jsonl", clock)
    play(ledger, clock, "data", 0.5)
    play(ledger, clock, "training", 3.0)
    ledger.close()
    assert ledger.seconds() == FIRST | {"data": 1.5, "lost": 3.0}


def test_the_file_has_a_line_for_each_ten_seconds_and_its_time_is_that_of_the_last_step(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "goodput.jsonl"
    ledger = GoodputLedger(path, 0, begin=clock.now)
    for number in range(1, 1001):
        step(ledger, clock, number, training=0.125)
    lines = path.read_text().splitlines()
    assert len(lines) <= 1 + 3 + 250 / EVERY
    assert clock.now - path.stat().st_mtime <= BEAT
    assert all(len(line) < 200 for line in lines)


@pytest.mark.parametrize("damage", ["", '{"end": 1', '{"end": "x", "step": 1, "seconds": {}}\n', "[]\n", "\x00\n"])
def test_damaged_lines_are_left_out(damage: str, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "goodput.jsonl"
    first_process(path, clock).close()
    with path.open("a") as file:
        file.write(damage)
    os.utime(path, (clock.now, clock.now))
    assert wall_seconds(path) == FIRST
    assert GoodputLedger(path, 8, begin=clock.now).seconds() == FIRST
    assert wall_seconds(tmp_path / "none.jsonl") == {}


def test_ranks_without_a_file_keep_the_time_and_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, clock: Clock
) -> None:
    assert GoodputLedger(None, 3, begin=clock.now).seconds() == {}
    with pytest.raises(RunFolderError, match="cannot write"):
        GoodputLedger(tmp_path / "none" / "goodput.jsonl", 0, begin=clock.now)


def test_a_process_knows_when_it_began() -> None:
    used = time.process_time()  # of all threads together
    assert time.time() - 24 * 3600 < process_begin() <= time.time() - min(used, 0.01)


def test_a_run_adds_up_to_the_wall_clock_by_kind(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(seconds: float, place: Any, name: str) -> None:
        whole = getattr(place, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            clock.now += seconds
            return whole(*arguments, **options)

        monkeypatch.setattr(place, name, timed)

    run = tiny_run(tmp_path)  # four steps; evaluations after 1, 2 and 4, checkpoints after 2 and 4
    session, folder, told = prepare(run, ENVIRONMENT), RunFolder(tmp_path), Recorder()
    takes(0.5, loop, "evaluate")
    takes(0.25, CheckpointStore, "save")
    takes(0.125, session.state.batches, "next_batch")
    takes(1.0, loop, "train_step")
    takes(0.0625, told, "stepped")
    ledger = GoodputLedger(folder.goodput, 0, begin=clock.now)
    clock.now += 3
    with StopRequest() as stop:
        store = open_store(run, folder)
        train_run(session, folder, store, Progress(), [told], stop, RunHooks(ledger=ledger))
    assert wall_seconds(folder.goodput) == {
        "start": 3.0, "data": 0.5, "training": 4.0, "evaluation": 1.5, "checkpoint": 0.5, "other": 0.25,
    }  # fmt: skip
    last = record(told.reports[-1])
    assert last["goodput"] == goodput(last["wall_seconds"]) == 4.0 / (9.75 - 0.0625 - 0.25)  # before the last save
    lines = [json.loads(line) for line in folder.goodput.read_text().splitlines()]
    assert [line["step"] for line in lines if "end" in line] == [1, 2, 2, 3, 4, 4]


def test_metrics_without_a_ledger_have_null() -> None:
    line = record(step_report(1))
    assert line["goodput"] is None and line["wall_seconds"] is None
    line = record(step_report(1, wall_seconds={"training": 3.0, "start": 1.0}))
    assert (line["goodput"], line["wall_seconds"]) == (0.75, {"training": 3.0, "start": 1.0})
