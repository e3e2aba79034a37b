"""Runs a ladder: each step is the configuration of the last successful step and one change, on the same data and seed.

    baseline   ran       the base of comparison, which stays even if it fails
    grouped    ran       baseline, grouped
    symmetric  skipped   the machine has no GPU
    sync-free  failed    baseline, grouped, sync-free: out of memory
    shared     slower    baseline, grouped, shared: it costs more than it gains here
    larger     ran       baseline, grouped, larger, and its fallback eager, because it ran out of memory without

A failed or slow step is left out of the later ones. A step that is refused or runs out of memory is tried again with
each of its fallbacks until one runs; other failures have no fallback. A step that the user excludes (`--only`) is not
measured but stays in the later ones, in the first variant that the configuration allows.

A step that only makes the micro-batch larger is of another kind, because it gives the device more work at once and
needs memory for it. Gains of the two kinds are multiplied separately; the two products together are the gain over the
first step. The gain of a step that ran with a fallback is that of both and counts as the step's kind.

The results are also written as JSON, and `--resume` takes trials back from the file: figures, refusals and trials that
ran out of memory, which would end the same way. Trials that crashed or timed out run again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.base.errors import ConfigError, PenstockError
from penstock.base.files import read_json
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.schema import differences
from penstock.tune.ladder_steps import MICRO_BATCH, LadderChange, LadderStep, why_skipped, why_unmet
from penstock.tune.trial import Failure, Figures, Trial

Measure = Callable[[Trial], Figures | Failure]
"""`run_trial`, or a replacement."""

State = Literal["ran", "slower", "skipped", "refused", "failed"]

NOISE = 0.02
"""Share of the throughput by which a step may seem slower by chance."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A variant of a step that was refused or ran out of memory."""

    trial: str  # name of its run, even if it was not started
    change: tuple[str, ...]  # overrides of the step, then those of the fallback
    overrides: tuple[str, ...]
    state: Literal["refused", "failed"]
    reason: str
    seconds: float  # duration of the trial


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a step: of the variant that ran or crashed, or of the plain step if no variant could run."""

    step: LadderStep
    state: State  # `slower` if it ran but is left out of later steps
    reason: str = ""  # one line; empty if it ran
    trial: str = ""
    fallback: tuple[str, ...] = ()  # overrides of the fallback; empty without one
    changed: tuple[str, ...] = ()  # `field=value` that the last step that ran lacks; for the first step its overrides
    overrides: tuple[str, ...] = ()
    figures: Figures | None = None  # None if it did not run
    seconds: float = 0.0  # duration, without earlier attempts
    tried: tuple[Attempt, ...] = ()  # variants that were refused or ran out of memory, in order

    @property
    def others(self) -> tuple[Attempt, ...]:
        """Attempts besides the variant that this is the result of."""
        return tuple(one for one in self.tried if one.trial != self.trial)


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """A step, plain or with a fallback."""

    trial: str
    change: tuple[str, ...]  # overrides of the step, then those of the fallback
    fallback: tuple[str, ...]
    held: tuple[str, ...]  # overrides of the steps before and of this one
    overrides: tuple[str, ...]  # all of the run's
    run: Run | Failure  # the configuration, or the reason why it is refused


@dataclass(frozen=True, kw_only=True)
class LadderGain:
    """Throughput ratios of a step, for each device."""

    before: float  # over the last step that ran and was kept
    first: float  # over the first step that ran
    by_optimization: float  # product of the gains up to here, without steps that change the micro-batch
    by_size: float  # product of the gains of the others
    loss_gap: float  # largest relative difference from the losses of the first step that ran


def climb(
    steps: Sequence[LadderStep], wanted: frozenset[str], base: Trial, measure: Measure, *, has_gpu: bool
) -> Iterator[Outcome]:
    """Measure the `wanted` steps one after another; a generator, so that the caller can report progress.

    All steps share the options of `base`; their own overrides come after its own.
    """
    held: tuple[str, ...] = ()
    # The run below the next step, measured or not; run and figures of the last measured step that was kept.
    below, last, best = load_run(base.target, base.overrides), None, None
    for place, step in enumerate(steps):
        skipped = why_skipped(step, below, has_gpu)
        variants = [] if skipped else _variants(step, held, below, base, has_gpu)
        variant = next((one for one in variants if isinstance(one.run, Run)), None)
        pays = False
        if step.name in wanted:
            outcome = Outcome(step=step, state="skipped", reason=skipped)
            if variants:
                outcome, variant = _measured(step, variants, last, base, measure)
            outcome = _judged(outcome, best)
            yield outcome
            pays = outcome.state == "ran"
            best = outcome.figures if pays else best
        if variant is None or isinstance(variant.run, Failure):
            continue
        last = variant.run if pays else last
        if pays or place == 0 or step.name not in wanted:  # the base stays even if it fails
            held, below = variant.held, variant.run


def _variants(step: LadderStep, held: tuple[str, ...], below: Run, base: Trial, has_gpu: bool) -> list[_Variant]:
    """The plain step, and the step with each fallback that applies and makes a different run or refusal."""
    own = step.change
    if step.micro_batch_times > 1:
        own = (*own, f"{MICRO_BATCH}={below.training.micro_batch * step.micro_batch_times}")
    found: list[_Variant] = []
    for name, fallback in {"": LadderChange(), **step.fallbacks}.items():
        if why_unmet(fallback, below, has_gpu):
            continue
        change = (*own, *fallback.change)
        mine = (*held, *change)
        overrides = (*base.overrides, *mine)
        run = _describe(overrides, base)
        if isinstance(run, Run) and run.training.global_batch != below.training.global_batch:
            # All steps use one global batch; written out, it does not follow the micro-batch.
            overrides = (*overrides, f"training.global_batch={below.training.global_batch}")
            run = _describe(overrides, base)
        if name and run in (below, *(one.run for one in found)):
            continue  # a fallback that changes nothing, or nothing more than one before it
        trial = step.trial_name(name)
        found.append(
            _Variant(trial=trial, change=change, fallback=fallback.change, held=mine, overrides=overrides, run=run)
        )
    return found


def _describe(overrides: tuple[str, ...], base: Trial) -> Run | Failure:
    """The run of these overrides, or the reason why the configuration is refused."""
    try:
        run = load_run(base.target, overrides)
        grid_of(run, base.processes)
    except PenstockError as error:
        return Failure(kind="refused", reason=str(error), had_begun=False)
    return run


def _measured(
    step: LadderStep, variants: Sequence[_Variant], last: Run | None, base: Trial, measure: Measure
) -> tuple[Outcome, _Variant]:
    """The outcome of a step, and the variant that it belongs to. The plain variant comes first.

    `last` is the run of the last step that was kept.
    """
    tried: list[Attempt] = []
    outcomes: list[Outcome] = []
    for variant in variants:
        found: Run | Figures | Failure = variant.run
        if isinstance(found, Run):
            found = measure(replace(base, name=variant.trial, overrides=variant.overrides))
        outcome = _outcome(step, variant, last, found)
        if isinstance(found, Figures) or not found.is_mendable:
            return replace(outcome, tried=tuple(tried)), variant
        outcomes.append(outcome)
        tried.append(
            Attempt(
                trial=variant.trial,
                change=variant.change,
                overrides=variant.overrides,
                state=found.kind,
                reason=found.reason,
                seconds=found.seconds,
            )
        )
    return replace(outcomes[0], tried=tuple(tried)), variants[0]


def _outcome(step: LadderStep, variant: _Variant, last: Run | None, found: Figures | Failure) -> Outcome:
    """The outcome of a step from the trial of a variant."""
    changed: tuple[str, ...] = ()
    if isinstance(variant.run, Run):
        changed = variant.change
        if last is not None:
            changed = tuple(f"{one.field}={one.right}".replace('"', "") for one in differences(last, variant.run))
    outcome = Outcome(
        step=step,
        state="ran",
        trial=variant.trial,
        fallback=variant.fallback,
        changed=changed,
        overrides=variant.overrides,
        seconds=found.seconds,
    )
    if isinstance(found, Failure):
        return replace(outcome, state=found.kind, reason=found.reason)
    return replace(outcome, figures=found)


def _judged(outcome: Outcome, best: Figures | None) -> Outcome:
    """Mark an outcome as slower if its fastest training step is slower than the slowest one without it, beyond NOISE.

    `best` are the figures of the last step that was kept, if there is one.
    """
    figures = outcome.figures
    if figures is None or best is None or _ratio(figures, best) >= 1 - NOISE:
        return outcome
    fastest = _ratio(figures, best) * figures.step_seconds_median / min(figures.step_seconds)
    slowest = best.step_seconds_median / max(best.step_seconds)
    if fastest >= slowest:
        return outcome
    timed, twice = len(figures.step_seconds), figures.repeated_steps
    because = f", {twice} of {timed} timed training steps were repeated" if twice else ""
    return replace(outcome, state="slower", reason=f"slower than without it{because}; later steps go without it")


def gains(outcomes: Sequence[Outcome]) -> list[LadderGain | None]:
    """The gain of each step; None for steps that did not run."""
    found: list[LadderGain | None] = []
    first: Figures | None = None
    last: tuple[Figures, LadderGain] | None = None
    for outcome in outcomes:
        figures = outcome.figures
        if figures is None:
            found.append(None)
            continue
        first = first or figures
        before = 1.0 if last is None else _ratio(figures, last[0])
        sizes, others = (before, 1.0) if outcome.step.is_size else (1.0, before)
        gain = LadderGain(
            before=before,
            first=_ratio(figures, first),
            by_optimization=others * (1.0 if last is None else last[1].by_optimization),
            by_size=sizes * (1.0 if last is None else last[1].by_size),
            loss_gap=loss_gap(figures.losses, first.losses),
        )
        if outcome.state == "ran":
            last = figures, gain
        found.append(gain)
    return found


def _ratio(one: Figures, other: Figures) -> float:
    return one.tokens_per_second_per_device / other.tokens_per_second_per_device


def loss_gap(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference between the losses of the same training steps."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def balancing(run: Run) -> str:
    """How tokens choose their experts, and the balancing of the load, in a few words."""
    if run.model.moe is None:
        return "no experts"
    balance, router = run.model.moe.balance, run.model.moe.router
    if balance.force_load_balance:
        return "FORCED EVEN ROUTING, BENCHMARK ONLY"
    parts = ["natural routing"]
    if balance.aux_loss != "none" and balance.aux_loss_coef:
        parts.append(f"auxiliary loss {balance.aux_loss_coef:g} by {balance.aux_loss}")
    if router.expert_bias:
        parts.append("expert bias")
    if balance.capacity_factor:
        parts.append(f"tokens beyond capacity {balance.capacity_factor:g} dropped")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class SavedTrials:
    """Content of an earlier ladder's file."""

    trials: Mapping[tuple[str, tuple[str, ...]], Figures | Failure]  # by name and overrides
    steps: Sequence[Mapping[str, Any]] = ()  # entries of the file

    def still_ahead(self, outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
        """Entries of steps that this ladder has not reached yet; they stay in the file in case it is interrupted."""
        names = {outcome.step.name for outcome in outcomes}
        return [step for step in self.steps if step["name"] not in names]

    def or_measured(self, measure: Measure) -> Measure:
        """Measure only trials that are not in the file."""

        def recall(trial: Trial) -> Figures | Failure:
            found = self.trials.get((trial.name, trial.overrides))
            return measure(trial) if found is None else found

        return recall


NO_TRIALS = SavedTrials(trials={})


def steps_as_json(outcomes: Sequence[Outcome], flops_per_token: float) -> list[dict[str, Any]]:
    """Outcomes as JSON entries."""
    found = []
    for outcome, gain in zip(outcomes, gains(outcomes), strict=True):
        figures = outcome.figures
        found.append(
            {
                "name": outcome.step.name,
                "what": outcome.step.what,
                "kind": "size" if outcome.step.is_size else "optimization",
                "state": outcome.state,
                "reason": outcome.reason,
                "trial": outcome.trial,
                "fallback": list(outcome.fallback),
                "tried": [asdict(one) for one in outcome.tried],
                "changed": list(outcome.changed),
                "overrides": list(outcome.overrides),
                "seconds": outcome.seconds,
                "figures": None if figures is None else figures.as_json(flops_per_token),
                "gain": None if gain is None else asdict(gain),
            }
        )
    return found


def read_saved_trials(path: Path, environment: Mapping[str, Any], commit: str) -> SavedTrials:
    """The trials of an interrupted ladder, none if its file is missing.

    Raises a ConfigError if the file is no ladder, or has another environment.
    """
    if not path.exists():
        return NO_TRIALS
    try:
        result = read_json(path)
        numbers = result["numbers"]
        steps = [*numbers["ladder_steps"], *numbers["still_ahead"]]
        trials = dict(trial for step in steps for trial in _trials_of(step))
        then = {**result["environment"], "commit": result["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no ladder to go on with", got=error, fix="leave out --resume") from error
    now = {**environment, "commit": commit}
    if then != now:
        others = [f"{key} {then.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)]
        raise ConfigError(f"{path} was measured with another environment", got=", ".join(others), fix="another --json")
    return SavedTrials(trials=trials, steps=steps)


def _trials_of(step: Mapping[str, Any]) -> Iterator[tuple[tuple[str, tuple[str, ...]], Figures | Failure]]:
    """Trials in the entry of a step, by name and overrides."""
    for one in step["tried"]:
        failure = Failure(kind=one["state"], reason=one["reason"], seconds=one["seconds"], had_begun=False)
        yield (one["trial"], tuple(one["overrides"])), failure
    if table := step["figures"]:
        lists = {"step_seconds", "losses"}
        values: dict[str, Any] = {
            name: tuple(table[name]) if name in lists else table[name] for name in Figures.__dataclass_fields__
        }
        yield (step["trial"], tuple(step["overrides"])), Figures(**values)
