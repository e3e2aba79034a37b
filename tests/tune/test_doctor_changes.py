"""What the plan refuses is not offered, and what another program has no field for is said in words."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.rules.advice import MANY_COPIES
from penstock.tune.doctor import planned as doctor_planned
from penstock.tune.doctor.diagnosis import diagnose
from penstock.tune.doctor.evidence import Evidence, LateRank, RankCosts, RunFacts
from penstock.tune.doctor.planned import with_changes

GB = 1_000_000_000
CAPACITY = 140 * GB
EXPERTS = {"experts": 2_000.0}
IDLE = RankCosts(
    rank=0,
    total_us=100_000.0,
    compute_us=50_000.0,
    exposed_communication_us=0.0,
    exposed_copies_us=0.0,
    idle_us=50_000.0,
    sync_idle_us=10_000.0,
    computing_us=EXPERTS,
)
SENT = replace(
    IDLE, exposed_communication_us=50_000.0, idle_us=0.0, sync_idle_us=0.0, communication_us={"all-to-all": 50_000.0}
)


def projection(seconds: float, size: int) -> Any:
    return SimpleNamespace(
        time=SimpleNamespace(step_seconds=seconds),
        memory=SimpleNamespace(total=size),
        over_bytes=size - CAPACITY,
        fits=size <= CAPACITY,
        cluster=SimpleNamespace(devices=8),
    )


def run_of(*overrides: str) -> Run:
    return load_run("deepseek-v2-lite", ("training.global_batch=32", "parallel.expert=8", *overrides))


def judged(
    monkeypatch: pytest.MonkeyPatch, evidence: Evidence, project: Callable[[Run], tuple[float, int]], **facts: Any
) -> Evidence:
    """With what such a plan says of changes."""
    monkeypatch.setattr(doctor_planned, "project", lambda run, cluster: projection(*project(run)))
    run = evidence.facts.run
    assert run is not None
    planned = projection(*project(run))
    facts = {"world": 8, "planned_bytes": planned.memory.total, "capacity_bytes": CAPACITY} | facts
    facts["planned_step_seconds"] = planned.time.step_seconds
    return with_changes(replace(evidence, facts=replace(evidence.facts, **facts)), planned)


def traced(*overrides: str, rank: RankCosts = IDLE) -> Evidence:
    return Evidence(source="trace", ranks=(rank,), steps=1, facts=RunFacts(run=run_of(*overrides)))


def offered(evidence: Evidence) -> dict[str, str]:
    return {one.change: one.rule for one in diagnose(evidence).remedies}


def test_a_change_that_does_not_fit_by_the_plan_is_not_offered_and_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def project(run: Run) -> tuple[float, int]:
        rows = run.training.micro_batch
        return 0.2 - 0.01 * rows - 0.001 * run.dispatch.sync_free, 60 * GB * rows

    found = judged(monkeypatch, traced("training.micro_batch=2"), project)
    assert "larger-passes" not in offered(found).values()
    (line,) = [one for one in diagnose(found).lines if "is not offered" in one.what]
    assert (line.what.split()[0], line.size) == ("training.micro_batch=4", 100 * GB)
    assert "training.micro_batch=2" in offered(judged(monkeypatch, traced("training.micro_batch=1"), project))


def test_a_change_that_comes_down_to_the_same_run_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    start = traced('dispatch.method="all-to-all"', rank=SENT)
    assert "tokens-travel-once" in offered(replace(start, facts=replace(start.facts, world=8))).values()
    found = judged(monkeypatch, start, lambda run: (0.1 if run.dispatch.overlap == "none" else 0.09, GB))
    assert "tokens-travel-once" not in offered(found).values()
    assert "overlap-if-exposed" in offered(found).values()


def test_another_form_of_a_change_is_offered_where_the_first_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(run: Run) -> tuple[float, int]:
        return 0.1, CAPACITY + (GB if run.graphs.capture == "full" else -GB)

    changes = offered(judged(monkeypatch, traced("dispatch.method=symmetric"), project))
    assert changes.get('graphs.capture="partial"') == "launches-in-one-call"


def test_without_a_trace_no_gain_is_more_than_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    start = replace(traced("training.micro_batch=2"), source="plan")
    found = judged(monkeypatch, start, lambda run: (0.1 - 0.001 * (run.training.micro_batch == 4), GB))
    assert {one.rule: one.gain_us for one in diagnose(found).remedies} == {"larger-passes": pytest.approx(1_000.0)}


def test_a_run_that_has_made_steps_has_room_for_changes_that_need_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(
        monkeypatch, traced("training.micro_batch=2"), lambda run: (0.1 / run.training.micro_batch, 150 * GB)
    )
    assert "training.micro_batch=4" in offered(found)


@pytest.mark.parametrize(("world", "is_offered"), [(MANY_COPIES // 2, True), (MANY_COPIES, False), (None, False)])
def test_gradients_are_summed_in_two_bytes_only_where_few_ranks_sum(world: int | None, is_offered: bool) -> None:
    rank = replace(SENT, communication_us={"reduce-scatter": 50_000.0})
    facts = RunFacts(run=run_of("training.global_batch=256", "parallel.reduce=fp32"), world=world)
    found = offered(Evidence(source="trace", ranks=(rank,), facts=facts))
    assert ('parallel.reduce="bf16"' in found) == is_offered


def not_fitting(saved: Mapping[str, float]) -> Evidence:
    freed = {"training.micro_batch=1": 12 * GB, 'recompute.modules=["layer"]': 110 * GB, "selective": 26 * GB}
    facts = RunFacts(
        planned_bytes=165 * GB, capacity_bytes=CAPACITY, freed_bytes=freed, saved_seconds=saved, has_steps=False
    )
    return Evidence(source="plan", ranks=(replace(SENT, communication_us={}),), facts=facts)


def test_what_makes_a_run_fit_comes_first_and_of_that_the_fastest() -> None:
    saved = {"selective": -0.1, 'recompute.modules=["layer"]': -0.9, "training.micro_batch=1": 0.2}
    remedies = diagnose(not_fitting(saved)).remedies
    assert [one.change for one in remedies] == ["selective", 'recompute.modules=["layer"]', "training.micro_batch=1"]
    assert [one.what.split(":")[0] for one in remedies] == ["fits then", "fits then", "not enough alone"]
    assert "selective-before-full" not in [one.rule for one in remedies if "layer" in one.change]


def foreign(rank: RankCosts, **more: Any) -> Evidence:
    return Evidence(source="trace", ranks=(rank,), steps=1, **more)


def test_a_trace_of_another_program_gets_words_and_no_fields_of_ours() -> None:
    both = replace(IDLE, compute_us=0.0, exposed_communication_us=50_000.0, communication_us={"all-to-all": 50_000.0})
    found = offered(foreign(both))
    assert {"launches-in-one-call", "larger-passes", "tokens-travel-once", "host-never-waits"} <= set(found.values())
    assert not [change for change in found if "=" in change or "." in change]


def test_a_trace_without_products_of_experts_has_no_tokens_that_travel() -> None:
    for rank in (IDLE, SENT):
        found = set(offered(foreign(replace(rank, computing_us={}))).values())
        assert not found & {"tokens-travel-once", "overlap-if-exposed", "host-never-waits"}


def test_a_trace_that_trains_nothing_is_not_given_larger_passes() -> None:
    assert "larger-passes" in offered(foreign(IDLE)).values()
    assert "larger-passes" not in offered(foreign(IDLE, trains=False)).values()


def test_the_part_of_exposed_communication_that_counts_for_the_host_is_told() -> None:
    waits = replace(SENT, wait_us=40_000.0)
    late = (LateRank(rank=1, times_last=9, caused_wait_us=40_000.0, cause="host"),)
    verdict = diagnose(foreign(waits, late=late))
    (line,) = [one for one in verdict.lines if "counts as the host's" in one.what]
    (exposed,) = [one for one in verdict.lines if one.what.startswith("exposed communication")]
    assert exposed.time_us is not None and line.time_us is not None
    assert exposed.time_us - line.time_us == pytest.approx(verdict.times.communication_us)
