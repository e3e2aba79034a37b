"""The loop of `penstock tune`: which candidate is tried next, what a trial says, and when the search ends.

    1. the reference   the run as it is; its losses are those that every trial must have
    2. a trial         of the candidate with the largest expected gain that is likely to fit
    3. a judgement     memory, hang, crash, NaN, another loss, a clock that lies: results that are never repeated
    4. a correction    of all estimates (penstock/tune/belief.py), which decides the next one
    5. a diagnosis     when nothing can gain any more, single changes of the leader join, and when these cannot either,
                       the doctor's; once for each leader
    6. a second trial  of the reference and the best, one after the other: the gain is a fact, not the luck of a trial;
                       it comes earlier if one more trial would leave no trials or no time for it
    7. the end         no candidate can gain more than `LEAST_GAIN` with 95 % confidence, or the budget is spent
    8. a whole step    of the leader, once, if the trials were of short steps and the budget has room

Seconds are those of whole steps: a measured short step (`ShortStep`) is multiplied by `TrialCandidate.stretch`. The
budget is of the wall clock: trials, and what the caller says that it has spent beside them.

It starts no process and needs no PyTorch: `Trials` runs configurations, on this machine (penstock/tune/trial.py)
or on a made-up one (benchmarks/simulated_machine.py). It is deterministic, so that a search which goes on takes the
results of the one before from its journal and asks for the same candidates in the same order.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal, Protocol

from penstock.base.errors import DeviceError
from penstock.tune.belief import CONFIDENT, LEAST_NOISE, Belief, Measured, StepEstimate, TrialCandidate

LEAST_GAIN = 0.01  # a candidate that cannot gain more is not tried
CLOCK = 1.3  # factor between the clock of a trial and the clock of the loop that is no accident any more
MEMORY_ERROR = 0.05  # standard deviation of the projected memory, as a share
WHOLE_STEPS = 3  # steps of a trial of whole steps, the first of them not timed
Objective = Literal["tokens", "memory", "energy", "time-to-loss"]

Kind = Literal[
    "ran", "out of memory", "hang", "crash", "refused", "not finite", "another loss", "lying clock", "too slow"
]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial says; without `kind` ran, `reason` is one line."""

    step_seconds: tuple[float, ...] = ()  # of its timed steps, by its own clock
    observed_seconds: float = 0.0  # of a timed step, by the clock of the process that started it; 0 if unknown
    losses: tuple[float, ...] = ()  # of all its steps
    peak_memory_bytes: int = 0
    seconds: float = 0.0  # that it took of the budget
    kind: Kind = "ran"
    reason: str = ""
    was_stopped: bool = False  # ended early because it could not win
    spread: float = 0.0  # relative standard deviation of the medians of several trials; 0 of one
    expert_load: float | None = None  # fullest expert over the mean; None without experts
    power_watts: float | None = None  # median of the first rank's GPU; None without readings
    folder: str = ""  # of its run

    @property
    def step(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def error(self) -> float:
        """Relative standard error of `step`."""
        return math.hypot(median_error_of(self.step_seconds), self.spread / math.sqrt(2))


def median_error_of(seconds: Sequence[float]) -> float:
    """Relative standard error of the median of some step times."""
    if len(seconds) < 2:
        return 0.05
    return 1.25 * statistics.stdev(seconds) / statistics.median(seconds) / math.sqrt(len(seconds))


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """When a trial may end; seconds of its own steps, which may be short ones."""

    expected_seconds: float  # of a step
    left_seconds: float  # of the budget
    most_seconds: float = math.inf  # of a step; the trial may be ended as soon as its steps surely take more
    most_steps: float = math.inf  # after which it is ended
    sure_error: float = 0.0  # relative standard error of the step at which it has enough steps; 0 asks for all of them


class Trials(Protocol):
    """Runs configurations."""

    def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult: ...


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial in the order of the search; `projected` and `estimated` are from before it.

    `result` has seconds of the steps that it made; all other seconds are those of whole steps.
    """

    candidate: TrialCandidate
    result: TrialResult
    projected: float
    estimated: StepEstimate
    score: float = math.inf  # seconds, bytes for the objective `memory`, joules for `energy`; less is better
    number: int = 1  # of the trials of this candidate
    is_whole: bool = False  # the one trial of whole steps, where those of `candidate` are short

    @property
    def step(self) -> float:
        """Seconds of a whole step: measured, or computed from the measured short step."""
        return self.result.step * (1.0 if self.is_whole else self.candidate.stretch)

    @property
    def expected(self) -> float:
        """Seconds of a whole step as estimated before the trial."""
        return self.estimated.seconds * self.candidate.batches

    @property
    def even_step(self) -> float:
        """Seconds for the tokens of a step of the reference."""
        return self.step / self.candidate.batches

    @property
    def peak_memory_bytes(self) -> float:
        """Of a whole step: measured, with what the plan adds to a short step; 0 if it did not run."""
        more = 0.0 if self.is_whole or self.result.kind != "ran" else self.candidate.more_bytes
        return self.result.peak_memory_bytes + more


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Limits of a search; `loss_tolerance` is a relative difference, None without a check of losses."""

    budget_seconds: float
    most_trials: int = 12
    objective: Objective = "tokens"
    loss_tolerance: float | None = 2e-3
    capacity_bytes: float = math.inf


Around = Callable[[TrialRecord], Sequence[TrialCandidate]]  # further candidates for a leader

Diagnose = Callable[[TrialRecord, float], Sequence[TrialCandidate]]
"""The same from a recording, for which so many seconds of the budget are left."""


@dataclass
class Search:
    """A search; `run` returns when it has ended, and `records` and `leader` can be read at any time."""

    candidates: list[TrialCandidate]  # the first one is the reference
    trials: Trials
    settings: SearchSettings
    begin: Callable[[str], None] = lambda key: None  # is told the key of a trial before it begins
    tell: Callable[[TrialRecord, "Search"], None] = lambda record, search: None
    around: Around = lambda leader: ()  # single changes of a leader
    diagnose: Diagnose = lambda leader, left: ()
    elsewhere: Callable[[], float] = lambda: 0.0  # seconds of the budget beside trials
    recorded: Mapping[str, TrialResult] = field(default_factory=dict)
    records: list[TrialRecord] = field(default_factory=list)
    trial_seconds: float = 0.0
    ending: str = ""
    _widened: set[str] = field(default_factory=set)
    _diagnosed: set[str] = field(default_factory=set)
    _confirmed: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Search until nothing can gain or the budget is spent, then measure a whole step of the leader."""
        self._search()
        self._try_whole()

    def _search(self) -> None:
        if not self.records:
            self.try_one(self.candidates[0])
        while not self.is_spent():
            if self._must_confirm():
                self._confirm()
            elif (chosen := self._next()) is not None:
                self.try_one(chosen)
            else:
                self._without_gain()

    def _without_gain(self) -> None:
        """Nothing can gain any more: let candidates join, confirm the best, or end."""
        leader = self.leader
        if leader is None:
            tried = {record.candidate.key for record in self.records}
            waiting = [candidate for candidate in self.candidates if candidate.key not in tried]
            self.ending = "none of the other candidates is likely to fit" if waiting else "every candidate was tried"
        elif leader.candidate.key not in self._widened:
            self._widened.add(leader.candidate.key)
            self.add(self.around(leader))
        elif leader.candidate.key not in self._diagnosed:
            self._diagnosed.add(leader.candidate.key)
            self.add(self.diagnose(leader, self.left))
        elif not self._is_unconfirmed:
            self.ending = f"no candidate can gain more than {LEAST_GAIN:.0%} with 95% confidence"
        elif self._trials_left < 2:
            self.ending = "one trial is left, too few to confirm the best"
        elif 0.8 * self._confirming_seconds > self.left:
            self.ending = "the budget is spent"
        else:
            self._confirm()

    @property
    def _is_unconfirmed(self) -> bool:
        """Whether the best is not the reference, and has not been measured beside it."""
        first = self.reference
        return first is not None and self._best.key not in (first.candidate.key, *self._confirmed)

    @property
    def _confirming_seconds(self) -> float:
        """Time that the reference and the best need, by their first trials; 0 if nothing ran."""
        first = self.reference
        keys = () if first is None else (first.candidate.key, self._best.key)
        return sum(record.result.seconds for record in self._ran() if record.candidate.key in keys)

    def _must_confirm(self) -> bool:
        """Whether one more trial would leave no trials or no time to confirm the best."""
        needed, left = self._confirming_seconds, self.left
        return self._is_unconfirmed and (self._trials_left == 2 or 0.8 * needed <= left < needed + self._longest)

    def _confirm(self) -> None:
        """Measure the reference and the best again, in turn: a machine that became faster meanwhile is no gain.

        Where an earlier search ended between the two, both are measured now.
        """
        best, first = self._best, self.reference
        assert first is not None, "the best ran, so there is a reference"
        self._confirmed.add(best.key)
        known = [
            key
            for candidate in (first.candidate, best)
            if (key := trial_key(candidate, self._number(candidate))) in self.recorded
        ]
        if len(known) == 1 and self.recorded[known[0]].kind == "ran":
            self.recorded = {key: result for key, result in self.recorded.items() if key != known[0]}
        self.try_one(first.candidate)
        self.try_one(best)

    def replan(self, candidates: Sequence[TrialCandidate]) -> None:
        """Replace the candidates, and the projections of those that were tried."""
        self.candidates = list(candidates)
        fresh = {candidate.key: candidate for candidate in candidates}
        self.records = [
            replace(record, candidate=fresh.get(record.candidate.key, record.candidate)) for record in self.records
        ]

    def is_spent(self) -> bool:
        """Whether budget or trials are used up, which `ending` then says; a trial that would not end is not begun."""
        if self.spent + 0.8 * self._longest > self.settings.budget_seconds:
            self.ending = "the budget is spent"
        elif self._trials_left <= 0:
            self.ending = f"{self.settings.most_trials} trials were made"
        return bool(self.ending)

    @property
    def spent(self) -> float:
        return self.trial_seconds + self.elsewhere()

    @property
    def left(self) -> float:
        return max(0.0, self.settings.budget_seconds - self.spent)

    @property
    def _trials_left(self) -> int:
        return self.settings.most_trials - sum(not record.is_whole for record in self.records)

    @property
    def _longest(self) -> float:
        """Seconds of the longest trial that ran, but for that of whole steps."""
        ran = (record.result.seconds for record in self.records if record.result.kind == "ran" and not record.is_whole)
        return max(ran, default=0.0)

    def add(self, more: Sequence[TrialCandidate]) -> None:
        """Let candidates join, unless they are there already."""
        known = {candidate.key for candidate in self.candidates}
        self.candidates += [trial for trial in {trial.key: trial for trial in more}.values() if trial.key not in known]

    @property
    def reference(self) -> TrialRecord | None:
        """The first candidate that ran, with all its trials: the run as it is, or else what could run."""
        return next(iter(self._ran()), None)

    @property
    def leader(self) -> TrialRecord | None:
        """The best candidate, with all its trials; the reference unless another is better by more than the errors."""
        ran = self._ran()
        if not ran:
            return None
        best, first = min(ran, key=attrgetter("score")), ran[0]
        if self.settings.objective == "memory":
            return best
        unsure = CONFIDENT * math.hypot(best.result.error, first.result.error)
        return first if best.score > first.score * (1 - unsure) else best

    @property
    def _best(self) -> TrialCandidate:
        """The leader, or what may be better within the errors; something ran."""
        return min(self._ran(), key=attrgetter("score")).candidate

    @property
    def whole(self) -> TrialRecord | None:
        return next((record for record in self.records if record.is_whole), None)

    def _ran(self) -> list[TrialRecord]:
        """Candidates that ran, in their order, each with the steps of all its trials; none whose whole step failed."""
        trials: dict[str, list[TrialRecord]] = {}
        for record in self.records:
            if record.result.kind == "ran" and not record.is_whole:
                trials.setdefault(record.candidate.key, []).append(record)
        whole = self.whole
        if whole is not None and whole.result.kind not in ("ran", "too slow"):
            trials.pop(whole.candidate.key, None)
        return [self._merged(ones) for ones in trials.values()]

    def _merged(self, records: Sequence[TrialRecord]) -> TrialRecord:
        """The first of several trials of a candidate, with the steps of all."""
        first = records[0]
        if len(records) == 1:
            return first
        medians = [record.result.step for record in records]
        steps = tuple(second for record in records for second in record.result.step_seconds)
        result = replace(first.result, step_seconds=steps, spread=statistics.stdev(medians) / statistics.fmean(medians))
        return self._scored(replace(first, result=result))

    def try_one(self, candidate: TrialCandidate) -> TrialRecord:
        """Run a trial, or take it from the journal; judge and record it."""
        leader, number, limit = self.leader, self._number(candidate), math.inf
        if leader is not None and self.settings.objective == "tokens" and number == 1:
            limit = leader.even_step * candidate.batches / candidate.stretch
        return self._tried(candidate, number, most_seconds=limit)

    def _number(self, candidate: TrialCandidate) -> int:
        return 1 + sum(record.candidate.key == candidate.key for record in self.records)

    def _tried(self, candidate: TrialCandidate, number: int, *, is_whole: bool = False, **more: float) -> TrialRecord:
        estimate = self.estimates()[candidate.key]
        expected = estimate.seconds * candidate.batches / (1.0 if is_whole else candidate.stretch)
        # The second of two trials that were begun together may find no time left.
        left = max(self.left, self._longest)
        sure = 0.0 if self.settings.objective == "time-to-loss" or is_whole else LEAST_NOISE / 2
        limits = TrialLimits(expected_seconds=expected, left_seconds=left, sure_error=sure, **more)
        measured = replace(candidate, short=None) if is_whole else candidate
        key = trial_key(candidate, number, is_whole=is_whole)
        result = self.recorded.get(key)
        if result is None:
            self.begin(key)
            result = self.trials.run(measured, limits)
        self.trial_seconds += result.seconds
        record = TrialRecord(
            candidate=candidate,
            result=judged(result, None if is_whole else self.reference, self.settings),  # a whole step has other rows
            projected=candidate.projected * candidate.batches,
            estimated=estimate,
            number=number,
            is_whole=is_whole,
        )
        record = self._scored(record)
        self.records.append(record)
        self.tell(record, self)
        return record

    def _try_whole(self) -> None:
        """Measure whole steps of a leader that was found by short ones, if the rest of the budget is enough."""
        leader, first = self.leader, self.reference
        if leader is None or first is None or leader.candidate.short is None or self.whole is not None:
            return
        starts = [record.result.seconds - record.result.step * len(record.result.losses) for record in self._ran()]
        needed = statistics.median(starts) + WHOLE_STEPS * leader.step
        if leader.candidate.key != first.candidate.key and needed <= self.left:
            self._tried(leader.candidate, 1, is_whole=True, most_steps=WHOLE_STEPS)

    def estimates(self) -> dict[str, StepEstimate]:
        """Seconds of each candidate for the tokens of a step of the reference, by key."""
        ran = self._ran()
        # Two trials of one configuration tell how many times as far as their steps trials of others are off.
        noise = [max(LEAST_NOISE, median_error_of(record.result.step_seconds)) for record in ran]
        between = max((record.result.spread / steps for record, steps in zip(ran, noise, strict=True)), default=0.0)
        measured = [
            Measured(
                candidate=record.candidate,
                seconds=record.even_step,
                error=record.result.error if record.result.spread else math.hypot(record.result.error, between * steps),
            )
            for record, steps in zip(ran, noise, strict=True)
        ]
        estimates = Belief(self.candidates, measured).estimates()
        return {candidate.key: estimate for candidate, estimate in zip(self.candidates, estimates, strict=True)}

    def _scored(self, record: TrialRecord) -> TrialRecord:
        objective, result, score = self.settings.objective, record.result, math.inf
        if result.kind == "ran" and objective == "memory":
            score = record.peak_memory_bytes
        elif result.kind == "ran" and objective == "tokens":
            score = record.even_step
        elif result.kind == "ran" and objective == "energy":
            if result.power_watts is None:
                raise DeviceError(
                    "--objective energy finds no power of the GPU in the metrics of a trial",
                    got="power_watts null",
                    fix="install nvidia-ml-py (NVIDIA) or amdsmi (AMD), or leave --objective at tokens",
                )
            score = record.even_step * result.power_watts
        elif result.kind == "ran":
            first = self.reference
            steps = len(result.losses) if first is None else steps_to(result.losses, first.result.losses[-1])
            score = record.step * steps
        return replace(record, score=score)

    def _next(self) -> TrialCandidate | None:
        """The candidate with the largest expected gain; None if no candidate can gain enough."""
        leader, tried = self.leader, {record.candidate.key for record in self.records}
        left = [
            candidate for candidate in self.candidates if candidate.key not in tried and self._fit(candidate) > 0.05
        ]
        if leader is None or not left:  # nothing ran yet: the one that is most likely to fit, then the fastest
            return max(left, key=lambda candidate: (round(self._fit(candidate), 1), -candidate.projected), default=None)
        if self.settings.objective == "memory":
            best = self._memory_factor() * min(candidate.memory_bytes for candidate in left)
            smallest = min(left, key=lambda candidate: candidate.memory_bytes)
            return smallest if best < leader.score * (1 - LEAST_GAIN) else None
        estimates = self.estimates()
        best_seconds = min(record.even_step for record in self._ran())
        able = [candidate for candidate in left if estimates[candidate.key].least < best_seconds * (1 - LEAST_GAIN)]
        return max(
            able,
            key=lambda candidate: estimates[candidate.key].expected_gain(best_seconds) * self._fit(candidate),
            default=None,
        )

    def _fit(self, candidate: TrialCandidate) -> float:
        fit = max((record.candidate.memory_bytes for record in self._ran()), default=0.0)
        full = [record.candidate.memory_bytes for record in self.records if record.result.kind == "out of memory"]
        full = [size for size in full if size > fit]  # one that needs less than what fits was something else's fault
        # Two that did not fit may be errors of the plan; each further one says that there is less memory.
        surely = 1 - MEMORY_ERROR * max(0, len(full) - 2)
        limit = min([self.settings.capacity_bytes, *(size * surely for size in full)])
        if limit == math.inf or not candidate.memory_bytes:
            return 1.0
        away = limit / (candidate.memory_bytes * self._memory_factor()) - 1
        return 0.5 * math.erfc(-away / MEMORY_ERROR / math.sqrt(2))

    def _memory_factor(self) -> float:
        factors = [
            record.peak_memory_bytes / record.candidate.memory_bytes
            for record in self.records
            if record.result.kind == "ran" and record.result.peak_memory_bytes and record.candidate.memory_bytes
        ]
        return statistics.median(factors) if factors and self.settings.objective == "memory" else 1.0


def trial_key(candidate: TrialCandidate, number: int, *, is_whole: bool = False) -> str:
    if is_whole:
        return f"{candidate.key} #whole"
    return candidate.key if number == 1 else f"{candidate.key} #{number}"


def judged(result: TrialResult, reference: TrialRecord | None, settings: SearchSettings) -> TrialResult:
    """The result, as a failure if its losses or its clock are wrong."""
    if result.kind != "ran":
        return result
    if not result.step_seconds:
        return replace(result, kind="crash", reason="it ended without a timed step")
    if not all(map(math.isfinite, result.losses)):
        index = next(number for number, loss in enumerate(result.losses) if not math.isfinite(loss))
        return replace(result, kind="not finite", reason=f"the loss of step {index + 1} is {result.losses[index]}")
    mean = statistics.fmean(result.step_seconds)
    if min(result.step_seconds) <= 0 or (
        result.observed_seconds and max(mean / result.observed_seconds, result.observed_seconds / mean) > CLOCK
    ):
        text = f"its clock says {mean * 1e3:.1f} ms a step, ours {result.observed_seconds * 1e3:.1f} ms"
        return replace(result, kind="lying clock", reason=text)
    if reference is not None and settings.loss_tolerance is not None:
        for index, (loss, wanted) in enumerate(zip(result.losses, reference.result.losses, strict=False)):
            gap = abs(loss - wanted) / max(abs(wanted), 1e-9)
            if gap > settings.loss_tolerance:
                text = f"step {index + 1}: {loss:.5f}, the reference has {wanted:.5f} ({gap:.1e} apart)"
                return replace(result, kind="another loss", reason=text)
    return result


def steps_to(losses: Sequence[float], wanted: float) -> float:
    """Steps until the loss is `wanted`, between two steps by a straight line; as many more as it lacks at the end."""
    for index, loss in enumerate(losses):
        if loss <= wanted:
            before = losses[index - 1] if index else loss
            return index + (1.0 if before == loss else (before - wanted) / (before - loss))
    fallen = losses[0] - losses[-1]
    return math.inf if fallen <= 0 else len(losses) * (losses[0] - wanted) / fallen


def median_error(records: Sequence[TrialRecord], *, corrected: bool) -> float | None:
    """Median share by which trials differ from what was estimated right before, or from the bare projections."""
    ran = [record for record in records if record.result.kind == "ran"][1:]  # the first one sets the scale
    if not ran:
        return None
    expected = [record.expected if corrected else record.projected for record in ran]
    return statistics.median(abs(record.step / guess - 1) for record, guess in zip(ran, expected, strict=True))
