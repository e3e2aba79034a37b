"""What reports say about load."""

import math

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


def test_the_least_even_layer_is_the_worst() -> None:
    worst = step_report(1).worst_layer
    assert worst is not None
    assert worst.layer == 1
    assert step_report(1, layers=()).worst_layer is None
