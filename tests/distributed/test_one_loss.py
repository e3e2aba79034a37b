"""Every layout trains as one process does: losses, gradient norms, held-out loss, weights and moments agree."""

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.closeness import assert_equal, assert_within
from tests.distributed.one_loss import (
    CASES,
    NO_ROOM,
    OFTEN,
    TOLERANCES,
    Case,
    StepFigures,
    differences,
    pipeline,
    trace,
)
from tests.distributed.pool import Pool

Alone = Callable[[tuple[str, ...]], tuple[StepFigures, dict[str, Tensor]]]


@pytest.fixture(scope="session")
def alone(ranks: Pool) -> Alone:
    """What one process sees of a model, and the weights that it starts from; made once for each model."""
    known: dict[tuple[str, ...], tuple[StepFigures, dict[str, Tensor]]] = {}

    def of(model: tuple[str, ...]) -> tuple[StepFigures, dict[str, Tensor]]:
        if model not in known:
            known[model] = trace(ranks, 1, model, TWO), trace(ranks, 1, model, 0).tensors
        return known[model]

    return of


SHORT, SHORTEST = ("model.layers=4",), ("model.layers=2",)
TWO = 2
"""Steps: the second one is of weights that the first one changed."""


def model_of(case: Case) -> tuple[str, ...]:
    """The model of a case with as few layers as its pipeline, and kinds of layers that take turns, need."""
    is_long = "parallel.pipeline=4" in case.overrides and "parallel.pipeline.stages_per_rank=1" not in case.overrides
    words = " ".join((*case.model, *case.overrides))
    if is_long or "model.layers" in words or "pipeline.layout" in words:
        return case.model
    return case.model + (SHORT if "moe_layer_freq" in words or "pipeline=" in words else SHORTEST)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.slow) for case in CASES]
)
def test_a_layout_gives_the_figures_of_one_process(case: Case, ranks: Pool, alone: Alone) -> None:
    expected, start = alone(model_of(case))
    got = trace(ranks, case.ranks, model_of(case) + case.overrides, TWO)
    assert_within(differences(got, expected, start), TOLERANCES)


@pytest.mark.slow
def test_a_step_whose_rows_find_no_room_is_made_again_and_gives_the_same(ranks: Pool, alone: Alone) -> None:
    no_room = SHORTEST + NO_ROOM
    expected, start = alone(SHORTEST)
    got = trace(ranks, 4, no_room, TWO)
    assert got.left_out[0] > 0  # rows
    assert got.left_out == trace(ranks, 4, no_room, TWO).left_out
    enough = trace(ranks, 4, (*no_room, "dispatch.row_capacity_factor=4.0"), TWO)
    assert enough.left_out == [0] * TWO
    assert (got.losses, got.norms, got.held_out) == (enough.losses, enough.norms, enough.held_out)
    assert_within(differences(got, expected, start), TOLERANCES)


@pytest.mark.slow
def test_in_bf16_putting_weight_gradients_off_changes_nothing(ranks: Pool) -> None:
    settings = [(*SHORT, "training.precision=bf16", *pipeline(schedule, 2)) for schedule in ("1f1b", "zb-1f1b")]
    plain, split = (trace(ranks, 2, one, TWO) for one in settings)
    assert (split.losses, split.norms, split.held_out) == (plain.losses, plain.norms, plain.held_out)
    assert_equal(split.tensors, plain.tensors)


def test_in_bf16_every_layout_starts_from_the_values_that_weights_were_rounded_from(ranks: Pool) -> None:
    exact = trace(ranks, 1, SHORTEST, 0).tensors
    bf16 = "training.precision=bf16"
    for count, overrides in ((1, ()), (2, ("parallel.shard=optimizer",)), (2, ("parallel.shard=full",))):
        started = trace(ranks, count, (*SHORTEST, bf16, *overrides), 0).tensors
        assert_equal({name: started[name] for name in exact}, exact, what=str(overrides))
