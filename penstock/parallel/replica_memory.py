"""Replicas of experts in the memory that the GPUs of a node map for each other; the host reads nothing.

The buffers of dispatch have two sections more, the same on every rank and shared by all layers:

    slots        weights of replicas, written by the ranks of their experts
    gradients    float32 sums of replicas, read by the ranks of their experts

A fetch runs on a stream of its own beside the products of own experts:

    meet     all ranks have read their slots of the fetch before
    push     each rank writes its experts to the slots of the plan
    meet     all slots are written; products of replicas wait for this

Gradients go home on the stream of the products: a meeting says that all ranks have written theirs, and each rank adds
those of its experts. Gradients are written again only after another meeting, in a fetch or here. Ranks make the same
calls in the same order, and a meeting waits for the flags of all (`SymmetricBuffers.meet`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.replica_plan import ReplicaPlan
from penstock.kernels.replica_slots import already_here
from penstock.kernels.replica_transfer import clear_slots, pull_gradients, push_replicas
from penstock.parallel.replica_exchange import ReplicaSizes
from penstock.parallel.symmetric import Channel, SymmetricBuffers


@dataclass
class ReplicaMemory:
    """The sections of a rank, for all of its layers."""

    buffers: SymmetricBuffers
    sizes: ReplicaSizes
    dtype: torch.dtype  # of the weights
    unread: set[int] = field(default_factory=set)  # gradients, by place, that other ranks may still read

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of fetches; None on a CPU, where ranks are simulated, and in a plan."""
        late = self.buffers.late
        return torch.cuda.Stream(late.device) if late.is_cuda else None

    def meet(self, channel: Channel) -> None:
        """Block the stream until all ranks are here: what they read before may be written."""
        self.buffers.meet(channel)
        self.unread.clear()

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
            memory.meet(Channel.GRADIENTS)
        clear_slots(sums, self.plan, memory.sizes.rule, memory.buffers.peers)
        return sums

    def give_back(self, place: int, gradients: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
        """See `ReplicaSlots.give_back`."""
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
            pull_gradients(total_e, self.plan, rule, peers, memory.at(sections[one]))
        memory.unread.update(places)

    def _push(self, own: Sequence[Tensor]) -> None:
        memory = self.memory
        memory.meet(Channel.REPLICAS)
        for place, weight_e in enumerate(own):
            at = memory.at(memory.sizes.weights[place])
            push_replicas(weight_e.detach().contiguous(), self.plan, memory.sizes.rule, memory.buffers.peers, at)
        memory.meet(Channel.REPLICAS)
