"""Phases of a step add up to the step, and are known one step later."""

import time

import pytest
import torch

from penstock.base.spans import Span
from penstock.parallel import spans
from penstock.parallel.spans import Stopwatch, untimed

CPU = torch.device("cpu")


def test_times_are_those_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 8.0, 100.0, 101.0, 200.0, 201.0])
    monkeypatch.setattr(spans.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)
    watch.start(Span.DATA)
    watch.enter(Span.FORWARD)
    watch.enter(Span.BACKWARD)
    watch.enter(Span.FORWARD)
    assert watch.stop() == {}
    watch.start(Span.DATA)
    assert watch.stop() == {"data": 1.0, "forward": 2.0 + 1.0, "backward": 4.0}
    watch.start(Span.DATA)
    assert watch.stop() == {"data": 1.0}, "what lies between two steps is of none"


def test_what_a_failed_step_left_is_forgotten() -> None:
    watch = Stopwatch(CPU)
    watch.start(Span.DATA)
    watch.enter(Span.FORWARD)
    watch.start(Span.REDUCE)
    watch.stop()
    watch.start(Span.DATA)
    assert list(watch.stop()) == ["reduce"]


def test_phases_together_are_the_step() -> None:
    watch = Stopwatch(CPU)
    begin = time.perf_counter()
    watch.start(Span.DATA)
    time.sleep(0.01)
    watch.enter(Span.FORWARD)
    time.sleep(0.02)
    watch.stop()
    whole = time.perf_counter() - begin
    watch.start(Span.DATA)
    seconds = watch.stop()
    assert seconds["data"] >= 0.01
    assert seconds["forward"] >= 0.02
    assert sum(seconds.values()) <= whole


def test_phases_may_be_untimed() -> None:
    untimed(Span.FORWARD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_phase_of_a_gpu_holds_its_kernels_and_fits_into_the_time_that_the_host_saw() -> None:
    """Of one step each, so that it holds on a GPU that other processes keep busy, too."""
    device = torch.device("cuda")
    watch, x = Stopwatch(device), torch.randn(4096, 4096, device=device)
    kernels, waited = [], []
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        watch.start(Span.FORWARD)
        first.record()
        for _ in range(20):
            x @ x
        last.record()
        watch.enter(Span.BACKWARD)
        seconds = watch.stop()
        torch.cuda.synchronize()
        waited.append(time.perf_counter() - begin)
        if len(kernels) > 0:
            # Two clocks may run apart by a thousandth; events have a resolution of about a microsecond.
            assert 0.999 * kernels[-1] - 1e-5 <= seconds["forward"] <= 1.001 * waited[-2] + 1e-5
        kernels.append(first.elapsed_time(last) / 1e3)
