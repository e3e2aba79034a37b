"""A timeline shows every pass where the clock had it, and what ranks hold is what the clock counts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import Schedule, even_costs, play
from penstock.layout.schedules import SCHEDULES, schedule
from penstock.report.figure import Figure
from penstock.report.timeline import (
    BOX_POINTS,
    ActivationShares,
    Interval,
    Timeline,
    TimelineLane,
    planned,
    timeline_figure,
)

ONE_F_ONE_B = schedule("1f1b", ranks=2, stages_per_rank=1, micro_batches=3)


def timeline_of(plan: Schedule, *, send: float = 0.0) -> Timeline:
    return planned(plan, play(plan, even_costs(plan.stages, send=send)))


def boxes(figure: Figure) -> list[dict[str, Any]]:
    return [dict(trace) for trace in figure.data if trace["meta"]["role"] == "boxes"]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    shape, ranks = SCHEDULES[name], draw(st.integers(1, 4))
    least = max(1, shape.micro_batches_per_rank * ranks)
    stages = draw(st.integers(shape.fewest, shape.most or 3))
    return schedule(name, ranks=ranks, stages_per_rank=stages, micro_batches=draw(st.integers(least, least + 6)))


@given(schedules())
def test_every_pass_is_a_box_with_the_times_of_the_clock(plan: Schedule) -> None:
    playback = play(plan, even_costs(plan.stages, send=0.25))
    figure = timeline_figure("t", "T", [planned(plan, playback)])
    drawn = {}
    for trace in boxes(figure):
        assert len(trace["x"]) == len(trace["y"]) == BOX_POINTS * len(trace["meta"]["names"])
        for box, name in enumerate(trace["meta"]["names"]):
            at = box * BOX_POINTS
            drawn[name, trace["meta"]["lanes"][box]] = trace["x"][at], trace["x"][at + 1]
    kinds = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    for event in playback.events:
        stage, kind, micro_batch = event.action
        name = f"{kinds[kind]} of stage {stage}, micro-batch {micro_batch}"
        assert drawn.pop((name, event.rank)) == pytest.approx((event.start, event.end), rel=1e-5)
    assert not drawn


@given(schedules())
def test_what_a_rank_holds_at_most_is_what_the_clock_counts(plan: Schedule) -> None:
    playback = play(plan, even_costs(plan.stages))
    for lane, peak in zip(planned(plan, playback).lanes, playback.peak_live, strict=True):
        assert max(held for _, held in lane.held) == pytest.approx(peak)
        assert lane.held[-1][1] == pytest.approx(0)


def test_what_stages_hold_may_be_given_in_bytes() -> None:
    playback = play(ONE_F_ONE_B, even_costs(2))
    lanes = planned(ONE_F_ONE_B, playback, ActivationShares(activation=(3.0, 5.0), unit="GB")).lanes
    assert [max(held for _, held in lane.held) for lane in lanes] == [6.0, 5.0]  # 2 micro-batches of 3 GB, 1 of 5


def test_a_pair_shares_its_time_and_divides_the_height() -> None:
    plan = schedule("dualpipe-v", ranks=2, stages_per_rank=2, micro_batches=6, pairs=True)
    intervals = timeline_of(plan).lanes[0].intervals
    together = [one for one in intervals if one.part != (0.0, 1.0)]
    assert {(one.group.split(",")[0], one.part) for one in together} == {
        ("forward", (0.5, 1.0)),
        ("backward", (0.0, 0.5)),
    }


def test_the_share_of_waiting_is_that_of_the_clock() -> None:
    playback = play(ONE_F_ONE_B, even_costs(2, send=0.5))
    figure = timeline_figure("t", "T", [planned(ONE_F_ONE_B, playback)])
    assert f"{playback.bubble:.1%} idle" in figure.caption
    shares = [text.split("\u00b7")[1].strip() for text in figure.layout["yaxis"]["ticktext"]]
    assert shares == [f"{1 - busy / playback.span:.0%} idle" for busy in playback.busy]


INTERVAL = Interval(start=0.0, end=0.5, name="forward of stage 0", colour="#3579c8", group="forward")


def test_a_measured_timeline_lies_under_the_planned_one() -> None:
    lanes = [TimelineLane(name=f"rank {rank}", intervals=[INTERVAL]) for rank in range(2)]
    figure = timeline_figure("t", "T", [timeline_of(ONE_F_ONE_B), Timeline(name="measured", lanes=lanes)])
    names = [text.split(" \u00b7")[0] for text in figure.layout["yaxis"]["ticktext"]]
    assert names == ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    (forwards,) = [trace for trace in boxes(figure) if trace["name"] == "forward"]
    assert set(forwards["meta"]["lanes"]) == {0, 1, 2, 3}


def test_lanes_stand_under_the_place_that_they_name() -> None:
    lanes = [TimelineLane(name=f"rank {rank}", intervals=[INTERVAL], place=rank // 2) for rank in range(4)]
    figure = timeline_figure("t", "T", [timeline_of(ONE_F_ONE_B), Timeline(name="measured", lanes=lanes)])
    names = [text.split(" \u00b7")[0] for text in figure.layout["yaxis"]["ticktext"]]
    assert names[:3] == ["rank 0 planned", "rank 0 measured", "rank 1 measured"]
    assert names[3:] == ["rank 1 planned", "rank 2 measured", "rank 3 measured"]


def test_without_anything_held_boxes_have_the_whole_lane() -> None:
    timeline = Timeline(name="measured", lanes=[TimelineLane(name="rank 0", intervals=[INTERVAL])], ground="idle")
    figure = timeline_figure("t", "T", [timeline])
    ((_, _, top, _, _, _),) = [trace["y"] for trace in boxes(figure)]
    (bottom, *_) = boxes(figure)[0]["y"]
    assert top - bottom == pytest.approx(0.88)  # BOX_TOP - HELD_BOTTOM
    assert figure.data[0]["name"] == "idle" and "Grey is idle" in figure.caption


def test_a_large_step_has_one_trace_for_each_colour() -> None:
    plan = schedule("interleaved", ranks=16, stages_per_rank=4, micro_batches=64)
    figure = timeline_figure("t", "T", [timeline_of(plan)])
    assert sum(len(trace["meta"]["names"]) for trace in boxes(figure)) == 2 * 64 * 64
    assert len(boxes(figure)) == 8 and len(figure.data) == 10  # 4 chunks, two kinds; ground and held memory
