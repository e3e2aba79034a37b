"""Memory of every rank over one step, by component, from the objects that the run itself is made of.

    state           weights, float32 sums of gradients, masters, moments: reported by the optimizer
    activations     of the passes (penstock/plan/meta_run.py), in the order of the rank's own schedule
    gathered        whole weights of the blocks around the one that computes, with FSDP2
    buffers         memory that GPUs of a node write into; the rows of the step
    communication   buckets of gradients and new weights: the optimizer's own methods, run on the meta device

Passes and update follow each other, so the peak of a step is the larger of the two. Only the pool of a captured pass
stays reserved during the update. Libraries, the driver's context and the allocator's unused memory are figures of the
hardware (`Overheads`). `assemble` is the one place that adds the components up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.config.run import Run
from penstock.layout.actions import Kind
from penstock.plan.liveness import PUT_OFF, StageActivations
from penstock.plan.meta_rank import Target
from penstock.plan.meta_run import MetaRun, meta_run_of
from penstock.plan.param_state import PartState

LOSS = "loss"
"""Label of logits and of the loss's gradients."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Bytes that no tensor of the run takes.

    Attributes:
        libraries: work space of matrix products, inside the allocator.
        context: driver, modules and communicators, outside of the allocator.
        unused: share of the allocated peak that the allocator reserves besides.
        process: of the host, where the run keeps tensors there.
    """

    libraries: int = 0
    context: int = 0
    unused: float = 0.0
    process: int = 0


NO_OVERHEADS = Overheads()

STATE, FIXED = ("parameters", "gradients", "master", "moments"), ("libraries", "reserve")
"""Components between steps, and components that do not depend on the run."""

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Of one moment of a value, without scales."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank at the fullest moment of a step, in bytes.

    Attributes:
        gradients: float32 sums.
        master: float32 weights, or the bits that are missing to them, where the weights themselves are not float32.
        moments: on the device; with the optimizer on the host, the buffers that they pass through.
        gathered: whole weights, and gradients that are being reduced, with FSDP2.
        activations: memory of forward and backward, without the loss, whose memory is `logits`.
        buffers: memory that GPUs write into, and the rows of the step.
        communication: buckets; 0 if a pass is the fullest moment.
        graph_pool: memory of the update beside the pool of a captured pass, which it cannot use; 0 without graphs.
        libraries: work space of matrix products.
        reserve: context, and memory that the allocator reserves and does not hand out.
        host: the optimizer's state and sums of gradients in host memory, and that of the process. Not in `total`.
        moment: of the step: `forward`, `backward`, ... and the stage, or `update`.
        terms: `activations` and `logits` of all micro-batches that are held, by the label of the allocating module.
    """

    rank: int
    parameters: int
    gradients: int
    master: int
    moments: int
    gathered: int
    activations: int
    logits: int
    buffers: int
    communication: int
    graph_pool: int
    libraries: int
    reserve: int
    host: int
    moment: str
    terms: Mapping[str, int] = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        """Peak of torch's allocator."""
        return self.total - self.reserve

    @property
    def total(self) -> int:
        """Memory that the device must have."""
        return sum(components(self).values())


COMPONENTS = (*STATE, "gathered", "activations", "logits", "buffers", "communication", "graph_pool", *FIXED)
"""Parts of a rank's memory, which add up to its total, in the order of tables."""


def components(memory: RankMemory) -> dict[str, int]:
    return {name: vars(memory)[name] for name in COMPONENTS}


@dataclass(frozen=True, kw_only=True)
class PassPeak:
    """A moment of the passes that may be the fullest: its name, bytes, and bytes by label."""

    name: str
    bytes: int
    terms: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Everything that a rank's memory is assembled from, in bytes; fields as in `RankMemory`.

    Attributes:
        state: between steps, on the device.
        passes: the fullest moment of the passes.
        is_captured: the passes are captured as a graph with a memory pool of its own.
    """

    rank: int
    state: PartState
    passes: PassPeak
    gathered: int = 0
    update: int = 0
    buffers: int = 0
    host: int = 0
    is_captured: bool = False


def assemble(parts: MemoryParts, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """Memory of a rank at the fullest moment of its step: a pass, or the update."""
    state, passes, update = parts.state, parts.passes, parts.update
    # The pool of a captured pass stays reserved, so there the update adds to the passes.
    is_update = update > passes.bytes + parts.gathered and not parts.is_captured
    logits = passes.terms.get(LOSS, 0)
    memory = RankMemory(
        rank=parts.rank,
        parameters=state.weights,
        gradients=state.gradients,
        master=state.master,
        moments=state.moments,
        gathered=0 if is_update else parts.gathered,
        activations=0 if is_update else passes.bytes - logits,
        buffers=parts.buffers,
        logits=0 if is_update else logits,
        communication=update if is_update else 0,
        graph_pool=update if parts.is_captured else 0,
        libraries=overheads.libraries,
        reserve=0,
        host=parts.host + overheads.process if parts.host else 0,
        moment="update" if is_update else passes.name,
        terms={} if is_update else dict(passes.terms),
    )
    return replace(memory, reserve=overheads.context + round(overheads.unused * memory.allocated))


def memory_of(run: Run, *, world: int, rank: int, target: Target, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """Memory of one rank of a run; see `meta_run_of` for arguments and errors."""
    return memory_of_meta_run(meta_run_of(run, world=world, rank=rank, target=target), overheads)


def fullest_rank(memories: Iterable[RankMemory]) -> RankMemory:
    """The rank that needs most; the first of several."""
    return max(memories, key=lambda memory: memory.total)


def ranks_that_differ(run: Run, world: int) -> tuple[int, ...]:
    """The first rank of each place on the pipeline, which needs the most of its place.

    Where rows do not divide evenly, the first ranks have the larger part.
    """
    return tuple(range(0, world, world // run.parallel.pipeline))


def memory_of_meta_run(meta_run: MetaRun, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    rank, state = meta_run.rank, meta_run.rank.state
    parts = MemoryParts(
        rank=meta_run.first_rank,
        state=PartState(
            weights=state.weights,
            gradients=state.gradients,
            # With the optimizer on the host, `state.optimizer` are the device's buffers.
            master=state.optimizer - state.moments,
            moments=state.moments,
        ),
        passes=max(_peaks(meta_run), key=lambda peak: peak.bytes),
        gathered=meta_run.gathered_bytes,
        update=meta_run.update.peak_bytes,
        buffers=rank.symmetric_bytes + meta_run.batch_bytes,
        host=state.host,
        is_captured=rank.run.graphs.capture == "full",
    )
    return assemble(parts, overheads)


def _peaks(meta_run: MetaRun) -> list[PassPeak]:
    """The peak of every action of the step, with the memory of the other micro-batches."""
    schedule = meta_run.rank.schedule
    if schedule is None:
        (stage,) = meta_run.stages
        passes = (("forward", stage.forward), ("backward", stage.backward))
        return [PassPeak(name=name, bytes=peak.bytes, terms=peak.terms) for name, peak in passes]
    pass_peaks: list[PassPeak] = []
    held: Counter[str] = Counter()
    peaks = {stage.number: _peaks_by_kind(stage) for stage in meta_run.stages}
    changes = {stage.number: _changes_by_kind(stage) for stage in meta_run.stages}
    for unit in schedule.units(meta_run.place):
        terms = Counter(held)
        for action in unit:
            terms.update(peaks[action.stage][action.kind])
            # The actions of a pair run at once: each peaks over the memory before both.
            held.update(changes[action.stage][action.kind])
        name = " and ".join(f"{action.kind} of stage {action.stage}" for action in unit)
        pass_peaks.append(PassPeak(name=name, bytes=sum(terms.values()), terms=+terms))
    return pass_peaks


def _peaks_by_kind(stage: StageActivations) -> dict[Kind, Counter[str]]:
    """Peak of each kind of action over the memory before it, which holds the kept memory of a backward pass."""
    backward = Counter(stage.backward.terms)
    backward.subtract(stage.kept)
    weight = Counter({PUT_OFF: stage.weight})
    return {Kind.FORWARD: stage.forward.terms, Kind.BACKWARD: backward, Kind.INPUT: backward, Kind.WEIGHT: weight}


def _changes_by_kind(stage: StageActivations) -> dict[Kind, dict[str, int]]:
    """Bytes that each kind of action leaves behind or frees."""
    freed = {name: -size for name, size in stage.kept.items()}
    return {
        Kind.FORWARD: dict(stage.kept),
        Kind.BACKWARD: freed,
        Kind.INPUT: {**freed, PUT_OFF: stage.left},
        Kind.WEIGHT: {PUT_OFF: -stage.left},
    }
