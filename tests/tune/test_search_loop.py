"""The search of `penstock tune` on made-up machines: what it finds, in how many trials, and what failures do to it."""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulated_machine import SimulatedMachine, random_candidates
from penstock.base.errors import DeviceError
from penstock.tune.belief import Belief, Measured, StepEstimate, TrialCandidate
from penstock.tune.search_loop import (
    LEAST_GAIN,
    Kind,
    Search,
    SearchSettings,
    TrialLimits,
    TrialRecord,
    TrialResult,
    judged,
    median_error,
    steps_to,
    trial_key,
)
from penstock.tune.tune_files import read_journal, write_journal

CAPACITY = 80e9
NO_LIMIT = SearchSettings(budget_seconds=1e9, capacity_bytes=CAPACITY)


def machine(seed: int, **more: object) -> SimulatedMachine:
    rng = random.Random(seed)
    return replace(SimulatedMachine(random_candidates(rng), rng, capacity_bytes=CAPACITY), **more)  # type: ignore[arg-type]


def searched(there: SimulatedMachine, settings: SearchSettings = NO_LIMIT, **more: object) -> Search:
    search = Search(list(there.candidates), there, settings, **more)  # type: ignore[arg-type]
    search.run()
    return search


class MadeUp:
    """Trials whose steps take what a function says, in seconds."""

    def __init__(self, seconds: Callable[[TrialCandidate], tuple[float, ...]]) -> None:
        self.seconds = seconds

    def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        return TrialResult(step_seconds=self.seconds(candidate), losses=(5.0,), seconds=10.0)


def leader(search: Search) -> TrialCandidate:
    assert search.leader is not None
    return search.leader.candidate


def slower(search: Search, there: SimulatedMachine) -> float:
    """True step of the leader over that of the best candidate."""
    return there.seconds(leader(search).key) / there.best


def test_random_machines_are_tuned_to_3_percent_in_few_trials() -> None:
    there = [machine(seed) for seed in range(40)]
    searches = [searched(one) for one in there]
    good = [slower(search, one) <= 1.03 for search, one in zip(searches, there, strict=True)]
    assert statistics.fmean(good) >= 0.95
    assert max(len(search.records) for search in searches) <= 12
    assert statistics.median(len(search.records) for search in searches) <= 7
    bare, corrected = ([median_error(one.records, corrected=way) for one in searches] for way in (False, True))
    assert statistics.median(filter(None, corrected)) < 0.03 < 0.1 < statistics.median(filter(None, bare))


def test_a_measured_term_corrects_candidates_that_share_it() -> None:
    sends = {"products": 0.5, "dispatch": 0.5}
    ones = [TrialCandidate(overrides=(f"a={place}",), terms=sends) for place in range(2)]
    other = TrialCandidate(overrides=("b=1",), terms={"products": 1.0})
    seen = [Measured(candidate=other, seconds=1.0), Measured(candidate=ones[0], seconds=1.4)]
    guess, plain = Belief([ones[1], other], seen).estimates()
    assert guess.seconds == pytest.approx(1.4, rel=0.03)
    assert plain.seconds == pytest.approx(1.0, rel=0.01)
    assert guess.deviation < Belief([ones[1]]).estimates()[0].deviation / 5


def test_five_trials_that_agree_leave_an_equal_candidate_nothing_to_gain() -> None:
    ones = [TrialCandidate(overrides=(f"a={place}",), terms={"products": 1.0}) for place in range(8)]

    def bound(trials: int) -> float:
        seen = [Measured(candidate=one, seconds=1.1 + 0.001 * (place % 3)) for place, one in enumerate(ones[:trials])]
        return 1 - Belief(ones[7:], seen).estimates()[0].least / 1.1

    assert bound(4) > LEAST_GAIN > bound(5)


FAULTS: tuple[Kind, ...] = ("out of memory", "hang", "crash", "not finite", "another loss", "lying clock")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_the_best_candidates_is_a_result_and_the_next_best_wins(kind: Kind) -> None:
    for seed in range(4):
        there = machine(seed)
        ranked = sorted((one.key for one in there.candidates[1:]), key=there.seconds)
        there = machine(seed, faults={ranked[0]: kind, ranked[1]: kind})
        search = searched(there, replace(NO_LIMIT, most_trials=20))
        assert slower(search, there) <= 1.03
        failed = [one for one in search.records if one.candidate.key in ranked[:2]]
        assert all(one.result.kind == kind and one.result.reason for one in failed)
        asked = [key for key in there.asked if key in ranked[:2]]
        assert len(asked) == len(set(asked)), "a failure is not repeated"


def test_a_reference_that_does_not_run_still_gives_a_leader() -> None:
    there = machine(3, faults={"": "crash"})
    search = searched(there, replace(NO_LIMIT, most_trials=20))
    assert search.records[0].result.kind == "crash"
    assert slower(search, there) <= 1.03


def test_a_steady_trial_keeps_its_time_beside_a_reference_whose_trials_differ() -> None:
    there = machine(5)
    first, steady, odd = there.candidates[:3]
    search = Search(list(there.candidates), there, NO_LIMIT)

    def trial(candidate: TrialCandidate, *factors: float) -> TrialRecord:
        times = tuple(candidate.projected * factor for factor in factors)
        guess = StepEstimate(seconds=candidate.projected, deviation=0.5)
        result = TrialResult(step_seconds=times)
        return TrialRecord(
            candidate=candidate, result=result, projected=candidate.projected, estimated=guess, score=1.0
        )

    search.records = [
        trial(first, 1.9, 2.0, 1.5, 1.6), trial(steady, 0.92, 0.921, 0.919), trial(odd, 1.5, 1.51, 1.49),
        trial(first, 1.7, 1.4, 1.6, 1.5),
    ]  # fmt: skip
    assert search.estimates()[steady.key].seconds == pytest.approx(0.92 * steady.projected, rel=0.01)


def test_a_resumed_search_measures_nothing_twice_and_ends_the_same() -> None:
    whole = searched(machine(5))
    saved = {trial_key(one.candidate, one.number): one.result for one in whole.records[:3]}
    again = machine(5)
    resumed = searched(again, recorded=saved)
    assert len(again.asked) == len(resumed.records) - 3
    assert [one.candidate.key for one in resumed.records[:4]] == [one.candidate.key for one in whole.records[:4]]


def test_second_trials_between_which_a_search_ended_are_both_made_again() -> None:
    whole = searched(machine(5))
    place = next(place for place, one in enumerate(whole.records) if one.number == 2)
    saved = {trial_key(one.candidate, one.number): one.result for one in whole.records[: place + 1]}
    again = machine(5)
    resumed = searched(again, recorded=saved)
    assert again.asked[:2] == [one.candidate.key for one in whole.records[place : place + 2]]
    assert len(resumed.records) == len(whole.records)


def test_a_journal_keeps_results_that_a_search_has_not_come_to(tmp_path: Path) -> None:
    saved = {trial_key(one.candidate, one.number): one.result for one in searched(machine(5)).records}
    there = machine(5)
    resumed = Search(list(there.candidates), there, NO_LIMIT, recorded=saved)
    resumed.try_one(there.candidates[0])
    write_journal(tmp_path, {}, 8, resumed)
    found = read_journal(tmp_path, {})
    assert found is not None
    assert (found.results, found.rows) == (saved, 8)


def test_the_budget_ends_a_search_with_the_best_so_far() -> None:
    search = searched(machine(7), replace(NO_LIMIT, budget_seconds=30.0))
    assert search.ending == "the budget is spent"
    assert search.leader is not None
    assert search.spent <= 60


def test_memory_that_is_not_there_is_not_asked_for_again_and_again() -> None:
    """The machine has less memory than the search was told: one that needs little runs, most would be faster."""
    needs = [(f"a={n}", 90e9 - 0.1e9 * n, 1.0) for n in range(20)] + [("b=1", 60e9, 1.2)]
    candidates = [
        TrialCandidate(overrides=(key,), terms={"products": seconds}, memory_bytes=need) for key, need, seconds in needs
    ]
    there = SimulatedMachine(candidates, random.Random(0), capacity_bytes=70e9)
    search = Search(list(candidates), there, replace(NO_LIMIT, capacity_bytes=150e9, most_trials=20))
    search.run()
    kinds = [one.result.kind for one in search.records]
    assert "ran" in kinds
    assert kinds.count("out of memory") <= 6


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("out of memory", "none of the other candidates is likely to fit"), ("crash", "every candidate was tried")],
)
def test_an_ending_without_a_leader_says_whether_all_were_tried(kind: Kind, ending: str) -> None:
    candidates = [TrialCandidate(overrides=(f"a={n}",), terms={"products": 1.0}, memory_bytes=5e10) for n in range(9)]

    class Failing:
        def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
            return TrialResult(kind=kind, reason="a fault", seconds=1.0)

    search = Search(candidates, Failing(), NO_LIMIT)
    search.run()
    assert (search.leader, search.ending) == (None, ending)


def test_memory_is_an_objective() -> None:
    there = machine(2)
    search = searched(there, replace(NO_LIMIT, objective="memory"))
    assert leader(search).memory_bytes <= 1.03 * min(one.memory_bytes for one in there.candidates)


def test_the_fewest_joules_of_a_step_are_an_objective_which_needs_readings_of_power() -> None:
    watts: dict[str, float | None] = {"a=0": 700.0, "a=1": 560.0, "a=2": 700.0}
    seconds = {"a=0": 1.0, "a=1": 0.97, "a=2": 0.95}

    class Powered:
        def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
            (word,) = candidate.overrides
            steps = tuple(seconds[word] * (1 + 1e-4 * step) for step in range(8))
            return TrialResult(step_seconds=steps, losses=(5.0,), seconds=10.0, power_watts=watts[word])

    candidates = [TrialCandidate(overrides=(f"a={n}",), terms={f"t{n}": 1.0 - 0.1 * n}) for n in range(3)]
    for objective, best in (("tokens", "a=2"), ("energy", "a=1")):
        search = Search(candidates, Powered(), SearchSettings(budget_seconds=1e9, objective=objective))
        search.run()
        assert leader(search).overrides == (best,)
    watts["a=0"] = None
    with pytest.raises(DeviceError, match="finds no power of the GPU .*; fix: install nvidia-ml-py"):
        Search(candidates, Powered(), SearchSettings(budget_seconds=1e9, objective="energy")).run()


def test_a_diagnosis_adds_candidates_once_for_a_leader() -> None:
    there, asked = machine(1), list[str]()
    extra = TrialCandidate(overrides=("host.bind=true",), terms={"products": 1e-3}, source="doctor")

    def diagnose(leader: TrialRecord, left: float) -> list[TrialCandidate]:
        asked.append(leader.candidate.key)
        return [extra]

    there._seconds[extra.key], there._memory[extra.key] = there.best * 0.8, 1e9
    search = searched(there, diagnose=diagnose)
    assert leader(search) is extra
    assert len(asked) == len(set(asked)) == 2


def test_changes_of_the_leader_join_before_it_is_diagnosed() -> None:
    there, order = machine(1), list[str]()
    better = TrialCandidate(overrides=("pipeline.x=2",), terms={"products": 1e-3}, source="change")
    there._seconds[better.key], there._memory[better.key] = there.best * 0.8, 1e9

    def around(leader: TrialRecord) -> list[TrialCandidate]:
        order.append(f"around {leader.candidate.key}")
        return [better]

    def diagnose(leader: TrialRecord, left: float) -> list[TrialCandidate]:
        order.append(f"diagnose {leader.candidate.key}")
        return []

    search = searched(there, around=around, diagnose=diagnose)
    assert leader(search) is better
    assert order[1:] == [f"around {better.key}", f"diagnose {better.key}"], "no recording before something can gain"


def test_what_is_spent_beside_trials_counts() -> None:
    recorded = list[float]()

    def diagnose(leader: TrialRecord, left: float) -> list[TrialCandidate]:
        recorded.append(left)
        return []

    settings = replace(NO_LIMIT, budget_seconds=1000.0)
    search = searched(machine(7), settings, diagnose=diagnose, elsewhere=lambda: 900.0 * len(recorded) + 60.0)
    assert search.ending == "the budget is spent"
    assert [one.number for one in search.records if one.number > 1] == [], "no time for second trials after a recording"
    assert recorded == [pytest.approx(1000.0 - 60.0 - search.trial_seconds)]
    assert search.spent == pytest.approx(search.trial_seconds + 960.0)


def test_a_change_that_may_be_better_gets_a_second_trial() -> None:
    """Steps of the first trials scatter by 15 %, so a gain of 10 % is not sure."""
    first = TrialCandidate(overrides=(), terms={"products": 1.0}, source="reference")
    other = TrialCandidate(overrides=("a=1",), terms={"products": 0.95})

    def scattered(candidate: TrialCandidate) -> tuple[float, ...]:
        return tuple(one * (0.9 if candidate.overrides else 1.0) for one in (0.85, 1.15, 0.85, 1.15))

    search = Search([first, other], MadeUp(scattered), NO_LIMIT)
    search.run()
    assert [one.candidate.key for one in search.records] == ["", "a=1", "", "a=1"]


@pytest.mark.parametrize("limits", [{"most_trials": 4}, {"budget_seconds": 52.0}])
def test_the_last_trials_and_the_rest_of_the_time_are_for_second_trials(limits: dict[str, float]) -> None:
    candidates = [TrialCandidate(overrides=(f"a={n}",), terms={"products": 1.0 - 0.01 * n}) for n in range(9)]
    candidates[0] = replace(candidates[0], overrides=())
    even = MadeUp(lambda candidate: (candidate.projected * (1.0 if candidate.overrides else 1.3),) * 5)
    search = Search(candidates, even, replace(NO_LIMIT, **limits))  # type: ignore[arg-type]
    search.run()
    assert [one.number for one in search.records[-2:]] == [2, 2]
    assert [one.candidate.key for one in search.records[-2:]] == ["", leader(search).key]
    assert sum(one.number == 2 for one in search.records) == 2


@pytest.mark.parametrize("most_trials", [1, 2, 3])
def test_a_search_makes_no_more_trials_than_it_may(most_trials: int) -> None:
    """The last trial finds the only change faster, and two more would confirm it."""
    first = TrialCandidate(overrides=(), terms={"products": 1.0}, source="reference")
    other = TrialCandidate(overrides=("a=1",), terms={"products": 0.8})
    even = MadeUp(lambda candidate: (candidate.projected,) * 5)
    search = Search([first, other], even, replace(NO_LIMIT, most_trials=most_trials))
    search.run()
    assert len(search.records) == min(most_trials, 2)
    assert search.ending


RAN = TrialResult(step_seconds=(0.1,) * 5, observed_seconds=0.1, losses=(5.0, 4.9, 4.8), seconds=3.0)


def test_a_clock_that_lies_is_found_by_ours() -> None:
    found = judged(replace(RAN, step_seconds=(0.01,) * 5), None, NO_LIMIT)
    assert (found.kind, found.reason) == ("lying clock", "its clock says 10.0 ms a step, ours 100.0 ms")
    assert judged(replace(RAN, step_seconds=(-0.1,) * 5), None, NO_LIMIT).kind == "lying clock"
    assert judged(RAN, None, NO_LIMIT) is RAN


def test_a_gain_that_a_second_trial_does_not_confirm_is_no_gain() -> None:
    there = machine(0, noise=0.0)
    key = min((one.key for one in there.candidates), key=there.seconds)
    luck = iter([0.5 * there.seconds("") / there.seconds(key), 2.0 * there.seconds("") / there.seconds(key)])
    run = there.run

    def lucky(candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        result = run(candidate, limits)
        factor = next(luck, 1.0) if candidate.key == key else 1.0
        times = tuple(factor * one for one in result.step_seconds)
        return replace(result, step_seconds=times, observed_seconds=times[0] if times else 0.0)

    there.run = lucky  # type: ignore[method-assign]
    first, best = there.candidates[0], next(one for one in there.candidates if one.key == key)
    search = Search([first, best], there, NO_LIMIT)
    search.run()
    assert [one.number for one in search.records] == [1, 1, 2, 2]
    assert leader(search) is first


def test_another_loss_is_told_with_its_step_and_can_be_allowed_by_name() -> None:
    search = searched(machine(0))
    first = search.reference
    assert first is not None
    other = replace(RAN, losses=(5.0, 4.7))
    found = judged(other, first, NO_LIMIT)
    assert found.kind == "another loss"
    assert found.reason.startswith("step 2: 4.70000, the reference has 4.90000")
    assert judged(other, first, replace(NO_LIMIT, loss_tolerance=None)) is other


def test_steps_to_a_loss_are_interpolated_and_continued() -> None:
    assert steps_to([5.0, 4.0, 3.0], 3.5) == pytest.approx(2.5)
    assert steps_to([5.0, 4.5, 4.0], 3.0) == pytest.approx(6.0)
    assert steps_to([5.0, 5.1], 3.0) == math.inf
