"""Memory of every rank over one step, by component, from the objects that the run itself is made of.

    state           weights, float32 sums of gradients, masters, moments: what the optimizer says it holds
    activations     what the passes hold (penstock/plan/meta_run.py), in the order of the rank's own schedule
    gathered        whole weights of the blocks around the one that computes, with FSDP2
    buffers         memory that GPUs of a node write into; the rows of the step
    communication   buckets of gradients and new weights: the optimizer's own methods, run without memory

Passes and the update follow each other, so the most of a step is the larger of the two, but for a captured pass, whose
pool nobody else may use. What libraries allocate by themselves, the driver's context and what the allocator cannot use
are not the model's: they come from the hardware (`Overheads`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.config.run import Run
from penstock.layout.actions import Kind
from penstock.plan.liveness import PUT_OFF, StageActivations
from penstock.plan.meta_rank import Target
from penstock.plan.meta_run import MetaRun, meta_run_of

LOSS = "loss"
"""Name under which the ledger has logits and the loss's gradients."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Bytes of a device that no tensor of ours takes.

    Attributes:
        libraries: work space of matrix products, inside the allocator.
        context: driver, modules and communicators, outside of the allocator.
        unused: part of what is allocated at the peak that the allocator holds besides.
    """

    libraries: int = 0
    context: int = 0
    unused: float = 0.0


NO_OVERHEADS = Overheads()


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs at the fullest moment of a step, in bytes.

    Attributes:
        rank: which.
        parameters: weights between steps.
        gradients: float32 sums.
        master: float32 weights, where they are not the weights themselves.
        moments: both; on the device. With the optimizer on the host, what passes through.
        gathered: whole weights, and gradients on their way, with FSDP2.
        activations: all that forward and backward hold, but for the loss.
        buffers: memory that GPUs write into, and the rows of the step.
        logits: what the loss holds at that moment.
        communication: buckets; 0 if the passes are the fullest moment.
        graph_pool: what the update takes besides the pool of a captured pass, which it cannot use; 0 without graphs.
        libraries: work space of matrix products.
        reserve: context, and what the allocator holds without handing it out.
        host: of the optimizer, on the host. Not in `total`.
        moment: of the step: `forward`, `backward`, ... and the stage, or `update`.
        terms: of `activations` and `logits`, by the module that allocated them, of all micro-batches that are held.
    """

    rank: int
    parameters: int
    gradients: int
    master: int
    moments: int
    gathered: int
    activations: int
    buffers: int
    logits: int
    communication: int
    graph_pool: int
    libraries: int
    reserve: int
    host: int
    moment: str
    terms: Mapping[str, int] = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        """The most that torch's allocator has handed out at once."""
        state = self.parameters + self.gradients + self.master + self.moments
        passing = self.gathered + self.activations + self.buffers + self.logits + self.communication + self.graph_pool
        return state + passing + self.libraries

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.allocated + self.reserve


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """A moment of the passes that may be the fullest."""

    name: str
    bytes: int
    terms: Counter[str]


def memory_of(run: Run, *, world: int, rank: int, target: Target, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """What one rank of a run needs. Starts and ends a process group, so there must be none.

    Args:
        run: its configuration.
        world: ranks of the run.
        rank: which of them.
        target: where it will run.
        overheads: of the hardware.

    Raises:
        ConfigError: the layout does not fit the ranks or the model.
        KernelError: the run asks for kernels that the target cannot run.
    """
    return memory_of_meta_run(meta_run_of(run, world=world, rank=rank, target=target), overheads)


def fullest_rank(memories: Iterable[RankMemory]) -> RankMemory:
    """The one that needs most; the first of several."""
    return max(memories, key=lambda memory: memory.total)


def ranks_that_differ(run: Run, world: int) -> tuple[int, ...]:
    """One rank for each place on the pipeline: with equal tokens, all others of a stage need the same, or less.

    The first of a stage is taken: where rows do not divide, the first ranks have the larger part.
    """
    stage = world // run.parallel.pipeline
    return tuple(range(0, world, stage))


def memory_of_meta_run(rehearsal: MetaRun, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """The same of a rank that was rehearsed."""
    rank = rehearsal.rank
    state, buffers = rank.state, rank.shared_bytes + rehearsal.batch_bytes
    fullest = max(_moments(rehearsal), key=lambda moment: moment.bytes)
    gathered, update = rehearsal.gathered_bytes, rehearsal.update.peak_bytes
    is_captured = rank.run.graphs.capture == "full"
    is_update = update > fullest.bytes + gathered and not is_captured
    logits = fullest.terms[LOSS]
    memory = RankMemory(
        rank=rehearsal.first_rank,
        parameters=state.weights,
        gradients=state.gradients,
        master=0 if state.host else state.optimizer - rank.moment_bytes,
        moments=state.optimizer if state.host else rank.moment_bytes,
        gathered=0 if is_update else gathered,
        activations=0 if is_update else fullest.bytes - logits,
        buffers=buffers,
        logits=0 if is_update else logits,
        communication=update if is_update else 0,
        graph_pool=update if is_captured else 0,
        libraries=overheads.libraries,
        reserve=0,
        host=state.host,
        moment="update" if is_update else fullest.name,
        terms={} if is_update else dict(fullest.terms),
    )
    return replace(memory, reserve=overheads.context + round(overheads.unused * memory.allocated))


def _moments(rehearsal: MetaRun) -> list[_Moment]:
    """Every pass of the step at its fullest, with what other micro-batches hold meanwhile."""
    schedule, stages = rehearsal.rank.schedule, rehearsal.stages
    by_number = {stage.number: stage for stage in stages}
    if schedule is None:
        (stage,) = stages
        return [
            _Moment(name="forward", bytes=stage.forward.bytes, terms=stage.forward.terms),
            _Moment(name="backward", bytes=stage.backward.bytes, terms=stage.backward.terms),
        ]
    moments: list[_Moment] = []
    held: Counter[str] = Counter()
    peaks = {number: _peaks(stage) for number, stage in by_number.items()}
    changes = {number: _changes(stage) for number, stage in by_number.items()}
    for unit in schedule.units(rehearsal.place):
        terms = Counter(held)
        for action in unit:
            terms.update(peaks[action.stage][action.kind])
            held.update(changes[action.stage][action.kind])
        name = " and ".join(f"{action.kind} of stage {action.stage}" for action in unit)
        moments.append(_Moment(name=name, bytes=sum(terms.values()), terms=+terms))
    return moments


def _peaks(stage: StageActivations) -> dict[Kind, Counter[str]]:
    """Of each kind of action the most, over what was held before it; a backward pass finds its own share there."""
    backward = Counter(stage.backward.terms)
    backward.subtract(stage.kept)
    weight = Counter({PUT_OFF: stage.weight})
    return {Kind.FORWARD: stage.forward.terms, Kind.BACKWARD: backward, Kind.INPUT: backward, Kind.WEIGHT: weight}


def _changes(stage: StageActivations) -> dict[Kind, dict[str, int]]:
    """What each kind of action adds to what is held."""
    freed = {name: -size for name, size in stage.kept.items()}
    return {
        Kind.FORWARD: dict(stage.kept),
        Kind.BACKWARD: freed,
        Kind.INPUT: {**freed, PUT_OFF: stage.left},
        Kind.WEIGHT: {PUT_OFF: -stage.left},
    }
