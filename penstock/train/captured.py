"""Forward and backward of a micro-batch as one captured graph (`graphs.capture` full), replayed for each of them.

    first step     eager: kernels are compiled, communicators made
    second step    the pass is captured, then as in every later step:
    each pass      what the micro-batch reads is copied to where the graph reads it; replay; its losses are added up

What a pass leaves behind, it leaves where it always does, in tensors whose addresses never change: gradients in the
optimizer's float32 sums, loads in the routers' meters, rows without room in the layers' rooms. Capture itself runs
nothing on the device, so it counts nothing. Parameters and expert bias are updated in place and read anew by each
replay. One number of a micro-batch is part of the graph instead of an input of it, its share of the global batch, which
is the same for all.

Eager all the same: evaluation, the search for a value that is not finite, and a step that is made again with more room
for rows, whose shapes are others. Before such a step the graph is given up, because memory might not be enough for
both; the next step captures it anew. Clipping and update stay eager too: some hundred launches once a step, which the
host is through with long before the device (docs/graphs.md).

Transfers through the memory that GPUs share count on the device (penstock/parallel/symmetric.py), so they can be
replayed; which slots they use is part of the graph.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.base.spans import MICRO_BATCH, Span
from penstock.models.rank_model import RankModel
from penstock.moe.dispatch.row_capacity import widenings
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather_json
from penstock.parallel.graphs import Capture, Replayable, capture
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import GlobalBatch, MicroBatch
from penstock.train.loss import LossRule
from penstock.train.passes import differentiate, forward_backward

if TYPE_CHECKING:  # it imports Triton, which may be absent
    from penstock.parallel.symmetric import TransferDirection


class CapturedPasses:
    """`forward_backward` by replaying a graph; called the same way.

    Args:
        is_asked_for: a graph that finds no memory is an error; else passes stay eager and a notice says so.
        capture: of a pass.

    Attributes:
        pool_bytes: device memory that the graph holds; 0 while there is none.
    """

    def __init__(self, *, is_asked_for: bool, capture: Capture = capture) -> None:
        self.pool_bytes = 0
        self._is_asked_for = is_asked_for
        self._capture = capture
        self._is_warm = False
        self._is_given_up = False
        self._widenings = 0
        self._pass: _CapturedPass | None = None
        self._notices: list[str] = []

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        """See `forward_backward`.

        Raises:
            DeviceError: there is no memory for the graph, on any rank, and it was asked for.
        """
        if (now := widenings(model.modules)) != self._widenings:
            self._widenings = now
            self.release()
            return forward_backward(model, batch, rule, enter)
        if self._is_warm and not self._is_given_up and self._pass is None:
            self._pass = self._make_pass(model, batch, rule)
        self._is_warm = True
        if self._pass is None:
            return forward_backward(model, batch, rule, enter)
        sums = torch.zeros(1 + rule.depths, device=model.device)
        enter(Span.REPLAY)
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number), span(Span.REPLAY):
                sums += self._pass.replay(micro_batch, batch.counted)
        return sums

    def take_notices(self) -> tuple[str, ...]:
        """What a user should know and has not been told yet."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def release(self) -> None:
        """Give the graph up, if there is one; the next step captures another. Before the process group ends."""
        if self._pass is not None:
            self._pass.graph.release()
        self._pass, self.pool_bytes = None, 0

    def _make_pass(self, model: RankModel, batch: GlobalBatch, rule: LossRule) -> "_CapturedPass | None":
        """Capture on all ranks, or on none."""
        made, obstacle = None, ""
        try:
            made = _capture_pass(self._capture, model, batch, rule)
        except torch.OutOfMemoryError as error:
            obstacle = str(error).partition(". ")[0]
        obstacle = first_obstacle(obstacle, model.axes.world)
        if obstacle and made is not None:
            made.graph.release()
        if obstacle and self._is_asked_for:
            raise no_memory("graphs.capture=full finds no memory for a pass", obstacle)
        if obstacle:
            self._is_given_up = True
            self._notices.append(f"graphs: passes stay eager, there is no memory for a graph ({obstacle})")
            return None
        assert made is not None, "a capture gives a graph or an obstacle"
        self.pool_bytes = made.graph.pool_bytes
        self._notices.append(
            f"graphs: one pass captured in {made.graph.seconds:.1f} s; its pool keeps {self.pool_bytes / 1e9:.2f} GB"
        )
        return made


def first_obstacle(obstacle: str, world: Axis) -> str:
    """What keeps any rank from a graph; empty if nothing does. All ranks call it."""
    return next((one for one in all_gather_json(obstacle, world) if one), "")


def no_memory(what: str, obstacle: str) -> DeviceError:
    """The error of somebody who asked for graphs."""
    fix = "a smaller training.micro_batch, more recompute.modules, or graphs.capture=none"
    return DeviceError(what, got=obstacle, fix=fix)


@dataclass(frozen=True)
class _CapturedPass:
    """A graph, and the tensors through which it is spoken with.

    Attributes:
        graph: of one pass.
        model: whose pass it is.
        batch: of one micro-batch: what the graph reads.
        parts: what it writes, see `MicroLoss.parts`.
        transfers: that it makes through memory that GPUs share.
    """

    graph: Replayable
    model: RankModel
    batch: GlobalBatch
    parts: Tensor
    transfers: "Sequence[tuple[TransferDirection, int]]"

    def replay(self, micro_batch: MicroBatch, counted: Tensor) -> Tensor:
        """A pass over another micro-batch. Returns its losses, which the next pass overwrites."""
        fill(self.batch.micro_batches[0], self.batch.counted, micro_batch, counted)
        if self.model.buffers is not None:
            self.model.buffers.replayed(self.transfers)
        self.graph.replay()
        return self.parts


def _capture_pass(capture: Capture, model: RankModel, batch: GlobalBatch, rule: LossRule) -> _CapturedPass:
    """Capture a pass over a copy of the first micro-batch."""
    own = copy_of(batch.micro_batches[0])
    counted = batch.counted.clone()
    parts = torch.zeros(1 + rule.depths, device=model.device)

    def work() -> None:
        parts.copy_(differentiate(model, own, counted, rule))

    transfers: list[tuple[TransferDirection, int]] = []
    with ExitStack() as around:
        if model.buffers is not None:
            transfers = around.enter_context(model.buffers.recording())
        graph = capture(work)
    return _CapturedPass(graph, model, GlobalBatch(micro_batches=(own,), counted=counted), parts, transfers)


def copy_of(micro_batch: MicroBatch) -> MicroBatch:
    """The same in memory of its own."""
    reading, labels = micro_batch.reading, micro_batch.labels
    documents_BS, places_S = reading.documents_BS, reading.places_S
    own = replace(
        reading,
        tokens_BS=reading.tokens_BS.clone(),
        positions_BS=reading.positions_BS.clone(),
        ahead=tuple(ahead_BS.clone() for ahead_BS in reading.ahead),
        documents_BS=None if documents_BS is None else documents_BS.clone(),
        places_S=None if places_S is None else places_S.clone(),
    )
    return MicroBatch(reading=own, labels=tuple(labels_BS.clone() for labels_BS in labels))


def fill(own: MicroBatch, own_counted: Tensor, micro_batch: MicroBatch, counted: Tensor) -> None:
    """Copy what a micro-batch holds into another one of the same shapes.

    Args:
        own: is changed.
        own_counted: is changed.
        micro_batch: of which a graph was not captured.
        counted: goes with it.
    """
    share, own_share = micro_batch.reading.share, own.reading.share
    assert share == own_share, f"a graph of a share of {own_share} is replayed for one of {share}"
    targets, sources = _tensors(own, own_counted), _tensors(micro_batch, counted)
    assert targets.keys() == sources.keys(), f"a graph that reads {[*targets]} is given {[*sources]}"
    for name, target in targets.items():
        source = sources[name]
        assert (source.shape, source.dtype) == (target.shape, target.dtype), (
            f"{name} of a graph is {target.dtype} {tuple(target.shape)}, and {source.dtype} {tuple(source.shape)} came"
        )
        target.copy_(source)


def _tensors(micro_batch: MicroBatch, counted: Tensor) -> dict[str, Tensor]:
    """Everything that a pass reads of its micro-batch, by name."""
    labels = {f"labels {depth}": labels_BS for depth, labels_BS in enumerate(micro_batch.labels)}
    return micro_batch.reading.tensors | labels | {"counted": counted}
