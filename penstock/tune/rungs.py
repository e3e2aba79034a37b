"""The rungs of a ladder, as data: what each changes of the one below it, and what it needs to mean anything.

    [[rung]]
    name = "chunked-loss"
    what = "logits of some thousand tokens at once"
    change = ["kernels.loss_chunk=0"]

A ladder is a list of such tables in a TOML file, or `LADDER`, which is for models with experts and leaves out what does
not apply to others. The first rung is the ground: it sets what the later ones improve. A later rung either makes the
same work faster (`change`), or gives the device more work at once (`micro_batch_times`): never both, because nobody
could tell the two gains apart.

    [rung.fallbacks.eager]
    change = ["graphs.capture=none"]

A rung may have fallbacks, tried in their order where it is refused by configuration or finds no memory: they give up
what stands in its way. Its gain is then that of both together.

A new optimization is a row here. A knob that this version does not have yet may stand in it: the rung is left out, and
says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from penstock.base.errors import ConfigError
from penstock.base.files import read_toml
from penstock.base.meant import did_you_mean
from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.merge import settle
from penstock.config.run import Run
from penstock.config.schema import fields_of, find
from penstock.config.section import Section, knob
from penstock.config.validation import build
from penstock.train.run_folder import check_name

MICRO_BATCH = "training.micro_batch"


class Change(Section):
    """Overrides, and where they mean anything."""

    change: tuple[str, ...] = knob((), doc="Overrides `a.b=c`, laid over all that there are.")
    needs: tuple[str, ...] = knob((), doc="What the rungs below must have, by the names of `NEEDS`.")

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of what it changes."""
        return tuple(override.partition("=")[0].strip() for override in self.change)


class LadderStep(Change):
    """One step of a ladder."""

    name: str = knob(doc="Short name, also of the folder of its run.")
    what: str = knob("", doc="What it is, in a few words.")
    micro_batch_times: int = knob(1, doc="Factor on the micro-batch of the rung below.", low=1)
    fallbacks: dict[str, Change] = knob(
        {}, doc="By name, what is laid over it in turn, as long as it is refused by configuration or finds no memory."
    )

    @property
    def is_size(self) -> bool:
        """It only makes the micro-batch larger."""
        return self.micro_batch_times > 1 or MICRO_BATCH in self.fields

    def trial_name(self, fallback: str = "") -> str:
        """Name of its run; with a fallback, of the run that this has."""
        return f"{self.name}-{fallback}" if fallback else self.name


@dataclass(frozen=True)
class Need:
    """Something that a rung may ask of a run.

    Attributes:
        is_met: by a run, on a machine with or without a GPU.
        otherwise: why the rung is left out.
    """

    is_met: Callable[[Run, bool], bool]
    otherwise: str


NEEDS = MappingProxyType(
    {
        "experts": Need(lambda run, has_gpu: run.model.moe is not None, "the model has no experts"),
        "shared-expert": Need(
            lambda run, has_gpu: run.model.moe is not None and run.model.moe.shared_expert_intermediate_size > 0,
            "the model has no shared expert",
        ),
        "sharing": Need(
            lambda run, has_gpu: run.parallel.expert * run.parallel.expert_tensor > 1,
            "each rank holds all experts (parallel.expert is 1)",
        ),
        "gpu": Need(lambda run, has_gpu: has_gpu, "there is no GPU"),
        "static-rows": Need(
            lambda run, has_gpu: _has_static_rows(run), "no buffer has room for rows that may not come"
        ),
        "counted-rows": Need(
            lambda run, has_gpu: not _has_static_rows(run), "buffers have room for rows that may not come"
        ),
    }
)


def _has_static_rows(run: Run) -> bool:
    """Row counts stay on the device, so that buffers are as large as a bound or the worst case says."""
    return run.model.moe is not None and run.dispatch.sync_free >= COUNTS_STAY


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
            "float8.dispatch=none",
            "graphs.capture=none",
            "kernels.route=reference",
            "kernels.permute=reference",
            "kernels.experts=reference",
            "kernels.swiglu=reference",
            "kernels.norm=reference",
            "kernels.rope=reference",
            "kernels.attention=default",
            # The loss has no eager form; with a chunk larger than any micro-batch its logits are whole.
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
        # auto is symmetric where that runs, and elsewhere all-gather: all-to-all makes the host wait.
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
        name="overlap-halves",
        what="and half of the micro-batch's rows while the other half travels",
        change=("dispatch.overlap=halves",),
        needs=("experts", "sharing"),
        # Two passes are under way, and captured parts have memory for one.
        fallbacks={"eager": Change(change=("graphs.capture=none",))},
    ),
    LadderStep(
        name="larger",
        what="twice the rows in a micro-batch",
        micro_batch_times=2,
        # Room for the worst case and the memory that graphs keep are twice as large with it.
        fallbacks={
            "bounded": Change(change=("dispatch.sync_free=2",), needs=("static-rows",)),
            "bounded-eager": Change(change=("dispatch.sync_free=2", "graphs.capture=none"), needs=("static-rows",)),
            "counted-eager": Change(change=("dispatch.sync_free=1", "graphs.capture=none"), needs=("static-rows",)),
            "eager": Change(change=("graphs.capture=none",), needs=("counted-rows",)),
        },
    ),
    LadderStep(
        name="float8-dense",
        what="products of attention, dense networks and shared experts in 8 bits",
        change=("float8.dense=auto",),
        needs=("gpu",),
    ),
    LadderStep(
        name="float8-experts",
        what="those of the experts",
        change=("float8.experts=auto",),
        needs=("experts", "gpu"),
    ),
    LadderStep(
        name="float8-dispatch",
        what="and the rows that travel to them",
        change=("float8.dispatch=auto",),
        needs=("experts", "sharing", "gpu"),
    ),
)
"""From the plainest form of everything to the fastest that there is."""


def load_rungs(path: Path) -> tuple[LadderStep, ...]:
    """The ladder of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is no list of rungs.
    """
    try:
        tables = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check --rungs") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    rungs = tables.pop("rung", None)
    if tables or not isinstance(rungs, list) or not all(isinstance(rung, dict) for rung in rungs):
        raise ConfigError(f"{path} is no ladder", got=", ".join(tables) or None, allowed="[[rung]] tables only")
    found = []
    for number, rung in enumerate(rungs, start=1):
        try:
            found.append(build(LadderStep, settle(fields_of(LadderStep), rung)))
        except ConfigError as error:
            raise ConfigError(
                f"{path}, rung {number}: {error.what}", got=error.got, allowed=error.allowed, fix=error.fix
            ) from error
    return checked(found)


def checked(rungs: Sequence[LadderStep]) -> tuple[LadderStep, ...]:
    """The same rungs, if they make a ladder.

    Raises:
        PenstockError: a name is no folder's or comes twice, a need is unknown, or two gains would be one.
    """
    if not rungs:
        raise ConfigError("a ladder has no rung", fix="write at least one [[rung]] table")
    taken: set[str] = set()
    for place, rung in enumerate(rungs):
        for name, change in {"": rung, **rung.fallbacks}.items():
            _check_form(rung.trial_name(name), change, taken)
        if name := next((name for name, one in rung.fallbacks.items() if MICRO_BATCH in one.fields), ""):
            raise ConfigError(
                f"fallback {name} of rung {rung.name} sets {MICRO_BATCH}, and only rungs do", fix="make a rung of it"
            )
        if place and rung.is_size and set(rung.fields) - {MICRO_BATCH}:
            raise ConfigError(
                f"rung {rung.name} makes the micro-batch larger and changes something else, so its gain has two causes",
                fix="make two rungs of it",
            )
    return tuple(rungs)


def _check_form(name: str, change: Change, taken: set[str]) -> None:
    """Refuse a form of a rung whose run cannot have its name, or that needs what nobody knows.

    Args:
        name: of its run.
        change: the rung, or a fallback of it.
        taken: names of other runs; gets this one.
    """
    check_name(name)
    if name in taken:
        raise ConfigError(f"two rungs are called {name}", fix="give each its own name; RUNG-FALLBACK is one, too")
    taken.add(name)
    if unknown := set(change.needs) - set(NEEDS):
        raise ConfigError(
            f"rung {name} needs what nobody knows", got=", ".join(sorted(unknown)), allowed=", ".join(NEEDS)
        )


def chosen(rungs: Sequence[LadderStep], names: Sequence[str]) -> frozenset[str]:
    """Names of the rungs that are to be measured.

    Args:
        rungs: the ladder.
        names: what the user wants; empty for all.

    Raises:
        PenstockError: there is no such rung, or a rung that is left out would hide the cause of a gain.
    """
    known = [rung.name for rung in rungs]
    if unknown := [name for name in names if name not in known]:
        told = did_you_mean(unknown[0], known)
        got, allowed = ", ".join(unknown), ", ".join(known)
        raise ConfigError("--only names no rung of the ladder", got=got, allowed=allowed, fix=told)
    wanted = frozenset(names or known)
    first = min(known.index(name) for name in wanted)
    left_out: list[LadderStep] = []
    for rung in rungs[first + 1 :]:
        if rung.name not in wanted:
            left_out.append(rung)
            continue
        mixed = [one.name for one in left_out if one.is_size != rung.is_size]
        if mixed:
            raise ConfigError(
                f"the gain of rung {rung.name} would have two causes, micro-batch and optimization",
                got=f"--only leaves out {', '.join(mixed)}",
                fix=f"name {mixed[-1]} as well",
            )
        left_out = []
    return wanted


def why_skipped(rung: LadderStep, run: Run, has_gpu: bool) -> str:
    """Why a rung means nothing for a run; empty if it means something.

    Args:
        rung: the rung.
        run: of the rung below.
        has_gpu: the run is on a GPU.
    """
    for field in rung.fields:
        if not find(Run, field):
            return f"this version has no {field}"
    return why_unmet(rung, run, has_gpu)


def why_unmet(change: Change, run: Run, has_gpu: bool) -> str:
    """What a change needs and a run does not have; empty if there is nothing.

    Args:
        change: a rung or a fallback.
        run: of the rung below.
        has_gpu: the run is on a GPU.
    """
    return next((NEEDS[need].otherwise for need in change.needs if not NEEDS[need].is_met(run, has_gpu)), "")
