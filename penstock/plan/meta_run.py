"""Run one rank of a run on the meta device: the memory of a step and its operators, without memory or devices.

Each stage's decoder runs forward and backward once, with one layer of each kind, under a `MemoryTracker` and an
`OpRecorder`. Marks cut the passes into pieces (penstock/plan/liveness.py). Where passes overlap, or activations leave
for the host, a layer depends on its neighbours, so there all layers run. Then the optimizer's own update runs.

penstock/plan/memory.py and penstock/plan/step_time.py read the same `MetaRun`. Pipeline ranks with the same parts
differ only in the order of their passes, so one meta run serves them all (`MetaRun.at_place`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.config.fit import context_method, grid_of, micro_batches
from penstock.config.run import Run
from penstock.layout.stages import Stage
from penstock.models.block import Block, MultiTokenPrediction
from penstock.models.decoder import Decoder
from penstock.models.model_inputs import ModelInputs
from penstock.models.parameters import refresh_float8
from penstock.models.rank_model import embedding_places, message_of, stages_of
from penstock.moe.layer import MoE
from penstock.parallel.async_transfer import Task
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.liveness import PipelineShape, StageActivations, StagePiece, layer_kind
from penstock.plan.meta_rank import META, MetaRank, Target, make_meta_rank
from penstock.plan.op_recorder import MemoryTracker, OpRecorder, RecordedOps, TrackedSection
from penstock.train.passes import MicroBatch, batch_loss, loss_rule


@dataclass(frozen=True, kw_only=True)
class UpdateOps:
    """The work of a step outside the passes."""

    peak_bytes: int = 0  # the most that sums over ranks, norm and update hold
    zero: RecordedOps = ()  # sets gradients to zero, before the passes
    reduce: RecordedOps = ()  # sums gradients over ranks
    norm: RecordedOps = ()
    step: RecordedOps = ()  # the optimizer, and new weights for the other ranks
    host_bytes: int = 0  # masters and moments that come from the host and go back


@dataclass(frozen=True, kw_only=True)
class MetaRun:
    """Memory and operators of one pipeline rank."""

    rank: MetaRank  # on the meta device
    stages: tuple[StageActivations, ...]
    batch_bytes: int  # rows of the whole step, which are all on the device
    gathered_bytes: int  # whole weights under FSDP2, and gradients that are being reduced
    gathers: tuple[tuple[int, ...], ...]  # bytes that FSDP2 gathers for each piece of each stage
    update: UpdateOps


def meta_run_of(run: Run, *, world: int, rank: int, target: Target) -> MetaRun:
    """Run one rank on the meta device. Starts and ends a process group, so none may be running.

    Raises a ConfigError if the layout does not fit, and a KernelError if the target cannot run the kernels.
    """
    grid = grid_of(run, world)
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid, embedding_places(run), run.parallel.shard_size, target.ranks_per_node, is_dry=True)
        built = make_meta_rank(run, axes, target)
        stages = activations_of(built)
        gathered, gathers = _gathers(built)
        return MetaRun(
            rank=built,
            stages=stages,
            batch_bytes=micro_batches(run, grid) * micro_batch_bytes(built),
            gathered_bytes=gathered,
            gathers=gathers,
            update=_update(built),
        )
    finally:
        stop_process_group()


def meta_runs_of(run: Run, world: int, target: Target) -> tuple[MetaRun, ...]:
    """A meta run for each place of the pipeline; places with the same parts share one.

    With equal tokens every rank of a place needs the same memory or less than the first: where rows do not divide
    evenly, the first ranks have the larger part.
    """
    stages, places = stages_of(run), run.parallel.pipeline
    if places == 1:
        return (meta_run_of(run, world=world, rank=0, target=target),)
    by_parts: dict[Hashable, MetaRun] = {}
    meta_runs = []
    for position in range(places):
        parts = _parts_of(run, stages, position)
        if parts not in by_parts:
            by_parts[parts] = meta_run_of(run, world=world, rank=position * (world // places), target=target)
        meta_runs.append(by_parts[parts])
    return tuple(meta_runs)


def _parts_of(run: Run, stages: tuple[Stage, ...], position: int) -> Hashable:
    """Equal for places whose stages hold the same parts and recompute alike."""
    ranks, recompute = run.parallel.pipeline, run.recompute

    def parts(number: int) -> Hashable:
        stage = stages[number]
        layers = tuple((layer_kind(run, layer), layer in recompute.layers) for layer in stage.layers)
        return stage.embed, layers, len(stage.mtp), stage.norm_and_head, number in recompute.stages

    shape = PipelineShape(run.pipeline.schedule, ranks, len(stages) // ranks, micro_batches=1)
    return tuple(map(parts, shape.stages_of(position)))


def _update(rank: MetaRank) -> UpdateOps:
    """Run the optimizer's update. FSDP2 has reduced its own gradients; all else runs for every parameter."""
    tracker, peak = MemoryTracker(), 0
    recorder = OpRecorder(rank.target.ranks_per_node, rank.target.ranks_per_pod, tracker)
    reduce: RecordedOps = ()
    if rank.optimizer is not None:
        if rank.run.offload.optimizer:
            rank.optimizer.step(0.0)  # Allocates the buffers that the optimizer itself counts as state.
        with recorder:
            rank.optimizer.reduce_gradients()
            reduce = recorder.cut()
            rank.optimizer.gradient_norm()
            rank.optimizer.step(0.0)
            peak = tracker.mark("update").peak
    with recorder:
        recorder.cut()
        rank.full_optimizer.zero_gradients(before_passes=True)
        zero = recorder.cut()
        rank.full_optimizer.gradient_norm()
        norm = recorder.cut()
        rank.full_optimizer.step(0.0)
        peak = max(peak, tracker.mark("update of all").peak)
        if not rank.sharded or rank.run.float8.gather:
            refresh_float8(rank.decoders.values())
        step = recorder.cut()
    return UpdateOps(peak_bytes=peak, zero=zero, reduce=reduce, norm=norm, step=step, host_bytes=rank.state.host)


def gathered_bytes(run: Run, always: int, largest: int) -> int:
    """Whole weights under FSDP2, and gradients that are being reduced, at the fullest moment.

    `always` are bytes outside of blocks, which stay whole from the start of forward to the end of backward. Of the
    largest block there are its weights, the flat buffer that they came in, those of the blocks that are prefetched, and
    the float32 gradients of the block before, in one buffer.
    """
    values = largest // (2 if run.training.precision == "bf16" else 4)
    return always + largest * (2 + run.parallel.prefetch) + 4 * values


def _gathers(rank: MetaRank) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Whole weights at the fullest moment, and bytes that FSDP2 gathers for each piece of each stage."""
    if not rank.sharded:
        return 0, ((),) * len(rank.decoders)
    always, largest, gathers = 0, 0, []
    for decoder in rank.decoders.values():
        blocks = [_sharded_bytes(rank, decoder, block) for block in decoder.blocks.values()]
        depths = [_sharded_bytes(rank, decoder, depth) for depth in decoder.mtp.values()]
        rest = _sharded_bytes(rank, decoder, decoder) - sum(blocks) - sum(depths)
        always, largest = always + rest, max([largest, *blocks, *depths])  # A stage may have no block.
        gathers.append((rest, *blocks, sum(depths)))
    return gathered_bytes(rank.run, always, largest), tuple(gathers)


def _sharded_bytes(rank: MetaRank, decoder: Decoder, part: nn.Module) -> int:
    identities = {id(parameter) for parameter in part.parameters()}
    return sum(
        parameter.nbytes
        for name, parameter in decoder.named_parameters()
        if id(parameter) in identities and name in rank.sharded
    )


def activations_of(rank: MetaRank, batch: MicroBatch | None = None) -> tuple[StageActivations, ...]:
    """Run the passes of every stage of a rank once.

    `rank` is on the meta device, or has memory and a `batch`; the result must be the same.
    """
    batch = batch or micro_batch_of(rank)
    return tuple(_stage(rank, decoder, batch) for decoder in rank.decoders.values())


def kind_of(run: Run, layer: int, block: Block) -> Hashable:
    """Layers of one kind have equal pieces."""
    return layer_kind(run, layer), block.layer_context.recompute


def micro_batch_of(rank: MetaRank) -> MicroBatch:
    training, axes = rank.run.training, rank.axes
    rows, here = training.micro_batch, training.sequence_length // axes.context.size
    depths = rank.run.model.mtp_layers

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape or (rows, here), dtype=torch.int64, device=META)

    # The shapes are those of `penstock.train.passes`.
    is_masked, is_part = rank.run.data.document_mask, axes.context.size > 1 and context_method(rank.run) != "ulysses"
    reading = ModelInputs(
        tokens_BS=numbers(),
        positions_BS=numbers(),
        ahead=tuple(numbers() for _ in range(depths)),
        documents_BS=numbers(rows, training.sequence_length) if is_masked else None,
        query_positions_S=numbers(here) if is_masked and is_part else None,
    )
    return MicroBatch(reading=reading, labels=tuple(numbers() for _ in range(depths + 1)))


def micro_batch_bytes(rank: MetaRank) -> int:
    batch = micro_batch_of(rank)
    return sum(tensor.nbytes for tensor in (*batch.reading.tensors.values(), *batch.labels))


def _stage(rank: MetaRank, decoder: Decoder, batch: MicroBatch) -> StageActivations:
    blocks = {int(layer): block for layer, block in decoder.blocks.items() if isinstance(block, Block)}
    # Overlap and offload connect neighbouring layers, so one layer cannot stand for its kind.
    runs_all = rank.run.dispatch.overlap == "passes" or bool(rank.run.offload.activations)
    runs_all = runs_all or rank.run.offload.gradients
    kinds = {layer: (layer if runs_all else kind_of(rank.run, layer, block)) for layer, block in blocks.items()}
    first_of: dict[Hashable, int] = {}
    for layer, kind in kinds.items():
        first_of.setdefault(kind, layer)
    # The same stage with one layer of each kind; the modules are shared.
    short = Decoder(
        decoder.config,
        embed=decoder.embed,
        blocks={layer: blocks[layer] for layer in first_of.values()},
        norm=decoder.norm,
        head=decoder.head,
        mtp={int(depth): module for depth, module in decoder.mtp.items() if isinstance(module, MultiTokenPrediction)},
        layer_context=decoder.layer_context,
        streams=decoder.streams,
        is_first=decoder.is_first,
    )
    short.reached = decoder.reached
    passes = _Passes(rank, short, batch)
    pieces = passes.pieces()
    if len(pieces) > 1:
        before, *layers, behind = pieces
        by_kind = dict(zip(first_of, layers, strict=True))
        # Every layer gets the piece of the first layer of its kind.
        pieces = [before, *(by_kind[kind] for kind in kinds.values()), behind]
    return StageActivations(pieces=tuple(pieces), weight=passes.weight)


class _Passes:
    """One forward and backward pass of a stage, tracked and recorded."""

    def __init__(self, rank: MetaRank, decoder: Decoder, batch: MicroBatch) -> None:
        self.rank = rank
        self.batch = batch
        self.device = batch.reading.tokens_BS.device
        self.decoder = decoder
        self.tracker = MemoryTracker()
        self.recorder = OpRecorder(rank.target.ranks_per_node, rank.target.ranks_per_pod, self.tracker)
        self.weight = 0
        self.ops: list[RecordedOps] = []
        self.tasks: list[Task] = []
        self.task_counts: list[int] = []
        # Layers that pause are not called as modules, so none has a piece of its own.
        is_cut = len(decoder.blocks) > 0 and rank.run.dispatch.overlap != "passes"
        self.blocks = [block for block in decoder.blocks.values() if isinstance(block, Block)] if is_cut else []
        self.kinds = [layer_kind(rank.run, int(layer)) for layer in decoder.blocks] if is_cut else []

    def pieces(self) -> list[StagePiece]:
        """Run, and make pieces of the sections."""
        run = self.rank.run
        counted = torch.ones(1 + run.model.mtp_layers, dtype=torch.float64, device=self.device)
        names = ["embed", *self.kinds, "head"] if self.blocks else ["stage"]
        with _labelled(self.decoder, self.tracker), self._marked(), self.recorder:
            output = self._forward(counted)
            end = output if self.decoder.norm is not None else get_gradient_edge(output)
            del output  # As in penstock/parallel/pipeline.py, after it was sent.
            self._mark("forward")
            gradient = self._message() if self.decoder.norm is None else None
            with ExitStack() as around:
                around.enter_context(self.tracker.named("gradients"))
                if self.rank.weight_grads is not None:
                    self.tasks = around.enter_context(self.rank.weight_grads.collecting())
                torch.autograd.backward(end, gradient)
            del end, gradient
            self._end_of_backward()
            weight_ops = self._weights()
        # Forward marks the pieces first to last, backward last to first.
        sections = self.tracker.sections
        forward, backward = sections[: len(names)], sections[len(names) :][::-1]
        assert len(backward) == len(names), f"{len(sections)} sections of {names}"
        self.weight = self.tracker.mark("weight").passing
        message = message_of(run, self.rank.axes, META)
        handed = 0 if self.rank.weight_grads is None else prod(message.shape) * message.dtype.itemsize
        # Backward and weight gradients in the order of forward.
        ops = zip(self.ops[: len(names)], self.ops[len(names) :][::-1], weight_ops[::-1], strict=True)
        return [
            replace(piece, forward_ops=there, backward_ops=back, weight_ops=weights)
            for piece, (there, back, weights) in zip(_pieces(names, forward, backward, handed), ops, strict=True)
        ]

    def _mark(self, name: str) -> None:
        self.tracker.mark(name)
        self.ops.append(self.recorder.cut())

    def _end_of_backward(self) -> None:
        self._mark("backward")
        self.task_counts.append(len(self.tasks))

    def _weights(self) -> list[RecordedOps]:
        """Run the weight gradients that were put off; their operators, by section of backward."""
        ops: list[RecordedOps] = []
        for first, last in pairwise((0, *self.task_counts)):
            for _ in range(first, last):
                self.tasks.pop(0)()
            ops.append(self.recorder.cut())
        return ops

    def _message(self, *, requires_grad: bool = False) -> Tensor:
        """An activation, or its gradient, that comes from another stage."""
        message = message_of(self.rank.run, self.rank.axes, self.device)
        with self.tracker.named("message"):
            return torch.zeros(message.shape, dtype=message.dtype, device=self.device, requires_grad=requires_grad)

    def _forward(self, counted: Tensor) -> Tensor:
        rank, decoder, batch = self.rank, self.decoder, self.batch
        x_BSD = None if decoder.is_first else self._message(requires_grad=True)
        hidden = decoder(batch.reading, x_BSD)
        if decoder.norm is None:
            return hidden.main_BSD
        with self.tracker.named("loss"):
            rule = loss_rule(rank.run, rank.axes)
            total_VD, float8 = decoder.head_main_grad, decoder.head_float8
            return batch_loss(hidden, decoder.head_VD, batch.labels, counted, rule, total_VD, float8).total

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Mark before each layer and after the last, in forward and in backward."""
        sharded = [
            parameter
            for name, parameter in self.decoder.named_parameters()
            if name in self.rank.sharded and name.startswith("blocks.")
        ]

        def ends(gradient: Tensor) -> None:
            self._end_of_backward()
            for parameter in sharded:  # FSDP2 reduces a layer's gradients and frees them.
                parameter.grad = None

        def before(block: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._mark("forward")
            # The gradient of a layer's input ends the backward pass of that layer.
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
def _labelled(decoder: Decoder, tracker: MemoryTracker) -> Iterator[None]:
    """Allocations of a module get its label."""

    def enter(label: str, *_: object) -> None:
        tracker.enter(label)

    def leave(*_: object) -> None:
        tracker.leave()

    handles = []
    for path, module in decoder.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, _label(path, module))))
        # `always_call`: recomputation leaves a region by an exception.
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _label(path: str, module: nn.Module) -> str:
    """A module's name without the number of the layer."""
    if isinstance(module, Decoder):
        return "angles"
    _, is_in_layer, inner = path.partition("blocks.")
    name = inner.partition(".")[2] if is_in_layer else path
    if isinstance(module, Block):
        return "residual" if is_in_layer else f"{path.rpartition('.')[0]}.residual"
    return f"{name}.dispatch" if isinstance(module, MoE) else name


def _pieces(
    names: Sequence[str], forward: Sequence[TrackedSection], backward: Sequence[TrackedSection], gradient: int
) -> list[StagePiece]:
    """Pieces of the sections, all in the order of forward.

    `gradient` are bytes of the gradient that a piece hands to the one before it, if weight gradients are put off; else
    0, because nothing is left behind.
    """
    pieces: list[StagePiece] = []
    behind = gradient
    for name, there, back in reversed(list(zip(names, forward, backward, strict=True))):
        # A piece hands on a gradient as large as the one that it received, except the first piece.
        left = back.end - there.start - behind + (gradient if name == names[0] else 0) if gradient else 0
        pieces.append(
            StagePiece(
                name=name,
                kept=_less(there.held, there.before),
                forward=there.passing,
                # Without the memory that later pieces left: StageActivations.backward adds it.
                backward=back.peak - there.start - (behind - gradient),
                at_forward=_less(there.at_peak, there.before),
                at_backward=_less(back.at_peak, there.before),
                left=left,
            )
        )
        behind += left
    return pieces[::-1]


def _less(counts: Counter[str], other: Counter[str]) -> dict[str, int]:
    return {name: counts[name] - other[name] for name in counts.keys() | other.keys() if counts[name] != other[name]}
