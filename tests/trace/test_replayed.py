"""Kernels of captured graphs: layers and passes by an eager pass, by the capture, by repetition, or not at all."""

import random

import numpy as np
import pytest

from penstock.trace.events import NONE, Trace
from penstock.trace.graph_replays import aligned, infer_replays
from penstock.trace.phases import find_phases, plain_row
from penstock.trace.tree import SPANS, Placement, place
from tests.trace.synthetic_graph import ADD, GEMM, Recording, Step
from tests.trace.tiny import event, kernel


def inferred(trace: Trace) -> tuple[Placement, str | None]:
    placement, replays = infer_replays(trace, place(trace))
    assert replays is not None
    return placement, replays.source


def layers(placement: Placement) -> list[int | None]:
    return [None if one == NONE else one for one in placement.layer.tolist()]


def test_a_trace_without_graphs_is_left_as_it_is() -> None:
    trace = Recording().eager().trace()
    placement = place(trace)
    assert infer_replays(trace, placement) == (placement, None)


def test_a_replay_is_what_the_eager_pass_was() -> None:
    recording = Recording().eager().replay().replay()
    placement, source = inferred(recording.trace(says_model=False))
    assert source == "eager pass"
    assert layers(placement) == [step.layer for step in recording.truth]
    assert placement.is_backward.tolist() == [step.is_backward for step in recording.truth]
    assert [SPANS[one] for one in placement.span.tolist()] == [step.span for step in recording.truth]
    size = len(recording.steps)
    assert placement.is_inferred.tolist() == [False] * size + [True] * 2 * size


def test_kernels_that_only_the_replay_has_take_the_place_of_those_around_them() -> None:
    recording = Recording().eager()
    inside = next(at for at, step in enumerate(recording.steps) if step.layer == 2 and "sdpa" in step.name)
    other = Step("void some_new_kernel<3>", recording.steps[inside].span, 2, False)
    recording.replay([*recording.steps[:inside], other, *recording.steps[inside:]])
    placement, source = inferred(recording.trace())
    assert source == "eager pass"
    assert layers(placement) == [step.layer for step in recording.truth]


def test_kernels_of_two_streams_may_change_places() -> None:
    recording = Recording(layers=6).eager()
    steps, shuffled = recording.steps, random.Random(3)
    for at in shuffled.sample(range(1, len(steps) - 1, 12), 4):
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    recording.replay(steps)
    placement, _ = inferred(recording.trace())
    right = [found == step.layer for found, step in zip(layers(placement), recording.truth, strict=True)]
    assert np.mean(right) > 0.97


def test_a_replay_is_what_was_captured() -> None:
    recording = Recording().captured().replay()
    placement, source = inferred(recording.trace(says_model=False))
    assert source == "capture"
    assert layers(placement) == [step.layer for step in recording.truth]
    assert placement.is_backward.tolist() == [step.is_backward for step in recording.truth]


def test_a_capture_of_something_else_tells_nothing() -> None:
    recording = Recording().captured()
    assert inferred(recording.replay(recording.steps[:-3]).trace(says_model=False))[1] is None


@pytest.mark.parametrize(("count", "dense"), [(4, 1), (9, 1), (3, 0), (5, 2)])
def test_names_that_repeat_as_often_as_the_model_has_layers_are_layers(count: int, dense: int) -> None:
    recording = Recording(layers=count, dense_layers=dense).replay()
    placement, source = inferred(recording.trace())
    assert source == "repeating layers"
    known = np.flatnonzero(placement.is_inferred).tolist()
    for at in known:
        step = recording.truth[at]
        assert placement.is_backward[at] == step.is_backward
        assert layers(placement)[at] == (None if dense > 1 and step.layer in range(dense) else step.layer), step
    told = {recording.truth[at].layer for at in known}
    assert set(range(dense if dense > 1 else 0, count)) <= told


def test_how_many_layers_there_are_must_be_known() -> None:
    recording = Recording().replay()
    trace = recording.trace(says_model=False)
    placement, replays = infer_replays(trace, place(trace))
    assert replays is not None
    assert (replays.source, replays.placed, replays.events) == (None, 0, len(recording.steps))
    assert "not told: no pass without graphs, no capture and no number of layers" in replays.told
    assert not placement.is_inferred.any()
    recording.model["moe"]["moe_layer_freq"] = 2  # MoE in every second layer: layers are not equal
    assert inferred(recording.trace())[1] is None


@pytest.mark.parametrize("told", [5, 3, 13])
def test_another_number_of_layers_than_names_repeat_tells_nothing(told: int) -> None:
    recording = Recording(layers=4).replay()
    recording.model["layers"] = told
    trace = recording.trace()
    placement, replays = infer_replays(trace, place(trace))
    assert replays is not None
    assert replays.source is None
    assert "names do not repeat as often as layers should" in replays.told
    assert (placement.layer == NONE).all()


def test_a_graph_of_anything_else_is_not_taken_for_layers() -> None:
    recording = Recording(layers=3, dense_layers=0)
    span = recording.steps[0].span
    recording.replay([Step(ADD, span, None, False)] * 60)
    recording.replay([Step(GEMM.format(one % 8), span, None, False) for one in range(60)])
    placement, source = inferred(recording.trace())
    assert source is None and not placement.is_inferred.any()


def test_graphs_inside_layers_are_placed_by_the_spans_around_their_launches() -> None:
    recording = Recording()
    recording.events += [
        event("user_annotation", "layer 3", 0, 90),
        event("cuda_runtime", "cudaGraphLaunch", 10, 4, correlation=77),
        *(kernel(f"kernel_{one}", 20 + 10 * one, 8, correlation=77) for one in range(20)),
    ]
    trace = recording.trace()
    phases = find_phases(trace)
    assert phases.replays is not None
    assert "placed by the spans around the launches" in phases.replays.told
    assert {(row.layer, row.pass_, row.inferred) for row in phases.rows()} == {(3, "forward", False)}


def test_the_table_of_phases_says_what_is_inferred() -> None:
    recording = Recording().eager()
    eager = {(row.name, row.layer, row.pass_): row for row in find_phases(recording.trace()).rows()}
    rows = find_phases(recording.replay().trace()).rows()
    assert all(row.inferred for row in rows)
    both = {(row.name, row.layer, row.pass_): row for row in rows}
    assert eager.keys() == both.keys()
    for key, row in both.items():
        assert row.kernel_us == pytest.approx(2 * eager[key].kernel_us), key
        assert not eager[key].inferred
    assert plain_row(rows[0])["inferred"] is True


def test_alignment_keeps_the_order() -> None:
    theirs = np.array([7, *range(20, 40), 8, *range(40, 60)])
    assert aligned(np.arange(20, 60), theirs).tolist() == [*range(1, 21), *range(22, 42)]
    mine = np.array([*range(20, 40), 9, *range(40, 60)])
    assert aligned(mine, theirs).tolist() == [*range(1, 21), NONE, *range(22, 42)]


def test_lists_that_share_little_are_not_aligned() -> None:
    assert (aligned(np.arange(20), np.arange(10, 30)) == NONE).all()
