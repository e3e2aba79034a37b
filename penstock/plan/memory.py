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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.config.run import Run
from penstock.plan.liveness import PassPeak, fullest_pass, shape_of
from penstock.plan.meta_rank import Target
from penstock.plan.meta_run import MetaRun, meta_run_of
from penstock.plan.param_state import PartState

LOSS = "loss"  # label of logits and of the loss's gradients


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Bytes that no tensor of the run takes."""

    libraries: int = 0  # work space of matrix products, inside the allocator
    context: int = 0  # driver, modules and communicators, outside of the allocator
    unused: float = 0.0  # share of the allocated peak that the allocator reserves besides
    process: int = 0  # of the host, where the run keeps tensors there


NO_OVERHEADS = Overheads()

STATE, FIXED = ("parameters", "gradients", "master", "moments"), ("libraries", "reserve")
"""Components between steps, and components that do not depend on the run."""

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of one moment of a value, without scales


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank at the fullest moment of a step, in bytes.

    `terms` are `activations` and `logits` of all micro-batches that are held, by the label of the allocating module.
    """

    rank: int
    parameters: int
    gradients: int  # float32 sums
    master: int  # float32 weights, or the bits that are missing to them, where the weights themselves are not float32
    moments: int  # on the device; with the optimizer on the host, the buffers that they pass through
    gathered: int  # whole weights, and gradients that are being reduced, with FSDP2
    activations: int  # memory of forward and backward, without the loss, whose memory is `logits`
    logits: int
    buffers: int  # memory that GPUs write into, and the rows of the step
    communication: int  # buckets; 0 if a pass is the fullest moment
    graph_pool: int  # memory of the update beside the pool of a captured pass, which it cannot use; 0 without graphs
    libraries: int  # work space of matrix products
    reserve: int  # context, and memory that the allocator reserves and does not hand out
    host: int  # the optimizer's state and sums of gradients in host memory, and that of the process. Not in `total`.
    moment: str  # of the step: `forward`, `backward`, ... and the stage, or `update`.
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


def assemble(
    rank: int,
    state: PartState,
    passes: PassPeak,
    *,
    gathered: int,
    update: int,
    buffers: int,
    is_captured: bool,
    overheads: Overheads,
) -> RankMemory:
    """Memory of a rank at the fullest moment of its step: a pass, or the update.

    `state` is that between steps; `is_captured`: the passes are a graph with a memory pool of its own.
    """
    # The pool of a captured pass stays reserved, so there the update adds to the passes.
    is_update = update > passes.bytes + gathered and not is_captured
    logits = passes.terms.get(LOSS, 0)
    memory = RankMemory(
        rank=rank,
        parameters=state.weights,
        gradients=state.gradients,
        master=state.master,
        moments=state.moments,
        gathered=0 if is_update else gathered,
        activations=0 if is_update else passes.bytes - logits,
        buffers=buffers,
        logits=0 if is_update else logits,
        communication=update if is_update else 0,
        graph_pool=update if is_captured else 0,
        libraries=overheads.libraries,
        reserve=0,
        host=state.host + overheads.process if state.host else 0,
        moment="update" if is_update else passes.name,
        terms={} if is_update else dict(passes.terms),
    )
    return replace(memory, reserve=overheads.context + round(overheads.unused * memory.allocated))


def memory_of(run: Run, *, world: int, rank: int, target: Target, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """Memory of one rank of a run; see `meta_run_of` for arguments and errors."""
    meta_run = meta_run_of(run, world=world, rank=rank, target=target)
    return memory_of_meta_run(meta_run, meta_run.rank.axes.pipeline.rank, overheads)


def fullest_rank(memories: Iterable[RankMemory]) -> RankMemory:
    """The rank that needs most; the first of several."""
    return max(memories, key=lambda memory: memory.total)


def memory_of_meta_run(meta_run: MetaRun, position: int, overheads: Overheads = NO_OVERHEADS) -> RankMemory:
    """Memory of the first rank at a place of the pipeline."""
    rank, state = meta_run.rank, meta_run.rank.state
    grid, shape = rank.axes.grid, shape_of(rank.run, rank.axes.grid)
    numbers = (0,) if shape is None else shape.stages_of(position)
    return assemble(
        position * grid.world // grid.pipeline,
        PartState(
            weights=state.weights,
            gradients=state.gradients,
            # With the optimizer on the host, `state.optimizer` are the device's buffers.
            master=state.optimizer - state.moments,
            moments=state.moments,
            host=state.host,
        ),
        fullest_pass(dict(zip(numbers, meta_run.stages, strict=True)), shape, position),
        gathered=meta_run.gathered_bytes,
        update=meta_run.update.peak_bytes,
        buffers=rank.symmetric_bytes + meta_run.batch_bytes,
        is_captured=rank.run.graphs.capture == "full",
        overheads=overheads,
    )
