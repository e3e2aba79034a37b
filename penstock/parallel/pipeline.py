"""Runs the action list of a pipeline schedule on this rank's stages: the list sets the order, this file moves tensors.

    F   take the input (a message, or the output of an own stage), run the stage, send the output
    B   take the output's gradient, differentiate, send the input's gradient
    I   the same for the input alone; weight gradients become tasks (penstock/parallel/async_transfer.py)
    W   run these tasks

In a pair of F and B the forward pass runs to its next yield whenever the backward pass has started a transfer, inside
autograd's own pass and on its thread:

    compute     B loss | F attention   | B experts      | F experts     | B attention   | ...
    transfers          | B combine     | F dispatch     | B dispatch    | F combine     | ...

Compute never waits for a send. Messages of one sender travel in its order, which the receiver knows from the schedule:
it posts receives in that order and stores early messages. Messages up and down use different groups, because on one
NCCL communicator a send that waits for its receiver would block a receive behind it. So a schedule that
`penstock.layout.actions` can play does not hang. No receive is posted ahead of need: NCCL's would wait on the GPU, and
a first step hung then, probably because CUDA does not load a new kernel beside it (decision 0015).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.base.spans import ACTIONS, Span
from penstock.layout.actions import Action, Kind, Schedule
from penstock.layout.schedules import forward_only
from penstock.parallel.async_transfer import Task, TransferStream, WeightGradStore
from penstock.parallel.axes import Axes
from penstock.parallel.layer_context import Steps, drain, within
from penstock.parallel.spans import EnterPhase, span, untimed

StageCall = Callable[[int, Tensor | None], Steps[Tensor]]
"""(micro-batch, input, or None on the first stage) -> steps to the output; on the last stage to the loss, a scalar."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Hidden states of one micro-batch between stages, B x s x D in the compute dtype, or their gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _MessageTag:
    """One message: the input of a stage (upwards), or the gradient of its output (downwards), for a micro-batch."""

    stage: int
    is_gradient: bool
    micro_batch: int


@dataclass(frozen=True, eq=False)
class PipelineRunner:
    """One rank's part of a pipeline, with the `weight_grads` and `transfers` that its stages were built with."""

    schedule: Schedule
    axes: Axes
    message: Message
    weight_grads: WeightGradStore | None = None  # None if the schedule never defers them
    transfers: TransferStream | None = None  # None if the schedule has no pairs

    def __post_init__(self) -> None:
        name = self.schedule.name
        can_split = self.weight_grads is not None or not self.schedule.splits_backward
        assert can_split, f"{name} puts weight gradients off"
        assert self.transfers is not None or not self.schedule.pairs, f"{name} computes while tokens travel"

    def train(self, calls: Mapping[int, StageCall], enter: EnterPhase = untimed) -> None:
        """One step, whose gradients are in the parameters afterwards, by the `calls` of this rank's stages.

        `enter` gets the phase of each action, for a pair that of backward.
        """
        messenger = _Messenger(self.schedule, self.axes, self.message)
        _Run(self.schedule, messenger, calls, self.weight_grads, self.transfers).play(self.axes.pipeline.rank, enter)

    @torch.no_grad()
    def evaluate(self, calls: Mapping[int, StageCall], micro_batches: int) -> None:
        """Forward passes only, of `micro_batches` on every rank."""
        schedule = forward_only(self.schedule, micro_batches)
        _Run(schedule, _Messenger(schedule, self.axes, self.message), calls).play(self.axes.pipeline.rank)


@dataclass(eq=False)
class _Run:
    schedule: Schedule
    messenger: "_Messenger"
    calls: Mapping[int, StageCall]
    weight_grads: WeightGradStore | None = None
    transfers: TransferStream | None = None
    # By stage and micro-batch: input and end of the graph of a pass that waits for backward; deferred weight gradients.
    passes: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    work: dict[tuple[int, int], list[Task]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.schedule.stages - 1

    def play(self, rank: int, enter: EnterPhase = untimed) -> None:
        for unit in self.schedule.units(rank):
            enter(Span.FORWARD if unit[-1].kind is Kind.FORWARD else Span.BACKWARD)
            with _span_of(unit[-1]):
                self._do(*unit)
        assert not self.passes and not self.work, "the schedule left something undone"
        self.messenger.finish()

    def _do(self, *unit: Action) -> None:
        if len(unit) > 1:
            self._forward_in_backward(*unit)
            return
        (action,) = unit
        match action.kind:
            case Kind.FORWARD:
                drain(self._forward(action))
            case Kind.BACKWARD:
                self._backward(action)
            case Kind.INPUT:
                self._backward_input(action)
            case Kind.WEIGHT:
                for task in self.work.pop((action.stage, action.micro_batch)):
                    task()

    def _forward(self, action: Action) -> Steps[None]:
        stage, _, micro_batch = action
        x = None
        if stage > 0:
            x = self.messenger.take(_MessageTag(stage, False, micro_batch))
            x.requires_grad_(torch.is_grad_enabled())  # a leaf: backward leaves the message for the stage before in it
        output = yield from self.calls[stage](micro_batch, x)
        if torch.is_grad_enabled():
            # Behind the last stage is a scalar. Of others backward needs the place in the graph, not what was computed.
            self.passes[stage, micro_batch] = (x, output if stage == self.last else get_gradient_edge(output))
        if stage < self.last:
            self.messenger.send(_MessageTag(stage + 1, False, micro_batch), output.detach())

    def _forward_in_backward(self, forward: Action, backward: Action) -> None:
        """A forward pass in the gaps of a backward pass.

        Autograd takes nodes in reverse order of their numbers, which each thread counts by itself. So both passes stay
        on this thread, or the forward pass would not be differentiated in its mirror order.
        """
        assert self.transfers is not None, "PipelineRunner checks it"
        steps = within(partial(_span_of, forward), self._forward(forward))
        with (
            self.transfers.during_transfers(partial(next, steps, None)),
            torch.autograd.set_multithreading_enabled(False),
        ):
            self._backward(backward, before_sending=partial(drain, steps))  # steps that found no gap run then

    def _backward(self, action: Action, before_sending: Callable[[], None] | None = None) -> None:
        stage, _, micro_batch = action
        x, end = self.passes.pop((stage, micro_batch))
        gradient = None if stage == self.last else self.messenger.take(_MessageTag(stage, True, micro_batch))
        torch.autograd.backward(end, gradient)
        if before_sending is not None:
            before_sending()
        if x is not None:
            assert x.grad is not None, f"stage {stage} does not depend on its input"
            self.messenger.send(_MessageTag(stage - 1, True, micro_batch), x.grad)

    def _backward_input(self, action: Action) -> None:
        assert self.weight_grads is not None, "PipelineRunner checks it"
        with self.weight_grads.collecting() as work:
            self._backward(action)
        self.work[action.stage, action.micro_batch] = work


def _span_of(action: Action) -> AbstractContextManager[object]:
    return span(ACTIONS[action.kind], action.stage, action.micro_batch)


class _Messenger:
    """Messages of one rank: sent as they are made, received in the sender's order."""

    def __init__(self, schedule: Schedule, axes: Axes, message: Message) -> None:
        self._schedule = schedule
        self._axes = axes
        self._message = message
        self._own = axes.pipeline.rank
        self._local: dict[_MessageTag, Tensor] = {}  # between stages of this rank
        self._sent: list[tuple[Tensor, dist.Work]] = []  # tensors that must live until they have left
        self._posted: dict[_MessageTag, tuple[Tensor, dist.Work]] = {}  # receives, also those that came early
        self._coming: dict[int, Iterator[_MessageTag]] = {  # by sender, in its order
            peer: iter(_tags_between(schedule, peer, self._own)) for peer in range(schedule.ranks)
        }

    def send(self, tag: _MessageTag, tensor: Tensor) -> None:
        """Start a message, or store it if it is our own. The tensor is not changed afterwards."""
        peer = self._schedule.rank_of(tag.stage)
        if peer == self._own:
            self._local[tag] = tensor
            return
        self._release_sent()
        # The group is chosen by the ranks' order, not by the kind of message.
        axis = self._axes.pipeline if peer > self._own else self._axes.pipeline_back
        tensor = tensor.contiguous()
        work = dist.isend(tensor, axis.ranks[peer], group=axis.group)
        assert work is not None, "isend gives work to every rank of its group"
        self._sent.append((tensor, work))

    def take(self, tag: _MessageTag) -> Tensor:
        """Wait for a message. On a GPU the stream waits, not the host."""
        if tag in self._local:
            return self._local.pop(tag).detach()
        peer = self._schedule.rank_of(tag.stage + 1 if tag.is_gradient else tag.stage - 1)
        while tag not in self._posted:
            self._receive_next(peer, tag)
        tensor, work = self._posted.pop(tag)
        work.wait()
        return tensor

    def _release_sent(self) -> None:
        """Free messages that have left. Gloo cannot tell before a wait, so there they stay."""
        under_way = []
        for tensor, work in self._sent:
            if work.is_completed():
                work.wait()  # costs nothing now; NCCL's work holds the tensor until then
            else:
                under_way.append((tensor, work))
        self._sent = under_way

    def finish(self) -> None:
        for _, work in self._sent:
            work.wait()

    def _receive_next(self, peer: int, wanted: _MessageTag) -> None:
        """Post the receive of the next message from a rank, which may not be the wanted one."""
        tag = next(self._coming[peer], None)
        assert tag is not None, f"no rank sends {wanted}"
        axis = self._axes.pipeline if self._own > peer else self._axes.pipeline_back  # the sender's choice
        tensor = torch.empty(self._message.shape, dtype=self._message.dtype, device=self._message.device)
        work = dist.irecv(tensor, axis.ranks[peer], group=axis.group)
        assert work is not None, "irecv gives work to every rank of its group"
        self._posted[tag] = (tensor, work)


def _tags_between(schedule: Schedule, sender: int, receiver: int) -> list[_MessageTag]:
    tags = []
    for stage, kind, micro_batch in schedule.actions[sender]:
        if kind is Kind.FORWARD and stage + 1 < schedule.stages:
            tags.append(_MessageTag(stage + 1, False, micro_batch))
        elif kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0:
            tags.append(_MessageTag(stage - 1, True, micro_batch))
    return [tag for tag in tags if sender != receiver == schedule.rank_of(tag.stage)]
