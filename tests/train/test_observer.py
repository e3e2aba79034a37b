"""What reports say about load."""

import math
from typing import Any

import pytest

from penstock.train.observer import LayerReport
from tests.train.tiny_run import step_report


@pytest.mark.parametrize(
    ("slots", "max_over_mean", "entropy"),
    [
        ((5, 5, 5, 5), 1.0, 1.0),
        ((20, 0, 0, 0), 4.0, 0.0),
        ((10, 10, 0, 0), 2.0, 0.5),
        ((0, 0, 0, 0), 1.0, 1.0),
        ((7,), 1.0, 1.0),
    ],
)
def test_evenness_of_load(slots: tuple[int, ...], max_over_mean: float, entropy: float) -> None:
    layer = LayerReport(layer=0, slots=slots, dropped=0, auxiliary_loss=0.0)
    assert math.isclose(layer.max_over_mean, max_over_mean)
    assert math.isclose(layer.entropy, entropy, abs_tol=1e-12)


def test_loads_of_ranks_are_those_of_their_experts_together() -> None:
    layer = LayerReport(layer=0, slots=(30, 10, 5, 15, 0, 0), dropped=0, auxiliary_loss=0.0)
    assert layer.rank_loads(1) == (1.0,)
    assert layer.rank_loads(2) == (1.5, 0.5)
    assert layer.rank_loads(3) == (2.0, 1.0, 0.0)
    empty = LayerReport(layer=0, slots=(0, 0, 0, 0), dropped=0, auxiliary_loss=0.0)
    assert empty.rank_loads(2) == (1.0, 1.0)


def test_time_sees_the_fullest_rank_of_each_layer_and_memory_one_rank_over_all() -> None:
    layers = tuple(
        LayerReport(layer=number, slots=slots, dropped=0, auxiliary_loss=0.0)
        for number, slots in enumerate([(3, 3, 1, 1), (1, 1, 3, 3), (3, 3, 1, 1), (2, 2, 2, 2)])
    )
    report = step_report(1, layers=layers, expert_ranks=2)
    assert report.expert_rank_load_max_over_mean == (1.5 + 1.5 + 1.5 + 1.0) / 4
    assert report.expert_rank_load_fullest == (1.5 + 0.5 + 1.5 + 1.0) / 4


@pytest.mark.parametrize("changes", [{"expert_ranks": 1}, {"expert_ranks": 2, "layers": ()}])
def test_without_expert_ranks_none_is_fuller_than_another(changes: dict[str, Any]) -> None:
    report = step_report(1, **changes)
    assert (report.expert_rank_load_max_over_mean, report.expert_rank_load_fullest) == (None, None)


def test_the_least_even_layer_is_the_worst() -> None:
    worst = step_report(1).worst_layer
    assert worst is not None
    assert worst.layer == 1
    assert step_report(1, layers=()).worst_layer is None
