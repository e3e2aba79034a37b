"""Replicas of experts: their weights to the ranks that hold them, their gradients back; memory that GPUs map.

By collectives the host reads which slots are filled, and every exchange sends just these replicas. All ranks of the
axis make the same calls, one message each; if no replica is placed anywhere there is none.

GPUs of a node write to each other's slots, and the host reads nothing. The buffers of dispatch then have two sections
more, the same on every rank and shared by all layers:

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
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from math import prod

import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.config.dispatcher import DispatcherChoice, choose_dispatcher, dispatch_facts, plain_row_bytes
from penstock.config.parallel import Dispatch
from penstock.config.run import Run
from penstock.config.sync_free import IDLE
from penstock.kernels.expert_parts import already_here
from penstock.kernels.float8.quantized import BLOCKWISE, MXFP8, row_bytes
from penstock.kernels.language import record_wait
from penstock.kernels.replica_kernels import PULL_PROGRAMS, PUSH_PROGRAMS, clear_slots, pull_gradients, push_replicas
from penstock.kernels.replica_plan import MILLION, PlanFact, ReplicaPlan, ReplicaRule
from penstock.kernels.symmetric import signal
from penstock.kernels.tuning import TRITON_PACKAGE, installed
from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, Axis
from penstock.parallel.collectives import all_gather, all_gather_json, exchange_rows
from penstock.parallel.symmetric import BufferSizes, Channel, SymmetricBuffers, aligned, allocate

USUAL_SLOTS = 4  # with `dispatch.balance` auto and bounded: enough for all loads but groups without a single row


def replica_rule(experts: int, groups: int, dispatch: Dispatch) -> ReplicaRule | None:
    """The rule of a layer; None if its loads are not balanced, or one group holds all experts."""
    if dispatch.balance == "none" or groups == 1:
        return None
    per_group, is_exact = experts // groups, dispatch.balance == "exact"
    return ReplicaRule(
        experts=experts,
        groups=groups,
        slots=dispatch.balance_slots or (per_group if is_exact else min(USUAL_SLOTS, per_group)),
        tolerance=0 if is_exact else round(dispatch.balance_tolerance * MILLION),
        idle=round(IDLE * MILLION) if dispatch.balance == "auto" else 0,
        least_rows=0 if is_exact else dispatch.balance_rows,
    )


@dataclass(frozen=True)
class ReplicaSizes:
    """Sections of a rank's symmetric memory for the replicas of its layers; the same on all ranks."""

    rule: ReplicaRule
    shapes: tuple[tuple[int, ...], ...]  # of one expert's matrices and biases, as a rank holds them
    itemsize: int  # of the weights

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """First byte of each parameter's slots."""
        return self._starts[: len(self.shapes)]

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """First byte of each parameter's float32 sums."""
        return self._starts[len(self.shapes) : -1]

    @property
    def total_bytes(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        numbers = [self.rule.slots * prod(shape) for shape in self.shapes]
        sizes = [count * self.itemsize for count in numbers] + [count * 4 for count in numbers]
        return tuple(accumulate(map(aligned, sizes), initial=0))


def replica_sizes(run: Run, grid: Grid) -> ReplicaSizes | None:
    """Sections of a rank; None without replicas."""
    moe = run.model.moe
    rule = None if moe is None else replica_rule(moe.experts, grid.expert, run.dispatch)
    if moe is None or rule is None:
        return None
    hidden, width = run.model.hidden_size, moe.moe_intermediate_size // grid.expert_tensor
    wide = run.model.projections * width
    shapes: tuple[tuple[int, ...], ...] = ((wide, hidden), (hidden, width))
    biases: tuple[tuple[int, ...], ...] = ((wide,), (hidden,)) if moe.bias else ()
    return ReplicaSizes(rule, shapes + biases, plain_row_bytes(run) // hidden)


@dataclass(frozen=True)
class ExchangedSlots:
    """`penstock.kernels.expert_parts.ReplicaSlots` for one plan."""

    axis: Axis
    slots: int
    send: tuple[tuple[int, ...], ...]  # own experts whose replicas are on each rank, in the order of its slots
    fill: tuple[tuple[int, ...], ...]  # own slots that are filled from each rank

    def begin(self, *parameters: Tensor) -> None:
        """Nothing: collectives wait for their turn."""

    def fetch(self, *parameters: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        sent = torch.cat([weight_e.detach()[list(chain(*self.send))].flatten(1) for weight_e in parameters], 1)
        came = exchange_rows(sent, self.axis, _sizes(self.fill), _sizes(self.send))
        slots = tuple(weight_e.new_empty(self.slots, *weight_e.shape[1:]) for weight_e in parameters)
        for slots_X, part in zip(slots, came.split([weight_e[0].numel() for weight_e in parameters], 1), strict=True):
            slots_X[list(chain(*self.fill))] = part.view(-1, *slots_X.shape[1:])
        return slots, already_here

    def gradient_sums(self, index: int, weight_e: Tensor) -> Tensor:
        return torch.zeros(self.slots, *weight_e.shape[1:], dtype=torch.float32, device=weight_e.device)

    def give_back(
        self, index: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        sent = torch.cat([gradient_X[list(chain(*self.fill))].flatten(1) for gradient_X in gradients], 1)
        came = exchange_rows(sent, self.axis, _sizes(self.send), _sizes(self.fill))
        for total_e, part in zip(totals, came.split([total_e[0].numel() for total_e in totals], 1), strict=True):
            of_expert: dict[int, Tensor] = {}
            for expert, row in zip(chain(*self.send), part.view(-1, *total_e.shape[1:]), strict=True):
                of_expert[expert] = of_expert.get(expert, total_e[expert].float()) + row
            for expert, total in of_expert.items():
                total_e[expert].copy_(total)


def exchanged_counts(counts_E: Tensor, axis: Axis) -> Tensor:
    """The loads of all ranks, W x E."""
    return all_gather(counts_E[None], axis, dim=0)


def exchanged_slots(plan: ReplicaPlan, rule: ReplicaRule, axis: Axis) -> ExchangedSlots | None:
    """The slots of a plan, which the host reads; None if no group holds a replica."""
    if plan.slot_experts_ZX.is_meta:
        record_wait(plan.slot_experts_ZX)
        nothing: tuple[tuple[int, ...], ...] = ((),) * axis.size
        return ExchangedSlots(axis, rule.slots, nothing, nothing)
    slot_experts: list[list[int]] = plan.slot_experts_ZX.tolist()
    if all(expert == rule.experts for expert in chain(*slot_experts)):
        return None
    parts, m = axis.size // rule.groups, rule.per_group
    group, part = divmod(axis.rank, parts)
    send: list[tuple[int, ...]] = [()] * axis.size
    fill = list(send)
    for other in range(rule.groups):
        rank = other * parts + part  # a rank sends its part of an expert to the same part of another group
        send[rank] = tuple(expert % m for expert in slot_experts[other] if expert // m == group)
        fill[rank] = tuple(slot for slot, expert in enumerate(slot_experts[group]) if expert // m == other)
    return ExchangedSlots(axis, rule.slots, tuple(send), tuple(fill))


def _sizes(by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [len(indices) for indices in by_rank]


def in_backward(x: Tensor, function: Callable[[], None]) -> Tensor:
    """`x`; the backward pass calls `function` when the gradient of this use of `x` is there, before it goes on."""
    if not x.requires_grad:
        return x
    y = x.view_as(x)
    y.register_hook(lambda gradient: function())
    return y


@dataclass
class ReplicaMemory:
    """The sections of a rank, for all of its layers. Ranks make the same calls in the same order.

    Gradients go home on the same stream, beside the rest of the layer's backward pass: a meeting says that all ranks
    have written theirs, and each rank adds those of its experts. They are here when the pass ends
    (`backward_of_layer`); outside of one, and where they are read at once, they come on the stream of the products.
    Kernels of a meeting read in the plan, the same on all ranks, whether there are replicas to meet for.
    """

    buffers: SymmetricBuffers
    sizes: ReplicaSizes
    dtype: torch.dtype  # of the weights
    unread: set[int] = field(default_factory=set)  # gradients, by place, that other ranks may still read
    in_layer: bool = False  # a layer's backward pass runs, at whose end gradients must be home
    pending_pulls: list[ReplicaPlan] = field(default_factory=list)  # plans that a pull beside the pass still reads
    # Slots whose weights are on their way without a meeting, and when this rank has written its part of them.
    in_flight: "tuple[MappedSlots, torch.cuda.Event | None] | None" = None

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of fetches; None on a CPU, where ranks are simulated, and in a plan."""
        late = self.buffers.late
        return torch.cuda.Stream(late.device) if late.is_cuda else None

    def barrier(self, channel: Channel, plan: ReplicaPlan | None = None) -> None:
        """Block the stream until all ranks are here; with a plan, only if it has replicas."""
        self.buffers.meet(channel, None if plan is None else plan.facts[PlanFact.REPLICAS])
        if plan is None:
            self.unread.clear()

    def backward_of_layer(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`layer(x)`, in whose backward pass gradients come home beside the products; they are here when it ends."""

        def begin() -> None:
            self.in_layer = True

        def end() -> None:
            self.in_layer = False
            self.join()

        if not x.requires_grad:  # then its backward pass has no end that autograd tells of
            return layer(x)
        return in_backward(layer(in_backward(x, end)), begin)

    def join(self) -> None:
        """Let the current stream wait for all that runs beside it."""
        if self.pending_pulls and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.pending_pulls.clear()

    def wait_weights(self) -> None:
        """Let the current stream wait for weights that are on their way."""
        if self.in_flight is None:
            return
        (_, pushed), self.in_flight = self.in_flight, None
        if pushed is not None:
            torch.cuda.current_stream(self.buffers.late.device).wait_event(pushed)
        self.buffers.wait(Channel.REPLICAS, 1)

    def weights(self, index: int) -> Tensor:
        """Of a parameter, X x its shape."""
        sizes = self.sizes
        return self.buffers.replica_view(sizes.weights[index], (sizes.rule.slots, *sizes.shapes[index]), self.dtype)

    def gradients(self, index: int) -> Tensor:
        """Float32 sums of a parameter's slots."""
        sizes = self.sizes
        shape = sizes.rule.slots, *sizes.shapes[index]
        return self.buffers.replica_view(sizes.gradients[index], shape, torch.float32)

    def at(self, first: int) -> int:
        return self.buffers.sizes.replica_offset + first


@dataclass(frozen=True, eq=False)
class MappedSlots:
    """`penstock.kernels.expert_parts.ReplicaSlots` for one plan."""

    memory: ReplicaMemory
    plan: ReplicaPlan

    @property
    def slots(self) -> int:
        return self.memory.sizes.rule.slots

    def begin(self, *parameters: Tensor) -> None:
        memory = self.memory
        memory.wait_weights()  # begun before recomputation, or by slots that ended before their products
        memory.in_flight = self, self._beside(lambda: self._push(parameters))

    def fetch(self, *parameters: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        memory = self.memory
        weights = tuple(map(memory.weights, range(len(parameters))))
        memory.unread.clear()  # rows have travelled since, or travel before gradients are written
        if memory.in_flight is not None and memory.in_flight[0] is self:
            return weights, memory.wait_weights
        memory.wait_weights()
        pushed = self._beside(lambda: self._push(parameters, between_barriers=True))
        if pushed is None:
            return weights, already_here
        return weights, lambda: torch.cuda.current_stream(memory.buffers.late.device).wait_event(pushed)

    def gradient_sums(self, index: int, weight_e: Tensor) -> Tensor:
        memory, sums = self.memory, self.memory.gradients(index)
        if index in memory.unread:
            memory.join()
            memory.barrier(Channel.GRADIENTS)
        clear_slots(sums, self.plan, memory.sizes.rule, memory.buffers.peers)
        return sums

    def give_back(
        self, index: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        memory, stream = self.memory, self.memory.stream
        if not aside or not memory.in_layer or stream is None:
            memory.join()  # meetings follow each other
            self._pull(index, gradients, totals, PULL_PROGRAMS)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        memory.pending_pulls.append(self.plan)
        with torch.cuda.stream(stream):
            self._pull(index, gradients, totals, PUSH_PROGRAMS)

    def _pull(self, index: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], programs: int) -> None:
        memory, places = self.memory, range(index, index + len(gradients))
        rule, peers, sections = memory.sizes.rule, memory.buffers.peers, memory.sizes.gradients
        for parameter, gradient in zip(places, gradients, strict=True):
            sums = memory.gradients(parameter)
            if sums.data_ptr() != gradient.data_ptr():  # not those of `gradient_sums`
                if parameter in memory.unread:
                    memory.barrier(Channel.GRADIENTS)
                sums.copy_(gradient)
        memory.barrier(Channel.GRADIENTS, self.plan)
        for parameter, total_e in zip(places, totals, strict=True):
            pull_gradients(total_e, self.plan, rule, peers, memory.at(sections[parameter]), programs)
        memory.unread.update(places)

    def _beside(self, push: Callable[[], None]) -> torch.cuda.Event | None:
        """Push on the stream of fetches; returns its end, or None where there is no such stream."""
        stream = self.memory.stream
        if stream is None:
            push()
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            push()
            return stream.record_event()

    def _push(self, parameters: Sequence[Tensor], *, between_barriers: bool = False) -> None:
        memory, peers = self.memory, self.memory.buffers.peers
        if between_barriers:
            memory.barrier(Channel.REPLICAS, self.plan)
        for index, weight_e in enumerate(parameters):
            at = memory.at(memory.sizes.weights[index])
            push_replicas(weight_e.detach().contiguous(), self.plan, memory.sizes.rule, peers, at)
        if between_barriers:
            memory.barrier(Channel.REPLICAS, self.plan)
        else:
            signal(peers, memory.buffers.flags_at(Channel.REPLICAS))


def shared_buffers(run: Run, axes: Axes, device: torch.device) -> SymmetricBuffers | None:
    """Buffers for the tokens of one micro-batch, for all layers; None if tokens travel in another way. Collective.

    Raises a DeviceError if the method was asked for by name and cannot be had.
    """
    if run.model.moe is None or axes.expert.size == 1 or device.type == "meta":
        return None
    choice = dispatcher_on(run, axes, device)
    refuse(choice)
    if not choice.writes_to_peers:
        return None
    return allocate(buffer_sizes(run, axes), axes.expert_node, device)


def dispatcher_on(run: Run, axes: Axes, device: torch.device) -> DispatcherChoice:
    """The dispatcher of a mixture of experts on GPUs that may reach each other's memory. Collective."""
    facts = dispatch_facts(run, axes.expert_node.size)
    choice = choose_dispatcher(facts)
    if not choice.writes_to_peers and not choice.obstacle:
        return choice  # The method sends tokens in another way: all ranks know that without asking each other.
    return choose_dispatcher(replace(facts, obstacle=peer_obstacle(choice, axes, device)))


def replica_memory(run: Run, axes: Axes, buffers: SymmetricBuffers | None) -> ReplicaMemory | None:
    """The sections of replicas in these buffers; None without replicas, or if they travel by collectives."""
    sizes = replica_sizes(run, axes.grid)
    if buffers is None or sizes is None:
        return None
    dtype = torch.bfloat16 if sizes.itemsize == 2 else torch.float32
    return ReplicaMemory(buffers, sizes, dtype)


def refuse(choice: DispatcherChoice) -> None:
    """Raise a DeviceError if the dispatcher that was asked for by name cannot be had."""
    problem = choice.refusal
    if problem is not None:
        raise DeviceError(f"{problem.field} {problem.what}", got=problem.got, allowed=problem.allowed, fix=problem.fix)


def buffer_sizes(run: Run, axes: Axes) -> BufferSizes:
    assert run.model.moe is not None, "a dense model sends no tokens"
    # Tokens of all nodes may be on their way to the experts of this one.
    tokens = run.training.micro_batch * run.training.sequence_length // axes.sequence.size * axes.expert_across.size
    replicas = replica_sizes(run, axes.grid)
    return BufferSizes(
        tokens=tokens,
        top_k=run.model.moe.top_k * axes.grid.expert_tensor,
        row_bytes=widest_row(run),
        ranks=axes.expert_node.size,
        numbers=0 if replicas is None else run.model.moe.experts,
        replica_bytes=0 if replicas is None else replicas.total_bytes,
    )


def widest_row(run: Run) -> int:
    """Bytes of the widest row: gradients and outputs travel in the compute dtype, and packing widens narrow rows."""
    plain = plain_row_bytes(run)
    if run.float8.dispatch == "none":
        return plain
    return max(plain, *(row_bytes(run.model.hidden_size, recipe) for recipe in (BLOCKWISE, MXFP8)))


def peer_obstacle(choice: DispatcherChoice, axes: Axes, device: torch.device) -> str:
    """Reason why ranks cannot write to each other's memory, the same for all (collective); empty if they can."""
    if device.type != "cuda":
        return f"device {device.type}, which is no GPU"
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    local_obstacle = choice.obstacle  # the first obstacle that this rank sees
    if not local_obstacle and not installed((TRITON_PACKAGE,)):
        local_obstacle = "no Triton"
    if not local_obstacle and not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        local_obstacle = "GPUs that cannot reach each other's memory"
    # A rank with an obstacle must not leave before this: the others would wait for it here.
    said = all_gather_json([local_obstacle, axes.expert_node.ranks[0], device.index], axes.world)
    obstacle = next((reason for reason, *_ in said if reason), "")
    # Ranks of a node that see their own GPU only give it the same index: torch maps no memory then.
    (_, index), ranks = Counter((first, index) for _, first, index in said).most_common(1)[0]
    if obstacle or ranks == 1:
        return str(obstacle)
    return (
        f"{ranks} ranks of a node that see their own GPUs only and call them all {index} (show each rank all GPUs of "
        "its node: srun with --gpus-per-node and --gpu-bind=none, without --gpus-per-task)"
    )
