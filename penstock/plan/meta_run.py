"""One rank of a run, rehearsed without memory: what a step holds there, and what it does.

Memory (penstock/plan/memory.py) and time (penstock/plan/step_time.py) read the same rehearsal, so they speak of the
same step. Places on the pipeline whose stages hold the same parts differ only in their order of passes: one rehearsal
serves them all (`at_place`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.config.fit import context_method, grid_of, micro_batches
from penstock.config.run import Run
from penstock.kernels.float8.operators import NO_FLOAT8
from penstock.layout.actions import stages_of as stage_numbers
from penstock.layout.schedules import SCHEDULES
from penstock.layout.stages import Stage
from penstock.models.block import Block, MultiTokenPrediction
from penstock.models.decoder import OVERLAPS_IN_STEPS, Decoder
from penstock.models.model_inputs import ModelInputs
from penstock.models.parameters import head_main_grad, refresh_float8
from penstock.models.rank_model import embedding_places, message_of, stages_of
from penstock.moe.layer import MoE
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.parallel.weight_grad_store import Task
from penstock.plan.liveness import StageActivations, StagePiece, layer_kind
from penstock.plan.meta_rank import META, MetaRank, Target, make_meta_rank
from penstock.plan.op_recorder import MemoryTracker, OpRecorder, RecordedOps, TrackedSection
from penstock.train.global_batch import MicroBatch
from penstock.train.loss import batch_loss, loss_rule


@dataclass(frozen=True, kw_only=True)
class UpdateOps:
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
    zero: RecordedOps = ()
    reduce: RecordedOps = ()
    norm: RecordedOps = ()
    step: RecordedOps = ()
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MetaRun:
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
    update: UpdateOps

    def at_place(self, place: int, world: int) -> "MetaRun":
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


def meta_run_of(run: Run, *, world: int, rank: int, target: Target) -> MetaRun:
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
        return run_meta_rank(make_meta_rank(run, axes, target))
    finally:
        stop_process_group()


def run_meta_rank(rank: MetaRank) -> MetaRun:
    """The same of a rank that was built."""
    return MetaRun(
        rank=rank,
        first_rank=rank.axes.rank,
        place=rank.axes.pipeline.rank,
        stages=activations_of(rank),
        batch_bytes=_batch_bytes(rank),
        gathered_bytes=_gathered(rank),
        gathers=_gathers(rank),
        update=_update(rank),
    )


def meta_runs_of(run: Run, world: int, target: Target) -> tuple[MetaRun, ...]:
    """Every place of the pipeline: one rank of each is rehearsed that holds other parts than those before.

    With equal tokens all ranks of a stage need the same, or less: where rows do not divide, the first ranks have the
    larger part, so the first is taken.
    """
    stages, places = stages_of(run), run.parallel.pipeline
    if places == 1:
        return (meta_run_of(run, world=world, rank=0, target=target),)
    by_parts: dict[Hashable, MetaRun] = {}
    found = []
    for place in range(places):
        parts = _parts_of(run, stages, place)
        if parts not in by_parts:
            by_parts[parts] = meta_run_of(run, world=world, rank=place * (world // places), target=target)
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


def _update(rank: MetaRank) -> UpdateOps:
    """Sums over ranks, norm and update, run without memory."""
    tape, ledger, peak = OpRecorder(rank.target.ranks_per_node), MemoryTracker(), 0
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
    return UpdateOps(peak_bytes=peak, zero=zero, reduce=reduce, norm=norm, step=step, host_bytes=rank.state.host)


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


def activations_of(rank: MetaRank, batch: MicroBatch | None = None) -> tuple[StageActivations, ...]:
    """Run every stage of a rank once.

    Args:
        rank: its stages; on the meta device, or with memory, where they must give the same.
        batch: what they read; None for a micro-batch without memory.
    """
    batch = batch or micro_batch_of(rank)
    return tuple(_stage(rank, number, decoder, batch) for number, decoder in rank.decoders.items())


def kind_of(decoder: Decoder, layer: int, block: Block) -> Hashable:
    """Layers of one kind hold the same."""
    return layer_kind(decoder.config, layer), block.layer_context.recompute, block.layer_context.float8 == NO_FLOAT8


def micro_batch_of(rank: MetaRank) -> MicroBatch:
    """What a rank reads of a micro-batch, without memory."""
    training, axes = rank.run.training, rank.axes
    rows, here = training.micro_batch, training.sequence_length // axes.context.size
    depths = rank.run.model.mtp_layers

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape or (rows, here), dtype=torch.int64, device=META)

    is_masked, is_part = rank.run.data.document_mask, axes.context.size > 1 and context_method(rank.run) != "ulysses"
    reading = ModelInputs(
        tokens_BS=numbers(),
        positions_BS=numbers(),
        ahead=tuple(numbers() for _ in range(depths)),
        documents_BS=numbers(rows, training.sequence_length) if is_masked else None,
        query_positions_S=numbers(here) if is_masked and is_part else None,
    )
    return MicroBatch(reading=reading, labels=tuple(numbers() for _ in range(depths + 1)))


def _stage(rank: MetaRank, number: int, decoder: Decoder, batch: MicroBatch) -> StageActivations:
    blocks = {int(layer): block for layer, block in decoder.blocks.items() if isinstance(block, Block)}
    runs_all = rank.run.dispatch.overlap in OVERLAPS_IN_STEPS or bool(rank.run.offload.activations)
    kinds = {layer: (layer if runs_all else kind_of(decoder, layer, block)) for layer, block in blocks.items()}
    first_of: dict[Hashable, int] = {}
    for layer, kind in kinds.items():
        first_of.setdefault(kind, layer)
    short = _shortened(decoder, {layer: blocks[layer] for layer in first_of.values()})
    one = _Pass(rank, short, batch)
    pieces = one.pieces()
    if len(pieces) > 1:
        before, *layers, behind = pieces
        by_kind = dict(zip(first_of, layers, strict=True))
        pieces = [before, *(by_kind[kind] for kind in kinds.values()), behind]
    return StageActivations(number=number, pieces=tuple(pieces), weight=one.weight)


def _shortened(decoder: Decoder, blocks: dict[int, Block]) -> Decoder:
    """The same stage with some of its layers; modules are shared."""
    return Decoder(
        decoder.config,
        embed=decoder.embed,
        blocks=blocks,
        norm=decoder.norm,
        head=decoder.head,
        mtp={int(depth): one for depth, one in decoder.mtp.items() if isinstance(one, MultiTokenPrediction)},
        layer_context=decoder.layer_context,
        is_first=decoder.is_first,
    )


class _Pass:
    """One forward and backward pass of a stage under a ledger."""

    def __init__(self, rank: MetaRank, decoder: Decoder, batch: MicroBatch) -> None:
        self.rank = rank
        self.batch = batch
        self.device = batch.reading.tokens_BS.device
        self.decoder = decoder
        self.ledger = MemoryTracker()
        self.tape = OpRecorder(rank.target.ranks_per_node, self.ledger)
        self.weight = 0
        self.works: list[RecordedOps] = []
        self.work: list[Task] = []
        self.tasks: list[int] = []
        # Halves of a micro-batch pass a layer in turns, so there a layer has no piece of its own.
        is_cut = len(decoder.blocks) > 0 and rank.run.dispatch.overlap not in OVERLAPS_IN_STEPS
        self.blocks = [block for block in decoder.blocks.values() if isinstance(block, Block)] if is_cut else []
        self.kinds = [layer_kind(decoder.config, int(layer)) for layer in decoder.blocks] if is_cut else []

    def pieces(self) -> list[StagePiece]:
        """Run, and put the sections together."""
        run = self.rank.run
        counted = torch.ones(1 + run.model.mtp_layers, dtype=torch.float64, device=self.device)
        names = ["embed", *self.kinds, "head"] if self.blocks else ["stage"]
        with _labelled(self.decoder, self.ledger), self._marked(), self.tape:
            output = self._forward(self.batch, counted)
            end = output if self.decoder.norm is not None else get_gradient_edge(output)
            del output  # As in penstock/parallel/pipeline.py, where it has been sent.
            self._mark("forward")
            self._backward(end)
            del end
            self._end_of_backward()
            weight_works = self._weights()
        sections = self.ledger.sections
        forward, backward = sections[: len(names)], sections[len(names) :][::-1]
        assert len(backward) == len(names), f"{len(sections)} sections of {names}"
        self.weight = self.ledger.mark("weight").passing
        message = message_of(run, self.rank.axes, META)
        travelling = 0 if self.rank.weight_grads is None else prod(message.shape) * message.dtype.itemsize
        works = zip(self.works[: len(names)], self.works[len(names) :][::-1], weight_works[::-1], strict=True)
        return [
            replace(piece, forward_work=there, backward_work=back, weight_work=weights)
            for piece, (there, back, weights) in zip(_pieces(names, forward, backward, travelling), works, strict=True)
        ]

    def _mark(self, name: str) -> None:
        """End a section."""
        self.ledger.mark(name)
        self.works.append(self.tape.cut())

    def _end_of_backward(self) -> None:
        """End a section of backward."""
        self._mark("backward")
        self.tasks.append(len(self.work))

    def _weights(self) -> list[RecordedOps]:
        """Do what was put off; its operators, by section of backward."""
        works: list[RecordedOps] = []
        for first, last in pairwise((0, *self.tasks)):
            for _ in range(first, last):
                self.work.pop(0)()
            works.append(self.tape.cut())
        return works

    def _forward(self, batch: MicroBatch, counted: Tensor) -> Tensor:
        rank, decoder, x_BSD = self.rank, self.decoder, None
        if not decoder.is_first:
            message = message_of(rank.run, rank.axes, self.device)
            with self.ledger.named("message"):
                x_BSD = torch.zeros(message.shape, dtype=message.dtype, device=self.device, requires_grad=True)
        hidden = decoder(batch.reading, x_BSD)
        if decoder.norm is None:
            return hidden.main_BSD
        with self.ledger.named("loss"):
            rule = loss_rule(rank.run, rank.axes)
            return batch_loss(hidden, decoder.head_VD, batch.labels, counted, rule, head_main_grad(decoder)).total

    def _backward(self, end: Tensor | GradientEdge) -> None:
        gradient, weight_grads = None, self.rank.weight_grads
        if self.decoder.norm is None:
            message = message_of(self.rank.run, self.rank.axes, self.device)
            with self.ledger.named("message"):
                gradient = torch.zeros(message.shape, dtype=message.dtype, device=self.device)
        with ExitStack() as around:
            around.enter_context(self.ledger.named("gradients"))
            if weight_grads is not None:
                self.work = around.enter_context(weight_grads.collecting())
            torch.autograd.backward(end, gradient)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """A mark before each layer and behind the last, on the way back too."""
        divided = [
            parameter
            for name, parameter in self.decoder.named_parameters()
            if name in self.rank.divided and name.startswith("blocks.")
        ]

        def ends(gradient: Tensor) -> None:
            self._end_of_backward()
            for parameter in divided:  # FSDP2 reduces a layer's gradients and frees them.
                parameter.grad = None

        def before(block: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._mark("forward")
            arguments[0].register_hook(ends)

        def behind(block: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            self._mark("forward")
            output.register_hook(ends)

        handles = [block.register_forward_pre_hook(before) for block in self.blocks]
        if self.blocks:
            handles.append(self.blocks[-1].register_forward_hook(behind))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _labelled(decoder: Decoder, ledger: MemoryTracker) -> Iterator[None]:
    """What a module allocates is put down to it."""

    def enter(name: str, *_: object) -> None:
        ledger.enter(name)

    def leave(*_: object) -> None:
        ledger.leave()

    handles = []
    for path, module in decoder.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, _label(path, module))))
        # Also if it is left by an exception, as the end of a region that runs again.
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _label(path: str, module: nn.Module) -> str:
    """A module's name without the layer's number."""
    if isinstance(module, Decoder):
        return "angles"
    _, is_in_layer, name = path.partition("blocks.")
    if is_in_layer:
        name = name.partition(".")[2]
    else:
        name = path
    if isinstance(module, Block):
        return f"{path.rpartition('.')[0]}.residual" if not is_in_layer else "residual"
    return f"{name}.dispatch" if isinstance(module, MoE) else name


def _pieces(
    names: Sequence[str], forward: Sequence[TrackedSection], backward: Sequence[TrackedSection], travelling: int
) -> list[StagePiece]:
    """From sections to pieces; those of backward in the order of forward.

    Args:
        names: of the pieces.
        forward: their sections.
        backward: likewise.
        travelling: bytes of the gradient that a piece hands to the one before it, if weight gradients are put off;
            else nothing is left behind, and nobody asks.
    """
    pieces: list[StagePiece] = []
    behind = travelling
    for name, there, back in reversed(list(zip(names, forward, backward, strict=True))):
        left = back.end - there.start - behind + (travelling if name == names[0] else 0) if travelling else 0
        pieces.append(
            StagePiece(
                name=name,
                kept=_less(there.held, there.before),
                forward=there.passing,
                backward=back.peak - there.start - (behind - travelling),
                at_forward=_less(there.at_peak, there.before),
                at_backward=_less(back.at_peak, there.before),
                left=left,
            )
        )
        behind += left
    return pieces[::-1]


def _less(one: Counter[str], other: Counter[str]) -> dict[str, int]:
    return {name: one[name] - other[name] for name in one.keys() | other.keys() if one[name] != other[name]}
