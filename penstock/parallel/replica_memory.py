"""Replicas of experts in the memory that the GPUs of a node map for each other; the host reads nothing.

The buffers of dispatch have two sections more, the same on every rank and shared by all layers:

    slots        weights of replicas, written by the ranks of their experts
    gradients    float32 sums of replicas, read by the ranks of their experts

A fetch writes on a stream of its own. The dispatcher begins it before rows travel to the experts, or gradients of their
outputs, because the products of own experts leave no multiprocessor to kernels that start beside them (by a trace of W0
on two H200s):

    push     each rank writes its experts to the slots of the plan, and signals all ranks
    wait     for the signals of all ranks: on the stream of the products, before those of replicas

Such a fetch needs no meeting, because each rank does one thing after another, and transfers of rows order the ranks:

    slots        A rank that pushes has received outputs, or gradients of inputs, from all ranks, sent after they read
                 their slots. Between recomputation and backward of a layer is no transfer: both push the same bytes.
    gradients    A rank that writes gradients has received gradients of outputs from all ranks, which they sent after
                 the gradients before were home.

A fetch that begins with the products has no such transfer before it, so the ranks meet before and after the push.

Gradients go home on the same stream, beside the rest of the layer's backward pass: a meeting says that all ranks have
written theirs, and each rank adds those of its experts. The pass ends when they are here (`backward_of_layer`); outside
of one, and where they are read at once, they come on the stream of the products. Gradients are written again only
after another meeting or what stands for one.

Ranks make the same calls in the same order, and a meeting waits for the flags of all (`SymmetricBuffers.meet`). A plan
without replicas has no meetings: their kernels read that in the plan, which is the same on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.replica_plan import PlanFact, ReplicaPlan
from penstock.kernels.replica_slots import already_here
from penstock.kernels.replica_transfer import PULL_PROGRAMS, PUSH_PROGRAMS, clear_slots, pull_gradients, push_replicas
from penstock.kernels.symmetric import signal
from penstock.parallel.in_backward import in_backward
from penstock.parallel.replica_exchange import ReplicaSizes
from penstock.parallel.symmetric import Channel, SymmetricBuffers


@dataclass
class ReplicaMemory:
    """The sections of a rank, for all of its layers."""

    buffers: SymmetricBuffers
    sizes: ReplicaSizes
    dtype: torch.dtype  # of the weights
    unread: set[int] = field(default_factory=set)  # gradients, by place, that other ranks may still read
    in_layer: bool = False  # a layer's backward pass runs, at whose end gradients must be home
    coming: list[ReplicaPlan] = field(default_factory=list)  # plans that a pull beside the pass still reads
    begun: "MappedSlots | None" = None  # whose weights are on their way, without a meeting
    pushed: torch.cuda.Event | None = None  # this rank has written its part of them

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of fetches; None on a CPU, where ranks are simulated, and in a plan."""
        late = self.buffers.late
        return torch.cuda.Stream(late.device) if late.is_cuda else None

    def meet(self, channel: Channel, plan: ReplicaPlan | None = None) -> None:
        """Block the stream until all ranks are here: what they read may be written. With a plan, if it has replicas."""
        self.buffers.meet(channel, None if plan is None else plan.facts[PlanFact.REPLICAS])
        if plan is None:
            self.unread.clear()

    def backward_of_layer(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`layer(x)`, in whose backward pass gradients come home beside the products; they are here when it ends."""
        if not x.requires_grad:  # then its backward pass has no end that autograd tells of
            return layer(x)
        return in_backward(layer(in_backward(x, self.end)), self.begin)

    def begin(self) -> None:
        """A layer's backward pass begins."""
        self.in_layer = True

    def end(self) -> None:
        self.in_layer = False
        self.join()

    def join(self) -> None:
        """Let the current stream continue when all that runs beside it is over."""
        if self.coming and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.coming.clear()

    def arrive(self) -> None:
        """Let the current stream continue when the weights that are on their way are here."""
        if self.begun is None:
            return
        self.begun = None
        if self.pushed is not None:
            torch.cuda.current_stream(self.buffers.late.device).wait_event(self.pushed)
        self.buffers.wait(Channel.REPLICAS, 1)

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


@dataclass(frozen=True, eq=False)
class MappedSlots:
    """`penstock.kernels.replica_slots.ReplicaSlots` for one plan."""

    memory: ReplicaMemory
    plan: ReplicaPlan

    @property
    def slots(self) -> int:
        return self.memory.sizes.rule.slots

    def begin(self, *own: Tensor) -> None:
        memory = self.memory
        memory.arrive()  # begun before recomputation, or by one that ended before its products
        memory.pushed = self._aside(lambda: self._push(own))
        memory.begun = self

    def fetch(self, *own: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        memory = self.memory
        weights = tuple(map(memory.weights, range(len(own))))
        memory.unread.clear()  # rows have travelled since, or travel before gradients are written
        if memory.begun is self:
            return weights, memory.arrive
        memory.arrive()
        pushed = self._aside(lambda: self._push_between_meetings(own))
        if pushed is None:
            return weights, already_here
        return weights, lambda: torch.cuda.current_stream(memory.buffers.late.device).wait_event(pushed)

    def gradient_sums(self, place: int, weight_e: Tensor) -> Tensor:
        memory, sums = self.memory, self.memory.gradients(place)
        if place in memory.unread:
            memory.join()
            memory.meet(Channel.GRADIENTS)
        clear_slots(sums, self.plan, memory.sizes.rule, memory.buffers.peers)
        return sums

    def give_back(
        self, place: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
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
        memory.meet(Channel.GRADIENTS, self.plan)
        for one, total_e in zip(places, totals, strict=True):
            pull_gradients(total_e, self.plan, rule, peers, memory.at(sections[one]), programs)
        memory.unread.update(places)

    def _aside(self, push: Callable[[], None]) -> torch.cuda.Event | None:
        """Do it on the stream of fetches; returns its end, or None where there is no such stream."""
        stream = self.memory.stream
        if stream is None:
            push()
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            push()
            return stream.record_event()

    def _push(self, own: Sequence[Tensor]) -> None:
        memory = self.memory
        self._write(own)
        signal(memory.buffers.peers, memory.buffers.flags_at(Channel.REPLICAS))

    def _push_between_meetings(self, own: Sequence[Tensor]) -> None:
        self.memory.meet(Channel.REPLICAS, self.plan)
        self._write(own)
        self.memory.meet(Channel.REPLICAS, self.plan)

    def _write(self, own: Sequence[Tensor]) -> None:
        memory = self.memory
        for place, weight_e in enumerate(own):
            at = memory.at(memory.sizes.weights[place])
            push_replicas(weight_e.detach().contiguous(), self.plan, memory.sizes.rule, memory.buffers.peers, at)
