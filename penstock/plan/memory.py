"""Memory of every rank over one step, by component, from the objects that the run itself is made of.

    state           weights, float32 sums of gradients, masters, moments: what the optimizer says it holds
    activations     what the passes hold (penstock/plan/activations.py), in the order of the rank's own schedule
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

import torch

from penstock.config.fit import grid_of, micro_batches
from penstock.config.run import Run
from penstock.layout.actions import Action, Kind
from penstock.models.decoder import Decoder
from penstock.models.rank_model import embedding_places
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.meeting import start_fake_process_group, stop_process_group
from penstock.plan.activations import Peak, StageActivations, activations_of, micro_batch_of
from penstock.plan.ledger import Ledger
from penstock.plan.stand_in import StandIn, Target, stand_in

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
class Memory:
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
        terms: of `activations` and `logits`, by the module that allocated them; `held` are other micro-batches.
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


def memory_of(run: Run, *, world: int, rank: int, target: Target, overheads: Overheads = NO_OVERHEADS) -> Memory:
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
    grid = grid_of(run, world)
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid, embedding_places(run), run.parallel.shard_size, target.ranks_per_node)
        return memory_of_stand_in(stand_in(run, axes, target), overheads)
    finally:
        stop_process_group()


def worst_rank(memories: Iterable[Memory]) -> Memory:
    """The one that needs most; the first of several."""
    return max(memories, key=lambda memory: memory.total)


def ranks_that_differ(run: Run, world: int) -> tuple[int, ...]:
    """One rank for each place on the pipeline: with equal tokens, all others of a stage need the same, or less.

    The first of a stage is taken: where rows do not divide, the first ranks have the larger part.
    """
    stage = world // run.parallel.pipeline
    return tuple(range(0, world, stage))


def memory_of_stand_in(rank: StandIn, overheads: Overheads = NO_OVERHEADS) -> Memory:
    """The same of a rank that was built."""
    state, buffers = rank.state, rank.shared_bytes + _batch_bytes(rank)
    fullest = max(_moments(rank, activations_of(rank)), key=lambda moment: moment.bytes)
    gathered, update = _gathered(rank), _update_bytes(rank)
    is_captured = rank.run.graphs.capture == "passes"
    is_update = update > fullest.bytes + gathered and not is_captured
    logits = fullest.terms[LOSS]
    memory = Memory(
        rank=rank.axes.rank,
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


def _moments(rank: StandIn, stages: tuple[StageActivations, ...]) -> list[_Moment]:
    """Every pass of the step at its fullest, with what other micro-batches hold meanwhile."""
    by_number = {stage.number: stage for stage in stages}
    if rank.schedule is None:
        (stage,) = stages
        return [
            _Moment(name="forward", bytes=stage.forward.bytes, terms=stage.forward.terms),
            _Moment(name="backward", bytes=stage.backward.bytes, terms=stage.backward.terms),
        ]
    moments, held = [], 0
    peaks = {number: _peaks(stage) for number, stage in by_number.items()}
    for unit in rank.schedule.units(rank.axes.pipeline.rank):
        now, terms = held, Counter[str]()
        for action in unit:
            peak = peaks[action.stage][action.kind]
            now += peak.bytes
            terms.update(peak.terms)
            held += _change(action, by_number[action.stage])
        terms["held"] = now - sum(terms.values())
        name = " and ".join(f"{action.kind} of stage {action.stage}" for action in unit)
        moments.append(_Moment(name=name, bytes=now, terms=terms))
    return moments


def _peaks(stage: StageActivations) -> dict[Kind, Peak]:
    """Of each kind of action the most, over what was held before it; a backward pass finds its own share there."""
    backward = Peak(bytes=stage.backward.bytes - stage.kept_bytes, terms=stage.backward.terms)
    weight = Peak(bytes=stage.weight, terms=Counter({"put off": stage.weight}))
    return {Kind.FORWARD: stage.forward, Kind.BACKWARD: backward, Kind.INPUT: backward, Kind.WEIGHT: weight}


def _change(action: Action, stage: StageActivations) -> int:
    """What an action adds to what is held."""
    match action.kind:
        case Kind.FORWARD:
            return stage.kept_bytes
        case Kind.BACKWARD:
            return -stage.kept_bytes
        case Kind.INPUT:
            return stage.left - stage.kept_bytes
        case Kind.WEIGHT:
            return -stage.left


def _batch_bytes(rank: StandIn) -> int:
    """Rows of the whole step, which are all on the device."""
    batch = micro_batch_of(rank)
    reading = batch.reading
    tensors = [reading.tokens_BS, reading.positions_BS, *reading.ahead, *batch.labels]
    if reading.allowed_BSS is not None:
        tensors.append(reading.allowed_BSS)
    return micro_batches(rank.run, rank.axes.grid) * sum(tensor.nbytes for tensor in tensors)


def _update_bytes(rank: StandIn) -> int:
    """The most that sums over ranks, norm and update hold, run without memory."""
    if rank.optimizer is None:
        return 0
    if rank.run.offload.optimizer:
        rank.optimizer.step(0.0)  # Makes the buffers that the optimizer counts itself.
    ledger = Ledger()
    with ledger:
        rank.optimizer.reduce_gradients()
        rank.optimizer.gradient_norm()
        rank.optimizer.step(0.0)
        return ledger.mark("update").peak


def _gathered(rank: StandIn) -> int:
    """Whole weights with FSDP2, and gradients that are being reduced.

    What belongs to no block stays from the start of forward to the end of backward. Of blocks there are: the weights of
    the one that computes, the flat buffer that they came in, and those of the blocks gathered ahead; behind it the
    float32 gradients of the block before, in one buffer.
    """
    if not rank.divided:
        return 0
    whole = 0
    most = 0
    for decoder in rank.decoders.values():
        units = [*decoder.blocks.values(), *decoder.mtp.values()]
        sizes = [_divided_bytes(rank, decoder, unit) for unit in units]
        whole += _divided_bytes(rank, decoder, decoder) - sum(sizes)
        most = max(most, *sizes)
    values = most // (2 if rank.run.training.precision == "bf16" else 4)
    return whole + most * (2 + rank.run.parallel.prefetch) + 4 * values


def _divided_bytes(rank: StandIn, decoder: Decoder, part: torch.nn.Module) -> int:
    own = {id(parameter) for parameter in part.parameters()}
    return sum(
        parameter.nbytes
        for name, parameter in decoder.named_parameters()
        if id(parameter) in own and name in rank.divided
    )
