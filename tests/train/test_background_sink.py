"""A sink that fails, hangs or is slow: the run goes on, and the user is told once."""

import threading

import pytest

from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.sinks import WAITING, BackgroundSink
from tests.train.tiny_run import Recorder, run_start, step_report, tiny_run


class Sink(Recorder):
    """Remembers what it was told; raises at a step, or waits at one for a gate to open."""

    def __init__(self, fails_at: int = 0, waits_at: int = 0) -> None:
        super().__init__()
        self.fails_at, self.waits_at = fails_at, waits_at
        self.gate, self.waits = threading.Event(), threading.Event()

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if report.step == self.fails_at:
            raise ConnectionError("the service\nis down")
        if report.step == self.waits_at:
            self.waits.set()
            self.gate.wait()


@pytest.fixture
def start(tmp_path) -> RunStart:  # type: ignore[no-untyped-def]
    return run_start(tiny_run(tmp_path))


def drive(sink: BackgroundSink, start: RunStart, steps: int) -> None:
    sink.started(start)
    for step in range(1, steps + 1):
        sink.stepped(step_report(step))
    sink.saved(steps)


def test_everything_reaches_a_sink_in_its_order(start: RunStart) -> None:
    inner, told = Sink(), list[str]()
    sink = BackgroundSink("a service", lambda: inner, told.append)
    drive(sink, start, 3)
    sink.closed()
    assert inner.starts == [start]
    assert [report.step for report in inner.reports] == [1, 2, 3]
    assert (inner.saves, inner.is_closed, told) == ([3], True, [])


def test_a_sink_works_in_a_thread_of_its_own(start: RunStart) -> None:
    threads = []

    def open_sink() -> Observer:
        threads.append(threading.current_thread())
        return Sink()

    sink = BackgroundSink("a service", open_sink, lambda line: None)
    sink.closed()
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_a_sink_that_fails_is_told_once_and_closed(start: RunStart) -> None:
    inner, told = Sink(fails_at=2), list[str]()
    sink = BackgroundSink("a service", lambda: inner, told.append)
    drive(sink, start, 9)
    sink.closed()
    sink.closed()
    assert told == [
        "a service is off from here on, the run goes on without it (ConnectionError: the service)",
    ]
    assert [report.step for report in inner.reports] == [1, 2]
    assert inner.is_closed


def test_a_sink_that_cannot_be_opened_is_told_once(start: RunStart) -> None:
    told = list[str]()

    def open_sink() -> Observer:
        raise OSError(98, "Address already in use")

    sink = BackgroundSink("the endpoint", open_sink, told.append)
    drive(sink, start, 3)
    sink.closed()
    assert told == [
        "the endpoint is off from here on, the run goes on without it (OSError: [Errno 98] Address already in use)"
    ]


def test_even_a_sink_that_ends_its_program_ends_only_itself(start: RunStart) -> None:
    told = list[str]()

    def open_sink() -> Observer:
        raise SystemExit(1)

    sink = BackgroundSink("a service", open_sink, told.append)
    sink.closed()
    assert told == ["a service is off from here on, the run goes on without it (SystemExit: 1)"]


def test_a_slow_sink_misses_steps_and_the_run_does_not_wait(start: RunStart) -> None:
    inner, told = Sink(waits_at=1), list[str]()
    sink = BackgroundSink("a service", lambda: inner, told.append)
    sink.started(start)
    sink.stepped(step_report(1))
    assert inner.waits.wait(10), "the sink has begun with the first step"
    for step in range(2, WAITING + 5):
        sink.stepped(step_report(step))
    inner.gate.set()
    sink.closed()
    assert [report.step for report in inner.reports] == list(range(1, WAITING + 2))
    assert told == ["a service was too slow for 3 reports, which are missing there"]


def test_a_sink_that_hangs_is_left_behind(start: RunStart) -> None:
    inner, told = Sink(waits_at=1), list[str]()
    sink = BackgroundSink("a service", lambda: inner, told.append, close_seconds=0.05)
    drive(sink, start, 2)
    sink.closed()
    assert told == ["a service has not ended after 0.05 s and is left behind"]
    inner.gate.set()  # so that the thread ends with the test
