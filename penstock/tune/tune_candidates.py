"""The candidates of `penstock tune`: configurations that train the same thing as the run, with their projections.

    plan       layouts of a search on this machine (penstock/plan/search.py), with the measured load of the experts
    change     one choice of the run or of the best layout, because a plan leaves out what is slower by it
    doctor     changes that the doctor proposes for the leader
    free       8-bit recipes, larger batches, and micro-batches that are learned, only if they are named
    without    the leader without one of its changes, which tells what that change gains

`may_change` has the fields that do not change what is learned; a candidate with another difference is left out.

Steps of the trials have the rows of the run, or fewer if trials of whole steps exceed the budget (`rows_of_trials`):
presets have steps of hundreds or thousands of rows, which take minutes on a few devices. All candidates have the same
number, so that their losses stay comparable. It is a multiple of all micro-batches of a search on all data-parallel
ranks, as long as the budget permits; it leaves the reference at least `FEWEST_MICRO_BATCHES` and two for each stage, so
that a pipeline keeps its shape.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.base.errors import ConfigError, HardwareError, KernelError, PenstockError, TraceError
from penstock.base.numbers import bytes_text, counted, duration_text, time_text
from penstock.config.fit import grid_of, shard, stage_count
from penstock.config.load import with_overrides
from penstock.config.parallel import DISPATCHERS
from penstock.config.run import Run
from penstock.config.schema import differences
from penstock.plan.assumptions import Assumptions
from penstock.plan.candidates import MOST_MICRO_BATCH
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.plan.search import Progress, search
from penstock.plan.search_request import SearchRequest
from penstock.trace.analysis import analyse_files
from penstock.tune.belief import ShortStep, TrialCandidate, grouped_terms
from penstock.tune.doctor.diagnosis import diagnose
from penstock.tune.doctor.evidence import RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from penstock.tune.doctor.planned import with_plan
from penstock.tune.doctor.remedies import FLOAT8
from penstock.tune.doctor.remedy import accepted

_SAFE = ("pipeline.", "recompute.", "offload.", "graphs.", "kernels.", "host.", "parallel.", "dispatch.")
_LEARNED = ("parallel.reduce", "dispatch.row_capacity_factor", "dispatch.layer_capacity_factor")

_FREED: Mapping[str, tuple[str, ...]] = {
    "float8": ("float8.",),
    "global_batch": ("training.global_batch",),
    "micro_batch": ("training.micro_batch",),
}

FREE = tuple(_FREED)  # what `--free` may name
_MICRO_BATCHES = tuple(f"training.micro_batch={1 << power}" for power in range(4))

_RECOMPUTE = ("[]", '["norm"]', '["expert-activation"]', '["norm","expert-activation"]', '["layer"]')

LAYOUTS, CHANGED = 40, 1
"""Layouts of a plan that become candidates, and those of them that are changed in one choice more."""

MOST_IMBALANCE = 4.0
TOO_LARGE = 1.1  # projected memory of a reference over that of a device with which it is not tried


def may_change(field: str, free: Sequence[str] = ()) -> bool:
    """Whether a field may differ from the run's: it does not change what is learned, or is named."""
    freed = tuple(prefix for name in free for prefix in _FREED[name])
    if field.startswith(freed) and freed:
        return True
    return field == "training.micro_batch" or (field.startswith(_SAFE) and field not in _LEARNED)


@dataclass
class CandidateSource:
    """Candidates of a run on a cluster."""

    run: Run  # the reference
    cluster: Cluster
    fixed: Mapping[str, str]  # parts of the layout that stay, by their names in plans
    kept: frozenset[str] = frozenset()  # fields that stay
    free: tuple[str, ...] = ()  # of `FREE`
    imbalance: float = 1.2  # rows of the fullest rank's experts over the even share
    rows: int = 0  # of a step of the trials; 0 if they measure whole steps
    next_wins: tuple[str, ...] = ()  # what would be faster with more memory or devices, after `planned`
    left_out: int = 0  # candidates that cannot have steps of `rows`, after `planned`
    was_fitted: bool = False  # the run as it is could not start or fit, and `run` is a layout of a plan

    def measured_load(self, expert_load: float | None) -> None:
        """Take the measured load of the fullest expert over the mean for the imbalance of ranks."""
        moe = self.run.model.moe
        if moe is None or expert_load is None or self.cluster.devices == 1:
            return
        # Experts of one rank are filled unequally by chance, so their sum is closer to even.
        each = max(1, moe.experts // self.cluster.devices)
        self.imbalance = min(MOST_IMBALANCE, max(1.0, 1 + (expert_load - 1) / each**0.5))

    def reference(self) -> TrialCandidate:
        return self.candidate(self.run, "reference")

    def candidate(self, run: Run, source: str) -> TrialCandidate:
        """A run that differs from the reference only in what may be changed; raises a ConfigError if it is illegal."""
        return self._candidate(self._project(run), source)

    def fit(self, progress: Progress | None = None) -> None:
        """Where the run as it is cannot start on these devices, take the best layout of a plan for the reference."""
        try:
            projection = self._project(self.run)
        except ConfigError:
            pass
        else:
            if projection.memory.total <= TOO_LARGE * projection.capacity_bytes:
                return
        plan = search(self._request(1), progress)
        if not plan.candidates:
            there = f"{counted(self.cluster.devices, 'device')} of {bytes_text(self.cluster.hardware.usable_bytes)}"
            raise ConfigError(f"no layout of {self.run.name} fits {there}", fix="; ".join(plan.helps) or None)
        self.run = plan.candidates[0].run
        self.was_fitted = True

    def shorten(self, steps: int, budget_seconds: float, most_trials: int) -> None:
        """Choose the rows of a step of the trials; a ConfigError if the budget is too short for any."""

        def seconds_of(rows: int) -> float:
            return self._project(with_rows(self.run, rows)).time.step_seconds

        whole, ranks = self.run.training.global_batch, self.cluster.devices
        rows = rows_of_trials(
            self.run, ranks, seconds_of, steps=steps, budget_seconds=budget_seconds, most_trials=most_trials
        )
        self.rows = rows if rows < whole else 0

    def planned(self, progress: Progress | None = None) -> list[TrialCandidate]:
        """The reference; layouts of a plan; and single changes of both."""
        first = self._project(self.run)
        plan = search(self._request(LAYOUTS), progress)
        bases = [self.run, *(candidate.run for candidate in plan.candidates[:CHANGED])]
        pairs = [(candidate, "plan") for candidate in plan.candidates]
        for change in self._changes():
            source = "free" if change.startswith(("float8", "training.global_batch")) else "change"
            pairs += [(candidate, source) for candidate in self._changed(bases, change)]
        self.next_wins = tuple(self._next_wins(first))
        # Of candidates that are the same run in other words, the first one stays.
        kept = {_effect(first): self._candidate(first, "reference")}
        left_out = set()
        for projection, source in pairs:
            effect = _effect(projection)
            if effect in kept or not self.overrides_of(projection.run):
                continue
            try:
                kept[effect] = self._candidate(projection, source)
            except ConfigError:
                left_out.add(effect)
        self.left_out = len(left_out)
        return list(kept.values())

    def around(self, leader: TrialCandidate) -> list[TrialCandidate]:
        base = with_overrides(self.run, leader.overrides)
        candidates = {trial.key: trial for change in self._changes() for trial in self.changed(base, change, "change")}
        return list(candidates.values())

    def changed(self, base: Run, change: str, source: str) -> Iterator[TrialCandidate]:
        """A run with a change, which may be several overrides; none if that is illegal or may not be tried."""
        for projection in self._changed([base], change):
            try:
                if self.overrides_of(projection.run):
                    yield self._candidate(projection, source)
            except ConfigError:  # its layout cannot have the short step
                continue

    def _changes(self) -> Iterator[str]:
        """Changes of one choice, by a factor of two where it is a size."""
        run, ranks = self.run, self.cluster.devices
        sizes = [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]
        yield from _MICRO_BATCHES
        yield from (f"recompute.modules={modules} recompute.layers=[]" for modules in _RECOMPUTE)
        if ranks > 1:
            yield from (f"parallel.expert={size}" for size in sizes if run.model.moe is not None)
            yield from (f'dispatch.method="{method}"' for method in DISPATCHERS if method != "hierarchical")
            yield from (f'parallel.shard="{shard}"' for shard in ("optimizer", "full"))
        yield 'dispatch.overlap="none"'
        if self.cluster.hardware.vendor != "cpu":
            yield from (f'graphs.capture="{capture}"' for capture in ("none", "partial"))
            yield from ('dispatch.sync_free="auto"', "dispatch.sync_free=2", "offload.optimizer=false")
            yield from ("dispatch.sync_free=0",) if ranks > 1 else ()
            yield 'graphs.capture="full" dispatch.sync_free=2'
        if "float8" in self.free:
            yield FLOAT8
        if "global_batch" in self.free:
            yield from (f"training.global_batch={times * run.training.global_batch}" for times in (2, 4))

    def doctor(self, leader: TrialCandidate, folder: Path, step_seconds: float) -> list[TrialCandidate]:
        """Changes that the doctor proposes for the recorded run of a leader, with their gains."""
        run = with_overrides(self.run, leader.overrides)
        recorded = run if leader.short is None else with_rows(run, leader.short.rows)
        try:
            evidence = evidence_of(analyse_files([folder]), RunFacts(run=recorded, world=self.cluster.devices))
            verdict = diagnose(evidence if evidence.is_cpu else with_plan(evidence, self.cluster))
            offers = [(remedy.change, remedy.gain_us / 1e6 / step_seconds, remedy.rule) for remedy in verdict.remedies]
        except (TraceError, ConfigError, HardwareError):
            return []
        candidates = []
        for change, share, rule in offers:
            changed = accepted(run, change, self.cluster.devices)
            if changed is None or (overrides := self.overrides_of(changed)) is None:
                continue
            if self.rows and changed.training.global_batch != run.training.global_batch:
                continue  # the doctor doubles the rows of a short step
            try:
                short = self._short(changed)
            except ConfigError:
                continue
            left = 1 - min(share, 0.9)
            if short is not None and leader.short is not None:
                short = replace(short, terms=_scaled(leader.short.terms, left))
            candidates.append(
                replace(leader, overrides=overrides, terms=_scaled(leader.terms, left), short=short, source=rule)
            )
        return candidates

    def without_each(self, leader: TrialCandidate) -> list[tuple[str, TrialCandidate]]:
        """The leader without each of its changed fields, where that is legal; and the field."""
        candidates = []
        for field in leader.choices:
            left = tuple(override for override in leader.overrides if override.partition("=")[0] != field)
            if not left:
                continue
            try:
                changed = with_overrides(self.run, left)
                candidates.append((field, self.candidate(changed, "without")))
            except (ConfigError, HardwareError, KernelError):
                continue
        return candidates

    def overrides_of(self, run: Run) -> tuple[str, ...] | None:
        """What a run changes of the reference; None if it changes what may not be changed."""
        if shard(run) == shard(self.run):  # `auto` in other words
            parallel = run.parallel.model_copy(update={"shard": self.run.parallel.shard})
            run = run.model_copy(update={"parallel": parallel})
        changes = differences(self.run, run)
        kept = {*self.kept, *(("training.micro_batch",) if self._keeps_micro_batch else ())}
        if any(
            change.right is None or change.field in kept or not may_change(change.field, self.free)
            for change in changes
        ):
            return None
        return tuple(f"{change.field}={change.right}" for change in changes)

    @property
    def _assumptions(self) -> Assumptions:
        return Assumptions(imbalance=self.imbalance)

    @property
    def _keeps_micro_batch(self) -> bool:
        """Whether the micro-batch is learned and not free: an auxiliary loss or a capacity is of micro-batches."""
        moe = self.run.model.moe
        if moe is None or "micro_batch" in self.free:
            return False
        balance = moe.balance
        return (balance.aux_loss == "micro-batch" and balance.aux_loss_coef > 0) or balance.capacity_factor > 0

    def _fixed(self) -> dict[str, str]:
        kept = {"micro_batch": f"{self.run.training.micro_batch}"} if self._keeps_micro_batch else {}
        return {**self.fixed, **kept}

    def _project(self, run: Run) -> Projection:
        return project(run, self.cluster, self._assumptions)

    def _changed(self, bases: Sequence[Run], change: str) -> Iterator[Projection]:
        for base in bases:
            changed = accepted(base, change, self.cluster.devices)
            if changed is None:
                continue
            try:
                yield self._project(changed)
            except (ConfigError, HardwareError, KernelError):
                continue

    def _short(self, run: Run) -> ShortStep | None:
        """The step of the trials of a run; a ConfigError if its layout cannot have it."""
        if not self.rows:
            return None
        # In proportion, if `--free global_batch` has changed the rows.
        rows = self.rows * run.training.global_batch // self.run.training.global_batch
        there = self._project(with_rows(run, rows))
        return ShortStep(rows=rows, terms=_terms(there), memory_bytes=float(there.memory.total))

    def _candidate(self, projection: Projection, source: str) -> TrialCandidate:
        return TrialCandidate(
            overrides=self.overrides_of(projection.run) or (),
            terms=_terms(projection),
            memory_bytes=float(projection.memory.total),
            source=source,
            batches=projection.run.training.global_batch / self.run.training.global_batch,
            short=self._short(projection.run),
        )

    def _next_wins(self, first: Projection) -> Iterator[str]:
        """What would be faster if more memory, more devices or an 8-bit recipe were allowed, by projection."""
        hardware, ranks = self.cluster.hardware, self.cluster.devices
        memory = hardware.memory.model_copy(update={"capacity_bytes": 2 * hardware.memory.capacity_bytes})
        others = {f"with {2 * ranks} devices": cluster_of(2 * ranks, hardware)}
        if hardware.vendor != "cpu":
            others["with twice the memory"] = cluster_of(ranks, replace(hardware, memory=memory))
        for condition, there in others.items():
            try:
                candidates = search(replace(self._request(1), cluster=there)).candidates
            except PenstockError:
                continue
            if candidates and (ratio := first.time.step_seconds / candidates[0].time.step_seconds) > 1:
                yield f"{condition}: {candidates[0].layout}, {ratio:.2f} x the speed of the reference"
        freed = {} if "float8" in self.free else {"float8": (FLOAT8,)}
        for name, changes in (freed | ({"micro_batch": _MICRO_BATCHES} if self._keeps_micro_batch else {})).items():
            fits = [fit for change in changes for fit in self._changed([self.run], change) if fit.fits]
            ratio = max((first.time.step_seconds / fit.time.step_seconds for fit in fits), default=0.0)
            if ratio > 1:
                yield f"with --free {name}: {ratio:.2f} x the speed of the reference"

    def _request(self, top: int) -> SearchRequest:
        return SearchRequest(
            run=self.run, cluster=self.cluster, fixed=self._fixed(), top=top, assumptions=self._assumptions
        )


def _terms(projection: Projection) -> dict[str, float]:
    """Seconds of the slowest rank by term."""
    return grouped_terms(max(projection.time.ranks, key=lambda rank: sum(rank.terms.values())).terms)


def _scaled(terms: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * seconds for name, seconds in terms.items()}


def _effect(projection: Projection) -> str:
    """Equal for candidates that run the same way."""
    run = projection.run
    kept = (
        run.graphs,
        run.dispatch.overlap,
        projection.layout.sync_free_stage,
        run.float8,
        run.training.global_batch,
        run.kernels,
    )
    return f"{projection.layout} {kept}"


START_SECONDS = 20.0  # time that a trial needs beside its steps, about: on an H200 from 13 s to 32 s
USUAL_TRIALS, FEWEST_TRIALS = 8, 3  # trials that a budget shall be enough for, and without which there is no search
FEWEST_MICRO_BATCHES = 4  # of each data-parallel rank in a short step of the reference
MOST_UNITS = 4  # a short step has at most this many of the largest micro-batches on each rank


def rows_of_trials(
    run: Run, ranks: int, seconds_of: Callable[[int], float], *, steps: int, budget_seconds: float, most_trials: int
) -> int:
    """Rows of a step of all trials, by the projected seconds of a step with so many rows.

    Raises a ConfigError if the budget is not enough for the shortest step.
    """
    fewest = min(most_trials, FEWEST_TRIALS)
    each = budget_seconds / min(most_trials, USUAL_TRIALS) - START_SECONDS
    # Shorter steps than half a start would save little.
    allowed = min(max(each, START_SECONDS / 2), budget_seconds / fewest)
    rows, seconds = 0, 0.0
    for rows in (run.training.global_batch, *shorter(run, ranks)):
        seconds = steps * seconds_of(rows)
        if seconds <= allowed:
            return rows
    if fewest * seconds <= budget_seconds:
        return rows
    raise ConfigError(
        f"the budget is too short for {counted(fewest, 'trial')}: each makes {steps} steps, and the shortest possible "
        f"step, of {counted(rows, 'row')}, is projected at {time_text(seconds / steps)}",
        got=duration_text(budget_seconds),
        fix=f"--budget {math.ceil(fewest * (START_SECONDS + seconds) / 60)}m",
    )


def shorter(run: Run, ranks: int) -> Iterator[int]:
    """Rows that a short step may have, the most first."""
    data, rows = grid_of(run, ranks).data, run.training.global_batch
    pass_rows = run.training.micro_batch * data
    fewest = max(FEWEST_MICRO_BATCHES, 2 * stage_count(run))
    count = MOST_UNITS * math.lcm(MOST_MICRO_BATCH, run.training.micro_batch) * ranks
    while count % pass_rows == 0 and count // pass_rows >= fewest:
        if count < rows:
            yield count
        count //= 2


def with_rows(run: Run, rows: int) -> Run:
    """The run with another number of rows in a step."""
    return run.model_copy(update={"training": run.training.model_copy(update={"global_batch": rows})})
