"""One MoE layer with and without balanced dispatch on the workloads W0 to W9, forward and backward, on all GPUs here.

    torchrun --nproc-per-node 4 -m benchmarks.balanced_layer --output balanced-layer-h200x4.json
    torchrun --nproc-per-node 4 -m benchmarks.balanced_layer --tiny     # on a CPU: that it runs and agrees

    none       symmetric dispatch to the ranks of the experts; buffers for the fullest one
    bounded    `dispatch.balance` bounded with its defaults: 4 slots, 5 %, 1,024 rows
    exact      even to a row; as many slots as a rank has experts

Routing is given, with random weights, so no router is in the times. Gradients of rows and weights are taken, those of
matrices are added to float32 sums, as in training. A call is both passes, replayed from a CUDA graph; times are medians
of the slowest rank. On W0 `none` is the limit: all ranks have equal rows. Every way must give what `none` gives, up to
the rounding of bfloat16.

On ranks with fewer tokens (W4) rows without choices are added, because symmetric dispatch needs equal numbers.
"""

import faulthandler
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from benchmarks.balanced_cases import NAMES, all_choices, tokens_of
from benchmarks.dispatch import Machine
from penstock.kernels.backends import TRITON
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.replica_plan import PlanFact, ReplicaRule, plan_replicas
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import Routing
from penstock.moe.dispatch.balanced import BalancedDispatcher, CountsOf, ReplicaMeter, SlotsOf
from penstock.moe.dispatch.collective import AllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.parallel.replicas import MappedSlots, ReplicaMemory, ReplicaSizes, exchanged_counts, exchanged_slots
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate

CLOSE = 0.02  # relative distance that bfloat16 may make


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer; letters as in penstock/base/shapes.py, T of one rank."""

    name: str
    D: int
    F: int
    E: int
    K: int
    T: int

    def parameters(self) -> tuple[tuple[int, ...], ...]:
        return (2 * self.F, self.D), (self.D, self.F)


V2_LITE = Shape(name="V2-Lite", D=2048, F=1408, E=64, K=6, T=8192)
V3 = Shape(name="V3", D=7168, F=2048, E=256, K=8, T=4096)
TINY = Shape(name="tiny", D=32, F=16, E=16, K=3, T=64)


def rules(shape: Shape, ranks: int) -> dict[str, ReplicaRule | None]:
    per_rank, least = shape.E // ranks, 8 if shape is TINY else 1024
    bounded = ReplicaRule(experts=shape.E, groups=ranks, slots=min(4, per_rank), tolerance=50_000, least_rows=least)
    by_way: dict[str, ReplicaRule | None] = {"none": None, "bounded": bounded}
    if shape is not V3:  # whose slots would take more memory than its experts
        by_way["exact"] = ReplicaRule(experts=shape.E, groups=ranks, slots=per_rank)
    return by_way


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What every way computes on this rank."""

    shape: Shape
    ids_TK: Tensor
    counts_WE: Tensor  # loads of all ranks
    leaves: tuple[Tensor, Tensor]  # rows and routing weights
    matrices: tuple[Tensor, Tensor]
    sums: tuple[Tensor, Tensor]
    direction_TD: Tensor

    def run(self, way: "Way") -> list[Tensor]:
        """Both passes."""
        y_TD = way.around(partial(self._forward, way.dispatcher), self.leaves[0])
        return [y_TD.detach(), *torch.autograd.grad(y_TD, self.leaves, self.direction_TD)]

    def _forward(self, dispatcher: Dispatcher, x_TD: Tensor) -> Tensor:
        rows, metadata = dispatcher.dispatch(x_TD, Routing(self.leaves[1], self.ids_TK))
        y_RD = expert_ffn(
            *(rows.x_ND, *self.matrices, rows.counts_e, rows.weights_R, rows.index_R),
            places_TK=rows.places_NK,
            accumulate_into=self.sums,
            only_last=rows.only_last,
            replicas=rows.replicas,
        )
        return dispatcher.combine(y_RD, metadata)

    def results(self, way: "Way") -> list[Tensor]:
        """Output and all gradients, those of the matrices from sums that begin at zero."""
        for total in self.sums:
            total.zero_()
        return [*self.run(way), *(total.clone() for total in self.sums)]


class Matrices:
    """A rank's experts, the same for all workloads."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self.dtype = torch.bfloat16 if machine.device.type == "cuda" else torch.float32
        generator = torch.Generator(machine.device).manual_seed(7 + machine.axis.rank)
        normal = partial(torch.randn, device=machine.device, dtype=self.dtype, generator=generator)
        experts = shape.E // machine.axis.size
        gate_up, down = (normal(experts, *size) / size[1] ** 0.5 for size in shape.parameters())
        self.matrices = gate_up.requires_grad_(), down.requires_grad_()
        self.sums = torch.zeros_like(gate_up, dtype=torch.float32), torch.zeros_like(down, dtype=torch.float32)


def draw(machine: Machine, shape: Shape, workload: str, experts: Matrices) -> Layer:
    """A workload's choices, cut among the ranks; those with fewer tokens get rows without choices."""
    ranks, rank = machine.axis.size, machine.axis.rank
    choices_TK = all_choices(workload, 0, shape.T * ranks, shape.E, shape.K, ranks)
    sizes = tokens_of(workload, 0, shape.T * ranks, ranks)
    parts = [
        torch.cat((part, part.new_full((max(sizes) - len(part), shape.K), shape.E))) for part in choices_TK.split(sizes)
    ]
    counts = torch.stack([part.flatten().bincount(minlength=shape.E + 1)[:-1] for part in parts]).int()
    generator = torch.Generator(machine.device).manual_seed(rank)
    normal = partial(torch.randn, device=machine.device, generator=generator)
    ids_TK = parts[rank].to(machine.device)
    x_TD = normal(len(ids_TK), shape.D).to(experts.dtype).requires_grad_()
    weights_TK = normal(*ids_TK.shape).abs().masked_fill(ids_TK == shape.E, 0).requires_grad_()
    return Layer(
        shape=shape,
        ids_TK=ids_TK,
        counts_WE=counts,
        leaves=(x_TD, weights_TK),
        matrices=experts.matrices,
        sums=experts.sums,
        direction_TD=normal(len(ids_TK), shape.D).to(experts.dtype),
    )


class Way(NamedTuple):
    """A dispatcher, and what the model puts around a layer that has it (penstock/models/block.py)."""

    dispatcher: Dispatcher
    around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def nothing_around(layer: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    return layer(x_TD)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Makes dispatchers on one machine."""

    machine: Machine
    shape: Shape
    buffers: SymmetricBuffers | None  # None on a CPU
    dtype: torch.dtype

    def way(self, rule: ReplicaRule | None, factor: float, matrices: tuple[Tensor, Tensor]) -> Way:
        axis, operators = self.machine.axis, TRITON if self.buffers is not None else REFERENCE
        experts = self.shape.E if rule is None else rule.groups * rule.places
        placement = ExpertPlacement(experts=experts, expert=axis.size)
        if self.buffers is None:
            inner: Dispatcher = AllToAllDispatcher(placement, axis, operators)
        else:
            capacity = RowCapacity(placement, factor).to(self.machine.device)
            inner = SymmetricDispatcher(placement, transport_of(placement, self.buffers), capacity)
        return Way(inner, nothing_around) if rule is None else self._balanced(rule, inner, operators, matrices)

    def _balanced(
        self, rule: ReplicaRule, inner: Dispatcher, operators: Operators, matrices: tuple[Tensor, Tensor]
    ) -> Way:
        axis, meter = self.machine.axis, ReplicaMeter().to(self.machine.device)
        counts_of: CountsOf = partial(exchanged_counts, axis=axis)
        slots_of: SlotsOf = partial(exchanged_slots, rule=rule, axis=axis)
        around = nothing_around
        if self.buffers is not None:
            sizes = ReplicaSizes(rule, self.shape.parameters(), self.dtype.itemsize)
            memory = ReplicaMemory(self.buffers, sizes, self.dtype)
            counts_of, slots_of, around = self.buffers.gather, partial(MappedSlots, memory), memory.backward_of_layer
        balanced = BalancedDispatcher(rule, axis.rank, inner, operators, counts_of, slots_of, meter)
        return Way(replace(balanced, resident_weights=lambda: matrices), around)


def measure(ways: Ways, workload: str, experts: Matrices) -> list[dict[str, Any]]:
    """Every way on one workload."""
    machine, shape, ranks = ways.machine, ways.shape, ways.machine.axis.size
    layer, rows, expected = draw(machine, shape, workload, experts), [], list[Tensor]()
    even = int(layer.counts_WE.sum()) / ranks
    for name, rule in rules(shape, ranks).items():
        fullest, replicas = int(layer.counts_WE.sum(0).view(ranks, -1).sum(1).max()), 0
        if rule is not None:
            facts = plan_replicas(layer.counts_WE, rule, machine.axis.rank).facts.tolist()
            fullest, replicas = facts[PlanFact.FULLEST], facts[PlanFact.REPLICAS]
        # The even share that a row capacity counts with is all choices.
        way = ways.way(rule, 1.01 * fullest / (len(layer.ids_TK) * shape.K), layer.matrices)
        results = layer.results(way)
        expected = expected or results
        gap = machine.worst(max(relative_gap(*pair) for pair in zip(results, expected, strict=True)))
        assert gap < CLOSE, f"{workload}, {name}: {gap} apart"
        ms = 1e3 * seconds_of(machine, partial(layer.run, way))
        row = {"shape": shape.name, "workload": workload, "way": name, "ms": ms, "replicas": replicas}
        rows.append(row | {"fullest_over_even": fullest / even, "gap": gap})
        machine.say(rows[-1])
        if ways.buffers is not None:
            ways.buffers.check()
    return rows


def relative_gap(result: Tensor, expected: Tensor) -> float:
    result, expected = result.float(), expected.float()
    return ((result - expected).norm() / expected.norm().clamp(min=1e-20)).item()


def seconds_of(machine: Machine, call: Callable[[], object]) -> float:
    """On the slowest rank."""
    if machine.device.type == "cuda":
        return machine.seconds(call, graph=True)
    begin = time.perf_counter()
    call()
    return machine.worst(time.perf_counter() - begin)


def buffers_for(machine: Machine, shape: Shape) -> SymmetricBuffers:
    """Room for half as many tokens more (W4), and for the slots of every way."""
    kept = [rule for rule in rules(shape, machine.axis.size).values() if rule is not None]
    sizes = BufferSizes(
        tokens=shape.T * 3 // 2,
        top_k=shape.K,
        row_bytes=2 * shape.D,
        ranks=machine.axis.size,
        numbers=shape.E,
        replica_bytes=max(ReplicaSizes(rule, shape.parameters(), 2).total_bytes for rule in kept),
    )
    return allocate(sizes, machine.axis, machine.device)


def main() -> None:
    options = record.parser(
        __doc__,
        only=("", "workloads, as in W0,W2"),
        v3=(False, "the width of DeepSeek-V3, without exact"),
        tiny=(False, "a small layer on a CPU"),
        patience=(120, "seconds of a workload"),
    ).parse_args()
    shape = TINY if options.tiny else V3 if options.v3 else V2_LITE
    machine = Machine.begin("gloo" if options.tiny else "nccl")
    experts = Matrices(machine, shape)
    buffers = None if options.tiny else buffers_for(machine, shape)
    ways = Ways(machine=machine, shape=shape, buffers=buffers, dtype=experts.dtype)
    rows: list[dict[str, Any]] = []
    for workload in options.only.split(",") if options.only else NAMES:
        faulthandler.dump_traceback_later(options.patience, exit=True, file=sys.stderr)
        rows += measure(ways, workload, experts)
        if machine.axis.rank == 0:
            record.write(options, {"layers": rows}, ranks=machine.axis.size)
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
