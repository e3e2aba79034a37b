"""The diagnosis of traces: jobs with known faults, and steps of DeepSeek-V2-Lite that were recorded on H200s."""

import json
import lzma
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.fit import grid_of, micro_batches
from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.trace.analysis import TraceAnalysis, analyse_files, analyse_traces
from penstock.trace.calls import SyncKind
from penstock.trace.events import NONE
from penstock.trace.launches import HostCalls
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import STANDS, Evidence, PowerFacts, RunFacts
from penstock.tune.doctor.from_trace import evidence_of, kind_of
from penstock.tune.doctor.remedy import Remedy
from penstock.tune.doctor.run_facts import facts_of
from tests.trace.synthetic import Job, Traces, _Run, make
from tests.trace.synthetic_job import V2_LITE
from tests.trace.tiny import decoded, event, operator, ran, span
from tools.small_recording import contents, unpack


def examined(traces: Traces, folder: Path) -> tuple[Evidence, Diagnosis]:
    evidence = evidence_of(analyse_files([traces.write(folder)]), RunFacts())
    return evidence, diagnose(evidence)


class _OneHostStalls(_Run):
    """A job in which the host of one rank does something else before each layer."""

    late = 1

    def forward(self, layer: int):
        self.ranks[self.late].host_us += 1_700.0  # longer than the others' layer
        return super().forward(layer)


def one_host_stalls(job: Job) -> Traces:
    run = _OneHostStalls(job)
    for step in range(job.steps):
        run.step(step)
    return Traces(tuple(run.content(rank) for rank in range(job.ranks)), run.truth())


def remedy_of(evidence: Evidence, rule: str) -> Remedy:
    (one,) = [one for one in diagnose(evidence).remedies if one.rule == rule]
    return one


def late_of(evidence: Evidence) -> list[tuple[int, str]]:
    return [(one.rank, one.cause) for one in evidence.late]


def test_a_slow_rank_is_named_and_its_cost_is_the_truth_though_clocks_are_apart(tmp_path: Path) -> None:
    traces = make(Job(slow_rank=2, slow=1.6, offsets_us=(0.0, 410.0, -260.0, 95.0)))
    evidence, verdict = examined(traces, tmp_path)
    assert late_of(evidence) == [(2, "compute")]
    (late,) = evidence.late
    assert "attention" in late.detail
    assert late.caused_wait_us == pytest.approx(traces.truth.caused_wait_us()[2] / evidence.steps, abs=1.0)
    assert verdict.bottleneck == "communication"
    assert "rank 2 (its computing)" in verdict.sentence


def test_a_rank_with_hot_experts_is_named_and_balance_saves_the_waiting_for_it(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(hot_rank=1)), tmp_path)
    assert late_of(evidence) == [(1, "experts")]
    (late,) = evidence.late
    # The transfers of all ranks are longer than the waiting for this one, so overlap has the largest gain.
    assert [one.rule for one in verdict.remedies[:2]] == ["overlap-if-exposed", "even-experts"]
    assert verdict.remedies[1].gain_us == pytest.approx(evidence.mean("wait_us"))
    # The additional time of its experts is the other ranks' waiting, but for a hundredth.
    longer = float(late.detail.removeprefix("its experts take ").split()[0])
    assert longer == pytest.approx(late.caused_wait_us / 3 / 1e3, rel=0.1)
    assert late.share > 0.9


def test_a_job_without_faults_names_no_rank_and_its_costs_are_those_of_its_timelines(tmp_path: Path) -> None:
    traces = make(Job())
    evidence, verdict = examined(traces, tmp_path)
    assert (evidence.late, evidence.steps) == ((), 2)
    assert evidence.other_wait_us > 0
    assert next(iter(evidence.computing)) == "experts"
    assert sum(evidence.computing.values()) == pytest.approx(verdict.times.compute_us, rel=1e-3)
    for one, truth in zip(evidence.ranks, traces.truth.timelines, strict=True):
        assert 0 <= one.total_us - truth["total"] / 2 < 50, "and the host before the first launch"
        assert one.exposed_communication_us == pytest.approx(truth["exposed_communication"] / 2, abs=1.0)
        assert sum(one.communication_us.values()) == pytest.approx(one.exposed_communication_us, abs=1.0)


def test_hosts_that_stall_are_the_wall(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(stall_us=1_300.0)), tmp_path)
    assert verdict.bottleneck == "host"
    assert verdict.others == ("communication",)
    assert verdict.remedies[0].rule == "launches-in-one-call"
    assert 0 < evidence.mean("sync_idle_us") < evidence.mean("idle_us")


def test_one_host_that_stalls_is_the_wall_though_others_wait_in_collectives(tmp_path: Path) -> None:
    evidence, verdict = examined(one_host_stalls(Job()), tmp_path)
    assert late_of(evidence) == [(1, "host")]
    assert verdict.bottleneck == "host"
    assert verdict.remedies[0].rule == "no-host-is-late"
    idle = [one.idle_us / one.total_us for one in evidence.ranks]
    assert max(idle[:1] + idle[2:]) < idle[1], "the others wait, and are not idle"


def test_a_rank_that_is_late_by_its_host_and_by_its_experts_is_told_with_both(tmp_path: Path) -> None:
    evidence, verdict = examined(one_host_stalls(Job(hot_rank=1, hot=3.0)), tmp_path)
    assert set(late_of(evidence)) == {(1, "host"), (1, "experts")}
    assert "rank 1 (its host and its experts)" in verdict.sentence


def test_a_host_that_stood_still_once_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    often, _ = examined(one_host_stalls(Job()), tmp_path / "often")
    assert "at once" not in often.late[0].detail

    once = _Run(Job())
    once.step(0)
    once.ranks[1].host_us += 20_000.0  # one stall between the steps
    once.step(1)
    traces = Traces(tuple(once.content(rank) for rank in range(4)), once.truth())
    evidence, _ = examined(traces, tmp_path / "once")
    assert late_of(evidence) == [(1, "host")]
    assert "of it at once" in evidence.late[0].detail


def test_a_host_whose_launches_take_longer_is_told_so(tmp_path: Path) -> None:
    traces = one_host_stalls(Job())
    for one in traces.files[1]["traceEvents"]:
        if one["name"] == "cudaLaunchKernel":
            one["dur"] *= 1.5  # of every launch of rank 1
    evidence, _ = examined(traces, tmp_path)
    assert "50% longer than others'" in evidence.late[0].detail


def test_a_step_that_is_judged_alone_is_one_step(tmp_path: Path) -> None:
    folder = make(Job(stall_us=1_300.0)).write(tmp_path)
    whole, one = (evidence_of(analyse_files([folder], step=step), RunFacts()) for step in (None, 5))
    assert (whole.steps, one.steps) == (2, 1)
    assert whole.launches is not None and one.launches is not None
    assert 0 < one.launches.synchronizations < whole.launches.synchronizations


def test_a_collective_that_is_missing_is_told(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(hot_rank=1, missing=((2, 5),))), tmp_path)
    assert evidence.unmatched == 1
    assert any("match none of another rank" in line for line in verdict.missing)
    assert late_of(evidence) == [(1, "experts")]


@pytest.mark.parametrize(("dispatch", "kind"), [("symmetric", "symmetric"), ("deep_ep", "deep-ep")])
def test_tokens_that_no_library_of_collectives_sends_are_communication(
    tmp_path: Path, dispatch: str, kind: str
) -> None:
    evidence, verdict = examined(make(Job(dispatch=dispatch, hot_rank=3)), tmp_path)  # type: ignore[arg-type]
    assert evidence.communication(kind) > 0
    assert verdict.bottleneck == "communication"
    assert "tokens-travel-once" not in [one.rule for one in verdict.remedies]
    assert late_of(evidence) == [(3, "experts")]


def test_one_rank_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    folder = make(Job(hot_rank=1)).write(tmp_path)
    evidence = evidence_of(analyse_files([folder / "rank0_trace.json.gz"]), RunFacts())
    verdict = diagnose(evidence)
    assert all(one.wait_us is None for one in evidence.ranks)
    assert verdict.times.waiting_us == 0
    assert any(line.startswith("one rank of 4") for line in verdict.missing)


def test_a_recording_of_ours_carries_its_configuration_unless_another_version_wrote_it(tmp_path: Path) -> None:
    run = load_run("debug", ["training.global_batch=64"])
    traces = make(Job(stall_us=1_300.0))
    for config, expected in ((run.model_dump(mode="json"), run), ({"tomorrow": 1}, None)):
        for file in traces.files:
            file["penstock"] = {"config": config}
        evidence, verdict = examined(traces, tmp_path / f"{expected is None}")
        assert evidence.facts.run == expected
        assert ("training.micro_batch=8" in [one.change for one in verdict.remedies]) == (expected is not None)


def of_events(*events: dict[str, Any]) -> Evidence:
    return evidence_of(analyse_traces({0: decoded(*events)}), RunFacts())


ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


def test_a_run_of_elementwise_kernels_can_save_all_but_its_longest(tmp_path: Path) -> None:
    found = of_events(
        *ran("nvjet_sm90_tst_128x256", 1, 100, 50),
        *ran(ADD, 3, 150, 10),
        *ran(ADD.replace("_add", "_mul"), 5, 160, 30),
        *ran(ADD, 7, 190, 20),
        *ran("nvjet_sm90_tst_128x256", 9, 210, 50),
        *ran(ADD, 11, 260, 40),  # alone, it can be fused with nothing
    )
    (costs,) = found.ranks
    assert (costs.pointwise_us, costs.pointwise_kernels, costs.fusable_us) == (100.0, 4.0, 30.0)
    assert remedy_of(found, "elementwise-in-one-kernel").gain_us == 30.0


def test_the_host_in_a_copy_costs_what_the_device_lacks_work_meanwhile() -> None:
    copy = event("cuda_runtime", "hipMemcpyWithStream", 10, 500, correlation=5)
    found = of_events(
        *ran("nvjet_sm90_tst_128x256", 1, 10, 100),  # beside the copy's first 100 us
        span("load weights", 5, 600),
        operator("aten::copy_", 8, 520),
        copy,
        event("gpu_memcpy", "Memcpy HtoD", 120, 380, stream=7, correlation=5, bytes=1_000_000),
        *ran("nvjet_sm90_tst_128x256", 515, 520, 480),
    )
    assert found.host_call == HostCalls(
        call="hipMemcpyWithStream",
        where="load weights > aten::copy_",
        count=1,
        longest_us=500.0,
        alone_us=400.0,
        bytes=1_000_000,
    )
    assert remedy_of(found, "copies-ahead").gain_us == 400.0


def test_what_the_host_does_before_the_first_work_of_the_device_costs_no_step_anything() -> None:
    found = of_events(
        event("cuda_runtime", "cudaMalloc", 0, 200_000),
        *(
            started
            for number in range(4)
            for started in ran("nvjet_sm90", 200_100 + 200 * number, 200_110 + 200 * number, 150)
        ),
        event("cuda_runtime", "cudaFree", 300_000, 100_000),
    )
    assert found.host_call is None
    assert "memory-is-kept" not in [remedy.rule for remedy in diagnose(found).remedies]


def test_a_copy_is_not_blamed_for_queued_work_that_did_not_start() -> None:
    """Four kernels are launched before a copy of 463 ms, and begin only behind it, as on an MI300X that woke up."""
    found = of_events(
        *ran("Cijk_first", 1, 10, 100),
        *(one for number in range(4) for one in ran("Cijk_late", 20 + 5 * number, 464_000 + 100 * number, 100)),
        event("cuda_runtime", "hipMemcpyWithStream", 500, 463_000, correlation=5),
        event("gpu_memcpy", "Memcpy HtoD", 463_400, 90, stream=7, correlation=5, bytes=64),
        *ran("Cijk_last", 464_300, 464_400, 100),
    )
    verdict = diagnose(found)
    assert (verdict.bottleneck, verdict.others) == ("stall", ())
    assert found.stall is not None
    assert (found.stall.queued, found.stall.call) == (4, "hipMemcpyWithStream")
    assert "copies-ahead" not in [one.rule for one in verdict.remedies]
    assert "launches-in-one-call" not in [one.rule for one in verdict.remedies]


def steps_of_ten_ms(number: int, late_us: float = 0.0) -> list[dict[str, Any]]:
    """A step: ten kernels of 900 us, each launched just before it; the last ones come late."""
    begin = 10_000.0 * number
    return [
        span(f"ProfilerStep#{number}", begin, 10_000),
        *(
            one
            for place in range(10)
            for one in ran("nvjet_sm90", begin + 1000 * place, begin + 1000 * place + 8 + late_us * (place > 4), 900)
        ),
    ]


@pytest.mark.parametrize(("launched", "wall"), [(True, "stall"), (False, "host")], ids=["queued", "not launched"])
def test_one_long_stall_is_listed_apart_and_is_no_wall_of_every_step(launched: bool, wall: str) -> None:
    """Three of four steps compute 90 %; one stands still for 60 ms, with kernels launched before it or after it."""
    begin = 30_000.0
    stalled = [span("ProfilerStep#3", begin, 70_000), *ran("nvjet_sm90", begin, begin + 8, 900)]
    for place in range(9):
        start = begin + 61_008 + 1000 * place
        stalled += ran("nvjet_sm90", begin + 100 + place if launched else start - 8, start, 900)
    found = of_events(*(one for number in range(3) for one in steps_of_ten_ms(number)), *stalled)
    verdict = diagnose(found)
    assert verdict.bottleneck == "compute"
    assert found.ranks[0].total_us == pytest.approx(10_000, rel=0.02)
    (single,) = found.single_stalls
    assert (single.step, single.duration_us, single.queued) == (3, pytest.approx(60_100, abs=50), 9 if launched else 0)
    assert [line.bottleneck for line in verdict.lines if "single stall" in line.what] == [wall]


def test_a_device_whose_clock_is_ahead_has_no_queue() -> None:
    """Kernels of 100 us, each launched behind the one before; the device's clock is 5 ms ahead."""
    found = of_events(*(one for place in range(50) for one in ran("a", 1000 * place, 5008 + 1000 * place, 100)))
    assert diagnose(found).bottleneck == "host"
    assert found.stall is None


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("data", "user_annotation"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Operator"),  # PyTorch 1.x
    ],
)
def test_a_device_that_waits_for_rows_waits_for_data(name: str, category: str) -> None:
    """Steps of 1,000 us: rows for 600, of which the device still computes the first 100, and its launch comes after."""
    steps = [
        one
        for step in range(3)
        for one in (
            event(category, f"ProfilerStep#{step}", 1000 * step, 1000),
            event(category, name, 1000 * step, 600),
            *ran("nvjet_sm90_tst_128x256", 1000 * step + 610, 1000 * step + 650, 450),
        )
    ]
    found = of_events(*steps)
    verdict = diagnose(found)
    # On the device: 650 idle and 450, then twice 550 and 450; of the idle time 600 and twice 500 are beside the span.
    assert (3 * found.ranks[0].total_us, 3 * found.ranks[0].data_us) == pytest.approx((3100, 1600))
    assert 3 * found.ranks[0].idle_us == pytest.approx(150)
    assert verdict.bottleneck == "data"


def test_a_recording_without_steps_is_judged_as_a_whole() -> None:
    kernels = [*ran("gemm", 0, 5, 10), *ran("gemm", 500, 510, 10)]
    assert diagnose(of_events(*kernels)).sentence == "host: the device is idle 96.1% of the recording"
    assert diagnose(of_events(span("ProfilerStep#1", 0, 520), *kernels)).sentence.endswith("of the step")


@pytest.mark.parametrize(
    ("computes", "lasts", "copy", "counts"),
    [(5, 300, "HtoD", True), (310, 300, "HtoD", False), (5, 300, "DtoD", False), (5, 90, "HtoD", False)],
    ids=["host waits", "beside computing", "on the device", "only launched"],
)
def test_a_copy_costs_something_where_the_host_stays_in_it_and_the_device_lacks_work(
    computes: float, lasts: float, copy: str, counts: bool
) -> None:
    found = of_events(
        *ran("nvjet_sm90_tst_128x256", 1, 5, computes),
        event("cuda_runtime", "cudaMemcpyAsync", 10, lasts, correlation=5),
        event("gpu_memcpy", f"Memcpy {copy}", 15, lasts - 10, stream=9, correlation=5, bytes=100),
    )
    assert (found.host_call is not None) == counts


@pytest.mark.parametrize(
    ("collective", "kernel", "kind"),
    [
        ("all_to_allv", "ncclDevKernel_SendRecv(int)", "all-to-all"),
        ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(int)", "reduce-scatter"),
        ("ncclKernel_SendRecv", "ncclKernel_SendRecv(ncclDevComm*)", "send-recv"),
        ("wait_kernel", "wait_kernel", "symmetric"),
        ("ncclDevKernel_Generic", "ncclDevKernel_Generic(int)", "without a name"),
        ("", "void acme::ep::dispatch<7168>(int)", "expert-parallel"),
        ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(acme)", "gathered tokens"),
        ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(int)", "all-gather"),
        ("", "void hybrid_ep::dispatch_kernel<int>(int)", "hybrid-ep"),
        ("", "void deep_ep::internode::combine<int>(int)", "deep-ep"),
    ],
)
def test_kinds_of_communication_are_known_by_name(collective: str, kernel: str, kind: str) -> None:
    assert kind_of(collective, kernel, phase="dispatch" if "acme" in kernel else "") == kind


SLOW = replace(V2_LITE, slow_rank=3, slow=1.35, slows_all=True)
CONDITIONS: dict[str, tuple[Job, str, list[tuple[int, str]], list[str]]] = {
    "all-to-all": (V2_LITE, "communication", [], ["tokens-travel-once"]),
    "symmetric": (replace(V2_LITE, dispatch="symmetric"), "compute", [], []),
    "hot-expert": (replace(V2_LITE, hot_rank=2, hot=2.4), "communication", [(2, "experts")], ["even-experts"]),
    "slow-rank": (SLOW, "communication", [(3, "compute")], ["no-rank-is-late"]),
    "host-stalls": (replace(V2_LITE, stall_us=15_000.0), "host", [], ["launches-in-one-call"]),
}
"""A job, and its bottleneck, late rank and first remedy."""


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_built_condition_is_found_with_its_truth(name: str, tmp_path: Path) -> None:
    job, wall, late, first = CONDITIONS[name]
    traces = make(job)
    answer = analyse_files([traces.write(tmp_path)])
    evidence = evidence_of(answer, RunFacts())
    verdict = diagnose(evidence)
    assert verdict.bottleneck == wall
    assert late_of(evidence) == late
    assert [one.rule for one in verdict.remedies][: len(first)] == first
    assert all(one.phases.other_share == 0.0 for one in answer.ranks), "every phase has a name"
    assert {one.rank: one.times_last for one in answer.collectives.stragglers()} == traces.truth.times_last()
    for one in answer.collectives.stragglers():
        assert one.caused_wait_us == pytest.approx(traces.truth.caused_wait_us()[one.rank], abs=1.0)
    # The bottleneck is the largest loss of the truth.
    total, sent, idle = (
        sum(one[name] for one in traces.truth.timelines) for name in ("total", "exposed_communication", "idle")
    )
    largest = "communication" if sent > idle else "host"
    assert wall == (largest if max(sent, idle) >= STANDS * total else "compute")


def test_a_rank_that_is_slow_at_everything_is_not_taken_for_one_with_hot_experts(tmp_path: Path) -> None:
    both = replace(V2_LITE, slow_rank=1, slow=1.2, slows_all=True, hot_rank=1, hot=2.0)
    for job, cause in ((replace(both, hot=1.0), "compute"), (both, "experts")):
        assert late_of(examined(make(job), tmp_path / cause)[0]) == [(1, cause)]


DATA = Path(__file__).parent / "data" / "recorded"
COSTS = 0.05  # share of the step that each other rank waits for one, from which it is named here

FOUND = {
    "all-to-all": ("communication", [(2, "host"), (1, "experts")], "even-experts"),
    "symmetric": ("compute", [(2, "experts")], "even-experts"),
    "hot-experts": ("communication", [(0, "experts"), (3, "experts"), (2, "experts")], "even-experts"),
    "slow-rank": ("communication", [(2, "compute")], "no-rank-is-late"),
    "host-stalls": ("host", [(2, "host")], "no-host-is-late"),
}
"""Bottleneck, late ranks and first remedy of each recorded condition."""
UNMATCHED = {"hot-experts": 1}  # an all-to-all in which one rank had nothing for another, and left before that came


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recording and what was found in it."""

    name: str
    answer: TraceAnalysis
    evidence: Evidence
    verdict: Diagnosis

    @property
    def counts(self) -> int:
        """Waits of a rank's host for row counts in a step: one for each layer with experts and micro-batch."""
        run, world = self.evidence.facts.run, self.evidence.facts.world
        assert run is not None and world is not None
        return 0 if run.dispatch.sync_free else run.model.moe_layers * micro_batches(run, grid_of(run, world))

    @property
    def late(self) -> list[tuple[int, str]]:
        others, total_us = len(self.evidence.ranks) - 1, self.verdict.times.total_us
        return [(one.rank, one.cause) for one in self.evidence.late if one.caused_wait_us / others >= COSTS * total_us]


@pytest.fixture(scope="module", params=FOUND)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = unpack(DATA / f"{request.param}.tar.xz", tmp_path_factory.mktemp("recorded"))
    answer = analyse_files([folder])
    evidence = evidence_of(answer, *facts_of(folder))
    return Case(name=request.param, answer=answer, evidence=evidence, verdict=diagnose(evidence))


def test_bottleneck_late_ranks_and_first_remedy_are_those_of_the_condition(case: Case) -> None:
    wall, late, remedy = FOUND[case.name]
    assert case.verdict.bottleneck == wall
    assert case.verdict.sentence.startswith(f"{wall}: ")
    assert case.late == late
    assert case.verdict.remedies[0].rule == remedy
    assert max(one.phases.other_share for one in case.answer.ranks) < COSTS, "nearly all device time has a name"
    for one in case.evidence.late:
        assert "0.00 ms" not in one.detail and " 0% longer" not in one.detail


def test_the_host_waits_for_counts_and_figures_and_for_nothing_else(case: Case) -> None:
    launches, evidence = case.evidence.launches, case.evidence
    assert launches is not None
    assert launches.synchronizations == (case.counts + 1) * evidence.steps * len(evidence.ranks)
    behind = [one.counts_idle_us for one in evidence.ranks]
    assert all(us is not None and (us > 0) == (case.counts > 0) for us in behind)
    assert ("host-never-waits" in {one.rule for one in case.verdict.remedies}) == (case.counts > 0)


def test_recording_costs_less_than_a_tenth_where_the_device_is_busy_and_no_more_than_the_host(case: Case) -> None:
    walls = case.verdict.times
    # A step that launches decide is slowed by each launch that is written down.
    assert 0 <= walls.share(walls.recording_us) < (0.3 if case.name == "host-stalls" else 0.1)
    assert sum(walls.losses.values()) + walls.compute_us + walls.recording_us == pytest.approx(walls.total_us)


def test_all_collectives_are_matched_but_those_that_did_not_wait(case: Case) -> None:
    assert case.evidence.unmatched == UNMATCHED.get(case.name, 0)
    collectives = case.answer.collectives
    assert all("no number" not in one.why for one in collectives.unmatched)
    late = collectives.meetings.met[collectives.last != NONE]
    assert (collectives.calls.sync[late.max(axis=1)] < SyncKind.ALONE).all(), "a rank is last only where ranks wait"


def test_ranks_that_are_late_by_their_experts_have_the_most_rows_in_a_layer(case: Case) -> None:
    blamed = {rank for rank, cause in case.late if cause == "experts"}
    loads = case.answer.experts.loads
    if case.name != "symmetric":  # whose rows are padded to a bound
        assert blamed <= {case.answer.experts.ranks[one] for one in loads.argmax(axis=1)}


def test_waiting_for_late_ranks_adds_up_to_all_waiting(case: Case) -> None:
    steps = max(1, case.evidence.steps)
    waited_us = np.nansum(case.answer.collectives.wait_us) / steps
    named_us = Counter()
    for one in case.evidence.late:  # a rank with two causes has two entries
        named_us[one.rank] += one.caused_wait_us
    for one in case.answer.collectives.stragglers():
        assert named_us[one.rank] <= one.caused_wait_us / steps + 1.0
    assert named_us.total() == pytest.approx(waited_us, rel=0.1)


def test_a_small_recording_made_smaller_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    archive = DATA / "symmetric.tar.xz"
    assert contents(unpack(archive, tmp_path)) == lzma.decompress(archive.read_bytes())


def facts(folder: Path, milliseconds: list[float], *overrides: str, **more: Any) -> RunFacts:
    run = load_run("debug", overrides)
    (folder / RUN_FILE).write_text(dump_toml(run))
    lines = [
        {
            "step": step,
            "step_seconds": time / 1e3,
            "tokens_per_second_per_device": run.tokens_per_step / (time / 1e3),
            "phase_seconds": {"forward": before / 2e3} if before else None,
        }
        for step, (before, time) in enumerate(zip([0.0, *milliseconds], milliseconds, strict=False), start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line | more)}\n" for line in lines))
    return facts_of(folder)[0]


def test_the_usual_step_is_none_that_was_recorded_nor_the_one_that_waits_for_the_files(tmp_path: Path) -> None:
    found = facts(tmp_path, [5000, 300, 310, 400, 410, 700], "profile.start=4", "profile.steps=2")  # milliseconds
    assert found.step_seconds == pytest.approx(0.310)
    assert found.phase_seconds["forward"] == pytest.approx((0.300 + 0.310) / 2 / 2), "of the steps before the lines"
    # If none or all were recorded, the usual step is of the second half.
    for times, overrides, usual in (
        ([5000, 900, 800, 300, 310, 320], (), 0.310),
        ([5000, 400], ("profile.start=1", "profile.steps=2"), 0.4),
    ):
        found = facts(tmp_path, times, *overrides)
        assert (found.step_seconds, found.beside_seconds) == (pytest.approx(usual), None)


def test_beside_recorded_steps_the_longest_of_the_nearest_counts(tmp_path: Path) -> None:
    times = [5000, 900, 310, 330, 320, 420, 800, 300, 305, 950, 960, 970, 980]  # milliseconds; step 6 is recorded
    found = facts(tmp_path, times, "profile.start=6", "profile.steps=1")
    assert found.beside_seconds == pytest.approx(0.330)


DRAWN = {"power_watts": 664.0, "power_limit_watts": 700.0, "clock_mhz": 1485.0, "clock_limit_mhz": 1980.0}


@pytest.mark.parametrize(("more", "known"), [(DRAWN, True), (DRAWN | {"power_watts": None}, False), ({}, False)])
def test_power_and_clock_of_a_run_are_the_medians_of_its_metrics(
    more: dict[str, float | None], known: bool, tmp_path: Path
) -> None:
    found = facts(tmp_path, [300.0] * 6, **more)
    expected = PowerFacts(watts=664.0, limit_watts=700.0, clock_mhz=1485.0, limit_mhz=1980.0)
    assert found.power == (expected if known else None)
    job = replace(V2_LITE, dispatch="symmetric")  # computing is its bottleneck
    traces = make(job).write(tmp_path / "traces")
    verdict = diagnose(evidence_of(analyse_files([traces]), replace(found, run=None, beside_seconds=None)))
    assert verdict.bottleneck == ("power" if known else "compute")
