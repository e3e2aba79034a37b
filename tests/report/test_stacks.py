"""Bars add up, and have distinct names."""

import re
from dataclasses import replace

import pytest

from penstock.plan.projection import Plan
from penstock.report.colours import TIME_PARTS, part_colours
from penstock.report.figure import Figure
from penstock.report.stacks import memory_figure, memory_parts, names_of, time_figure, time_parts


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
    large = replace(first, memories=tuple(replace(one, activations=300 * 10**9) for one in first.memories))
    figure = memory_figure([first, large])
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
