"""Curves show what they are given; gaps stay gaps, and errors are counted against the bands."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_run
from penstock.plan.projection import Plan, Refusal
from penstock.plan.what_if import SweepPoint
from penstock.report.figure import TIME_PARTS, Figure, part_colours
from penstock.report.page import Curve, scaling_figure, scaling_pictures, sweep_pictures
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
from penstock.report.stacks import memory_figure, memory_parts, names_of, time_figure, time_parts
from tests.report.looking import drawn, shown
from tests.report.made_runs import PHASES, metrics_line
from tests.report.plans import projection, too_large
from tools.projection_picture import ProjectionCheck, checks_figure

REFUSED = Refusal(layout={}, rule="experts-divide", reason="64 experts do not divide among 48 ranks")


def test_scaling_has_speed_above_efficiency_over_the_fewest_devices_that_fit() -> None:
    scaling = Curve(name="weak", xs=[64, 128, 256], ys=[None, 1000.0, 950.0])
    figure = scaling_figure("s", "S", "", [scaling])
    assert [trace["y"] for trace in figure.data] == [[None, 1000.0, 950.0], [None, 1.0, 0.95]]
    assert figure.data[1]["yaxis"] == "y2"


def test_the_caption_counts_what_lies_within_the_bands() -> None:
    projected = (103.0, 95.1, 109.0, 120.0)
    checks = [ProjectionCheck(name=f"run {value}", group="all", measured=100.0, projected=value) for value in projected]
    caption = checks_figure("c", "C", "GB", checks).caption
    assert caption == "4 runs: 2 within 5%, 3 within 10%; median error 7.0%, largest 20.0%."
    assert ProjectionCheck(name="a", group="g", measured=2.0, projected=1.0).error == pytest.approx(-0.5)


def test_a_point_without_an_answer_is_a_gap(plan: Plan) -> None:
    one, speed = plan.candidates[0], plan.candidates[0].time.tokens_per_second_per_device
    asked = (("1", "symmetric", one), ("48", "symmetric", REFUSED), ("8", "all-to-all", one))
    points = [SweepPoint(asked={"ep": ep, "dispatcher": name}, answer=answer) for ep, name, answer in asked]
    speeds, memories, components = sweep_pictures(points, one)
    assert drawn(speeds, "symmetric")["y"] == [pytest.approx(speed, rel=1e-5), None]
    assert drawn(speeds, "symmetric")["text"][1] == "<br>experts-divide"
    assert drawn(memories, "all-to-all")["x"] == [8]
    bars = {
        name: sum(trace["x"][index] for trace in components.data) for index, name in enumerate(components.data[0]["y"])
    }
    memory = pytest.approx(one.memory.total / 1e9, rel=1e-4)
    assert bars == {"1 \u00b7 1, symmetric": memory, "3 \u00b7 8, all-to-all": memory}
    (words,) = sweep_pictures([SweepPoint(asked={"pipeline.schedule": "1f1b"}, answer=one)], one)
    assert words.data[0]["y"] == ["1 \u00b7 1f1b"], "no curve over words"


def test_both_kinds_of_scaling_are_in_one_picture(plan: Plan) -> None:
    one = plan.candidates[0]
    points = [SweepPoint(asked={"devices": "2"}, answer=one), SweepPoint(asked={"devices": "4"}, answer=REFUSED)]
    (figure,) = scaling_pictures({"strong": points, "weak": points}, one)
    assert [trace["name"] for trace in figure.data] == ["strong", "strong", "weak", "weak"]
    assert figure.data[1]["y"] == [1.0, None]


Values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)
LINES = [metrics_line(step) for step in range(1, 13)]


@given(Values, st.integers(1, 40))
def test_a_thinned_curve_has_few_points_within_their_band(values: list[float], most: int) -> None:
    points = thinned(list(range(len(values))), values, most)
    assert len(points.xs) == len(points.ys) <= most
    assert points.xs[-1] == len(values) - 1
    bands = zip(points.lows, points.ys, points.highs, strict=True)
    assert all(low - 1e-6 <= y <= high + 1e-6 for low, y, high in bands)
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
    uneven = shown(gradient_figure([*LINES, metrics_line(13) | {"gradient_norm": 900.0}], None))
    assert uneven.layout["yaxis"]["type"] == "log"


def test_speed_is_drawn_beside_the_plan() -> None:
    planned = projection()
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
    untimed = shown(step_figure([line | {"phase_seconds": None} for line in LINES], None))
    assert "Phases were not timed" in untimed.caption


def test_the_usual_step_is_the_median_of_the_last_half() -> None:
    lines = [{"step": step, "step_seconds": value} for step, value in enumerate([9.0, 9.0, 1.0, 2.0, 7.0, 4.0])]
    assert usual_of(lines, "step_seconds") == 4.0  # of 2, 7 and 4
    assert usual_of(lines, "loss") is None


def test_without_metrics_there_is_nothing_to_draw() -> None:
    assert loss_figure([]) is gradient_figure([], None) is speed_figure([], None) is step_figure([], None) is None


def sums(figure: Figure) -> list[float]:
    bars = [trace["x"] for trace in figure.data if trace["type"] == "bar"]
    return [sum(parts) for parts in zip(*bars, strict=True)]


def test_components_add_up_to_the_memory_of_a_rank(plan: Plan) -> None:
    for one in plan.candidates:
        assert sum(memory_parts(one.memory).values()) == one.memory.total


def test_bars_are_as_long_as_what_they_show(plan: Plan) -> None:
    memories, times = memory_figure(plan.candidates), time_figure(plan.candidates)
    assert sums(memories) == pytest.approx([one.memory.total / 1e9 for one in plan.candidates], rel=1e-4)
    # Less than a second: milliseconds.
    assert sums(times) == pytest.approx([one.time.step_seconds * 1e3 for one in plan.candidates], rel=1e-4)


def test_the_line_is_the_capacity(plan: Plan) -> None:
    (line,) = memory_figure(plan.candidates).layout["shapes"]
    assert line["x0"] == line["x1"] == plan.cluster.hardware.memory.capacity_bytes / 1e9


def test_no_sum_stands_where_bars_and_the_line_are(plan: Plan) -> None:
    first = plan.candidates[0]
    figure = memory_figure([first, too_large(first)])
    (line,), right = figure.layout["shapes"], figure.layout["xaxis"]["range"][1]
    labels = figure.layout["annotations"]
    assert [label["text"] for label in labels] == [f"{first.memory.total / 1e9:#.3g} GB", "<b>326 GB over</b>"]
    assert line["x1"] < right and max(sums(figure)) < right, "bars and line end inside of the axes"
    # The margin begins where the axes end; letters of 11 pixels are at most 7 wide.
    assert all((label["xref"], label["x"], label["xanchor"]) == ("paper", 1, "left") for label in labels)
    assert all(7 * len(re.sub("<.*?>", "", label["text"])) <= figure.layout["margin"]["r"] for label in labels)


def test_a_step_without_terms_is_shown_by_its_phases(plan: Plan) -> None:
    rank = replace(plan.candidates[0].time.ranks[0], terms={})
    assert time_parts(rank) == {"passes": rank.passes, "waiting": rank.waiting, "update": rank.update}


def test_a_layout_is_named_by_its_differences(plan: Plan) -> None:
    layout = plan.candidates[0].layout
    assert len(set(names_of([layout, layout]))) == 2
    assert names_of([layout, replace(layout, recompute="layer")])[0] == "1 \u00b7 PP2", "no recomputation is not named"
    names = names_of([layout, replace(layout, micro_batch=4), replace(layout, ep=8)])
    assert names == [
        "1 \u00b7 PP2 EP1<br><i>mb 2</i>",
        "2 \u00b7 PP2 EP1<br><i>mb 4</i>",
        "3 \u00b7 PP2 EP8<br><i>mb 2</i>",
    ]


def test_parts_of_a_stack_have_different_colours() -> None:
    names = ("attention", "experts", *(f"other {place}" for place in range(12)))
    assert len(set(part_colours(names, TIME_PARTS).values())) == len(names)
