"""Five conditions under which a mixture of experts trains on four GPUs, in the proportions of DeepSeek-V2-Lite."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.trace.analysis import TraceAnalysis, analyse_files
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import STANDS, Evidence, RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from tests.trace.synthetic import make
from tests.trace.synthetic_job import V2_LITE
from tests.trace.synthetic_truth import Truth

CONDITIONS = {
    "all-to-all": V2_LITE,
    "symmetric": replace(V2_LITE, dispatch="symmetric"),
    "hot expert": replace(V2_LITE, hot_rank=2, hot=2.4),
    "one slowed rank": replace(V2_LITE, slow_rank=3, slow=1.35, slows_all=True),
    "host stalls": replace(V2_LITE, stall_us=15_000.0),
}

WALLS = {
    "all-to-all": "communication",
    "symmetric": "compute",
    "hot expert": "communication",
    "one slowed rank": "communication",
    "host stalls": "host",
}
LATE = {"hot expert": (2, "experts"), "one slowed rank": (3, "compute")}
FIRST_REMEDIES = {
    "all-to-all": "tokens-travel-once",
    "hot expert": "even-experts",
    "one slowed rank": "no-rank-is-late",
    "host stalls": "launches-in-one-call",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A condition, what is true of it, and what was found."""

    name: str
    truth: Truth
    answer: TraceAnalysis
    evidence: Evidence
    verdict: Diagnosis


@pytest.fixture(scope="module", params=CONDITIONS, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    traces = make(CONDITIONS[request.param])
    answer = analyse_files([traces.write(tmp_path_factory.mktemp("ranks"))])
    evidence = evidence_of(answer, RunFacts())
    return Case(name=request.param, truth=traces.truth, answer=answer, evidence=evidence, verdict=diagnose(evidence))


def test_the_wall_is_the_one_that_was_built(case: Case) -> None:
    assert case.verdict.bottleneck == WALLS[case.name]


def test_the_wall_is_the_largest_loss_of_the_truth(case: Case) -> None:
    shares = {
        name: sum(one[name] for one in case.truth.timelines) / sum(one["total"] for one in case.truth.timelines)
        for name in ("exposed_communication", "idle")
    }
    largest = max(shares, key=lambda name: shares[name])
    expected = {"exposed_communication": "communication", "idle": "host"}[largest]
    assert case.verdict.bottleneck == (expected if shares[largest] >= STANDS else "compute")


def test_only_the_rank_that_is_to_blame_is_named_and_why(case: Case) -> None:
    named = [(one.rank, one.cause) for one in case.evidence.late]
    assert named == ([LATE[case.name]] if case.name in LATE else [])


def test_stragglers_and_what_others_waited_for_them_are_the_truth(case: Case) -> None:
    assert {one.rank: one.times_last for one in case.answer.collectives.stragglers()} == case.truth.times_last()
    for one in case.answer.collectives.stragglers():
        assert one.caused_wait_us == pytest.approx(case.truth.caused_wait_us()[one.rank], abs=1.0)


def test_the_remedy_that_wins_most_is_that_of_the_condition(case: Case) -> None:
    rules = [one.rule for one in case.verdict.remedies]
    assert rules[:1] == ([FIRST_REMEDIES[case.name]] if case.name in FIRST_REMEDIES else [])


def test_every_phase_has_a_name(case: Case) -> None:
    assert all(one.phases.other_share == 0.0 for one in case.answer.ranks)


def test_a_rank_that_is_slow_at_everything_is_not_taken_for_one_with_hot_experts(tmp_path: Path) -> None:
    """Experts take most of what such a rank computes longer."""
    both = replace(V2_LITE, slow_rank=1, slow=1.2, slows_all=True, hot_rank=1, hot=2.0)
    for job, cause in ((replace(both, hot=1.0), "compute"), (both, "experts")):
        folder = make(job).write(tmp_path / cause)
        (late,) = evidence_of(analyse_files([folder]), RunFacts()).late
        assert (late.rank, late.cause) == (1, cause)
