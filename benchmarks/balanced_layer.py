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

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from benchmarks.balanced_cases import NAMES, all_choices, tokens_of
from benchmarks.dispatch import relative_gap
from benchmarks.dispatch_traffic import Machine, begin, time_call
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.replica_plan import PlanFact, ReplicaRule, plan_replicas
from penstock.kernels.triton_operators import TRITON
from penstock.layout.experts import ExpertPlacement
from penstock.layout.grid import Grid
from penstock.moe.dispatch.balanced import BalancedDispatcher, CountsOf, ReplicaMeter, SlotsOf
from penstock.moe.dispatch.collective import AllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.moe.routing import Routing
from penstock.parallel.axes import make_axes
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
    found: dict[str, ReplicaRule | None] = {"none": None, "bounded": bounded}
    if shape is not V3:  # whose slots would take more memory than its experts
        found["exact"] = ReplicaRule(experts=shape.E, groups=ranks, slots=per_rank)
    return found


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
        found = self.run(way)
        return [*found, *(total.clone() for total in self.sums)]


class Matrices:
    """A rank's experts, the same for all workloads."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        own, dtype = shape.E // machine.axis.size, torch.bfloat16 if machine.device.type == "cuda" else torch.float32
        self.dtype = dtype
        generator = torch.Generator(machine.device).manual_seed(7 + machine.axis.rank)
        normal = partial(torch.randn, device=machine.device, dtype=dtype, generator=generator)
        gate_up, down = shape.parameters()
        both = normal(own, *gate_up) * shape.D**-0.5, normal(own, *down) * shape.F**-0.5
        self.matrices = both[0].requires_grad_(), both[1].requires_grad_()
        self.sums = torch.zeros_like(both[0], dtype=torch.float32), torch.zeros_like(both[1], dtype=torch.float32)


def draw(machine: Machine, shape: Shape, workload: str, experts: Matrices) -> Layer:
    """A workload's choices, cut among the ranks."""
    ranks, rank = machine.axis.size, machine.axis.rank
    ids_TK = all_choices(workload, 0, shape.T * ranks, shape.E, shape.K, ranks)
    sizes = tokens_of(workload, 0, shape.T * ranks, ranks)
    parts = [_padded(part, max(sizes), shape.E) for part in ids_TK.split(sizes)]
    counts = torch.stack([part.flatten().bincount(minlength=shape.E + 1)[:-1] for part in parts]).int()
    generator = torch.Generator(machine.device).manual_seed(rank)
    normal = partial(torch.randn, device=machine.device, generator=generator)
    own = parts[rank].to(machine.device)
    x_TD = normal(len(own), shape.D).to(experts.dtype).requires_grad_()
    weights_TK = normal(*own.shape).abs().masked_fill(own == shape.E, 0).requires_grad_()
    direction_TD = normal(len(own), shape.D).to(experts.dtype)
    return Layer(
        shape=shape,
        ids_TK=own,
        counts_WE=counts,
        leaves=(x_TD, weights_TK),
        matrices=experts.matrices,
        sums=experts.sums,
        direction_TD=direction_TD,
    )


def _padded(ids_TK: Tensor, tokens: int, experts: int) -> Tensor:
    return torch.cat((ids_TK, ids_TK.new_full((tokens - len(ids_TK), ids_TK.shape[1]), experts)))


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
            room = RowCapacity(placement, factor).to(self.machine.device)
            inner = SymmetricDispatcher(placement, transport_of(placement, self.buffers), room)
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
    layer, rows, expected = draw(machine, shape, workload, experts), [], None
    even = int(layer.counts_WE.sum()) / ranks
    room = len(layer.ids_TK) * shape.K  # even share that a row capacity counts with
    for way, rule in rules(shape, ranks).items():
        loads = layer.counts_WE.sum(0).view(ranks, -1).sum(1)
        fullest, replicas = int(loads.max()), 0
        if rule is not None:
            facts = plan_replicas(layer.counts_WE, rule, machine.axis.rank).facts.tolist()
            fullest, replicas = facts[PlanFact.FULLEST], facts[PlanFact.REPLICAS]
        made = ways.way(rule, 1.01 * fullest / room, layer.matrices)
        results = layer.results(made)
        expected = expected or results
        gap = max(relative_gap(one.float(), other.float()) for one, other in zip(results, expected, strict=True))
        gap = machine.worst(gap)
        assert gap < CLOSE, f"{workload}, {way}: {gap} apart"
        seconds = timed(machine, lambda made=made: layer.run(made))
        row = {"shape": shape.name, "workload": workload, "way": way, "ms": seconds * 1e3, "replicas": replicas}
        row |= {"fullest_over_even": fullest / even, "gap": gap}
        machine.say(
            "  " + "  ".join(f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in row.values())
        )
        rows.append(row)
        if ways.buffers is not None:
            ways.buffers.check()
    return rows


def timed(machine: Machine, call: Callable[[], object]) -> float:
    """Seconds of a call on the slowest rank."""
    if machine.device.type == "cuda":
        return time_call(machine, call, True)
    begin_seconds = time.perf_counter()
    call()
    return machine.worst(time.perf_counter() - begin_seconds)


def on_cpu() -> Machine:
    dist.init_process_group("gloo")
    axis = make_axes(Grid(world=dist.get_world_size(), expert=dist.get_world_size())).expert
    return Machine(axis=axis, device=torch.device("cpu"))


def buffers_for(machine: Machine, shape: Shape) -> SymmetricBuffers:
    """Room for half as many tokens more (W4), and for the slots of every way."""
    found: Sequence[ReplicaRule] = [rule for rule in rules(shape, machine.axis.size).values() if rule is not None]
    replica_bytes = max(ReplicaSizes(rule, shape.parameters(), 2).total_bytes for rule in found)
    sizes = BufferSizes(
        tokens=shape.T * 3 // 2,
        top_k=shape.K,
        row_bytes=2 * shape.D,
        ranks=machine.axis.size,
        numbers=shape.E,
        replica_bytes=replica_bytes,
    )
    return allocate(sizes, machine.axis, machine.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads, as in W0,W2")
    parser.add_argument("--v3", action="store_true", help="the width of DeepSeek-V3, without exact")
    parser.add_argument("--tiny", action="store_true", help="a small layer on a CPU")
    parser.add_argument("--patience", type=int, default=120, help="seconds of a workload")
    record.add_arguments(parser)
    options = parser.parse_args()
    shape = TINY if options.tiny else V3 if options.v3 else V2_LITE
    machine = on_cpu() if options.tiny else begin()
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
