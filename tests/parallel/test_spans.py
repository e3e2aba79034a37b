"""A span is in the trace while the profiler runs, in any place, and nothing else at any time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.base.spans import ACTIONS, LAYER, Span
from penstock.layout.actions import Kind
from penstock.parallel.recompute import recomputed
from penstock.parallel.spans import span


class NotAsked:
    """A number that must not be put into a name."""

    def __format__(self, _: str) -> str:
        raise AssertionError("the profiler is off")


def names_in(profiler: Any) -> list[str]:
    events = profiler.events()
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def test_without_a_profiler_a_span_is_no_object_of_its_own() -> None:
    number: Any = NotAsked()
    with span(LAYER, number) as one, span(Span.ROUTE) as other:
        assert one is other is None
    assert span(LAYER, number) is span(Span.ROUTE)


def test_a_span_is_recorded_under_its_name() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, span(LAYER, 3), span(Span.ROUTE):
        torch.zeros(2) + 1
    assert [name for name in names_in(profiler) if name in ("layer 3", "route")] == ["layer 3", "route"]


def test_a_span_ends_where_an_error_leaves_it() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(KeyError), span(Span.ROUTE):
            raise KeyError
        with span(Span.EXPERTS):
            torch.zeros(2) + 1
    route, experts = (next(e for e in profiler.events() if e.name == name) for name in ("route", "experts"))
    assert route.time_range.end <= experts.time_range.start


def test_what_is_computed_again_is_recorded_again() -> None:
    def part(x: Tensor) -> Tensor:
        with span(Span.DENSE):
            return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recomputed(part, x).sum().backward()
    again = [name for name in names_in(profiler) if name in ("dense", "recompute")]
    assert again == ["dense", "recompute", "dense"]
    given = x.grad
    assert given is not None
    assert torch.equal(given, -(torch.ones(3).cos() * torch.ones(3).sin().sin()))


def test_every_kind_of_a_pipeline_has_a_name() -> None:
    assert set(ACTIONS) == {kind.value for kind in Kind}


def test_only_one_module_asks_for_spans_of_the_profiler() -> None:
    root = Path(__file__).parents[2] / "penstock"
    asking = {path.name for path in root.rglob("*.py") if "import record_function" in path.read_text(encoding="utf-8")}
    assert asking == {"spans.py"}
