"""The steps of a ladder, as data: the change of each over the step before it, and its requirements.

    [[step]]
    name = "chunked-loss"
    what = "logits of some thousand tokens at once"
    change = ["kernels.loss_chunk=0"]

A ladder is a list of such tables in a TOML file, or `LADDER`, which is for MoE models and skips steps that do not apply
to others. The first step is the base of comparison: it sets every option that later steps improve. A later step either
makes the same work faster (`change`) or gives the device more work at once (`micro_batch_times`), never both, because
the two gains could not be told apart.

    [step.fallbacks.eager]
    change = ["graphs.capture=none"]

A step may have fallbacks, tried in order if the configuration is refused or runs out of memory. The gain is then that
of step and fallback together.

To measure a new optimization, add an entry here. An entry may name an option that this version does not have: the step
is then skipped with that reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from penstock.base.errors import ConfigError, did_you_mean
from penstock.base.files import read_toml
from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.run import Run
from penstock.config.schema import Section, fields_of, find, knob
from penstock.config.tree import build, settle
from penstock.train.run_folder import check_name

MICRO_BATCH = "training.micro_batch"


class LadderChange(Section):
    """Overrides and their requirements."""

    change: tuple[str, ...] = knob((), doc="Overrides `a.b=c`, applied last.")
    needs: tuple[str, ...] = knob((), doc="Requirements of the run so far, by the names of `REQUIREMENTS`.")

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of the changed options."""
        return tuple(override.partition("=")[0].strip() for override in self.change)


class LadderStep(LadderChange):
    """One step of a ladder."""

    name: str = knob(doc="Short name, also of the folder of its run.")
    what: str = knob("", doc="What it is, in a few words.")
    micro_batch_times: int = knob(1, doc="Factor on the micro-batch of the step before.", low=1)
    fallbacks: dict[str, LadderChange] = knob(
        {}, doc="By name, further changes to try in order while the run is refused or runs out of memory."
    )

    @property
    def is_size(self) -> bool:
        """The step only makes the micro-batch larger."""
        return self.micro_batch_times > 1 or MICRO_BATCH in self.fields

    def trial_name(self, fallback: str = "") -> str:
        """Name of the run of this step, or of the step with a fallback."""
        return f"{self.name}-{fallback}" if fallback else self.name


@dataclass(frozen=True)
class Requirement:
    """A requirement of a step."""

    is_met: Callable[[Run, bool], bool]  # by a run, on a machine with or without a GPU
    otherwise: str  # reason for skipping the step


def _has_static_rows(run: Run) -> bool:
    """Row counts stay on the device, so buffers have the size of a bound or of the worst case."""
    return run.model.moe is not None and run.dispatch.sync_free >= COUNTS_STAY


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
        "static-rows": Requirement(
            lambda run, has_gpu: _has_static_rows(run), "no buffer has room for rows that may not come"
        ),
        "counted-rows": Requirement(
            lambda run, has_gpu: not _has_static_rows(run), "buffers have room for rows that may not come"
        ),
    }
)


LADDER = (
    LadderStep(
        name="baseline",
        what="eager operators, a loop over experts, all-to-all",
        change=(
            "dispatch.method=all-to-all",
            "dispatch.sync_free=0",
            "dispatch.overlap=none",
            "dispatch.engines=false",
            "float8.dense=none",
            "float8.experts=none",
            "float8.head=none",
            "float8.dispatch=none",
            "graphs.capture=none",
            "kernels.route=reference",
            "kernels.permute=reference",
            "kernels.experts=reference",
            "kernels.swiglu=reference",
            "kernels.norm=reference",
            "kernels.rope=reference",
            "kernels.attention=default",
            # The loss has no eager form; a chunk larger than any micro-batch keeps its logits whole.
            "kernels.loss_chunk=1048576",
        ),
    ),
    LadderStep(
        name="grouped",
        what="grouped products of the experts, fused router and permutation",
        change=("kernels.route=auto", "kernels.permute=auto", "kernels.experts=auto"),
        needs=("experts",),
    ),
    LadderStep(
        name="fused",
        what="fused SwiGLU, norms and rotary embedding; the fastest attention",
        change=("kernels.swiglu=auto", "kernels.norm=auto", "kernels.rope=auto", "kernels.attention=auto"),
    ),
    LadderStep(name="chunked-loss", what="logits of some thousand tokens at once", change=("kernels.loss_chunk=0",)),
    LadderStep(
        name="graph-parts",
        what="attention, router and the order of rows captured once and replayed",
        change=("graphs.capture=partial",),
        needs=("gpu",),
    ),
    LadderStep(
        name="symmetric",
        what="tokens written straight into the node's other GPUs",
        change=("dispatch.method=symmetric",),
        needs=("experts", "sharing", "gpu"),
    ),
    LadderStep(
        name="sync-free-1",
        what="no wait for the device in router and permutation",
        change=("dispatch.sync_free=1",),
        needs=("experts",),
    ),
    LadderStep(
        name="sync-free-2",
        what="nor in dispatch and experts; bounded buffers",
        # auto is symmetric where it can run, otherwise all-gather; all-to-all makes the host wait.
        change=("dispatch.sync_free=2", "dispatch.method=auto"),
        needs=("experts",),
    ),
    LadderStep(
        name="sync-free-3",
        what="nowhere between router and combine; buffers for the worst case",
        change=("dispatch.sync_free=3",),
        needs=("experts",),
    ),
    LadderStep(
        name="graphs",
        what="forward and backward pass captured once and replayed; bounded buffers, whose shapes are static too",
        change=("graphs.capture=full", "dispatch.sync_free=2"),
        needs=("gpu",),
    ),
    LadderStep(
        name="overlap-shared",
        what="shared experts computed while tokens travel",
        change=("dispatch.overlap=shared",),
        needs=("experts", "shared-expert", "sharing"),
    ),
    LadderStep(
        name="overlap-engines",
        what="and rows sent by copy engines",
        change=("dispatch.overlap=shared", "dispatch.engines=true"),
        needs=("experts", "shared-expert", "sharing", "gpu"),
    ),
    LadderStep(
        name="larger",
        what="twice the rows in a micro-batch",
        micro_batch_times=2,
        # It doubles the buffers for the worst case and the memory that graphs keep.
        fallbacks={
            "bounded": LadderChange(change=("dispatch.sync_free=2",), needs=("static-rows",)),
            "bounded-eager": LadderChange(
                change=("dispatch.sync_free=2", "graphs.capture=none"), needs=("static-rows",)
            ),
            "counted-eager": LadderChange(
                change=("dispatch.sync_free=1", "graphs.capture=none"), needs=("static-rows",)
            ),
            "eager": LadderChange(change=("graphs.capture=none",), needs=("counted-rows",)),
        },
    ),
    LadderStep(
        name="float8-dense",
        what="products of attention, dense networks and shared experts in 8 bits",
        change=("float8.dense=auto",),
        needs=("gpu",),
    ),
    LadderStep(
        name="float8-experts", what="those of the experts", change=("float8.experts=auto",), needs=("experts", "gpu")
    ),
    LadderStep(
        name="float8-dispatch",
        what="and the rows that travel to them",
        change=("float8.dispatch=auto",),
        needs=("experts", "sharing", "gpu"),
    ),
)
"""From eager operators to the fastest configuration."""


def load_ladder_steps(path: Path) -> tuple[LadderStep, ...]:
    """The ladder in a TOML file. Raises a ConfigError if the file cannot be read or is no list of steps."""
    try:
        tables = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check --ladder") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    steps = tables.pop("step", None)
    if tables or not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ConfigError(f"{path} is no ladder", got=", ".join(tables) or None, allowed="[[step]] tables only")
    found = []
    for number, step in enumerate(steps, start=1):
        try:
            found.append(build(LadderStep, settle(fields_of(LadderStep), step)))
        except ConfigError as error:
            raise ConfigError(
                f"{path}, step {number}: {error.what}", got=error.got, allowed=error.allowed, fix=error.fix
            ) from error
    return checked(found)


def checked(steps: Sequence[LadderStep]) -> tuple[LadderStep, ...]:
    """The same steps, if they make a ladder.

    Raises a PenstockError for an unusable or doubled name, an unknown requirement, or a step that mixes two gains.
    """
    if not steps:
        raise ConfigError("a ladder has no step", fix="write at least one [[step]] table")
    taken: set[str] = set()
    for place, step in enumerate(steps):
        for name, change in {"": step, **step.fallbacks}.items():
            _check_change(step.trial_name(name), change, taken)
        if name := next((name for name, one in step.fallbacks.items() if MICRO_BATCH in one.fields), ""):
            raise ConfigError(
                f"fallback {name} of step {step.name} sets {MICRO_BATCH}, and only steps do", fix="make a step of it"
            )
        if place and step.is_size and set(step.fields) - {MICRO_BATCH}:
            raise ConfigError(
                f"step {step.name} makes the micro-batch larger and changes something else, so its gain has two causes",
                fix="make two steps of it",
            )
    return tuple(steps)


def _check_change(name: str, change: LadderChange, taken: set[str]) -> None:
    """Check the name of a run, which is added to those that are taken, and its requirements."""
    check_name(name)
    if name in taken:
        raise ConfigError(f"two steps are called {name}", fix="give each its own name; STEP-FALLBACK is one, too")
    taken.add(name)
    if unknown := set(change.needs) - set(REQUIREMENTS):
        raise ConfigError(
            f"step {name} has unknown needs", got=", ".join(sorted(unknown)), allowed=", ".join(REQUIREMENTS)
        )


def chosen(steps: Sequence[LadderStep], names: Sequence[str]) -> frozenset[str]:
    """Names of the steps to measure: the user's `--only`, or all if that is empty.

    Raises a PenstockError if a name is unknown, or if a step that is left out would give a gain two causes.
    """
    known = [step.name for step in steps]
    if unknown := [name for name in names if name not in known]:
        told = did_you_mean(unknown[0], known)
        got, allowed = ", ".join(unknown), ", ".join(known)
        raise ConfigError("--only names no step of the ladder", got=got, allowed=allowed, fix=told)
    wanted = frozenset(names or known)
    first = min(known.index(name) for name in wanted)
    left_out: list[LadderStep] = []  # since the last measured step: its gain is theirs too
    for step in steps[first + 1 :]:
        if step.name not in wanted:
            left_out.append(step)
            continue
        mixed = [one.name for one in left_out if one.is_size != step.is_size]
        if mixed:
            raise ConfigError(
                f"the gain of step {step.name} would have two causes, micro-batch and optimization",
                got=f"--only leaves out {', '.join(mixed)}",
                fix=f"name {mixed[-1]} as well",
            )
        left_out = []
    return wanted


def why_skipped(step: LadderStep, run: Run, has_gpu: bool) -> str:
    """Reason for skipping a step; empty if it applies."""
    for field in step.fields:
        if not find(Run, field):
            return f"this version has no {field}"
    return why_unmet(step, run, has_gpu)


def why_unmet(change: LadderChange, run: Run, has_gpu: bool) -> str:
    """The first unmet requirement of a step or a fallback; empty if there is none."""
    unmet = (REQUIREMENTS[need].otherwise for need in change.needs if not REQUIREMENTS[need].is_met(run, has_gpu))
    return next(unmet, "")
