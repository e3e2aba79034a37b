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

`graphs.capture` auto, the default, captures where the host is slower than the device: the second step stays eager and
measures how far the device is behind when the host has launched the last kernel. Where the device is the limit, graphs
gain little, keep memory, and hide phases of a pass from metrics and recordings.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.base.errors import ConfigError, DeviceError, KernelError, PenstockError
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
from penstock.parallel.symmetric import TransferDirection
from penstock.train.passes import GlobalBatch, LossRule, MicroBatch, differentiate, forward_backward


@dataclass(frozen=True)
class _CapturedPass:
    """A graph with its input and output tensors."""

    graph: Replayable
    model: RankModel
    batch: GlobalBatch  # input: one micro-batch
    parts: Tensor  # output, see `MicroLoss.parts`
    transfers: Sequence[tuple[TransferDirection, int]]  # that a replay makes through symmetric memory

    def replay(self, micro_batch: MicroBatch, counted: Tensor) -> Tensor:
        """Run the pass on another micro-batch. The next replay overwrites the returned losses."""
        fill(self.batch.micro_batches[0], self.batch.counted, micro_batch, counted)
        if self.model.buffers is not None:
            self.model.buffers.replayed(self.transfers)
        self.graph.replay()
        return self.parts

    def release(self) -> None:
        self.graph.release()


HeldT = TypeVar("HeldT", _CapturedPass, PartialGraphs)


class _Captured(Generic[HeldT]):
    """State that captured passes and captured parts share.

    If any rank has no memory for a graph, all passes stay eager, with a notice; a DeviceError if `is_asked_for`.
    """

    def __init__(self, *, is_asked_for: bool) -> None:
        self.pool_bytes = 0  # device memory of what is captured
        self._held: HeldT | None = None
        self._is_asked_for = is_asked_for
        self._is_warm = False  # an eager step has compiled the kernels and created the communicators
        self._is_given_up = False
        self._notices: list[str] = []

    @property
    def is_warm(self) -> bool:
        return self._is_warm

    def take_notices(self) -> tuple[str, ...]:
        notices, self._notices = tuple(self._notices), []
        return notices

    def release(self) -> None:
        """Release what is captured; the next step captures anew. Call it before the process group ends."""
        if self._held is not None:
            self._held.release()
        self._held, self.pool_bytes = None, 0

    def _is_possible(self, obstacle: str, world: Axis, wanted: str, eager: str) -> bool:
        """Whether no rank has an obstacle, else give up on all ranks. All ranks call it after a capture."""
        obstacle = next(filter(None, all_gather_json(obstacle, world)), "")
        if not obstacle:
            return True
        self.release()
        if self._is_asked_for:
            fix = "a smaller training.micro_batch, more recompute.modules, or graphs.capture=none"
            raise DeviceError(f"graphs.capture={wanted}", got=obstacle, fix=fix)
        self._is_given_up = True
        self._notices.append(f"graphs: {eager} ({obstacle})")
        return False


class CapturedPasses(_Captured[_CapturedPass]):
    """`forward_backward` by replaying a graph; called the same way."""

    def __init__(self, *, is_asked_for: bool, capture: Capture = capture) -> None:
        super().__init__(is_asked_for=is_asked_for)
        self._capture = capture
        self._widenings = 0  # of the expert buffers so far

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        if (now := widenings(model.modules)) != self._widenings:
            # A step that is repeated with larger buffers: their addresses have changed.
            self._widenings = now
            self.release()
            return forward_backward(model, batch, rule, enter)
        if self._is_warm and not self._is_given_up and self._held is None:
            self._make_pass(model, batch, rule)
        self._is_warm = True
        if self._held is None:
            return forward_backward(model, batch, rule, enter)
        sums = torch.zeros(1 + rule.depths, device=model.device)
        enter(Span.REPLAY)
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number), span(Span.REPLAY):
                sums += self._held.replay(micro_batch, batch.counted)
        return sums

    def _make_pass(self, model: RankModel, batch: GlobalBatch, rule: LossRule) -> None:
        obstacle = ""
        try:
            self._held = _capture_pass(self._capture, model, batch, rule)
        except torch.OutOfMemoryError as error:
            obstacle = str(error).partition(". ")[0]
        wanted, eager = "full finds no memory for a pass", "passes stay eager, there is no memory for a graph"
        if self._is_possible(obstacle, model.axes.world, wanted, eager):
            assert self._held is not None, "a capture gives a graph or an obstacle"
            graph = self._held.graph
            self.pool_bytes = graph.pool_bytes
            self._notices.append(
                f"graphs: one pass captured in {graph.seconds:.1f} s; its pool keeps {self.pool_bytes / 1e9:.2f} GB"
            )


def _capture_pass(capture: Capture, model: RankModel, batch: GlobalBatch, rule: LossRule) -> _CapturedPass:
    micro_batch = deepcopy(batch.micro_batches[0])
    counted = batch.counted.clone()
    parts = torch.zeros(1 + rule.depths, device=model.device)

    def work() -> None:
        parts.copy_(differentiate(model, micro_batch, counted, rule))

    transfers: list[tuple[TransferDirection, int]] = []
    with ExitStack() as around:
        if model.buffers is not None:
            transfers = around.enter_context(model.buffers.recording())
        graph = capture(work)
    return _CapturedPass(graph, model, GlobalBatch(micro_batches=(micro_batch,), counted=counted), parts, transfers)


def fill(own_batch: MicroBatch, own_counted: Tensor, micro_batch: MicroBatch, counted: Tensor) -> None:
    """Copy a micro-batch and its counts into those that a graph reads, which have the same shapes."""
    share, own_share = micro_batch.reading.share, own_batch.reading.share
    assert share == own_share, f"a graph of a share of {own_share} is replayed for one of {share}"
    targets, sources = _tensors(own_batch, own_counted), _tensors(micro_batch, counted)
    assert targets.keys() == sources.keys(), f"a graph that reads {[*targets]} is given {[*sources]}"
    for name, target in targets.items():
        source = sources[name]
        assert (source.shape, source.dtype) == (target.shape, target.dtype), (
            f"{name} of a graph is {target.dtype} {tuple(target.shape)}, and {source.dtype} {tuple(source.shape)} came"
        )
        target.copy_(source)


def _tensors(micro_batch: MicroBatch, counted: Tensor) -> dict[str, Tensor]:
    labels = {f"labels {depth}": labels_BS for depth, labels_BS in enumerate(micro_batch.labels)}
    return micro_batch.reading.tensors | labels | {"counted": counted}


class CapturedParts(_Captured[PartialGraphs]):
    """`forward_backward` with replayed parts; called the same way.

    `begin_pool` returns a `Capture` whose graphs share one new pool.
    """

    def __init__(self, *, is_asked_for: bool, begin_pool: Callable[[], Capture] = one_pool) -> None:
        super().__init__(is_asked_for=is_asked_for)
        self._begin_pool = begin_pool

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        if not self._is_warm or self._is_given_up:
            self._is_warm = True
            return forward_backward(model, batch, rule, enter)
        sums = torch.zeros(1 + rule.depths, device=model.device)
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number):
                sums += self._differentiate(model, micro_batch, batch.counted, rule, enter)
        return sums

    def _differentiate(
        self, model: RankModel, micro_batch: MicroBatch, counted: Tensor, rule: LossRule, enter: EnterPhase
    ) -> Tensor:
        if self._is_given_up:
            return differentiate(model, micro_batch, counted, rule, enter)
        is_new = self._held is None
        parts = self._held = self._held or PartialGraphs(self._begin_pool())
        reading = replace(micro_batch.reading, parts=parts)
        losses = differentiate(model, replace(micro_batch, reading=reading), counted, rule, enter)
        # The pass that captured the parts is correct in any case.
        wanted, eager = "partial finds no memory for a part", "layers stay eager, there is no memory for a part"
        if is_new and self._is_possible(parts.obstacle, model.axes.world, wanted, eager):
            self.pool_bytes, seconds = parts.pool_bytes, f"{parts.seconds:.1f} s"
            keeps = f"{self.pool_bytes / 1e9:.2f} GB"
            self._notices.append(f"graphs: {parts.count} parts captured in {seconds}; they keep {keeps}")
        return losses


HOST_LIMITS_BELOW = 0.2
"""Auto captures where the device is behind the host, at the end of eager passes, by less than this share of their time.

On H200s it was at most 0.02 where captured steps were 1.08 to 1.63 times as fast, and 0.39 where they were 1.02 times
as fast (docs/graphs.md).
"""


@dataclass(frozen=True)
class EagerPasses:
    """What eager passes show about their host."""

    sums: Tensor
    behind: float  # share of their time in which the host has launched everything and the device has not done it
    has_room: bool  # for the pool of a graph beside the update, which cannot use it


def _measured(model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase) -> EagerPasses:
    device = model.device
    torch.cuda.synchronize(device)
    # Passes and update need at most `peak - resident` each, as far as is known: one of them is the pool of a graph.
    resident, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    begin = time.perf_counter()
    sums = forward_backward(model, batch, rule, enter)
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    end = time.perf_counter()
    return EagerPasses(sums, (end - launched) / (end - begin), peak + (peak - resident) <= usable)


class AutoPasses:
    """Passes of `graphs.capture` auto: eager for two steps, then `captured` if the host limits them on any rank."""

    def __init__(
        self,
        captured: CapturedPasses | CapturedParts,
        measure: Callable[[RankModel, GlobalBatch, LossRule, EnterPhase], EagerPasses] = _measured,
    ) -> None:
        self._captured = captured
        self._measure = measure
        self._is_chosen: bool | None = None  # None until the second step has been measured
        self._notices: tuple[str, ...] = ()

    @property
    def pool_bytes(self) -> int:
        return self._captured.pool_bytes

    def take_notices(self) -> tuple[str, ...]:
        notices, self._notices = (*self._notices, *self._captured.take_notices()), ()
        return notices

    def release(self) -> None:
        self._captured.release()

    def __call__(self, model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
        if self._is_chosen or not self._captured.is_warm:
            return self._captured(model, batch, rule, enter)  # which is eager in its first step
        if self._is_chosen is not None:
            return forward_backward(model, batch, rule, enter)
        eager = self._measure(model, batch, rule, enter)
        self._choose(all_gather_json({"behind": eager.behind, "has_room": eager.has_room}, model.axes.world))
        return eager.sums

    def _choose(self, ranks: Sequence[Any]) -> None:
        behind = min(rank["behind"] for rank in ranks)  # of the slowest host
        has_room = all(rank["has_room"] for rank in ranks)
        self._is_chosen = behind < HOST_LIMITS_BELOW and has_room
        if self._is_chosen:
            why = f"the host limits passes: at their end the device is {behind:.0%} of their time behind"
        elif has_room:
            why = f"passes stay eager, the device limits them: at their end it is {behind:.0%} of their time behind"
        else:
            why = "passes stay eager, there may be no memory for a graph beside the update (graphs.capture=full tries)"
        self._notices = (f"graphs: {why}",)


READS_COUNTS: dict[Captured, tuple[str, ...]] = {"full": ("permute", "experts"), "partial": ("permute",)}
"""Operators whose reference implementation reads row counts on the host."""


def choose_capture(
    run: Run, device: torch.device, choices: Sequence[Choice]
) -> tuple[CapturedPasses | CapturedParts | AutoPasses | None, str]:
    """Choose the passes of a run by its `graphs.capture`: (passes, or None for eager ones; a note for the user).

    If graphs are asked for, raises a DeviceError if the device has none, and a KernelError if a kernel waits for it.
    """
    wanted = run.graphs.capture
    if wanted == "none" or (wanted == "auto" and device.type != "cuda"):
        return None, ""
    if wanted == "auto" and torch.version.hip is not None:
        return None, "none: by default not on AMD GPUs, where they have not been run (graphs.capture=full tries)"
    if wanted == "auto":
        return _auto(run, device, choices)
    if (problem := _obstacle(wanted, run, device, choices)) is not None:
        raise type(problem)(f"graphs.capture={wanted} is not available: {problem.what}", fix=problem.fix)
    if wanted == "full":
        return CapturedPasses(is_asked_for=True), "passes, from the second step on"
    return CapturedParts(is_asked_for=True), "parts of layers, from the second step on"


def _auto(run: Run, device: torch.device, choices: Sequence[Choice]) -> tuple[AutoPasses | None, str]:
    when = "from the third step on if the host limits passes (graphs.capture=none for never)"
    if (obstacle := _obstacle("full", run, device, choices)) is None:
        return AutoPasses(CapturedPasses(is_asked_for=False)), f"passes, {when}"
    if _obstacle("partial", run, device, choices) is not None:
        return None, f"none: {obstacle.what}"
    return AutoPasses(CapturedParts(is_asked_for=False)), f"parts of layers, {when}; no passes: {obstacle.what}"


def _obstacle(what: Captured, run: Run, device: torch.device, choices: Sequence[Choice]) -> PenstockError | None:
    if device.type != "cuda":
        return DeviceError(f"device {device.type} has no graphs", fix="graphs.capture=auto")
    if (problem := capture_problem(run, what)) is not None:
        return ConfigError(f"{problem.field} {problem.what}", fix="graphs.capture=auto")
    for choice in choices if run.model.moe is not None else ():
        if choice.op in READS_COUNTS[what] and choice.backend == "reference":
            reason = f"the reference form of {choice.op} reads counts on the host"
            return KernelError(reason, fix=f"leave kernels.{choice.op} and kernels.all at auto, or graphs.capture=none")
    return None
