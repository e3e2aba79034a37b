"""A span is in the trace while the profiler runs, in any place, and nothing else at any time."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.base.spans import ACTIONS, LAYER, Span
from penstock.layout.actions import Kind
from penstock.parallel.recompute import recomputed
from penstock.parallel.spans import Stopwatch, span, untimed


class NotAsked:
    """A number that must not be put into a name."""

    def __format__(self, _: str) -> str:
        raise AssertionError("the profiler is off")  # formatting a name costs more than the check


def test_without_a_profiler_a_span_is_no_object_of_its_own() -> None:
    number: Any = NotAsked()
    with span(LAYER, number) as one, span(Span.ROUTE) as other:
        assert one is other is None  # one shared null context
    assert span(LAYER, number) is span(Span.ROUTE)
    untimed(Span.FORWARD)


def test_a_span_is_recorded_under_its_name_and_ends_where_an_error_leaves_it() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(KeyError), span(LAYER, 3), span(Span.ROUTE):
            raise KeyError
        with span(Span.EXPERTS):
            torch.zeros(2) + 1
    times = {event.name: event.time_range for event in profiler.events()}
    assert times["layer 3"].start <= times["route"].start
    assert max(times["layer 3"].end, times["route"].end) <= times["experts"].start


def test_what_is_computed_again_is_recorded_again() -> None:
    def part(x: Tensor) -> Tensor:
        with span(Span.DENSE):
            return x.sin().cos()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recomputed(part, torch.ones(3, requires_grad=True)).sum().backward()  # runs `part` twice
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    again = [event.name for event in events if event.name in ("dense", "recompute")]
    assert again == ["dense", "recompute", "dense"]


def test_every_kind_of_a_pipeline_has_a_name() -> None:
    assert set(ACTIONS) == {kind.value for kind in Kind}


def test_only_one_module_asks_for_spans_of_the_profiler() -> None:
    root = Path(__file__).parents[2] / "penstock"
    asking = {path.name for path in root.rglob("*.py") if "import record_function" in path.read_text(encoding="utf-8")}
    assert asking == {"spans.py"}


CPU = torch.device("cpu")


def test_times_are_those_of_the_step_before_and_of_no_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 8.0, 100.0, 101.0, 150.0, 200.0, 201.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)
    watch.start(Span.DATA)
    for phase in (Span.FORWARD, Span.BACKWARD, Span.FORWARD):
        watch.enter(phase)
    assert watch.stop() == {}
    watch.start(Span.DATA)
    assert watch.stop() == {"data": 1.0, "forward": 2.0 + 1.0, "backward": 4.0}
    watch.start(Span.REDUCE)  # this step fails
    watch.start(Span.DATA)
    assert watch.stop() == {"data": 1.0}, "what lies between two steps is of none"


@pytest.mark.gpu
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
