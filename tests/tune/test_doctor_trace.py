"""The verdict on traces of jobs with known faults."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.config.load import load_run
from penstock.trace.analysis import TraceAnalysis, analyse_files
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import STANDS, Evidence, RunFacts
from penstock.tune.doctor.from_trace import evidence_of, kind_of
from tests.trace.synthetic import Job, Traces, _Run, make
from tests.trace.synthetic_job import V2_LITE
from tests.trace.synthetic_truth import Truth


def examined(traces: Traces, folder: Path) -> tuple[Evidence, Diagnosis]:
    evidence = evidence_of(analyse_files([traces.write(folder)]), RunFacts())
    return evidence, diagnose(evidence)


class _OneHostStalls(_Run):
    """A job in which the host of one rank does something else before each layer."""

    late = 1

    def forward(self, layer: int):
        self.ranks[self.late].host_us += 1_700.0
        return super().forward(layer)


def one_host_stalls(job: Job) -> Traces:
    run = _OneHostStalls(job)
    for step in range(job.steps):
        run.step(step)
    return Traces(tuple(run.content(rank) for rank in range(job.ranks)), run.truth())


def test_a_slow_rank_is_named_and_its_cost_is_the_truth(tmp_path: Path) -> None:
    traces = make(Job(slow_rank=2, slow=1.6))
    evidence, verdict = examined(traces, tmp_path)
    (late,) = evidence.late
    assert (late.rank, late.cause) == (2, "compute")
    assert "attention" in late.detail
    assert late.caused_wait_us == pytest.approx(traces.truth.caused_wait_us()[2] / evidence.steps, abs=1.0)
    assert verdict.bottleneck == "communication"
    assert "rank 2 (its computing)" in verdict.sentence


def test_a_rank_with_hot_experts_is_named_and_balance_is_what_wins(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(hot_rank=1)), tmp_path)
    (late,) = evidence.late
    assert (late.rank, late.cause) == (1, "experts")
    assert verdict.remedies[0].rule == "even-experts"
    assert verdict.remedies[0].gain_us <= evidence.mean("wait_us")


def test_two_faults_are_two_late_ranks(tmp_path: Path) -> None:
    evidence, _ = examined(make(Job(ranks=6, slow_rank=2, slow=1.8, hot_rank=4)), tmp_path)
    assert {late.rank: late.cause for late in evidence.late} == {2: "compute", 4: "experts"}


def test_a_job_without_faults_names_nobody(tmp_path: Path) -> None:
    evidence, _ = examined(make(Job()), tmp_path)
    assert evidence.late == ()
    assert evidence.other_wait_us > 0


def test_hosts_that_stall_are_the_wall(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(stall_us=1_300.0)), tmp_path)
    assert verdict.bottleneck == "host"
    assert verdict.others == ("communication",)
    assert verdict.remedies[0].rule == "launches-in-one-call"
    assert 0 < evidence.mean("sync_idle_us") < evidence.mean("idle_us")


def test_one_host_that_stalls_is_the_wall_though_others_wait_in_collectives(tmp_path: Path) -> None:
    evidence, verdict = examined(one_host_stalls(Job()), tmp_path)
    assert [(late.rank, late.cause) for late in evidence.late] == [(1, "host")]
    assert verdict.bottleneck == "host"
    assert verdict.remedies[0].rule == "no-host-is-late"
    idle = [one.idle_us / one.total_us for one in evidence.ranks]
    assert max(idle[:1] + idle[2:]) < idle[1], "the others wait, and are not idle"


def test_a_rank_that_is_late_by_its_host_and_by_its_experts_is_told_with_both(tmp_path: Path) -> None:
    evidence, verdict = examined(one_host_stalls(Job(hot_rank=1, hot=3.0)), tmp_path)
    assert {(late.rank, late.cause) for late in evidence.late} == {(1, "host"), (1, "experts")}
    assert "rank 1 (its host and its experts)" in verdict.sentence


def test_experts_are_told_with_all_that_they_take_longer_and_all_else_apart(tmp_path: Path) -> None:
    """What they take longer is what others wait, but for a hundredth."""
    evidence, _ = examined(make(Job(hot_rank=1)), tmp_path)
    (late,) = evidence.late
    longer = float(late.detail.removeprefix("its experts take ").split()[0])
    assert longer == pytest.approx(late.caused_wait_us / 3 / 1e3, rel=0.1)
    assert late.share > 0.9


def test_a_host_that_stood_still_once_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    often, _ = examined(one_host_stalls(Job()), tmp_path / "often")
    assert "at once" not in often.late[0].detail

    once = _Run(Job())
    once.step(0)
    once.ranks[1].host_us += 20_000.0
    once.step(1)
    traces = Traces(tuple(once.content(rank) for rank in range(4)), once.truth())
    evidence, _ = examined(traces, tmp_path / "once")
    (late,) = evidence.late
    assert (late.rank, late.cause) == (1, "host")
    assert "of it at once" in late.detail


def test_a_host_whose_launches_take_longer_is_told_so(tmp_path: Path) -> None:
    traces = one_host_stalls(Job())
    for one in traces.files[1]["traceEvents"]:
        if one["name"] == "cudaLaunchKernel":
            one["dur"] *= 1.5
    evidence, _ = examined(traces, tmp_path)
    assert "50% longer than others'" in evidence.late[0].detail


def test_computing_is_told_by_phase_and_adds_up(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job()), tmp_path)
    assert next(iter(evidence.computing)) == "experts"
    assert sum(evidence.computing.values()) == pytest.approx(verdict.times.compute_us, rel=1e-3)


def test_a_step_that_is_judged_alone_is_one_step(tmp_path: Path) -> None:
    folder = make(Job(stall_us=1_300.0)).write(tmp_path)
    whole, one = (evidence_of(analyse_files([folder], step=step), RunFacts()) for step in (None, 5))
    assert (whole.steps, one.steps) == (2, 1)
    assert whole.launches is not None and one.launches is not None
    assert 0 < one.launches.synchronizations < whole.launches.synchronizations


def test_clocks_that_are_apart_change_no_verdict(tmp_path: Path) -> None:
    offsets = (0.0, 410.0, -260.0, 95.0)
    evidence, _ = examined(make(Job(slow_rank=3, slow=1.6, offsets_us=offsets)), tmp_path)
    assert [(late.rank, late.cause) for late in evidence.late] == [(3, "compute")]


def test_a_collective_that_is_missing_is_told(tmp_path: Path) -> None:
    evidence, verdict = examined(make(Job(hot_rank=1, missing=((2, 5),))), tmp_path)
    assert evidence.unmatched == 1
    assert any("match none of another rank" in line for line in verdict.missing)
    assert [late.rank for late in evidence.late] == [1]


@pytest.mark.parametrize(("dispatch", "kind"), [("symmetric", "symmetric"), ("deep_ep", "deep-ep")])
def test_tokens_that_no_library_of_collectives_sends_are_communication(
    tmp_path: Path, dispatch: str, kind: str
) -> None:
    evidence, verdict = examined(make(Job(dispatch=dispatch, hot_rank=3)), tmp_path)  # type: ignore[arg-type]
    assert evidence.communication(kind) > 0
    assert verdict.bottleneck == "communication"
    assert "tokens-travel-once" not in [one.rule for one in verdict.remedies]
    assert [(late.rank, late.cause) for late in evidence.late] == [(3, "experts")]


def test_one_rank_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    folder = make(Job(hot_rank=1)).write(tmp_path)
    evidence = evidence_of(analyse_files([folder / "rank0_trace.json.gz"]), RunFacts())
    verdict = diagnose(evidence)
    assert all(one.wait_us is None for one in evidence.ranks)
    assert verdict.times.waiting_us == 0
    assert any(line.startswith("one rank of 4") for line in verdict.missing)


def test_costs_of_a_rank_are_those_of_its_timeline(tmp_path: Path) -> None:
    traces = make(Job())
    evidence, _ = examined(traces, tmp_path)
    assert evidence.steps == 2
    for one, truth in zip(evidence.ranks, traces.truth.timelines, strict=True):
        assert one.total_us == pytest.approx(truth["total"] / 2, abs=1.0)
        assert one.exposed_communication_us == pytest.approx(truth["exposed_communication"] / 2, abs=1.0)
        assert sum(one.communication_us.values()) == pytest.approx(one.exposed_communication_us, abs=1.0)


def test_a_recording_of_ours_carries_its_configuration(tmp_path: Path) -> None:
    run = load_run("debug", ["training.global_batch=64"])
    traces = make(Job(stall_us=1_300.0))
    for file in traces.files:
        file["penstock"] = {"config": run.model_dump(mode="json")}
    evidence, verdict = examined(traces, tmp_path)
    assert evidence.facts.run == run
    assert "training.micro_batch=8" in [one.change for one in verdict.remedies]


def test_a_configuration_of_another_version_is_left_alone(tmp_path: Path) -> None:
    traces = make(Job())
    for file in traces.files:
        file["penstock"] = {"config": {"tomorrow": 1}}
    assert examined(traces, tmp_path)[0].facts.run is None


@pytest.mark.parametrize(
    ("collective", "kernel", "kind"),
    [
        ("all_to_allv", "ncclDevKernel_SendRecv(int)", "all-to-all"),
        ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(int)", "reduce-scatter"),
        ("ncclKernel_SendRecv", "ncclKernel_SendRecv(ncclDevComm*)", "send-recv"),
        ("wait_kernel", "wait_kernel", "symmetric"),
        ("ncclDevKernel_Generic", "ncclDevKernel_Generic(int)", "without a name"),
    ],
)
def test_kinds_of_communication_are_known_by_name(collective: str, kernel: str, kind: str) -> None:
    assert kind_of(collective, kernel) == kind


CONDITIONS = {
    "all-to-all": V2_LITE,
    "symmetric": replace(V2_LITE, dispatch="symmetric"),
    "hot expert": replace(V2_LITE, hot_rank=2, hot=2.4),
    "one slowed rank": replace(V2_LITE, slow_rank=3, slow=1.35, slows_all=True),
    "host stalls": replace(V2_LITE, stall_us=15_000.0),
}

BUILT_WALLS = {
    "all-to-all": "communication",
    "symmetric": "compute",
    "hot expert": "communication",
    "one slowed rank": "communication",
    "host stalls": "host",
}
BUILT_LATE = {"hot expert": (2, "experts"), "one slowed rank": (3, "compute")}
BUILT_FIRST_REMEDIES = {
    "all-to-all": "tokens-travel-once",
    "hot expert": "even-experts",
    "one slowed rank": "no-rank-is-late",
    "host stalls": "launches-in-one-call",
}


@dataclass(frozen=True, kw_only=True)
class BuiltCase:
    """A condition, what is true of it, and what was found."""

    name: str
    truth: Truth
    answer: TraceAnalysis
    evidence: Evidence
    verdict: Diagnosis


@pytest.fixture(scope="module", params=CONDITIONS, ids=lambda name: name.replace(" ", "-"))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltCase:
    traces = make(CONDITIONS[request.param])
    answer = analyse_files([traces.write(tmp_path_factory.mktemp("ranks"))])
    evidence = evidence_of(answer, RunFacts())
    return BuiltCase(
        name=request.param, truth=traces.truth, answer=answer, evidence=evidence, verdict=diagnose(evidence)
    )


def test_the_wall_is_the_one_that_was_built(built: BuiltCase) -> None:
    assert built.verdict.bottleneck == BUILT_WALLS[built.name]


def test_the_wall_is_the_largest_loss_of_the_truth(built: BuiltCase) -> None:
    shares = {
        name: sum(one[name] for one in built.truth.timelines) / sum(one["total"] for one in built.truth.timelines)
        for name in ("exposed_communication", "idle")
    }
    largest = max(shares, key=lambda name: shares[name])
    expected = {"exposed_communication": "communication", "idle": "host"}[largest]
    assert built.verdict.bottleneck == (expected if shares[largest] >= STANDS else "compute")


def test_only_the_rank_that_is_to_blame_is_named_and_why(built: BuiltCase) -> None:
    named = [(one.rank, one.cause) for one in built.evidence.late]
    assert named == ([BUILT_LATE[built.name]] if built.name in BUILT_LATE else [])


def test_stragglers_and_what_others_waited_for_them_are_the_truth(built: BuiltCase) -> None:
    assert {one.rank: one.times_last for one in built.answer.collectives.stragglers()} == built.truth.times_last()
    for one in built.answer.collectives.stragglers():
        assert one.caused_wait_us == pytest.approx(built.truth.caused_wait_us()[one.rank], abs=1.0)


def test_the_first_remedy_of_a_built_condition(built: BuiltCase) -> None:
    rules = [one.rule for one in built.verdict.remedies]
    assert rules[:1] == ([BUILT_FIRST_REMEDIES[built.name]] if built.name in BUILT_FIRST_REMEDIES else [])


def test_every_phase_has_a_name(built: BuiltCase) -> None:
    assert all(one.phases.other_share == 0.0 for one in built.answer.ranks)


def test_a_rank_that_is_slow_at_everything_is_not_taken_for_one_with_hot_experts(tmp_path: Path) -> None:
    """Experts take most of what such a rank computes longer."""
    both = replace(V2_LITE, slow_rank=1, slow=1.2, slows_all=True, hot_rank=1, hot=2.0)
    for job, cause in ((replace(both, hot=1.0), "compute"), (both, "experts")):
        folder = make(job).write(tmp_path / cause)
        (late,) = evidence_of(analyse_files([folder]), RunFacts()).late
        assert (late.rank, late.cause) == (1, cause)
