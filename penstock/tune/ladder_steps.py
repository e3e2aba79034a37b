"""The steps of a ladder, as data: the change of each over the step before it, and its requirements.

A ladder is a list of `[[step]]` tables in a TOML file: `ladder.toml` beside this file, or one of the user's. The first
step is the base of comparison: it sets every option that later steps improve. A later step either makes the same work
faster (`change`) or gives the device more work at once (`micro_batch_times`), never both, because the two gains could
not be told apart. A step may name an option that this version does not have: it is skipped with that reason.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.base.errors import ConfigError, did_you_mean
from penstock.base.files import read_toml
from penstock.config.run import Run
from penstock.config.schema import Section, fields_of, find, knob
from penstock.config.tree import build, settle
from penstock.train.run_folder import check_name

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
