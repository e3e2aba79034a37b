"""Passes that replay captured graphs, and the choice between them (`graphs.capture`).

Full capture replays the forward and backward pass of a micro-batch as one graph:

    first step     eager: compiles kernels, creates communicators
    second step    captures the pass, then does as every later step:
    each pass      copies the micro-batch to the addresses that the graph reads, replays, adds up the losses

A pass writes only to tensors with fixed addresses: gradients to the optimizer's float32 sums, loads to the routers'
meters, rows without room to the layers' capacity trackers. Capture runs nothing on the device, so it counts nothing.
Parameters and expert bias are updated in place and read by each replay. The share of the micro-batch in the global
batch is a constant of the graph; it is the same for all micro-batches. Transfers through symmetric memory count on the
device (penstock/parallel/symmetric.py), so they can be replayed; their slots are part of the graph.

Evaluation, the search for a non-finite value, clipping, the update, and a step that is repeated with larger buffers
stay eager. Before such a step the graph is released, because memory may not suffice for both; the next step captures
it anew.

Partial capture replays parts of each layer, forward and backward: attention with the norms on both sides, the router,
and the order of this rank's slots (penstock/models/block.py, penstock/parallel/graphs.py). The first micro-batch of the
second step captures them. Dispatch, experts, combine and dense networks stay eager, so the host may read row counts.
Parts hold no collectives and do not depend on the rows of other ranks, so repeated steps replay them too.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.base.errors import DeviceError, KernelError
from penstock.base.spans import MICRO_BATCH, Span
from penstock.config.parallel import Captured
from penstock.config.rules import capture_problem
from penstock.config.run import Run
from penstock.kernels.choose import Choice
from penstock.models.rank_model import RankModel
from penstock.moe.dispatch.row_capacity import widenings
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather_json
from penstock.parallel.graphs import Capture, PartialGraphs, Replayable, capture, one_pool
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import GlobalBatch, MicroBatch
from penstock.train.loss import LossRule
from penstock.train.passes import differentiate, forward_backward

if TYPE_CHECKING:  # the module imports Triton, which may be absent
    from penstock.parallel.symmetric import TransferDirection


class _Captured:
    """State that captured passes and captured parts share."""

    def __init__(self, *, is_asked_for: bool) -> None:
        self.pool_bytes = 0
        self._is_asked_for = is_asked_for
        self._is_warm = False
        self._is_given_up = False
        self._notices: list[str] = []

    def take_notices(self) -> tuple[str, ...]:
        """New notices for the user."""
        notices, self._notices = tuple(self._notices), []
        return notices


class CapturedPasses(_Captured):
    """`forward_backward` by replaying a graph; called the same way.

    Args:
        is_asked_for: out of memory is an error; otherwise passes stay eager, with a notice.

    Attributes:
        pool_bytes: device memory of the graph; 0 without one.
    """

    def __init__(self, *, is_asked_for: bool, capture: Capture = capture) -> None:
        super().__init__(is_asked_for=is_asked_for)
        self._capture = capture
        self._widenings = 0
        self._pass: _CapturedPass | None = None

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        """See `forward_backward`.

        Raises:
            DeviceError: out of memory for the graph on any rank, and it was asked for.
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

    def release(self) -> None:
        """Release the graph; the next step captures another. Call it before the process group ends."""
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
    """The first rank's reason against a graph; empty if no rank has one. All ranks call it."""
    return next((one for one in all_gather_json(obstacle, world) if one), "")


def no_memory(what: str, obstacle: str) -> DeviceError:
    """Error for a user that asked for graphs."""
    fix = "a smaller training.micro_batch, more recompute.modules, or graphs.capture=none"
    return DeviceError(what, got=obstacle, fix=fix)


@dataclass(frozen=True)
class _CapturedPass:
    """A graph with its input and output tensors.

    Attributes:
        parts: output, see `MicroLoss.parts`.
    """

    graph: Replayable
    model: RankModel
    batch: GlobalBatch
    parts: Tensor
    transfers: "Sequence[tuple[TransferDirection, int]]"

    def replay(self, micro_batch: MicroBatch, counted: Tensor) -> Tensor:
        """Run the pass on another micro-batch. The next replay overwrites the returned losses."""
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
    """A copy in separate memory."""
    reading, labels = micro_batch.reading, micro_batch.labels
    documents_BS, query_positions_S = reading.documents_BS, reading.query_positions_S
    own = replace(
        reading,
        tokens_BS=reading.tokens_BS.clone(),
        positions_BS=reading.positions_BS.clone(),
        ahead=tuple(ahead_BS.clone() for ahead_BS in reading.ahead),
        documents_BS=None if documents_BS is None else documents_BS.clone(),
        query_positions_S=None if query_positions_S is None else query_positions_S.clone(),
    )
    return MicroBatch(reading=own, labels=tuple(labels_BS.clone() for labels_BS in labels))


def fill(own: MicroBatch, own_counted: Tensor, micro_batch: MicroBatch, counted: Tensor) -> None:
    """Copy a micro-batch into another one of the same shapes.

    Args:
        own: input of the graph.
        own_counted: input of the graph.
        micro_batch: source of `own`.
        counted: source of `own_counted`.
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
    """All tensors that a pass reads of its micro-batch, by name."""
    labels = {f"labels {depth}": labels_BS for depth, labels_BS in enumerate(micro_batch.labels)}
    return micro_batch.reading.tensors | labels | {"counted": counted}


class CapturedParts(_Captured):
    """`forward_backward` with replayed parts; called the same way.

    Args:
        is_asked_for: out of memory is an error; otherwise passes continue eagerly, with a notice.
        begin_pool: returns a `Capture` whose graphs share one new pool.

    Attributes:
        pool_bytes: device memory of the parts; 0 without them.
    """

    def __init__(self, *, is_asked_for: bool, begin_pool: Callable[[], Capture] = one_pool) -> None:
        super().__init__(is_asked_for=is_asked_for)
        self._begin_pool = begin_pool
        self._parts: PartialGraphs | None = None

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        """See `forward_backward`.

        Raises:
            DeviceError: out of memory for a part on any rank, and it was asked for.
        """
        if not self._is_warm or self._is_given_up:
            self._is_warm = True
            return forward_backward(model, batch, rule, enter)
        sums = torch.zeros(1 + rule.depths, device=model.device)
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number):
                sums += self._differentiate(model, micro_batch, batch.counted, rule, enter)
        return sums

    def release(self) -> None:
        """Release the parts; the next step captures others."""
        if self._parts is not None:
            self._parts.release()
        self._parts, self.pool_bytes = None, 0

    def _differentiate(
        self, model: RankModel, micro_batch: MicroBatch, counted: Tensor, rule: LossRule, enter: EnterPhase
    ) -> Tensor:
        if self._is_given_up:
            return differentiate(model, micro_batch, counted, rule, enter)
        is_new = self._parts is None
        if self._parts is None:
            self._parts = PartialGraphs(self._begin_pool())
        reading = replace(micro_batch.reading, parts=self._parts)
        losses = differentiate(model, replace(micro_batch, reading=reading), counted, rule, enter)
        if is_new:
            self._judge(self._parts, model)
        return losses

    def _judge(self, parts: PartialGraphs, model: RankModel) -> None:
        """Keep the parts on all ranks, or on none. The pass that captured them is correct in any case."""
        obstacle = first_obstacle(parts.obstacle, model.axes.world)
        if not obstacle:
            self.pool_bytes = parts.pool_bytes
            self._notices.append(
                f"graphs: {parts.count} parts captured in {parts.seconds:.1f} s; they keep "
                f"{self.pool_bytes / 1e9:.2f} GB"
            )
            return
        self.release()
        if self._is_asked_for:
            raise no_memory("graphs.capture=partial finds no memory for a part", obstacle)
        self._is_given_up = True
        self._notices.append(f"graphs: layers stay eager, there is no memory for a part ({obstacle})")


READS_COUNTS: dict[Captured, tuple[str, ...]] = {"full": ("permute", "experts"), "partial": ("permute",)}
"""Operators whose reference implementation reads row counts on the host."""


def choose_capture(
    run: Run, device: torch.device, choices: Sequence[Choice]
) -> tuple[CapturedPasses | CapturedParts | None, str]:
    """Choose how the passes of a run are made.

    Args:
        run: with the user's `graphs.capture`.

    Returns:
        The passes, or None for eager ones; and a note for the user, empty with `graphs.capture` none.

    Raises:
        DeviceError: graphs are asked for, and the device has none.
        KernelError: graphs are asked for, and a kernel waits for the device.
    """
    wanted = run.graphs.capture
    if wanted == "none":
        return None, ""
    if wanted != "auto":
        _refuse(wanted, run, device, choices)
    obstacle = why_not("full", run, device, choices)
    if wanted == "full" or (wanted == "auto" and not obstacle):
        return CapturedPasses(is_asked_for=wanted == "full"), "passes, from the second step on"
    if wanted == "partial":
        return CapturedParts(is_asked_for=True), "parts of layers, from the second step on"
    if why_not("partial", run, device, choices):
        return None, f"none: {obstacle}"
    return CapturedParts(is_asked_for=False), f"parts of layers, from the second step on; no passes: {obstacle}"


def why_not(what: Captured, run: Run, device: torch.device, choices: Sequence[Choice]) -> str:
    """The reason why passes, or parts of layers, cannot be captured; empty if they can."""
    if device.type != "cuda":
        return f"device {device.type} has no graphs"
    problem = capture_problem(run, what)
    if problem is not None:
        return f"{problem.field} {problem.what}"
    waiting = _waiting(what, run, choices)
    return f"the reference form of {waiting} reads counts on the host" if waiting else ""


def _refuse(what: Captured, run: Run, device: torch.device, choices: Sequence[Choice]) -> None:
    """Raise if the asked capture is impossible on this device; rules refuse those that are impossible everywhere."""
    if device.type != "cuda":
        raise DeviceError(f"graphs.capture={what} needs a GPU", got=f"device {device.type}", fix="graphs.capture=auto")
    waiting = _waiting(what, run, choices)
    if waiting:
        raise KernelError(
            f"graphs.capture={what} cannot be had: the reference form of {waiting} reads counts on the host",
            fix=f"leave kernels.{waiting} and kernels.all at auto, or set graphs.capture=none",
        )


def _waiting(what: Captured, run: Run, choices: Sequence[Choice]) -> str:
    """A chosen operator that waits for the device; empty if there is none."""
    if run.model.moe is None:
        return ""
    return next((one.op for one in choices if one.op in READS_COUNTS[what] and one.backend == "reference"), "")
