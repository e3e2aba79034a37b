"""Runs a ladder: each step is the configuration of the last successful step and one change, on the same data and seed.

    baseline   ran       the base of comparison, which stays even if it fails
    grouped    ran       baseline, grouped
    symmetric  skipped   the machine has no GPU
    sync-free  failed    baseline, grouped, sync-free: out of memory
    shared     slower    baseline, grouped, shared: it costs more than it gains here
    larger     ran       baseline, grouped, larger

A refused, failed or slow step is left out of the later ones. A step that the user excludes (`--only`) is not measured
but stays in the later ones. A step that only makes the micro-batch larger is of another kind, because it gives the
device more work at once and needs memory for it: gains of the two kinds are multiplied separately, and the two products
together are the gain over the first step.

The results are also written as JSON, and `--resume` takes steps back from the file: figures, refusals and steps that
ran out of memory, which would end the same way. Steps that crashed or timed out run again.

A ladder is a list of `[[step]]` tables in a TOML file: `ladder.toml` beside this file, or one of the user's. The first
step is the base of comparison: it sets every option that later steps improve. A later step either makes the same work
faster (`change`) or gives the device more work at once (`micro_batch_times`), never both, because the two gains could
not be told apart. A step may name an option that this version does not have: it is skipped with that reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from penstock.base.errors import ConfigError, PenstockError, did_you_mean
from penstock.base.files import read_json, read_toml
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.schema import Section, differences, fields_of, find, knob
from penstock.config.tree import build, settle
from penstock.train.run_folder import check_name
from penstock.tune.trial import Failure, Figures, Trial

MICRO_BATCH = "training.micro_batch"
OURS = Path(__file__).with_name("ladder.toml")


class LadderStep(Section):
    """One step of a ladder."""

    name: str = knob(doc="Short name, also of the folder of its run.")
    what: str = knob("", doc="What it is, in a few words.")
    change: tuple[str, ...] = knob((), doc="Overrides `a.b=c`, applied last.")
    needs: tuple[str, ...] = knob((), doc="Requirements of the run so far, by the names of `REQUIREMENTS`.")
    micro_batch_times: int = knob(1, doc="Factor on the micro-batch of the step before.", low=1)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(override.partition("=")[0].strip() for override in self.change)

    @property
    def is_size(self) -> bool:
        """The step only makes the micro-batch larger."""
        return self.micro_batch_times > 1 or MICRO_BATCH in self.fields


class Requirement(NamedTuple):
    """A requirement of a step."""

    is_met: Callable[[Run, bool], bool]  # by a run, on a machine with or without a GPU
    otherwise: str  # reason for skipping the step


REQUIREMENTS = MappingProxyType(
    {
        "experts": Requirement(lambda run, has_gpu: run.model.moe is not None, "the model has no experts"),
        "shared-expert": Requirement(
            lambda run, has_gpu: run.model.moe is not None and run.model.moe.shared_expert_intermediate_size > 0,
            "the model has no shared expert",
        ),
        "sharing": Requirement(
            lambda run, has_gpu: run.parallel.expert * run.parallel.expert_tensor > 1,
            "each rank holds all experts (parallel.expert is 1)",
        ),
        "gpu": Requirement(lambda run, has_gpu: has_gpu, "there is no GPU"),
    }
)


@cache
def our_ladder() -> tuple[LadderStep, ...]:
    """From eager operators to the fastest configuration; for MoE models, others skip what does not apply."""
    return load_ladder_steps(OURS)


def load_ladder_steps(path: Path) -> tuple[LadderStep, ...]:
    """The ladder in a TOML file. Raises a PenstockError if the file cannot be read or is no list of usable steps."""
    try:
        tables = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check --ladder") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    tables_of_steps = tables.pop("step", None)
    if tables or not isinstance(tables_of_steps, list) or not all(isinstance(step, dict) for step in tables_of_steps):
        raise ConfigError(f"{path} is no ladder", got=", ".join(tables) or None, allowed="[[step]] tables only")
    if not tables_of_steps:
        raise ConfigError("a ladder has no step", fix="write at least one [[step]] table")
    steps: list[LadderStep] = []
    for number, table in enumerate(tables_of_steps, start=1):
        if "fallbacks" in table:
            fix = "make the step's change complete, or a step of its own of each fallback"
            raise ConfigError(f"{path}, step {number}: fallbacks were removed", fix=fix)
        try:
            steps.append(build(LadderStep, settle(fields_of(LadderStep), table)))
        except ConfigError as error:
            raise ConfigError(
                f"{path}, step {number}: {error.what}", got=error.got, allowed=error.allowed, fix=error.fix
            ) from error
        _check(steps)
    return tuple(steps)


def _check(steps: Sequence[LadderStep]) -> None:
    """Check the last step: its name, its requirements, and that it does not mix two gains."""
    *before, step = steps
    check_name(step.name)
    if step.name in [other.name for other in before]:
        raise ConfigError(f"two steps are called {step.name}", fix="give each its own name")
    if unknown := set(step.needs) - set(REQUIREMENTS):
        got, allowed = ", ".join(sorted(unknown)), ", ".join(REQUIREMENTS)
        raise ConfigError(f"step {step.name} has unknown needs", got=got, allowed=allowed)
    if before and step.is_size and set(step.fields) - {MICRO_BATCH}:
        raise ConfigError(
            f"step {step.name} makes the micro-batch larger and changes something else, so its gain has two causes",
            fix="make two steps of it",
        )


def chosen(steps: Sequence[LadderStep], names: Sequence[str]) -> frozenset[str]:
    """Names of the steps to measure: the user's `--only`, or all if that is empty.

    Raises a PenstockError if a name is unknown, or if a step that is left out would give a gain two causes.
    """
    known = [step.name for step in steps]
    if unknown := [name for name in names if name not in known]:
        fix = did_you_mean(unknown[0], known)
        got, allowed = ", ".join(unknown), ", ".join(known)
        raise ConfigError("--only names no step of the ladder", got=got, allowed=allowed, fix=fix)
    wanted = frozenset(names or known)
    first = min(known.index(name) for name in wanted)
    unmeasured: list[LadderStep] = []  # since the last measured step: its gain is theirs too
    for step in steps[first + 1 :]:
        if step.name not in wanted:
            unmeasured.append(step)
            continue
        mixed = [other.name for other in unmeasured if other.is_size != step.is_size]
        if mixed:
            raise ConfigError(
                f"the gain of step {step.name} would have two causes, micro-batch and optimization",
                got=f"--only leaves out {', '.join(mixed)}",
                fix=f"name {mixed[-1]} as well",
            )
        unmeasured = []
    return wanted


def why_skipped(step: LadderStep, run: Run, has_gpu: bool) -> str:
    """Reason for skipping a step: an unknown option, or the first unmet requirement; empty if it applies."""
    unknown = (f"this version has no {field}" for field in step.fields if not find(Run, field))
    unmet = (REQUIREMENTS[need].otherwise for need in step.needs if not REQUIREMENTS[need].is_met(run, has_gpu))
    return next(unknown, "") or next(unmet, "")


Measure = Callable[[Trial], Figures | Failure]  # `run_trial`, or a replacement
NOISE = 0.02  # share of the throughput by which a step may seem slower by chance


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a step."""

    step: LadderStep
    state: Literal["ran", "slower", "skipped", "refused", "failed"]  # `slower` if later steps go without it
    reason: str = ""  # one line; empty if it ran
    changed: tuple[str, ...] = ()  # `field=value` that the last step that ran lacks; for the first step its overrides
    overrides: tuple[str, ...] = ()
    figures: Figures | None = None  # None if it did not run
    seconds: float = 0.0


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
    overrides = base.overrides
    # The run below the next step, measured or not; run and figures of the last measured step that was kept.
    below, last, best = load_run(base.target, overrides), None, None
    for step in steps:
        reason = why_skipped(step, below, has_gpu)
        if reason:
            if step.name in wanted:
                yield Outcome(step=step, state="skipped", reason=reason)
            continue
        mine = _overrides(step, overrides, below, base.target)
        run = _run_of(mine, base)
        outcome = None
        if step.name in wanted:
            result = run if isinstance(run, Failure) else measure(replace(base, name=step.name, overrides=mine))
            changed = mine[len(overrides) :] if last is None else _changes(last, run)
            outcome = Outcome(step=step, state="ran", changed=changed, overrides=mine, seconds=result.seconds)
            outcome = _judged(outcome, result, best)
            yield outcome
        if isinstance(run, Failure):
            continue
        if outcome is not None and outcome.state == "ran":
            last, best = run, outcome.figures
        if outcome is None or outcome.state == "ran" or step is steps[0]:  # the base stays even if it fails
            overrides, below = mine, run


def _overrides(step: LadderStep, before: tuple[str, ...], below: Run, target: str) -> tuple[str, ...]:
    """The overrides of a run with this step. All steps have one global batch, which does not follow the micro-batch."""
    mine = (*before, *step.change)
    if step.micro_batch_times > 1:
        mine = (*mine, f"{MICRO_BATCH}={below.training.micro_batch * step.micro_batch_times}")
    try:
        rows = load_run(target, mine).training.global_batch
    except PenstockError:  # `_run_of` gives the reason
        return mine
    batch = below.training.global_batch
    return mine if rows == batch else (*mine, f"training.global_batch={batch}")


def _run_of(overrides: tuple[str, ...], base: Trial) -> Run | Failure:
    try:
        run = load_run(base.target, overrides)
        grid_of(run, base.processes)
    except PenstockError as error:
        return Failure(kind="refused", reason=str(error), had_begun=False)
    return run


def _changes(last: Run, run: Run | Failure) -> tuple[str, ...]:
    if isinstance(run, Failure):
        return ()
    return tuple(f"{change.field}={change.right}".replace('"', "") for change in differences(last, run))


def _judged(outcome: Outcome, result: Figures | Failure, best: Figures | None) -> Outcome:
    """The outcome of a step with its result, beside the figures of the last step that was kept.

    It is slower if its fastest training step is slower than the slowest one without it, beyond NOISE.
    """
    if isinstance(result, Failure):
        return replace(outcome, state=result.kind, reason=result.reason)
    outcome = replace(outcome, figures=result)
    if best is None or _ratio(result, best) >= 1 - NOISE:
        return outcome
    fastest = _ratio(result, best) * result.step_seconds_median / min(result.step_seconds)
    slowest = best.step_seconds_median / max(best.step_seconds)
    if fastest >= slowest:
        return outcome
    timed, twice = len(result.step_seconds), result.repeated_steps
    because = f", {twice} of {timed} timed training steps were repeated" if twice else ""
    return replace(outcome, state="slower", reason=f"slower than without it{because}; later steps go without it")


def gains(outcomes: Sequence[Outcome]) -> list[LadderGain | None]:
    """The gain of each step; None for steps that did not run."""
    every: list[LadderGain | None] = []
    first: Figures | None = None
    last: tuple[Figures, LadderGain] | None = None
    for outcome in outcomes:
        figures = outcome.figures
        if figures is None:
            every.append(None)
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
        every.append(gain)
    return every


def _ratio(figures: Figures, base: Figures) -> float:
    return figures.tokens_per_second_per_device / base.tokens_per_second_per_device


def loss_gap(losses: Sequence[float], base_losses: Sequence[float]) -> float:
    """Largest relative difference between the losses of the same training steps."""
    return max(abs(loss - base) / abs(base) for loss, base in zip(losses, base_losses, strict=True))


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
class SavedSteps:
    """Content of an earlier ladder's file."""

    entries: Sequence[Mapping[str, Any]] = ()
    results: Mapping[tuple[str, tuple[str, ...]], Figures | Failure] = field(default_factory=dict)  # by name, overrides

    def still_ahead(self, outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
        """Entries of steps that this ladder has not reached yet; they stay in the file in case it is interrupted."""
        names = {outcome.step.name for outcome in outcomes}
        return [entry for entry in self.entries if entry["name"] not in names]

    def or_measured(self, measure: Measure) -> Measure:
        return lambda trial: self.results.get((trial.name, trial.overrides)) or measure(trial)


def steps_as_json(outcomes: Sequence[Outcome], flops_per_token: float) -> list[dict[str, Any]]:
    return [
        {
            "name": outcome.step.name,
            "what": outcome.step.what,
            "kind": "size" if outcome.step.is_size else "optimization",
            "state": outcome.state,
            "reason": outcome.reason,
            "changed": list(outcome.changed),
            "overrides": list(outcome.overrides),
            "seconds": outcome.seconds,
            "figures": None if outcome.figures is None else outcome.figures.as_json(flops_per_token),
            "gain": None if gain is None else asdict(gain),
        }
        for outcome, gain in zip(outcomes, gains(outcomes), strict=True)
    ]


def read_saved_steps(path: Path, environment: Mapping[str, Any], commit: str) -> SavedSteps:
    """The steps of an interrupted ladder, none if its file is missing.

    Raises a ConfigError if the file is no ladder, or has another environment.
    """
    if not path.exists():
        return SavedSteps()
    try:
        content = read_json(path)
        numbers = content["numbers"]
        entries = [*numbers["ladder_steps"], *numbers["still_ahead"]]
        results = {(entry["name"], tuple(entry["overrides"])): _result_of(entry) for entry in entries}
        then = {**content["environment"], "commit": content["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no ladder to go on with", got=error, fix="leave out --resume") from error
    now = {**environment, "commit": commit}
    if then != now:
        others = [f"{key} {then.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)]
        raise ConfigError(f"{path} was measured with another environment", got=", ".join(others), fix="another --json")
    return SavedSteps(entries=entries, results={key: result for key, result in results.items() if result is not None})


def _result_of(entry: Mapping[str, Any]) -> Figures | Failure | None:
    """The figures of an entry, or a failure that would come again; None for what is to be measured again."""
    if entry["figures"]:
        return TypeAdapter(Figures).validate_python(entry["figures"])
    if entry["state"] in ("skipped", "ran"):
        return None
    failure = Failure(kind=entry["state"], reason=entry["reason"], seconds=entry["seconds"], had_begun=False)
    return failure if failure.kind == "refused" or failure.lacks_memory else None
