"""Late ranks are named with their cause, from figures that are made by hand and on ranks that are slowed."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.base.spans import Span
from penstock.config.run import Checkpoint
from penstock.parallel import spans
from penstock.parallel.launch.environment import Environment
from penstock.parallel.spans import Stopwatch
from penstock.train import loop, setup, stragglers
from penstock.train.loop import Progress, RunHooks, open_store, train_run
from penstock.train.passes import forward_backward
from penstock.train.run_folder import RunFolder
from penstock.train.setup import prepare
from penstock.train.step import StopRequest
from penstock.train.stragglers import LATE, WARM_UP, WINDOW, RankPulse, StragglerWatch
from tests.distributed.pool import Pool
from tests.train.tiny_run import TRAINING, Recorder, tiny_run

STEP = 1.0
USUAL = RankPulse(data=0.01, work=0.7, host=0.4, clock=1700.0)


def told(*pulses: RankPulse, steps: int = WARM_UP + 2 * WINDOW, step: float = STEP) -> list[str]:
    watch = StragglerWatch(lambda rank: f"node-{rank // 2}")
    return [line for _ in range(steps) for line in watch.add(step, pulses)]


CAUSES = {
    "data": (USUAL._replace(data=0.31, work=1.0), "0.3 s of a step of 1 s", "cause: data, its rows take 0.31 s"),
    "clock": (
        USUAL._replace(work=0.9, clock=1200.0),
        "0.2 s of a step of 1 s",
        "cause: GPU clock, 1,200 MHz, 1,700 MHz in the median",
    ),
    "host": (USUAL._replace(work=0.9, host=0.89), "0.2 s of a", "cause: host, its passes take 0.89 s to launch"),
    "computing": (USUAL._replace(work=0.9), "0.2 s of a step", "cause: computing, with the clock of the others"),
}


@pytest.mark.parametrize(("late", "share", "cause"), CAUSES.values(), ids=CAUSES)
def test_a_rank_whose_part_of_the_step_is_longer_is_named_with_machine_time_and_cause(
    late: RankPulse, share: str, cause: str
) -> None:
    (line,) = told(USUAL, USUAL, USUAL, late)
    assert line.startswith(f"rank 3 on node-1 is late: {share}")
    assert cause in line


def test_ranks_that_wait_for_each_other_work_equally_long_but_one_host_never_waits() -> None:
    equal = USUAL._replace(work=0.95)
    assert told(equal, equal, equal) == []
    (line,) = told(equal, equal._replace(host=0.96), equal)
    assert line.startswith("rank 1 on node-0 is late: 0.56 s of a step of 1 s") and "cause: host" in line
    assert told(equal, equal._replace(host=0.7), equal) == [], "it launches ahead of its device"


def test_a_low_clock_is_told_though_no_time_shows_it() -> None:
    (line,) = told(USUAL, USUAL._replace(clock=1500.0), USUAL)
    assert line.startswith("rank 1 on node-0 is late: median of 20 steps; cause: GPU clock, 1,500 MHz")
    assert told(USUAL, USUAL._replace(clock=1600.0), USUAL) == []
    unknown = USUAL._replace(clock=0.0)
    assert told(unknown, unknown, unknown) == []


def test_small_differences_single_ranks_first_steps_and_single_slow_steps_are_not_told() -> None:
    late = USUAL._replace(work=0.9)
    assert told(USUAL, USUAL, USUAL._replace(work=0.7 + 0.9 * LATE)) == []
    assert told(late) == []
    assert told(USUAL, USUAL, late, steps=WARM_UP + WINDOW - 1) == []
    assert told(USUAL, USUAL, USUAL._replace(work=0.8), steps=WARM_UP + 2 * WINDOW - 1) == [], "in one window only"
    assert len(told(USUAL, USUAL, USUAL._replace(work=0.8))) == 1
    watch = StragglerWatch(lambda rank: "here")
    for step in range(4 * WINDOW):
        assert watch.add(STEP, (USUAL, USUAL, late if step % 3 == 0 else USUAL)) == ()


def warm() -> StragglerWatch:
    watch = StragglerWatch(lambda rank: "here")
    for _ in range(WARM_UP):
        assert watch.add(STEP, (USUAL, USUAL)) == ()
    return watch


def test_a_finding_is_told_once_and_its_end_too() -> None:
    watch = warm()
    late = USUAL._replace(work=0.9)
    lines = [
        line
        for one in (USUAL, late, late, USUAL, USUAL)
        for _ in range(WINDOW)
        for line in watch.add(0.3 + one.work, (USUAL, USUAL, one))  # the sum takes 0.3 s behind the last rank
    ]
    assert [line.partition(":")[0] for line in lines] == [
        "rank 2 on here is late",
        "rank 2 on here is no longer late (computing)",
    ]


def test_longer_sums_of_gradients_of_all_ranks_are_the_network() -> None:
    watch = warm()
    lines = [
        line
        for seconds in (1.0, 1.0, 1.05, 1.6)  # 0.3 s for the sums at first
        for _ in range(WINDOW)
        for line in watch.add(seconds, (USUAL, USUAL, USUAL))
    ]
    (line,) = lines
    assert line.startswith("all ranks are late: 0.6 s of a step of 1.6 s, median of 20 steps; cause: network, no rank")
    assert "0.9 s instead of 0.3 s" in line


STALL = 0.25


class PlayedClock:
    """The time of a rank whose passes take 0.5 s; the others wait for rank `slow`, which takes `STALL` longer."""

    def __init__(self, slow: int) -> None:
        self._now, self._phase = 0.0, Span.DATA
        self._stall, self._wait = (STALL, 0.0) if dist.get_rank() == slow else (0.0, STALL)

    def perf_counter(self) -> float:
        return self._now

    def passes(self, *arguments: Any) -> Any:
        self._now += 0.5 + self._stall
        return forward_backward(*arguments)

    def enter(self, watch: Stopwatch, phase: Span) -> None:
        if self._phase is Span.REDUCE:
            self._now += self._wait
        self._phase = phase
        ENTER(watch, phase)


ENTER = Stopwatch.enter


def lines_of_a_run(folder: str, slow: int) -> list[str]:
    """Notices of this rank in a run in which rank `slow` is late."""
    clock = PlayedClock(slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "WINDOW", 5)
        patch.setattr(setup, "forward_backward", clock.passes)
        patch.setattr(Stopwatch, "enter", lambda watch, phase: clock.enter(watch, phase))
        for module in (loop, spans):
            patch.setattr(module, "time", clock)
        training = TRAINING.model_copy(update={"steps": 12, "global_batch": 6})
        tiny = tiny_run(Path(folder), training=training, checkpoint=Checkpoint(enabled=False))
        here = Environment(color=False, threads=1, world_size=dist.get_world_size(), rank=dist.get_rank())
        session = prepare(tiny, here)
        run, recorder = RunFolder(Path(folder)), Recorder()
        with StopRequest() as stop:
            store = open_store(session.run, run, session.axes.world)
            hooks = RunHooks(host_of="node-{}".format)
            train_run(session, run, store, Progress(), [recorder], stop, hooks)
    return [notice for report in recorder.reports for notice in report.notices]


def test_a_rank_that_stalls_is_named_by_the_first_rank_while_it_trains(tmp_path: Path, ranks: Pool) -> None:
    first, *others = ranks.run(3, lines_of_a_run, str(tmp_path), 1)
    (line,) = first
    assert line.startswith("rank 1 on node-1 is late: 0.25 s of a step of 0.75 s, median of 5 steps; cause: host")
    assert others == [[], []]
