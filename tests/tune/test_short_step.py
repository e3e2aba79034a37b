"""How many rows a step of trials has, and how a measured short step becomes a whole one."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.simulated_machine import SimulatedMachine
from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of, micro_batches
from penstock.config.load import load_run, with_overrides
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.project import project
from penstock.plan.projection import Plan
from penstock.plan.search_request import SearchRequest
from penstock.tune import tune_candidates
from penstock.tune.belief import ShortStep, TrialCandidate
from penstock.tune.search_loop import Search, SearchSettings, TrialLimits, TrialResult, trial_key
from penstock.tune.tune_candidates import CandidateSource, rows_of_trials, shorter, with_rows

LONG = load_run("gpt-oss-20b-4l")  # 1,024 rows in a step, in micro-batches of one


def rows_for(budget: float, row_seconds: float, trials: int = 12) -> int:
    """Rows of trials of fourteen steps, on one device, that take the same time for each row."""
    return rows_of_trials(LONG, 1, lambda rows: rows * row_seconds, steps=14, budget_seconds=budget, most_trials=trials)


@pytest.mark.parametrize(
    ("budget", "row_seconds", "rows"),
    [
        (1200.0, 0.001, 1024),  # a whole step takes a second
        (1200.0, 0.05, 32),  # four of the largest micro-batches
        (120.0, 0.05, 8),
        (240.0, 0.2, 4),  # too few for the largest micro-batches
        (36000.0, 0.05, 1024),  # hours are enough for steps of a minute
    ],
)
def test_steps_of_trials_are_as_short_as_the_budget_demands(budget: float, row_seconds: float, rows: int) -> None:
    assert rows_for(budget, row_seconds) == rows


def test_a_budget_that_is_too_short_for_any_step_is_refused_with_one_that_is_enough() -> None:
    with pytest.raises(ConfigError) as raised:
        rows_for(120.0, 4.0)
    told = "the budget is too short for 3 trials: each makes 14 steps, and the shortest possible step, of 4 rows, is "
    assert str(raised.value) == told + "projected at 16.0 s; got 2:00; fix: --budget 13m"
    assert rows_for(13 * 60.0, 4.0) == 4
    assert rows_for(300.0, 4.0, trials=1) == 4, "one trial takes a third"


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ()),
        (8, ("parallel.expert=8",)),
        (8, ("parallel.pipeline=4", "training.micro_batch=2")),
        (6, ("parallel.pipeline=2", "training.global_batch=1020", "training.micro_batch=5")),
    ],
)
def test_a_short_step_keeps_the_shape_of_the_pipeline(ranks: int, overrides: tuple[str, ...]) -> None:
    run = with_overrides(LONG, overrides)
    found = list(shorter(run, ranks))
    assert found == sorted(found, reverse=True)
    assert len(found) >= 2
    for rows in found:
        short = with_rows(run, rows)
        assert rows < run.training.global_batch
        assert micro_batches(short, grid_of(short, ranks)) >= max(4, 2 * run.parallel.pipeline)
    assert found[0] % (8 * ranks) == 0, "every micro-batch of a search divides it"


def test_a_short_step_is_stretched_by_the_terms_of_both_projections() -> None:
    there, short = cluster_of(1, load_hardware("H200")), with_rows(LONG, 8)
    source = CandidateSource(run=LONG, cluster=there, fixed={}, rows=8)
    candidate = source.reference()
    seconds = [project(run, there, Assumptions()).time.step_seconds for run in (LONG, short)]
    assert candidate.stretch == pytest.approx(seconds[0] / seconds[1])
    assert candidate.short is not None
    assert candidate.terms["products"] == pytest.approx(128 * candidate.short.terms["products"], rel=1e-3)
    assert candidate.terms["update"] == pytest.approx(candidate.short.terms["update"]), "once a step"
    assert 100 < candidate.stretch < 128
    assert replace(candidate, short=None).stretch == 1.0


def test_a_short_step_of_a_pipeline_has_a_larger_bubble_and_the_plan_says_by_how_much() -> None:
    run = with_overrides(LONG, ("parallel.pipeline=4", 'pipeline.schedule="1f1b"'))
    source = CandidateSource(run=run, cluster=cluster_of(4, load_hardware("H200")), fixed={}, rows=32)
    candidate = source.reference()
    assert candidate.short is not None
    bubbles = [terms["bubble"] / sum(terms.values()) for terms in (candidate.terms, candidate.short.terms)]
    assert bubbles[1] > bubbles[0] + 0.02
    assert candidate.stretch < 31.5, "a whole step has 32 times as many rows"


def no_layouts(request: SearchRequest, progress: object = None) -> Plan:
    return Plan(model="gpt-oss", cluster=request.cluster, candidates=(), refused=(), considered=0)


@pytest.fixture(scope="module")
def candidates() -> list[TrialCandidate]:
    """Changes of a run whose whole step takes a minute, with the short steps of a budget of six minutes."""
    source = CandidateSource(run=LONG, cluster=cluster_of(1, load_hardware("H200")), fixed={}, free=("micro_batch",))
    source.shorten(14, 360.0, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_candidates, "search", no_layouts)
        return source.planned()


def machine(candidates: Sequence[TrialCandidate]) -> SimulatedMachine:
    return SimulatedMachine(list(candidates), random.Random(1), capacity_bytes=150e9, steps=14)


def searched(there: SimulatedMachine, budget: float, **more: object) -> Search:
    search = Search(list(there.candidates), there, SearchSettings(budget_seconds=budget), **more)  # type: ignore[arg-type]
    search.run()
    return search


def test_short_steps_find_the_fastest_whole_step(candidates: list[TrialCandidate]) -> None:
    assert {one.short.rows for one in candidates if one.short} == {16}
    there = machine(candidates)
    search = searched(there, 360.0)
    assert search.leader is not None
    assert there.seconds(search.leader.candidate.key) <= 1.02 * there.best
    assert search.leader.step == pytest.approx(there.seconds(search.leader.candidate.key), rel=0.1)
    assert search.spent <= 360.0


def test_a_whole_step_of_the_leader_is_measured_if_the_budget_has_room(candidates: list[TrialCandidate]) -> None:
    assert searched(machine(candidates), 360.0).whole is None
    there = machine(candidates)
    search = searched(there, 1200.0)
    whole, leader = search.whole, search.leader
    assert whole is not None
    assert leader is not None
    assert whole.candidate.key == leader.candidate.key
    assert whole.step == whole.result.step == pytest.approx(there.seconds(leader.candidate.key), rel=0.05)
    assert whole.expected == pytest.approx(leader.step, rel=0.02)
    assert sum(one.is_whole for one in search.records) == 1
    assert whole.step not in leader.result.step_seconds, "whole and short steps are not mixed"


def test_a_leader_whose_whole_step_fails_is_no_leader(candidates: list[TrialCandidate]) -> None:
    there = machine(candidates)
    run = there.run

    def without_room(candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        if candidate.short is None:
            return TrialResult(kind="out of memory", reason="CUDA out of memory", seconds=20.0)
        return run(candidate, limits)

    there.run = without_room  # type: ignore[method-assign]
    search = searched(there, 1200.0)
    assert search.whole is not None
    assert search.leader is not None
    assert search.leader.candidate.key != search.whole.candidate.key


def test_a_search_of_short_steps_goes_on_with_nothing_measured_twice(candidates: list[TrialCandidate]) -> None:
    whole = searched(machine(candidates), 1200.0)
    saved = {trial_key(one.candidate, one.number, is_whole=one.is_whole): one.result for one in whole.records}
    assert len(saved) == len(whole.records)
    again = machine(candidates)
    resumed = searched(again, 1200.0, recorded=saved)
    assert again.asked == []
    assert [one.step for one in resumed.records] == [one.step for one in whole.records]


def test_limits_of_a_trial_follow_the_projection_of_its_own_steps(candidates: list[TrialCandidate]) -> None:
    there, asked = machine(candidates), list[TrialLimits]()
    run = there.run

    def seen(candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        asked.append(limits)
        return run(candidate, limits)

    there.run = seen  # type: ignore[method-assign]
    search = searched(there, 1200.0)
    first = candidates[0].short
    assert first is not None
    assert asked[0].expected_seconds == pytest.approx(sum(first.terms.values()))
    assert asked[0].left_seconds == 1200.0
    assert asked[1].most_seconds == pytest.approx(search.records[0].result.step, rel=0.2), "of a short step"
    assert asked[-1].most_steps == 3
    assert asked[-1].expected_seconds == pytest.approx(search.records[-1].expected)
    assert asked[0].most_steps == math.inf


def test_the_second_of_two_trials_has_time_when_the_first_one_has_spent_the_budget(
    candidates: list[TrialCandidate],
) -> None:
    there, asked = machine(candidates), list[tuple[str, float]]()
    run = there.run

    def slower(one: TrialCandidate, limits: TrialLimits) -> TrialResult:
        result = run(one, limits)
        again = one.key in [key for key, _ in asked]
        asked.append((one.key, limits.left_seconds))
        return replace(result, seconds=300.0) if again else result

    there.run = slower  # type: ignore[method-assign]
    search = searched(there, 360.0)
    (first, second) = (place for place, one in enumerate(search.records) if one.number == 2)
    assert asked[first][1] < 300.0, "the first one took more than there was"
    ran = [one.result.seconds for one in search.records[:second]]
    assert asked[second][1] == max(ran), "as much as the longest trial took"


def test_memory_that_only_whole_steps_need_is_added_to_that_of_short_ones() -> None:
    short = ShortStep(rows=8, terms={"products": 1.0}, memory_bytes=2e9)
    one = TrialCandidate(overrides=(), terms={"products": 16.0}, memory_bytes=5e9, short=short)
    search = searched(SimulatedMachine([one], random.Random(1)), 1000.0)
    assert search.records[0].peak_memory_bytes == search.records[0].result.peak_memory_bytes + 3e9


def test_a_run_that_does_not_fit_is_not_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there = cluster_of(1, load_hardware("H200"))
    fits = load_run("gpt-oss-20b-8l", ["offload.optimizer=true"])
    plan = Plan(
        model="gpt-oss", cluster=there, candidates=(project(fits, there),), refused=(), considered=1,
        helps=("2 devices",),
    )  # fmt: skip
    monkeypatch.setattr(tune_candidates, "search", lambda request, progress: plan)
    source = CandidateSource(run=load_run("gpt-oss-20b-14l"), cluster=there, fixed={})
    source.fit()
    assert source.was_fitted
    assert source.run is fits
    source = CandidateSource(run=load_run("gpt-oss-20b-14l"), cluster=there, fixed={})
    monkeypatch.setattr(tune_candidates, "search", lambda request, progress: replace(plan, candidates=()))
    with pytest.raises(ConfigError, match=r"no layout of gpt-oss-20b-14l fits 1 device of .* GB; fix: 2 devices"):
        source.fit()


def test_a_micro_batch_that_is_learned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_candidates, "search", no_layouts)
    balance = ("model.moe.balance.aux_loss=micro-batch", "model.moe.balance.aux_loss_coef=0.01")
    run, there = load_run("debug-2l", [*balance, "training.global_batch=8"]), cluster_of(1, load_hardware("H200"))
    found = [CandidateSource(run=run, cluster=there, fixed={}, free=free) for free in ((), ("micro_batch",))]
    kept, freed = ([one.key for one in source.planned() if "micro_batch" in one.key] for source in found)
    assert (kept, len(freed)) == ([], 3)
    assert [line for line in found[0].next_wins if "--free micro_batch" in line], "what it would gain is told"


def test_choices_of_a_leader_are_candidates_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_candidates, "search", no_layouts)
    source = CandidateSource(
        run=load_run("deepseek-v2-lite-2l"), cluster=cluster_of(1, load_hardware("H200")), fixed={}
    )
    sync_free = "dispatch.sync_free=2"
    leader = next(one for one in source.planned() if one.overrides == (sync_free,))
    found = source.around(leader)
    assert all(sync_free in one.overrides or not any("sync_free" in word for word in one.overrides) for one in found)
    both = 'recompute.modules=["norm", "expert-activation"]'
    assert f"{sync_free} {both}" in {one.key for one in found}
    assert len({one.key for one in found}) == len(found)
