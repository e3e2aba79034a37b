"""Climbs a ladder: one configuration after another, each the last one that ran and a change, on the same data and seed.

    baseline   ran       the ground, which stays even if it fails itself
    grouped    ran       baseline, grouped
    symmetric  skipped   the machine has no GPU
    sync-free  failed    baseline, grouped, sync-free: no memory
    halves     slower    baseline, grouped, halves: it costs more than it gains here
    larger     ran       baseline, grouped, larger, and its fallback eager, because it found no memory as it was

So a failure costs its own rung and no other, and what does not pay is not carried upwards. What is refused by
configuration or finds no memory is tried again with each fallback of the rung, until a form of it runs, slow or fast;
what fails otherwise is not. A rung that the user has left out (`--only`) is not measured, and stays in what comes after
it, in the first form that the configuration allows.

A rung that only makes the micro-batch larger is of another kind: it gives the device more work at once, and memory pays
for it. The gains of both kinds are multiplied up apart, and the two products together are the gain over the first rung.
The gain of a rung that ran with a fallback is that of both, and counts as the rung's kind: of a larger micro-batch it
is what the size gains, less what was given up for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.base.errors import PenstockError
from penstock.config.compare import differences
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.tune.rungs import MICRO_BATCH, Change, LadderStep, why_skipped, why_unmet
from penstock.tune.trial import Failure, Figures, Trial

Measure = Callable[[Trial], Figures | Failure]
"""`run_trial`, or what stands in for it."""

State = Literal["ran", "slower", "skipped", "refused", "failed"]

NOISE = 0.02
"""Part of the throughput by which a rung may seem slower without being it."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all rungs have in common.

    Attributes:
        target: preset, TOML file or folder of a run.
        overrides: of the user and of `first_steps`, below those of all rungs.
        processes: ranks.
        warm_up: first steps that are not counted.
        folder: that gets the folders of the runs.
        most_seconds: of one rung; 0 waits as long as it takes.
        has_gpu: the ranks are on GPUs.
    """

    target: str
    overrides: tuple[str, ...]
    processes: int
    warm_up: int
    folder: Path
    most_seconds: float
    has_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A form of a rung that another one may stand in for: it was refused by configuration, or found no memory.

    Attributes:
        trial: name of its run, whether there was one or not.
        change: what the rung sets and, after it, what the fallback sets.
        overrides: all that are laid over the target, those of the ground included.
        state: of the trial.
        reason: one line.
        seconds: that it took.
    """

    trial: str
    change: tuple[str, ...]
    overrides: tuple[str, ...]
    state: Literal["refused", "failed"]
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a rung: of the form that ran or broke, or of its own if all were refused or found no memory.

    Attributes:
        rung: the rung.
        state: `ran`; or it ran and was slower than the last one that counts, so that later ones go without it; else it
            was left out, refused, or failed, with the reason.
        reason: one line; empty if it ran.
        trial: name of its run.
        fallback: overrides of the fallback that it ran with; empty without one.
        changed: what differs from the last rung that ran, `field=value` each; of the first one what it sets.
        overrides: all that are laid over the target, those of the ground included.
        figures: if it ran.
        seconds: that it took, without what was tried before.
        tried: all forms that were refused by configuration or found no memory, in order.
    """

    rung: LadderStep
    state: State
    reason: str = ""
    trial: str = ""
    fallback: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    figures: Figures | None = None
    seconds: float = 0.0
    tried: tuple[Attempt, ...] = ()

    @property
    def speed(self) -> float:
        """Tokens per second of each device; 0 if it did not run."""
        return 0.0 if self.figures is None else self.figures.tokens_per_second_per_device

    @property
    def others(self) -> tuple[Attempt, ...]:
        """What was tried besides the form that this is about."""
        return tuple(one for one in self.tried if one.trial != self.trial)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A rung as it is, or with a fallback.

    Attributes:
        trial: name of its run.
        own: overrides of the rung.
        fallback: those of the fallback, laid over them.
        held: those of the rungs below, and of this one.
        overrides: all that are laid over the target.
        run: what they describe, or why it cannot be had.
    """

    trial: str
    own: tuple[str, ...]
    fallback: tuple[str, ...]
    held: tuple[str, ...]
    overrides: tuple[str, ...]
    run: Run | Failure


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A rung's throughput for each device, as a ratio.

    Attributes:
        before: over the last rung that ran and was kept.
        first: over the first that ran.
        by_optimization: product of the gains of this rung and of all that it stands on, but for those that change the
            micro-batch.
        by_size: product of the gains of those.
        loss_gap: largest relative difference of its losses from those of the first that ran, step by step.
    """

    before: float
    first: float
    by_optimization: float
    by_size: float
    loss_gap: float


def climb(rungs: Sequence[LadderStep], wanted: frozenset[str], ground: Ground, measure: Measure) -> Iterator[Outcome]:
    """Measure one rung after another; a generator, so that somebody can watch.

    Args:
        rungs: the ladder, checked.
        wanted: names of those that are measured (`penstock.tune.rungs.chosen`).
        ground: below all of them.
        measure: runs a trial.
    """
    held: tuple[str, ...] = ()
    below, last, best = load_run(ground.target, ground.overrides), None, None
    for place, rung in enumerate(rungs):
        skipped = why_skipped(rung, below, ground.has_gpu)
        forms = [] if skipped else _forms(rung, held, below, ground)
        form = next((form for form in forms if isinstance(form.run, Run)), None)
        pays = False
        if rung.name in wanted:
            outcome = Outcome(rung=rung, state="skipped", reason=skipped)
            if forms:
                outcome, form = _measured(rung, forms, last, ground, measure)
            outcome = _judged(outcome, best)
            yield outcome
            pays = outcome.state == "ran"
            best = outcome.figures if pays else best
        if form is None or isinstance(form.run, Failure):
            continue
        last = form.run if pays else last
        if pays or place == 0 or rung.name not in wanted:
            held, below = form.held, form.run


def _forms(rung: LadderStep, held: tuple[str, ...], below: Run, ground: Ground) -> list[_Form]:
    """The rung as it is, and with each fallback that means something and makes another run of it.

    A fallback that is refused for a reason that is known already is left out.
    """
    own = rung.change
    if rung.micro_batch_times > 1:
        own = (*own, f"{MICRO_BATCH}={below.training.micro_batch * rung.micro_batch_times}")
    forms: list[_Form] = []
    for name, fallback in {"": Change(), **rung.fallbacks}.items():
        if why_unmet(fallback, below, ground.has_gpu):
            continue
        mine = (*held, *own, *fallback.change)
        overrides = (*ground.overrides, *mine)
        run = _describe(overrides, ground)
        if isinstance(run, Run) and run.training.global_batch != below.training.global_batch:
            # Rungs are compared at one global batch; written down, it does not follow the micro-batch.
            overrides = (*overrides, f"training.global_batch={below.training.global_batch}")
            run = _describe(overrides, ground)
        if name and run in (below, *(form.run for form in forms)):
            continue
        trial = rung.trial_name(name)
        forms.append(_Form(trial=trial, own=own, fallback=fallback.change, held=mine, overrides=overrides, run=run))
    return forms


def _describe(overrides: tuple[str, ...], ground: Ground) -> Run | Failure:
    """The run that overrides make; if there cannot be one, the reason, before anything is started."""
    try:
        run = load_run(ground.target, overrides)
        grid_of(run, ground.processes)
    except PenstockError as error:
        return Failure(kind="refused", reason=str(error), had_begun=False)
    return run


def _measured(
    rung: LadderStep, forms: Sequence[_Form], last: Run | None, ground: Ground, measure: Measure
) -> tuple[Outcome, _Form]:
    """What became of a rung, and the form that this is about.

    Args:
        rung: the rung.
        forms: of it, its own first.
        last: the last rung that ran and was kept.
        ground: below all rungs.
        measure: runs a trial.
    """
    tried: list[Attempt] = []
    outcomes: list[Outcome] = []
    for form in forms:
        found = form.run if isinstance(form.run, Failure) else measure(_trial(form, ground))
        outcome = _outcome(rung, form, last, found)
        if isinstance(found, Figures) or not found.is_mendable:
            return replace(outcome, tried=tuple(tried)), form
        outcomes.append(outcome)
        tried.append(
            Attempt(
                trial=form.trial,
                change=(*form.own, *form.fallback),
                overrides=form.overrides,
                state=found.kind,
                reason=found.reason,
                seconds=found.seconds,
            )
        )
    return replace(outcomes[0], tried=tuple(tried)), forms[0]


def _trial(form: _Form, ground: Ground) -> Trial:
    return Trial(
        name=form.trial,
        target=ground.target,
        overrides=form.overrides,
        processes=ground.processes,
        warm_up=ground.warm_up,
        folder=ground.folder,
        most_seconds=ground.most_seconds,
    )


def _outcome(rung: LadderStep, form: _Form, last: Run | None, found: Figures | Failure) -> Outcome:
    """What a trial of a form makes of the rung."""
    changed: tuple[str, ...] = ()
    if isinstance(form.run, Run):
        changed = (*form.own, *form.fallback) if last is None else _changes(last, form.run)
    outcome = Outcome(
        rung=rung,
        state="ran",
        trial=form.trial,
        fallback=form.fallback,
        changed=changed,
        overrides=form.overrides,
        seconds=found.seconds,
    )
    if isinstance(found, Failure):
        return replace(outcome, state=found.kind, reason=found.reason)
    return replace(outcome, figures=found)


def _changes(last: Run, run: Run) -> tuple[str, ...]:
    """The fields in which two runs differ, as overrides without quotes."""
    return tuple(f"{one.field}={one.right}".replace('"', "") for one in differences(last, run))


def _judged(outcome: Outcome, best: Figures | None) -> Outcome:
    """Whether it pays: it does unless even its fastest step is slower than the slowest without it, and more than NOISE.

    Args:
        outcome: of a rung.
        best: figures of the last one that did; None if there is none.
    """
    figures = outcome.figures
    if figures is None or best is None or _ratio(figures, best) >= 1 - NOISE:
        return outcome
    most, least = _ratio(figures, best) * _spread(figures, min), _spread(best, max)
    if most >= least:
        return outcome
    timed, twice = len(figures.step_seconds), figures.repeated_steps
    because = f", {twice} of {timed} timed steps were made twice" if twice else ""
    return replace(outcome, state="slower", reason=f"slower than without it{because}; later rungs go without it")


def _spread(figures: Figures, which: Callable[[Sequence[float]], float]) -> float:
    """Speed of one step, the fastest or slowest, over that of the middle one."""
    return figures.step_seconds_median / which(figures.step_seconds)


def gains(outcomes: Sequence[Outcome]) -> list[Gain | None]:
    """The gain of each rung; None for those that did not run."""
    found: list[Gain | None] = []
    first: Figures | None = None
    last: tuple[Figures, Gain] | None = None
    for outcome in outcomes:
        figures = outcome.figures
        if figures is None:
            found.append(None)
            continue
        first = first or figures
        before = 1.0 if last is None else _ratio(figures, last[0])
        sizes, others = (before, 1.0) if outcome.rung.is_size else (1.0, before)
        gain = Gain(
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
    """Largest relative difference between the losses of the same steps."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def balancing(run: Run) -> str:
    """How tokens find their experts, and what keeps these evenly loaded, in a few words."""
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
