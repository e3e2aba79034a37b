"""Replicas of experts in the memory that the GPUs of a node map for each other; the host reads nothing.

The buffers of dispatch have two sections more, the same on every rank and shared by all layers:

    slots        weights of replicas, written by the ranks of their experts
    gradients    float32 sums of replicas, read by the ranks of their experts

A fetch runs on a stream of its own beside the products of own experts:

    meet     all ranks have read their slots of the fetch before
    push     each rank writes its experts to the slots of the plan
    meet     all slots are written; products of replicas wait for this

Gradients go home on the same stream, beside the rest of the layer's backward pass: a meeting says that all ranks have
written theirs, and each rank adds those of its experts. The pass ends when they are here (`backward_of_layer`); outside
of one, and where they are read at once, they come on the stream of the products. Gradients are written again only
after another meeting, in a fetch or here. Ranks make the same calls in the same order, and a meeting waits for the
flags of all (`SymmetricBuffers.meet`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.replica_plan import ReplicaPlan
from penstock.kernels.replica_slots import already_here
from penstock.kernels.replica_transfer import PULL_PROGRAMS, PUSH_PROGRAMS, clear_slots, pull_gradients, push_replicas
from penstock.parallel.replica_exchange import ReplicaSizes
from penstock.parallel.symmetric import Channel, SymmetricBuffers


class _Edge(torch.autograd.Function):
    """Identity that calls a function when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return dx, None


@dataclass
class ReplicaMemory:
    """The sections of a rank, for all of its layers."""

    buffers: SymmetricBuffers
    sizes: ReplicaSizes
    dtype: torch.dtype  # of the weights
    unread: set[int] = field(default_factory=set)  # gradients, by place, that other ranks may still read
    in_layer: bool = False  # a layer's backward pass runs, at whose end gradients must be home
    coming: list[ReplicaPlan] = field(default_factory=list)  # plans that a pull beside the pass still reads

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of fetches; None on a CPU, where ranks are simulated, and in a plan."""
        late = self.buffers.late
        return torch.cuda.Stream(late.device) if late.is_cuda else None

    def meet(self, channel: Channel) -> None:
        """Block the stream until all ranks are here: what they read before may be written."""
        self.buffers.meet(channel)
        self.unread.clear()

    def backward_of_layer(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`layer(x)`, in whose backward pass gradients come home beside the products; they are here when it ends."""
        if not x.requires_grad:  # then its backward pass has no end that autograd tells of
            return layer(x)
        y: Tensor = _Edge.apply(layer(_Edge.apply(x, self.end)), self.begin)
        return y

    def begin(self) -> None:
        """A layer's backward pass begins."""
        self.in_layer = True

    def end(self) -> None:
        """It ends."""
        self.in_layer = False
        self.join()

    def join(self) -> None:
        """Let the current stream continue when all that runs beside it is over."""
        if self.coming and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.coming.clear()

    def weights(self, place: int) -> Tensor:
        """Slots of a parameter, X x its shape."""
        sizes = self.sizes
        return self.buffers.replica_view(sizes.weights[place], (sizes.rule.slots, *sizes.shapes[place]), self.dtype)

    def gradients(self, place: int) -> Tensor:
        """Float32 sums of a parameter's slots."""
        sizes = self.sizes
        shape = sizes.rule.slots, *sizes.shapes[place]
        return self.buffers.replica_view(sizes.gradients[place], shape, torch.float32)

    def at(self, first: int) -> int:
        """Byte of the buffers at which a parameter's section begins."""
        return self.buffers.sizes.replica_offset + first


@dataclass(frozen=True)
class MappedSlots:
    """`penstock.kernels.replica_slots.ReplicaSlots` for one plan."""

    memory: ReplicaMemory
    plan: ReplicaPlan

    @property
    def slots(self) -> int:
        """See `ReplicaSlots`."""
        return self.memory.sizes.rule.slots

    def fetch(self, *own: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """See `ReplicaSlots.fetch`."""
        weights, stream = tuple(map(self.memory.weights, range(len(own)))), self.memory.stream
        if stream is None:
            self._push(own)
            return weights, already_here
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._push(own)
            pushed = stream.record_event()
        return weights, lambda: torch.cuda.current_stream(stream.device).wait_event(pushed)

    def gradient_sums(self, place: int, weight_e: Tensor) -> Tensor:
        """See `ReplicaSlots.gradient_sums`."""
        memory, sums = self.memory, self.memory.gradients(place)
        if place in memory.unread:
            memory.join()
            memory.meet(Channel.GRADIENTS)
        clear_slots(sums, self.plan, memory.sizes.rule, memory.buffers.peers)
        return sums

    def give_back(
        self, place: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        """See `ReplicaSlots.give_back`."""
        memory, stream = self.memory, self.memory.stream
        if not aside or not memory.in_layer or stream is None:
            memory.join()  # meetings follow each other
            self._pull(place, gradients, totals, PULL_PROGRAMS)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        memory.coming.append(self.plan)
        with torch.cuda.stream(stream):
            self._pull(place, gradients, totals, PUSH_PROGRAMS)

    def _pull(self, place: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], programs: int) -> None:
        memory, places = self.memory, range(place, place + len(gradients))
        rule, peers, sections = memory.sizes.rule, memory.buffers.peers, memory.sizes.gradients
        for one, gradient in zip(places, gradients, strict=True):
            sums = memory.gradients(one)
            if sums.data_ptr() != gradient.data_ptr():  # not those of `gradient_sums`
                if one in memory.unread:
                    memory.meet(Channel.GRADIENTS)
                sums.copy_(gradient)
        memory.meet(Channel.GRADIENTS)
        for one, total_e in zip(places, totals, strict=True):
            pull_gradients(total_e, self.plan, rule, peers, memory.at(sections[one]), programs)
        memory.unread.update(places)

    def _push(self, own: Sequence[Tensor]) -> None:
        memory = self.memory
        memory.meet(Channel.REPLICAS)
        for place, weight_e in enumerate(own):
            at = memory.at(memory.sizes.weights[place])
            push_replicas(weight_e.detach().contiguous(), self.plan, memory.sizes.rule, memory.buffers.peers, at)
        memory.meet(Channel.REPLICAS)
