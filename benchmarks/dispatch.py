"""Dispatch and combine alone, on the GPUs of one node: right first, then fast.

    torchrun --nproc-per-node 4 -m benchmarks.dispatch --output dispatch.json
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --only steps                    # minutes at most, to begin with
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --payload bf16,float8           # rows in 16 bits, and in 8

    steps     1,000 steps with changing routing, two layers in flight, ranks delayed at random, whole numbers: outputs
              and gradients of `symmetric` bit for bit (each routing and top-k alone: tests/moe/test_symmetric.py)
    speed     dispatch and combine of `symmetric` (launched one by one, and replayed from a graph) and of `all_to_all`

Times are those of the slowest rank. Useful bytes are those that must leave a rank: each row once for each other rank
that needs it; `GB/s` divides them by the time. In 8 bits a dispatch quantizes rows in its time and sends their scales
along; a combine's rows are in 16. A section ends after `--patience` seconds; what was measured stays.
"""

import argparse
import faulthandler
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.dispatch_cases import KINDS, SMALL, V2_LITE, V3, Exact, Shape, choices, wrong_numbers
from penstock.kernels.backends import TRITON
from penstock.kernels.float8 import quantize
from penstock.kernels.float8.operators import REFERENCE
from penstock.kernels.float8.quantized import BLOCKWISE, row_bytes
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.moe.balance import Routing
from penstock.moe.dispatch.collective import AllToAllDispatcher
from penstock.moe.dispatch.contract import UNQUANTIZED, Dispatcher, WireFormat
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.parallel.axes import Axis, make_axes
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate

KERNELS = replace(REFERENCE, pack_rows=quantize.pack_rows, unpack_rows=quantize.unpack_rows)
PAYLOADS = {"bf16": UNQUANTIZED, "float8": WireFormat(recipe=BLOCKWISE, operators=KERNELS)}
"""What rows travel as. Where numbers are looked at, those in 8 bits are dequantized on arrival."""

CALLS_OF_A_GRAPH, RUNS = 8, 20

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank, and what its sections share."""

    axis: Axis
    device: torch.device

    @staticmethod
    def begin(backend: str = "nccl") -> "Machine":
        """One process of each GPU, or with `gloo` of a CPU."""
        dist.init_process_group(backend)
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
            torch.cuda.set_device(device)
        axis = make_axes(Grid(world=dist.get_world_size(), expert=dist.get_world_size())).expert
        return Machine(axis=axis, device=device)

    def say(self, row: Row) -> None:
        if self.axis.rank == 0:
            record.show(row)

    def buffers(self, shape: Shape, tokens: int, dtype: torch.dtype) -> SymmetricBuffers:
        width = shape.D * dtype.itemsize
        sizes = BufferSizes(tokens=tokens, top_k=shape.K, row_bytes=width, ranks=self.axis.size)
        return allocate(sizes, self.axis, self.device)

    def symmetric(
        self, shape: Shape, buffers: SymmetricBuffers, bound: float, wire_format: WireFormat
    ) -> SymmetricDispatcher:
        placement = ExpertPlacement(experts=shape.E, expert=self.axis.size)
        capacity = RowCapacity(placement, bound).to(self.device) if bound else None
        return SymmetricDispatcher(placement, transport_of(placement, buffers), capacity, wire_format=wire_format)

    def worst(self, value: float) -> float:
        worst = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.item()

    def seconds(self, call: Callable[[], object], *, graph: bool) -> float:
        """Of a call on the slowest rank, median."""
        for _ in range(3):
            call()
        calls = 1
        if graph:
            captured, calls = torch.cuda.CUDAGraph(), CALLS_OF_A_GRAPH
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                for _ in range(calls):
                    call()
            call = captured.replay
            call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
        torch.cuda.synchronize()
        dist.barrier()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
        return self.worst(median(times)) / 1000 / calls


def main() -> None:
    options = record.parser(
        __doc__,
        only=("steps,speed", "sections, in this order"),
        patience=(240, "seconds of a section"),
        steps=1000,
        tokens=("1024,2048,4096,8192,16384,32768", "of a rank"),
        shapes=(2, "1 leaves V3 out of speed"),
        payload=("bf16", f"what rows travel as: some of {', '.join(PAYLOADS)}"),
    ).parse_args()
    machine = Machine.begin()
    numbers: dict[str, list[Row]] = {}
    for name in options.only.split(","):
        # The only clock that runs while the host waits for a device that hangs.
        faulthandler.dump_traceback_later(options.patience, exit=True, file=sys.stderr)
        numbers[name] = []
        for row in {"steps": steps, "speed": speed}[name](machine, options):
            numbers[name].append(row)
            machine.say(row)
            if machine.axis.rank == 0:
                record.write(options, numbers, ranks=machine.axis.size)
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def steps(machine: Machine, options: argparse.Namespace) -> Iterator[Row]:
    for payload in options.payload.split(","):
        buffers = machine.buffers(SMALL, 1024, torch.float32)
        # Numbers from -4 to 4 are whole in 8 bits too, so what is right in 16 is right in 8.
        dispatcher = machine.symmetric(SMALL, buffers, 0, replace(PAYLOADS[payload], dequantizes=True))
        wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
        delays = torch.Generator().manual_seed(machine.axis.rank)
        for step in range(1, options.steps + 1):
            layers = [
                Exact.draw(SMALL, choices(kind, SMALL, 1024, machine.axis, machine.device, 2 * step + number))
                for number, kind in enumerate((KINDS[step % 2], KINDS[step % len(KINDS)]))
            ]
            torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
            wrong += wrong_numbers(dispatcher, layers)
            if step % 100 == 0:
                buffers.check()
                row = {"payload": payload, "steps": step, "wrong_numbers": machine.worst(float(wrong))}
                yield row
                assert row["wrong_numbers"] == 0, "rows were lost or mixed up"


@torch.no_grad()
def speed(machine: Machine, options: argparse.Namespace) -> Iterator[Row]:
    for shape in (V2_LITE, V3)[: options.shapes]:
        sizes = [int(size) for size in options.tokens.split(",")]
        buffers = machine.buffers(shape, max(sizes), torch.bfloat16)
        placement = ExpertPlacement(experts=shape.E, expert=machine.axis.size)
        for tokens, kind in itertools.product(sizes, ("even", "skewed")):
            traffic = Traffic(machine, shape, tokens, kind)
            for payload in options.payload.split(","):
                wire_format = PAYLOADS[payload]
                theirs = AllToAllDispatcher(placement, machine.axis, TRITON, wire_format=wire_format)
                ours = machine.symmetric(shape, buffers, traffic.bound, wire_format)
                yield traffic.row("all_to_all", theirs, payload, graph=False)
                yield traffic.row("symmetric", ours, payload, graph=False)
                yield traffic.row("symmetric, graph", ours, payload, graph=True)
                buffers.check()
        del buffers


class Traffic:
    """One routing at one size, and what it must move."""

    def __init__(self, machine: Machine, shape: Shape, tokens: int, kind: str) -> None:
        self.machine, self.shape, self.tokens, self.kind = machine, shape, tokens, kind
        device, ranks = machine.device, machine.axis.size
        experts_TK = choices(kind, shape, tokens, machine.axis, device)
        rank_TK = experts_TK // (shape.E // ranks)
        needed_TW = torch.zeros(tokens, ranks, dtype=torch.bool, device=device).scatter_(1, rank_TK, True)
        needed_TW[:, machine.axis.rank] = False
        useful = needed_TW.sum().double() * shape.D * 2
        counts_W = torch.bincount(rank_TK.flatten(), minlength=ranks)
        dist.all_reduce(useful)
        dist.all_reduce(counts_W)
        self.x_TD = torch.randn(tokens, shape.D, device=device, dtype=torch.bfloat16)
        self.routing = Routing(torch.rand(experts_TK.shape, device=device), experts_TK)
        self.useful_bytes = useful.item() / ranks
        self.bound = 1.05 * counts_W.max().item() / (tokens * shape.K)

    def row(self, way: str, dispatcher: Dispatcher, payload: str, *, graph: bool) -> Row:
        """Microseconds and useful GB/s of a dispatch and of a combine."""
        rows, metadata = dispatcher.dispatch(self.x_TD, self.routing)
        y_RD = torch.randn(len(rows.weights_R), self.shape.D, device=self.machine.device, dtype=torch.bfloat16)
        row = {"shape": self.shape.name, "tokens": self.tokens, "routing": self.kind, "way": way, "payload": payload}
        recipe, out = PAYLOADS[payload].recipe, self.useful_bytes
        if recipe is not None:
            out *= row_bytes(self.shape.D, recipe) / (2 * self.shape.D)
        for name, useful, call in (
            ("dispatch", out, lambda: dispatcher.dispatch(self.x_TD, self.routing)),
            ("combine", self.useful_bytes, lambda: dispatcher.combine(y_RD, metadata)),
        ):
            seconds = self.machine.seconds(call, graph=graph)
            row |= {f"{name}_us": seconds * 1e6, f"{name}_GB/s": useful / seconds / 1e9}
        return row | {"useful_MB": out / 1e6}


if __name__ == "__main__":
    main()
