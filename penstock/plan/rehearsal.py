"""One rank of a run, rehearsed without memory: what a step holds there, and what it does.

Memory (penstock/plan/memory.py) and time (penstock/plan/step_time.py) read the same rehearsal, so they speak of the
same step. Places on the pipeline whose stages hold the same parts differ only in their order of passes: one rehearsal
serves them all (`at_place`).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from penstock.config.fit import grid_of, micro_batches
from penstock.config.run import Run
from penstock.layout.actions import stages_of as stage_numbers
from penstock.layout.schedules import SCHEDULES
from penstock.layout.stages import Stage
from penstock.models.decoder import Decoder
from penstock.models.parameters import refresh_float8
from penstock.models.rank_model import embedding_places, stages_of
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.activations import activations_of, micro_batch_of
from penstock.plan.layer_kinds import layer_kind
from penstock.plan.ledger import Ledger
from penstock.plan.meta_rank import MetaRank, Target, make_meta_rank
from penstock.plan.pieces import StageActivations
from penstock.plan.tape import Tape, Work


@dataclass(frozen=True, kw_only=True)
class Update:
    """What follows the passes of a step.

    Attributes:
        peak_bytes: the most that sums over ranks, norm and update hold.
        zero: before the passes: gradients become zero.
        reduce: sums over ranks.
        norm: of the gradient.
        step: of the optimizer, and new weights for the others.
        host_bytes: of masters and moments that come from the host for it, and go back.
    """

    peak_bytes: int = 0
    zero: Work = ()
    reduce: Work = ()
    norm: Work = ()
    step: Work = ()
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rank of a run.

    Attributes:
        rank: without memory.
        first_rank: number of the first rank of its place on the pipeline.
        place: on the pipeline.
        stages: what their passes hold and do.
        batch_bytes: rows of the whole step, which are all on the device.
        gathered_bytes: whole weights with FSDP2, and gradients that are being reduced.
        gathers: bytes of whole weights that FSDP2 fetches for each piece of each stage; empty without it.
        update: what follows the passes.
    """

    rank: MetaRank
    first_rank: int
    place: int
    stages: tuple[StageActivations, ...]
    batch_bytes: int
    gathered_bytes: int
    gathers: Mapping[int, tuple[int, ...]]
    update: Update

    def at_place(self, place: int, world: int) -> "Rehearsal":
        """The same parts at another place of the pipeline."""
        schedule = self.rank.schedule
        if schedule is None or place == self.place:
            return self
        numbers = schedule.stages_of(place)
        pairs = list(zip(self.stages, numbers, strict=True))
        return replace(
            self,
            first_rank=place * (world // schedule.ranks),
            place=place,
            stages=tuple(replace(stage, number=number) for stage, number in pairs),
            gathers={number: self.gathers[stage.number] for stage, number in pairs if self.gathers},
        )


def rehearsal_of(run: Run, *, world: int, rank: int, target: Target) -> Rehearsal:
    """Rehearse one rank. Starts and ends a process group, so there must be none.

    Args:
        run: its configuration.
        world: ranks of the run.
        rank: which of them.
        target: where it will run.

    Raises:
        ConfigError: the layout does not fit the ranks or the model.
        KernelError: the run asks for kernels that the target cannot run.
    """
    grid = grid_of(run, world)
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid, embedding_places(run), run.parallel.shard_size, target.ranks_per_node)
        return rehearse(make_meta_rank(run, axes, target))
    finally:
        stop_process_group()


def rehearse(rank: MetaRank) -> Rehearsal:
    """The same of a rank that was built."""
    return Rehearsal(
        rank=rank,
        first_rank=rank.axes.rank,
        place=rank.axes.pipeline.rank,
        stages=activations_of(rank),
        batch_bytes=_batch_bytes(rank),
        gathered_bytes=_gathered(rank),
        gathers=_gathers(rank),
        update=_update(rank),
    )


def rehearsals_of(run: Run, world: int, target: Target) -> tuple[Rehearsal, ...]:
    """Every place of the pipeline: one rank of each is rehearsed that holds other parts than those before.

    With equal tokens all ranks of a stage need the same, or less: where rows do not divide, the first ranks have the
    larger part, so the first is taken.
    """
    stages, places = stages_of(run), run.parallel.pipeline
    if places == 1:
        return (rehearsal_of(run, world=world, rank=0, target=target),)
    by_parts: dict[Hashable, Rehearsal] = {}
    found = []
    for place in range(places):
        parts = _parts_of(run, stages, place)
        if parts not in by_parts:
            by_parts[parts] = rehearsal_of(run, world=world, rank=place * (world // places), target=target)
        found.append(by_parts[parts].at_place(place, world))
    return tuple(found)


def _parts_of(run: Run, stages: tuple[Stage, ...], place: int) -> Hashable:
    """Equal for places whose stages hold the same parts, and do the same with them."""
    ranks, again = run.parallel.pipeline, run.recompute

    def parts(number: int) -> Hashable:
        stage = stages[number]
        layers = tuple((layer_kind(run.model, layer), layer in again.layers) for layer in stage.layers)
        return stage.embed, layers, len(stage.mtp), stage.norm_and_head, number in again.stages

    placement = SCHEDULES[run.pipeline.schedule].placement
    numbers = stage_numbers(place, ranks=ranks, stages_per_rank=len(stages) // ranks, placement=placement)
    return tuple(map(parts, numbers))


def _batch_bytes(rank: MetaRank) -> int:
    batch = micro_batch_of(rank)
    tensors = [*batch.reading.tensors.values(), *batch.labels]
    return micro_batches(rank.run, rank.axes.grid) * sum(tensor.nbytes for tensor in tensors)


def _update(rank: MetaRank) -> Update:
    """Sums over ranks, norm and update, run without memory."""
    tape, ledger, peak = Tape(rank.target.ranks_per_node), Ledger(), 0
    if rank.optimizer is not None:
        if rank.run.offload.optimizer:
            rank.optimizer.step(0.0)  # Makes the buffers that the optimizer counts itself.
        with ledger, tape:
            rank.optimizer.reduce_gradients()
            reduce = tape.cut()
            rank.optimizer.gradient_norm()
            rank.optimizer.step(0.0)
            peak = ledger.mark("update").peak
    else:
        reduce = ()
    # What FSDP2 divides has its sums already; it takes part in all else.
    with tape:
        tape.cut()
        rank.keeper.zero_gradients()
        zero = tape.cut()
        rank.keeper.gradient_norm()
        norm = tape.cut()
        rank.keeper.step(0.0)
        if not rank.divided or rank.run.float8.gather:
            refresh_float8(rank.decoders.values())
        step = tape.cut()
    return Update(peak_bytes=peak, zero=zero, reduce=reduce, norm=norm, step=step, host_bytes=rank.state.host)


def _gathered(rank: MetaRank) -> int:
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
        most = max([most, *sizes])  # A stage may have no block.
    values = most // (2 if rank.run.training.precision == "bf16" else 4)
    return whole + most * (2 + rank.run.parallel.prefetch) + 4 * values


def _gathers(rank: MetaRank) -> dict[int, tuple[int, ...]]:
    if not rank.divided:
        return {}
    found = {}
    for number, decoder in rank.decoders.items():
        blocks = [_divided_bytes(rank, decoder, block) for block in decoder.blocks.values()]
        depths = sum(_divided_bytes(rank, decoder, depth) for depth in decoder.mtp.values())
        rest = _divided_bytes(rank, decoder, decoder) - sum(blocks) - depths
        found[number] = (rest, *blocks, depths)
    return found


def _divided_bytes(rank: MetaRank, decoder: Decoder, part: torch.nn.Module) -> int:
    own = {id(parameter) for parameter in part.parameters()}
    return sum(
        parameter.nbytes
        for name, parameter in decoder.named_parameters()
        if id(parameter) in own and name in rank.divided
    )
