"""A whole MoE layer on the GPUs of one node: dispatch, experts and combine, forward and backward.

    torchrun --nproc-per-node 4 -m benchmarks.moe_layer --output moe-layer.json

    all_to_all        rows to the ranks of their experts, over NCCL; the host reads how many
    all_gather        all tokens to all ranks, over NCCL; room for the rows that there are, and a twentieth more
    symmetric         rows written into the other GPUs' memory; the same room
    symmetric, graph  the same, replayed from CUDA graphs: one of the forward pass, one of both passes

Experts run on our Triton kernels in bfloat16; gradients of rows, routing weights and matrices are all taken. The
routing is given, with random weights: no router is in the times. Each way must give what `all_to_all` gives before it
is timed.

Times are those of the slowest rank; backward in a graph is both passes less the forward one. TFLOP/s are of a mean rank
and have its communication in them: 6 x D x F for each row forward, twice that backward.
"""

import argparse
import faulthandler
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from benchmarks.dispatch import number_text, relative_gap
from benchmarks.dispatch_cases import V2_LITE, Shape
from benchmarks.dispatch_traffic import Machine, Traffic, begin, symmetric, time_call
from penstock.kernels.triton_operators import TRITON
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher
from penstock.moe.routing import Routing
from penstock.parallel.symmetric import SymmetricBuffers

QWEN3_30B = Shape(name="Qwen3-30B", D=2048, E=128, K=8)
WIDTHS = {QWEN3_30B: 768, V2_LITE: 1408}
"""Of an expert, F."""

NAMES = ("y", "dx", "dweights", "dgate_up", "ddown")
CLOSE = 0.02
"""Relative distance that bfloat16 may make."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What every way computes."""

    traffic: Traffic
    leaves: tuple[Tensor, ...]
    direction_TD: Tensor

    @staticmethod
    def draw(machine: Machine, traffic: Traffic) -> "Layer":
        shape, width = traffic.shape, WIDTHS[traffic.shape]
        own, normal = machine.placement(shape).per_place, {"device": machine.device, "dtype": torch.bfloat16}
        gate_up = torch.randn(own, 2 * width, shape.D, **normal) * shape.D**-0.5
        down = torch.randn(own, shape.D, width, **normal) * width**-0.5
        leaves = (traffic.x_TD, traffic.routing.weights_TK, gate_up, down)
        direction_TD = torch.randn(traffic.tokens, shape.D, **normal)
        return Layer(traffic=traffic, leaves=tuple(leaf.requires_grad_() for leaf in leaves), direction_TD=direction_TD)

    @property
    def forward_flops(self) -> float:
        shape = self.traffic.shape
        return self.traffic.tokens * shape.K * 6 * shape.D * WIDTHS[shape]

    def forward(self, dispatcher: Dispatcher) -> Tensor:
        x_TD, weights_TK, *matrices = self.leaves
        rows, metadata = dispatcher.dispatch(x_TD, Routing(weights_TK, self.traffic.routing.experts_TK))
        y_RD = TRITON.expert_ffn(
            rows.x_ND, *matrices, rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
        )
        return dispatcher.combine(y_RD, metadata)

    def backward(self, y_TD: Tensor, *, again: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y_TD, self.leaves, self.direction_TD, retain_graph=again)

    def gaps(self, results: list[Tensor], others: list[Tensor]) -> dict[str, float]:
        pairs = zip(NAMES, results, others, strict=True)
        return {name: relative_gap(one.float(), other.float()) for name, one, other in pairs}

    def results(self, dispatcher: Dispatcher) -> list[Tensor]:
        y_TD = self.forward(dispatcher)
        return [y_TD.detach(), *self.backward(y_TD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--patience", type=int, default=240, help="seconds of a shape and routing")
    record.add_arguments(parser)
    options = parser.parse_args()
    machine = begin()
    rows: list[dict[str, Any]] = []
    for shape in WIDTHS:
        buffers = machine.buffers(shape, options.tokens, torch.bfloat16)
        for kind in ("even", "skewed"):
            faulthandler.dump_traceback_later(options.patience, exit=True, file=sys.stderr)
            for row in measure(machine, Traffic.draw(machine, shape, options.tokens, kind), buffers):
                rows.append(row)
                machine.say("  " + "  ".join(f"{key} {number_text(value)}" for key, value in row.items()))
                if machine.axis.rank == 0:
                    record.write(options, {"layers": rows}, ranks=machine.axis.size)
            faulthandler.cancel_dump_traceback_later()
        del buffers
    dist.barrier()
    dist.destroy_process_group()


def measure(machine: Machine, traffic: Traffic, buffers: SymmetricBuffers) -> Iterator[dict[str, Any]]:
    """All ways for one shape and routing; each is compared with the first."""
    layer, placement = Layer.draw(machine, traffic), machine.placement(traffic.shape)
    room = RowCapacity(placement, traffic.bound).to(machine.device)
    ways: dict[str, Dispatcher] = {
        "all_to_all": AllToAllDispatcher(placement, machine.axis, TRITON),
        "all_gather": AllGatherDispatcher(placement, machine.axis, TRITON, room),
        "symmetric": symmetric(machine, traffic.shape, buffers, traffic.bound),
    }
    expected = layer.results(ways["all_to_all"])
    for way, dispatcher in ways.items():
        gaps = layer.gaps(layer.results(dispatcher), expected)
        worst = {name: machine.worst(gap) for name, gap in gaps.items()}
        assert max(worst.values()) < CLOSE, f"{way}: further apart than bfloat16 rounds: {worst}"
        forms = (False, True) if isinstance(dispatcher, SymmetricDispatcher) else (False,)
        for graph in forms:
            seconds = time_layer(machine, layer, dispatcher, graph)
            yield report(layer, f"{way}, graph" if graph else way, seconds) | {"gaps": max(worst.values())}
    buffers.check()
    rooms = [room, *(way.row_capacity for way in ways.values() if isinstance(way, SymmetricDispatcher))]
    left_out = [machine.worst(float(one.left_out)) for one in rooms if one is not None]
    assert not any(left_out), f"rows found no room: {left_out}"


def time_layer(machine: Machine, layer: Layer, dispatcher: Dispatcher, graph: bool) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass."""
    forward: Callable[[], object] = lambda: layer.forward(dispatcher)  # noqa: E731
    if graph:
        both = time_call(machine, lambda: layer.backward(layer.forward(dispatcher)), True)
        first = time_call(machine, forward, True)
        return first, both - first
    y_TD = layer.forward(dispatcher)
    return time_call(machine, forward, False), time_call(machine, lambda: layer.backward(y_TD, again=True), False)


def report(layer: Layer, way: str, seconds: tuple[float, float]) -> dict[str, Any]:
    traffic = layer.traffic
    row = {"shape": traffic.shape.name, "tokens": traffic.tokens, "routing": traffic.kind, "way": way}
    for name, time, flops in zip(("forward", "backward"), seconds, (1, 2), strict=True):
        row[f"{name}_us"] = time * 1e6
        row[f"{name}_TFLOP/s"] = flops * layer.forward_flops / time / 1e12
    return row


if __name__ == "__main__":
    main()
