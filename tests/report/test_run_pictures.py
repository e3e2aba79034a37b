"""Figures of a run agree with its traces and metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.report.run_evidence import RunEvidence, gather
from penstock.report.run_metrics import PLACES, memory_figure, memory_over_time
from penstock.report.run_traces import (
    SQUARES,
    bytes_figure,
    expert_pictures,
    flame_figure,
    load_figure,
    rank_figure,
    rank_pictures,
    roofline_figure,
    waiting_figure,
)
from penstock.trace.analysis import analyse_traces
from penstock.trace.load import load_ranks
from tests.report.looking import drawn, shown
from tests.report.made_runs import host_folder, metrics_line, piped_folder, run_folder, traced_folder
from tests.trace.synthetic import Job, make
from tests.trace.tiny import event, operator, ran, span, trace_of, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunEvidence:
    return gather(traced_folder(tmp_path_factory.mktemp("traced") / "run"))


def totals(trace: Mapping[str, Any]) -> dict[str, float]:
    """What each block comes to, with all that is inside it, by id."""
    sums = dict(zip(trace["ids"], trace["values"], strict=True))
    for own, parent in reversed(list(zip(trace["ids"], trace["parents"], strict=True))):
        if parent:
            sums[parent] += sums[own]
    return sums


# Flame


def test_the_blocks_of_a_step_add_up_to_it(run: RunEvidence) -> None:
    figure = shown(flame_figure(run))
    assert figure.layout["meta"]["choices"] == [f"rank {rank}" for rank in range(4)]
    assert [trace["visible"] for trace in figure.data] == [True, False, False, False]
    for one, trace in zip(run.ranks, figure.data, strict=True):
        assert trace["branchvalues"] == "remainder" and min(trace["values"]) >= 0
        start, end = one.steps[-1].window_us
        assert totals(trace)["0"] == pytest.approx(end - start, rel=0.01)
        busy = one.steps[-1].timeline.busy_us
        idle = totals(trace)[trace["ids"][trace["labels"].index("idle")]]
        assert idle == pytest.approx(end - start - busy, abs=0.01 * (end - start))


def test_blocks_stand_in_the_order_of_a_step(tmp_path: Path) -> None:
    figure = shown(flame_figure(gather(piped_folder(tmp_path / "run"), plans=False)))
    trace = figure.data[0]
    top = [label for label, parent in zip(trace["labels"], trace["parents"], strict=True) if parent == "0"]
    passes = [label for label in top if " of stage " in label]
    assert passes == [f"{kind} of stage {stage}" for kind in ("forward", "backward") for stage in (0, 2)]
    assert not any("micro-batch" in label for label in trace["labels"]), "micro-batches are added up"


def test_a_cpu_has_a_flame_of_operators(tmp_path: Path) -> None:
    figure = shown(flame_figure(gather(host_folder(tmp_path / "run"))))
    trace = figure.data[0]
    place = dict(zip(trace["labels"], trace["ids"], strict=True))
    assert totals(trace)[place["aten::addmm"]] == pytest.approx(120)
    assert totals(trace)[place["layer 1"]] == pytest.approx(200)
    assert "outside of operators" in place


# Roofline


def product(side: int, start: float, us: float, number: int) -> list[dict[str, Any]]:
    dims = {"Input Dims": [[side, side], [side, side]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    return [operator("aten::mm", 10 * number, 6, **dims), *ran("gemm", 10 * number + 1, start, us)]


def test_the_roofline_has_roofs_and_calls_with_known_work(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.json", trace_of(*product(4096, 100, 900, 1)))
    figure = shown(roofline_figure(gather(tmp_path)))
    assert "datasheet: NVIDIA H100 SXM" in figure.caption
    roofs = [trace for trace in figure.data if trace["mode"] == "lines+text"]
    assert {text.strip() for trace in roofs for text in trace["text"]} >= {"bf16 989", "fp8 1,979", "3.35 TB/s"}
    (points,) = [trace for trace in figure.data if trace["mode"] == "markers"]
    assert points["y"] == [pytest.approx(2 * 4096**3 / 900e-6 / 1e12, rel=1e-3)]
    assert points["x"] == [pytest.approx(2 * 4096**3 / (3 * 2 * 4096**2), rel=1e-3)]  # three matrices of 2 bytes
    assert "4096x4096" in points["customdata"][0][2]


def test_an_unknown_device_has_no_roofs(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.json", trace_of(*product(4096, 100, 900, 1)) | {"deviceProperties": []})
    figure = shown(roofline_figure(gather(tmp_path)))
    assert "no roofs are drawn" in figure.caption
    assert all(trace["mode"] == "markers" for trace in figure.data)


def test_calls_that_reach_nothing_are_counted_not_drawn(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.json", trace_of(*product(1, 100, 900, 1), *product(4096, 1100, 900, 2)))
    figure = shown(roofline_figure(gather(tmp_path)))
    assert "1 call, 50.0% of their time, reaches almost nothing" in figure.caption


# Ranks


def test_waiting_is_that_of_matched_collectives(run: RunEvidence) -> None:
    assert run.answer is not None
    figure, cost_us = shown(waiting_figure(run.answer.collectives)), run.answer.collectives.cost_us
    square = np.array(figure.data[0]["z"])
    assert square == pytest.approx(cost_us / 1e3, rel=1e-3)
    assert square.sum(axis=0).argmax() == 2, "all wait for the rank with more rows"
    assert "Rank 2 came last" in figure.caption


def test_bytes_are_those_of_the_parts(tmp_path: Path) -> None:
    job = Job(ranks=3, steps=1, layers=1, seed=5)
    made = make(job)
    traces = load_ranks(made.write(tmp_path))
    figure = shown(bytes_figure(analyse_traces(traces).collectives, traces))
    received = np.array(figure.data[0]["z"]).sum(axis=0) * 1e6
    (rows,) = made.truth.rows[0]
    # Forward and backward send rows to experts, and bring as many home from them.
    home = job.tokens * job.top_k
    assert received == pytest.approx([2 * 2 * job.hidden * (there + home) for there in rows], rel=1e-3)


def test_equal_parts_are_divided(tmp_path: Path) -> None:
    traces = load_ranks(make(Job(ranks=2, steps=1, layers=1, is_even=True)).write(tmp_path))
    figure = shown(bytes_figure(analyse_traces(traces).collectives, traces))
    assert len({value for row in figure.data[0]["z"] for value in row}) == 1


def test_kernels_that_write_into_other_memory_have_no_bytes(tmp_path: Path) -> None:
    found = gather(make(Job(ranks=2, dispatch="symmetric")).write(tmp_path))
    figures, missing = rank_pictures(found)
    assert [figure.name for figure in figures] == ["waiting"]
    assert any("no all-to-all says the sizes" in line for line in missing)


def test_many_ranks_are_added_up_in_squares(tmp_path: Path) -> None:
    found = gather(make(Job(ranks=SQUARES + 8, experts=SQUARES + 8, steps=1, layers=1)).write(tmp_path))
    assert found.answer is not None
    figure = shown(waiting_figure(found.answer.collectives))
    assert "2 by 2 ranks" in figure.caption
    square = np.array(figure.data[0]["z"])
    assert square.shape == (36, 36)  # 72 ranks by twos
    assert square.sum() == pytest.approx(found.answer.collectives.cost_us.sum() / 1e3, rel=1e-2)


@pytest.mark.parametrize(("world", "line"), [(1, "The run has one rank"), (4, "Only one rank was traced")])
def test_one_rank_cannot_tell(tmp_path: Path, world: int, line: str) -> None:
    job = make(Job(ranks=1, steps=1))
    job.files[0]["distributedInfo"]["world_size"] = world
    job.files[0]["distributedInfo"]["pg_config"] = []
    figures, missing = rank_pictures(gather(job.write(tmp_path)))
    assert figures == [] and line in missing[0]


# Experts


def test_loads_of_layers_stand_over_steps() -> None:
    figure = shown(load_figure([metrics_line(step) for step in range(1, 6)]))
    assert figure.data[0]["x"] == [1, 2, 3, 4, 5] and figure.data[0]["y"] == ["1", "2", "3"]
    assert figure.data[0]["z"][2] == [1.3] * 5
    assert "layer 3 is least even: 1.30" in figure.caption


def test_of_many_steps_some_are_drawn_evenly(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run", steps=1001))
    figure = shown(load_figure(found.lines))
    assert figure.data[0]["x"] == list(range(2, 1002, 3))
    assert "Of 1,001 recorded steps 334 are drawn, evenly" in figure.caption


def test_loads_of_ranks_are_against_their_mean(run: RunEvidence) -> None:
    assert run.answer is not None
    figure = shown(rank_figure(run.answer.experts))
    table = np.array(figure.data[0]["z"])
    assert table.shape[0] == 4 and table.sum(axis=0) == pytest.approx(0, abs=0.5)
    assert table[2].min() > 20, "the hot rank is above the mean in every layer"


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    figures, missing = expert_pictures(gather(run_folder(tmp_path / "run", "model.moe=none", "model.dense_layers=4")))
    assert (figures, missing) == ([], ["The model has no experts."])


# Memory


def test_measured_memory_lies_over_the_planned_bar(run: RunEvidence) -> None:
    figure = memory_figure(run)
    marks = drawn(figure, "measured")
    assert marks["x"] == [9.0] and marks["y"] == ["ranks 0 to 3"]
    assert "capacity of H200" in shown(figure).caption


def test_each_place_of_a_pipeline_has_a_bar(tmp_path: Path) -> None:
    figure = shown(memory_figure(gather(piped_folder(tmp_path / "run"), on="2xH200")))
    assert list(figure.data[0]["y"]) == ["rank 0", "rank 1"]


def test_without_a_plan_what_was_measured_is_a_bar(tmp_path: Path) -> None:
    figure = shown(memory_figure(gather(host_folder(tmp_path / "run"))))
    assert figure.title == "Memory measured"
    assert "resident set" in figure.caption and drawn(figure, "measured")["x"] == [9.0]


def test_a_long_pipeline_shows_the_fullest_place_among_some(tmp_path: Path) -> None:
    sizes = ["parallel.pipeline=32", "model.layers=32", "training.global_batch=64", "training.micro_batch=2"]
    figure = shown(memory_figure(gather(run_folder(tmp_path / "run", *sizes), on="32xH200")))
    assert len(figure.data[0]["y"]) <= PLACES
    assert "places between these are left out" in figure.caption


def test_memory_over_a_step_keeps_its_peak(tmp_path: Path) -> None:
    sizes = [10**9 * (1 + (7 * number) % 50) for number in range(5000)]
    held: dict[str, Any] = {"Device Type": 1, "Device Id": 0, "Total Reserved": 60 * 10**9}
    blocks = [
        event("cpu_instant_event", "[memory]", 1 + number * 0.1, 0, **held | {"Total Allocated": size}) | {"ph": "i"}
        for number, size in enumerate(sizes)
    ]
    write(tmp_path / "rank-0.json", trace_of(span("step 1", 0, 600), *ran("k", 2, 9, 5), *blocks))
    figure = shown(memory_over_time(gather(tmp_path)))
    allocated, reserved = figure.data
    assert max(allocated["y"]) == 50.0 and set(reserved["y"]) == {60.0}
    assert len(allocated["x"]) <= 1600 and allocated["x"] == sorted(allocated["x"])


def test_without_a_trace_there_is_no_flame_and_no_roofline(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run"))
    assert flame_figure(found) is roofline_figure(found) is memory_over_time(found) is None
