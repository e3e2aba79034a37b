"""A whole training run as a plan: phases of tokens, and their days, GPU-hours, cost, energy and lost time.

A phase has one sequence length and one global batch: the steps of a batch-size ramp, or of a longer context. Each phase
is planned by itself, because a checkpoint loads on any layout. Failures follow a Poisson process, so the time that a
phase takes is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006), which also gives the interval between checkpoints that loses least.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, expm1, sqrt
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.numbers import bytes_text
from penstock.config.run import Run
from penstock.plan.asked_layout import with_overrides
from penstock.plan.hardware import Cluster
from penstock.plan.phases import TrainingPhase
from penstock.plan.projection import Plan, Projection, candidate_json

HOUR, DAY = 3600.0, 86400.0

RESTART_SECONDS, WRITE_SECONDS = 600.0, 600.0
"""Assumptions: from a failure until training goes on (detection, new processes, loading), and the time in which storage
takes a checkpoint in the background, so the least interval between two."""

MOST_FAILURES = 40.0  # in a restart and an interval between checkpoints; with more the goodput is none: e to minus this


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures that end a run, which then goes on from its newest checkpoint."""

    mtbf_seconds: float  # mean time between failures of one device
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Failures of a cluster, and checkpoints that lose least time to them."""

    between_seconds: float  # mean time between failures of the cluster
    save_seconds: float  # in which a checkpoint stops training
    interval_seconds: float  # of training from one checkpoint to the next
    goodput: float  # share of the time that trains steps which are not lost


def interruptions(failures: Failures, devices: int, save_seconds: float) -> Interruptions:
    """Interval and goodput of Daly's model for `devices` that fail independently.

    Raises a ConfigError if they fail so often that nothing is ever saved.
    """
    between = failures.mtbf_seconds / devices
    # Daly's higher-order optimum, which holds for saves shorter than twice the mean time.
    ratio, interval = save_seconds / (2 * between), between
    if ratio < 1:
        interval = sqrt(2 * save_seconds * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds
    interval = max(interval, WRITE_SECONDS)
    restarts, saves = failures.restart_seconds / between, (interval + save_seconds) / between
    if restarts + saves > MOST_FAILURES:
        raise ConfigError(
            f"--mtbf: {devices:,} devices would fail every {between:,.0f} s, before a step is saved",
            got=f"{failures.mtbf_seconds / HOUR:g} hours",
            fix="give the hours between failures of one device, such as 50000",
        )
    goodput = interval / (exp(restarts) * between * expm1(saves))
    return Interruptions(between_seconds=between, save_seconds=save_seconds, interval_seconds=interval, goodput=goodput)


def save_seconds_of(projection: Projection) -> float:
    """Seconds in which a checkpoint stops training: each rank copies its state to pinned host memory."""
    fullest = max(memory.master + memory.moments for memory in projection.memories)
    return fullest / projection.cluster.hardware.host_link.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """A planned phase."""

    phase: TrainingPhase
    plan: Plan  # its first candidate trains the phase
    steps: int
    busy_seconds: float  # of the steps alone
    interruptions: Interruptions | None  # None without failures

    @property
    def projection(self) -> Projection:
        """Of the steps."""
        return self.plan.candidates[0]

    @property
    def seconds(self) -> float:
        """With the time that failures and checkpoints take."""
        return self.busy_seconds / (self.interruptions.goodput if self.interruptions else 1.0)

    @property
    def device_hours(self) -> float:
        return self.seconds * self.projection.cluster.devices / HOUR


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Planned phases."""

    cluster: Cluster
    phases: tuple[PhaseCost, ...]
    price: float | None  # of a device for an hour, in any currency; None if unknown
    watts: float | None  # of a device while it trains; None if unknown

    def cost(self, phase: PhaseCost) -> float | None:
        return None if self.price is None else phase.device_hours * self.price

    def energy_joules(self, phase: PhaseCost) -> float | None:
        return None if self.watts is None else phase.device_hours * HOUR * self.watts


def plan_campaign(
    run: Run,
    phases: Sequence[TrainingPhase],
    plan_of: Callable[[Run, float | None], Plan],
    failures: Failures | None = None,
    step_tokens: float | None = None,
) -> tuple[PhaseCost, ...]:
    """Plan every phase with the fastest layout that `plan_of` finds for a run and tokens of a step.

    `step_tokens` replaces those of the run's steps where a phase names none. Raises a ConfigError if no layout fits a
    phase, or the model cannot have its sequence length.
    """
    costs = []
    for phase in phases:
        changed = run
        if phase.sequence_length is not None:
            rows = max(1, run.tokens_per_step // phase.sequence_length)
            overrides = [f"training.sequence_length={phase.sequence_length}", f"training.global_batch={rows}"]
            changed = with_overrides(run, overrides, 1)
        # Another length keeps about the tokens of a step.
        batch = phase.batch_tokens or step_tokens or (run.tokens_per_step if phase.sequence_length else None)
        plan = plan_of(changed, batch)
        if not plan.candidates or not plan.candidates[0].fits:
            length = changed.training.sequence_length
            nearest = plan.candidates[:1] or (() if plan.nearest is None else (plan.nearest,))
            reasons = [f"{near.layout} needs {bytes_text(near.over_bytes)} more" for near in nearest]
            reasons = reasons or [refusal.reason for refusal in plan.refused[:1]]
            raise ConfigError(": ".join([f"no layout of {run.name} fits at {length:,} positions", *reasons]))
        best = plan.candidates[0]
        steps = max(1, round(phase.tokens / best.run.tokens_per_step))
        lost = interruptions(failures, best.cluster.devices, save_seconds_of(best)) if failures else None
        busy = steps * best.time.step_seconds
        costs.append(PhaseCost(phase=phase, plan=plan, steps=steps, busy_seconds=busy, interruptions=lost))
    return tuple(costs)


def campaign_json(campaign: Campaign) -> dict[str, Any]:
    """The campaign for `--json`: seconds, hours of devices, joules."""
    phases = [
        {
            "tokens": cost.phase.tokens,
            "sequence_length": cost.projection.run.training.sequence_length,
            "global_batch": cost.projection.run.training.global_batch,
            "layout": str(cost.projection.layout),
            "steps": cost.steps,
            "step_seconds": cost.projection.time.step_seconds,
            "candidate": candidate_json(cost.projection),
            "gap": cost.plan.gap,
            "advice": [vars(advice) for advice in cost.plan.advice],
            "seconds": cost.seconds,
            "device_hours": cost.device_hours,
            "cost": campaign.cost(cost),
            "energy_joules": campaign.energy_joules(cost),
            "interruptions": cost.interruptions and vars(cost.interruptions),
        }
        for cost in campaign.phases
    ]
    return {"price": campaign.price, "watts": campaign.watts, "phases": phases}
