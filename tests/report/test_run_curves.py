"""Curves of a run show what metrics.jsonl says; what is thinned keeps its extremes and says so."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_run
from penstock.plan.projection import Projection
from penstock.report.figure import Figure
from penstock.report.run_metrics import (
    curve,
    extremes,
    gradient_figure,
    loss_figure,
    speed_figure,
    step_figure,
    thinned,
    usual_of,
)
from tests.report.made_runs import PHASES, metrics_line
from tests.report.plans import projection

Values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)
LINES = [metrics_line(step) for step in range(1, 13)]


def shown(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def drawn(figure: Figure | None, name: str) -> dict[str, Any]:
    return dict(next(trace for trace in shown(figure).data if trace.get("name") == name))


@pytest.fixture(scope="module")
def planned() -> Projection:
    return projection()


@given(Values, st.integers(1, 40))
def test_a_thinned_curve_has_few_points_within_their_band(values: list[float], most: int) -> None:
    points = thinned(list(range(len(values))), values, most)
    assert len(points.xs) == len(points.ys) <= most
    assert points.xs[-1] == len(values) - 1
    assert all(
        low - 1e-6 <= y <= high + 1e-6 for low, y, high in zip(points.lows, points.ys, points.highs, strict=True)
    )
    assert (min(points.lows), max(points.highs)) == (min(values), max(values))


@given(Values, st.integers(4, 40))
def test_a_thinned_staircase_keeps_its_least_and_its_most(values: list[float], most: int) -> None:
    xs, ys = extremes(list(range(len(values))), values, most)
    assert len(xs) <= max(most, 2) and xs == sorted(xs)
    assert (min(ys), max(ys)) == (min(values), max(values))


def test_a_long_curve_has_a_band_and_says_what_a_point_is() -> None:
    points = thinned(list(range(5000)), [float(step % 7) for step in range(5000)], 1000)
    band, line, mean = curve(points, "loss", "#3579c8", "")
    assert band["fill"] == "toself" and line["opacity"] < 1 and mean["hoverinfo"] == "skip"
    assert points.words.startswith("A point is the mean of 5 recorded steps")


def test_loss_is_drawn_with_that_of_held_out_text() -> None:
    figure = loss_figure(LINES)
    assert drawn(figure, "train")["y"] == pytest.approx([line["loss"] for line in LINES], rel=1e-4)
    assert drawn(figure, "held out")["x"] == [5, 10]
    assert figure is not None and "on held-out text" in figure.caption


def test_every_depth_of_multi_token_prediction_has_a_curve() -> None:
    lines = [line | {"mtp_losses": [3.0, 4.0]} for line in LINES]
    assert drawn(loss_figure(lines), "multi-token prediction 2")["y"] == [4.0] * 12


def test_clipped_steps_are_counted() -> None:
    figure = shown(gradient_figure(LINES, load_run("debug", ["training.clip_norm=2.0"])))
    assert "clipped to 2, in 25% of the recorded steps" in figure.caption


def test_gradients_that_differ_by_much_have_a_logarithmic_axis() -> None:
    figure = shown(gradient_figure([*LINES, metrics_line(13) | {"gradient_norm": 900.0}], None))
    assert figure.layout["yaxis"]["type"] == "log"


def test_speed_is_drawn_beside_the_plan(planned: Projection) -> None:
    figure = shown(speed_figure(LINES, planned))
    assert "Dashed, the plan" in figure.caption
    assert figure.layout["shapes"][0]["y0"] == planned.time.tokens_per_second_per_device
    assert figure.layout["yaxis2"]["title"]["text"] == "MFU"


def test_without_a_known_peak_there_is_no_utilization() -> None:
    figure = shown(speed_figure([metrics_line(step, mfu=None) for step in range(1, 5)], None))
    assert "yaxis2" not in figure.layout
    assert "No MFU" in figure.caption


def test_phases_are_those_of_the_step_before() -> None:
    figure = step_figure(LINES, None)
    assert drawn(figure, "forward")["x"] == list(range(1, 12))
    assert drawn(figure, "forward")["y"] == [pytest.approx(1e3 * PHASES["forward"])] * 11
    assert drawn(figure, "step")["y"] == [250.0] * 12


def test_a_step_without_timed_phases_is_a_curve() -> None:
    figure = shown(step_figure([line | {"phase_seconds": None} for line in LINES], None))
    assert "Phases were not timed" in figure.caption


def test_the_usual_step_is_the_median_of_the_last_half() -> None:
    lines = [{"step": step, "step_seconds": value} for step, value in enumerate([9.0, 9.0, 1.0, 2.0, 7.0, 4.0])]
    assert usual_of(lines, "step_seconds") == 4.0
    assert usual_of(lines, "loss") is None


def test_without_metrics_there_is_nothing_to_draw() -> None:
    assert loss_figure([]) is gradient_figure([], None) is speed_figure([], None) is step_figure([], None) is None
