"""Measured lanes are where the trace has them, on one clock, and a page holds them however many ranks there are."""

from pathlib import Path

import pytest

from penstock.report.run_evidence import RunEvidence, clock_of, gather
from penstock.report.run_timeline import LANES, measured_passes, measured_phases, timeline_pictures
from penstock.trace.analysis import last_step
from tests.report.made_runs import exchanging, host_folder, host_trace, pass_name, piped, piped_folder, run_folder
from tests.trace.synthetic import Job, make
from tests.trace.tiny import ran, span, trace_of, write


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> RunEvidence:
    return gather(piped_folder(tmp_path_factory.mktemp("piped") / "run"), on="2xH200")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RunEvidence:
    return gather(make(exchanging()).write(tmp_path_factory.mktemp("ranks")))


def test_measured_passes_are_those_that_were_made(pipeline: RunEvidence) -> None:
    clock = clock_of(pipeline, pipeline.ranks)
    found = measured_passes(pipeline, pipeline.ranks, clock, {0: 0, 1: 1})
    for rank, lane in enumerate(found.lanes):
        made = [one for one in piped().playback.events if one.rank == rank]
        assert [one.name for one in lane.intervals] == [pass_name(one.action) for one in made]
        assert [one.start * 1e6 for one in lane.intervals] == pytest.approx([one.start for one in made], abs=1e-3)
        assert [one.end * 1e6 for one in lane.intervals] == pytest.approx([one.end for one in made], abs=1e-3)


def test_clocks_that_are_apart_are_brought_together(pipeline: RunEvidence) -> None:
    clock = clock_of(pipeline, pipeline.ranks)
    assert clock.zero_us[1] - clock.zero_us[0] == pytest.approx(700.0)
    assert "the furthest by 350" in clock.words  # from the median of both clocks


def test_planned_and_measured_lie_on_one_axis_with_their_bubbles(pipeline: RunEvidence) -> None:
    (figure,), missing = timeline_pictures(pipeline)
    assert missing == []
    names = [text.split(" \u00b7 ") for text in figure.layout["yaxis"]["ticktext"]]
    assert [name for name, _ in names] == ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    shares = [share for _, share in names]
    assert all(share.endswith("bubble") for share in shares)
    playback = piped().playback
    assert [shares[1], shares[3]] == [f"{1 - busy / playback.span:.0%} bubble" for busy in playback.busy]


def test_a_pipeline_without_a_plan_shows_what_was_measured(tmp_path: Path) -> None:
    found = gather(piped_folder(tmp_path / "run"), plans=False)
    (figure,), (missing,) = timeline_pictures(found)
    assert figure.title == "Pipeline, measured in step 7" and "--no-plan" in missing


def test_a_pipeline_without_traces_shows_what_is_planned(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "parallel.pipeline=2", "training.global_batch=8", "training.micro_batch=2")
    (figure,), (missing,) = timeline_pictures(gather(folder, on="2xH200"))
    assert figure.title == "Pipeline, planned" and "record some steps" in missing


def test_a_place_without_a_recorded_rank_shows_its_plan(tmp_path: Path) -> None:
    folder = piped_folder(tmp_path / "run")
    (folder / "profile" / "rank-0.json").unlink()
    (figure,), _ = timeline_pictures(gather(folder, on="2xH200"))
    names = [text.split(" \u00b7")[0] for text in figure.layout["yaxis"]["ticktext"]]
    assert names == ["rank 0 planned", "rank 1 planned", "rank 1 measured"]


def test_a_step_that_did_nothing_is_not_drawn(tmp_path: Path) -> None:
    steps = [span(f"step {step}", 1000 * step, 900) for step in (1, 2)]
    write(tmp_path / "rank-0.json", trace_of(*steps, *ran("k", 1005, 1050, 9)))
    assert last_step(gather(tmp_path).ranks) == 1


def test_a_pass_within_another_shares_its_lane(tmp_path: Path) -> None:
    events = [
        span("step 1", 0, 900),
        span("backward of stage 0, micro-batch 0", 10, 100),
        span("forward of stage 0, micro-batch 1", 30, 20),
        *ran("gemm", 15, 200, 100),
        *ran("gemm", 35, 300, 50),
        *ran("gemm", 70, 350, 100),
    ]
    write(tmp_path / "rank-0.json", trace_of(*events))
    found = gather(tmp_path)
    (lane,) = measured_passes(found, found.ranks, clock_of(found, found.ranks), {}).lanes
    backward, forward = lane.intervals
    assert (backward.part, forward.part) == ((0.0, 0.5), (0.5, 1.0))
    assert (backward.end - backward.start) * 1e6 == pytest.approx(250)  # from its first kernel to its last
    assert (forward.start - backward.start) * 1e6 == pytest.approx(100)


def test_what_is_sent_lies_below_what_computes(ranks: RunEvidence) -> None:
    lanes = measured_phases(ranks.ranks, clock_of(ranks, ranks.ranks))
    assert lanes.has_halves and lanes.slot_us == 0
    groups = {one.group: one.part for lane in lanes.timeline.lanes for one in lane.intervals}
    assert groups["experts"] == (0.5, 1.0) and groups["dispatch"] == (0.0, 0.46)


def test_boxes_cover_what_the_device_did(ranks: RunEvidence) -> None:
    lanes = measured_phases(ranks.ranks, clock_of(ranks, ranks.ranks))
    for one, lane in zip(ranks.ranks, lanes.timeline.lanes, strict=True):
        step = one.steps[-1]
        assert last_step(ranks.ranks) == step.number
        compute = sum(box.end - box.start for box in lane.intervals if box.part == (0.5, 1.0)) * 1e6
        assert compute == pytest.approx(step.timeline.compute_us, rel=0.02)


def test_a_rank_that_waits_does_so_before_it_sends(ranks: RunEvidence) -> None:
    lanes = measured_phases(ranks.ranks, clock_of(ranks, ranks.ranks)).timeline.lanes
    waiting = {
        lane.name: sum(one.end - one.start for one in lane.intervals if one.group == "waiting") for lane in lanes
    }
    assert waiting["rank 0"] > 5 * waiting["rank 2"], "others wait for the rank with more rows"


def test_too_many_boxes_become_slots_that_say_so(ranks: RunEvidence) -> None:
    clock = clock_of(ranks, ranks.ranks)
    lanes = measured_phases(ranks.ranks, clock, boxes=160)
    assert lanes.slot_us > 0
    assert max(len(lane.intervals) for lane in lanes.timeline.lanes) <= 40  # 160 boxes for 4 ranks
    exact = measured_phases(ranks.ranks, clock).timeline.lanes[0].intervals
    cut = lanes.timeline.lanes[0].intervals
    experts = [sum(one.end - one.start for one in each if one.group == "experts") for each in (exact, cut)]
    assert experts[1] == pytest.approx(experts[0], rel=0.2)


def test_a_hundred_ranks_are_drawn_with_those_that_others_wait_for(tmp_path: Path) -> None:
    found = gather(make(Job(ranks=100, experts=100, steps=1, layers=1, hot_rank=37)).write(tmp_path))
    (figure,), _ = timeline_pictures(found)
    names = [text.split(" \u00b7")[0] for text in figure.layout["yaxis"]["ticktext"]]
    assert len(names) == LANES and "rank 37" in names
    assert "64 of 100 recorded ranks" in figure.caption


def test_lanes_of_a_cpu_are_of_its_operators(tmp_path: Path) -> None:
    (figure,), missing = timeline_pictures(gather(host_folder(tmp_path / "run", ranks=2)))
    assert missing == [] and figure.title == "Step 3, measured"
    assert "operators of each process" in figure.caption and "the clocks of all ranks agree" in figure.caption


def test_ranks_whose_clocks_nothing_joins_begin_at_their_own_step(tmp_path: Path) -> None:
    for rank in range(2):
        events = [span("step 1", 0, 900), *ran("gemm", 5, 50 + 1000 * rank, 100)]
        write(tmp_path / f"rank-{rank}.json", trace_of(*events, rank=rank))
    found = gather(tmp_path)
    clock = clock_of(found, found.ranks)
    assert clock.zero_us == {0: clock.windows_us[0][0], 1: clock.windows_us[1][0]}
    assert "each begins at its own start" in clock.words


def test_a_trace_without_steps_is_drawn_whole(tmp_path: Path) -> None:
    trace = host_trace()
    trace["traceEvents"] = [one for one in trace["traceEvents"] if one["name"] != "step 3"]
    write(tmp_path / "rank-0.json", trace)
    (figure,), _ = timeline_pictures(gather(tmp_path))
    assert figure.title == "The trace"
