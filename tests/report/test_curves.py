"""Curves show what they are given; gaps stay gaps, and errors are counted against the bands."""

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.plan.projection import Plan, Refusal
from penstock.plan.what_if import SweepPoint
from penstock.report.curves import Scaling, scaling_figure, scaling_pictures, sweep_pictures
from tools.projection_picture import ProjectionCheck, checks_figure

REFUSED = Refusal(layout={}, rule="experts-divide", reason="64 experts do not divide among 48 ranks")


def trace_of(data: Any, name: str) -> Mapping[str, Any]:
    return next(trace for trace in data if trace["name"] == name)


def test_efficiency_is_over_the_fewest_devices_that_fit() -> None:
    scaling = Scaling(name="weak", devices=[64, 128, 256], tokens_per_second_per_device=[None, 1000.0, 950.0])
    assert scaling.efficiency == [None, 1.0, 0.95]


def test_scaling_has_speed_above_efficiency() -> None:
    figure = scaling_figure("s", "S", "", [Scaling(name="weak", devices=[8, 16], tokens_per_second_per_device=[10, 9])])
    assert [trace["y"] for trace in figure.data] == [[10, 9], [1.0, 0.9]]
    assert figure.data[1]["yaxis"] == "y2"


def test_the_caption_counts_what_lies_within_the_bands() -> None:
    projected = (103.0, 95.1, 109.0, 120.0)
    checks = [ProjectionCheck(name=f"run {value}", group="all", measured=100.0, projected=value) for value in projected]
    caption = checks_figure("c", "C", "GB", checks).caption
    assert caption == "4 runs: 2 within 5%, 3 within 10%; median error 7.0%, largest 20.0%."


def test_an_error_has_its_sign() -> None:
    assert ProjectionCheck(name="a", group="g", measured=2.0, projected=1.0).error == pytest.approx(-0.5)


def test_a_point_without_an_answer_is_a_gap(plan: Plan) -> None:
    one, speed = plan.candidates[0], plan.candidates[0].time.tokens_per_second_per_device
    points = [SweepPoint(asked={"ep": "1", "dispatcher": "symmetric"}, answer=one)]
    points.append(SweepPoint(asked={"ep": "48", "dispatcher": "symmetric"}, answer=REFUSED))
    points.append(SweepPoint(asked={"ep": "8", "dispatcher": "all-to-all"}, answer=one))
    speeds, memories = sweep_pictures(points, one)
    assert trace_of(speeds.data, "symmetric")["y"] == [pytest.approx(speed, rel=1e-5), None]
    assert trace_of(speeds.data, "symmetric")["text"][1] == "<br>experts-divide"
    assert trace_of(memories.data, "all-to-all")["x"] == [8]


def test_a_sweep_of_words_is_not_drawn(plan: Plan) -> None:
    one = plan.candidates[0]
    assert sweep_pictures([SweepPoint(asked={"pipeline.schedule": "1f1b"}, answer=one)], one) == []


def test_both_kinds_of_scaling_are_in_one_picture(plan: Plan) -> None:
    one = plan.candidates[0]
    points = [SweepPoint(asked={"devices": "2"}, answer=one), SweepPoint(asked={"devices": "4"}, answer=REFUSED)]
    (figure,) = scaling_pictures({"strong": points, "weak": points}, one)
    assert [trace["name"] for trace in figure.data] == ["strong", "strong", "weak", "weak"]
    assert figure.data[1]["y"] == [1.0, None]
