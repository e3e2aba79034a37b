"""Climbs a ladder: one configuration after another, each the last one that ran and a change, on the same data and seed.

    baseline   ran       the ground, which stays even if it fails itself
    grouped    ran       baseline, grouped
    symmetric  skipped   the machine has no GPU
    sync-free  failed    baseline, grouped, sync-free: no memory
    halves     slower    baseline, grouped, halves: it costs more than it gains here
    larger     ran       baseline, grouped, larger

So a failure costs its own rung and no other, and what does not pay is not carried upwards. A rung that the user has
left out (`--only`) is not measured, and stays in what comes after it.

A rung that only makes the micro-batch larger is of another kind: it gives the device more work at once, and memory pays
for it. The gains of both kinds are multiplied up apart, and the two products together are the gain over the first rung.
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
from penstock.tune.rungs import MICRO_BATCH, Rung, why_skipped
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
class Outcome:
    """What became of a rung.

    Attributes:
        rung: the rung.
        state: `ran`; or it ran and was slower than the last one that counts, so that later ones go without it; else it
            was left out, refused, or failed, with the reason.
        reason: one line; empty if it ran.
        changed: what differs from the last rung that ran, `field=value` each; of the first one what it sets.
        overrides: all that are laid over the target, those of the ground included.
        figures: if it ran.
        seconds: that it took.
    """

    rung: Rung
    state: State
    reason: str = ""
    changed: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    figures: Figures | None = None
    seconds: float = 0.0


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


def climb(rungs: Sequence[Rung], wanted: frozenset[str], ground: Ground, measure: Measure) -> Iterator[Outcome]:
    """Measure one rung after another; a generator, so that somebody can watch.

    Args:
        rungs: the ladder, checked.
        wanted: names of those that are measured (`penstock.tune.rungs.chosen`).
        ground: below all of them.
        measure: runs a trial.
    """
    held: tuple[str, ...] = ()
    below, last, fastest = load_run(ground.target, ground.overrides), None, 0.0
    for place, rung in enumerate(rungs):
        change = (*held, *_change(rung, below))
        overrides = (*ground.overrides, *change)
        run = _describe(rung, below, overrides, ground)
        is_kept = place == 0 or rung.name not in wanted
        if rung.name in wanted:
            outcome = run if isinstance(run, Outcome) else _measured(rung, last, run, overrides, ground, measure)
            outcome = _judged(outcome, fastest)
            yield outcome
            is_kept = is_kept or outcome.state == "ran"
            if outcome.state == "ran" and outcome.figures is not None and isinstance(run, Run):
                last, fastest = run, outcome.figures.tokens_per_second_per_device
        if is_kept and isinstance(run, Run):
            held, below = change, run


def _change(rung: Rung, below: Run) -> tuple[str, ...]:
    """The overrides of a rung."""
    if rung.micro_batch_times == 1:
        return rung.change
    return (*rung.change, f"{MICRO_BATCH}={below.training.micro_batch * rung.micro_batch_times}")


def _describe(rung: Rung, below: Run, overrides: tuple[str, ...], ground: Ground) -> Run | Outcome:
    """The run of a rung; if there cannot be one, the outcome that says why, before anything is started."""
    if skipped := why_skipped(rung, below, ground.has_gpu):
        return Outcome(rung=rung, state="skipped", reason=skipped)
    try:
        run = load_run(ground.target, overrides)
        grid_of(run, ground.processes)
    except PenstockError as error:
        return Outcome(rung=rung, state="refused", reason=str(error), overrides=overrides)
    return run


def _measured(
    rung: Rung, last: Run | None, run: Run, overrides: tuple[str, ...], ground: Ground, measure: Measure
) -> Outcome:
    changed = rung.change
    if last is not None:
        changed = tuple(f"{one.field}={one.right}".replace('"', "") for one in differences(last, run))
    trial = Trial(
        name=rung.name,
        target=ground.target,
        overrides=overrides,
        processes=ground.processes,
        warm_up=ground.warm_up,
        folder=ground.folder,
        most_seconds=ground.most_seconds,
    )
    found = measure(trial)
    if isinstance(found, Failure):
        return Outcome(
            rung=rung,
            state=found.kind,
            reason=found.reason,
            changed=changed,
            overrides=overrides,
            seconds=found.seconds,
        )
    return Outcome(rung=rung, state="ran", changed=changed, overrides=overrides, figures=found, seconds=found.seconds)


def _judged(outcome: Outcome, fastest: float) -> Outcome:
    """Whether it pays.

    Args:
        outcome: of a rung.
        fastest: throughput for each device of the last one that did.
    """
    figures = outcome.figures
    if figures is None or figures.tokens_per_second_per_device >= (1 - NOISE) * fastest:
        return outcome
    return replace(outcome, state="slower", reason="slower than without it; later rungs go without it")


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
    if balance.force:
        return "FORCED EVEN ROUTING, BENCHMARK ONLY"
    parts = ["natural routing"]
    if balance.auxiliary != "none" and balance.auxiliary_weight:
        parts.append(f"auxiliary loss {balance.auxiliary_weight:g} by {balance.auxiliary}")
    if router.expert_bias:
        parts.append("expert bias")
    if balance.capacity_factor:
        parts.append(f"tokens beyond capacity {balance.capacity_factor:g} dropped")
    return ", ".join(parts)
