"""What `benchmarks.dispatch` measures on: the GPUs of a node, what travels between them, and a clock."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dispatch_cases import Shape, choices
from penstock.kernels.float8 import quantize
from penstock.kernels.float8.operators import REFERENCE
from penstock.kernels.float8.quantized import row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE
from penstock.layout.experts import ExpertPlacement
from penstock.layout.grid import Grid
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.payload import UNQUANTIZED, WireFormat
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, SymmetricTransport, transport_of
from penstock.moe.routing import Routing
from penstock.parallel.axes import Axis, make_axes
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate

KERNELS = replace(REFERENCE, pack_rows=quantize.pack_rows, unpack_rows=quantize.unpack_rows)
PAYLOADS = {"bf16": UNQUANTIZED, "float8": WireFormat(recipe=BLOCKWISE, operators=KERNELS)}
"""What rows travel as. Where numbers are looked at, those in 8 bits are dequantized on arrival."""

CALLS_OF_A_GRAPH = 8
RUNS = 20


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's place, and what its sections share."""

    axis: Axis
    device: torch.device

    def say(self, text: str) -> None:
        if self.axis.rank == 0:
            print(text, flush=True)

    def placement(self, shape: Shape) -> ExpertPlacement:
        return ExpertPlacement(experts=shape.E, expert=self.axis.size)

    def buffers(self, shape: Shape, tokens: int, dtype: torch.dtype) -> SymmetricBuffers:
        width = shape.D * dtype.itemsize
        sizes = BufferSizes(tokens=tokens, top_k=shape.K, row_bytes=width, ranks=self.axis.size)
        return allocate(sizes, self.axis, self.device)

    def worst(self, value: float) -> float:
        worst = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.item()


def begin() -> Machine:
    """One process of each GPU."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    axis = make_axes(Grid(world=dist.get_world_size(), expert=dist.get_world_size())).expert
    return Machine(axis=axis, device=device)


def dequantized(payload: str) -> WireFormat:
    """Numbers from -4 to 4 are whole in 8 bits too, so what is right in 16 is right in 8."""
    return replace(PAYLOADS[payload], dequantizes=True)


def symmetric(
    machine: Machine,
    shape: Shape,
    buffers: SymmetricBuffers,
    bound: float = 0,
    change: "Change | None" = None,
    wire_format: WireFormat = UNQUANTIZED,
) -> SymmetricDispatcher:
    placement = machine.placement(shape)
    transport = transport_of(placement, buffers)
    room = RowCapacity(placement, bound).to(machine.device) if bound else None
    return SymmetricDispatcher(
        placement, transport if change is None else change.of(transport), room, wire_format=wire_format
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is launched otherwise than by default: fields of one launch, or the number of chunks."""

    launch: str = ""
    fields: tuple[tuple[str, int], ...] = ()
    chunks: int = 0

    @staticmethod
    def parse(text: str) -> "Change":
        """`push.programs=32/block_rows=4` or `chunks=8`."""
        if text.startswith("chunks="):
            return Change(chunks=int(text.removeprefix("chunks=")))
        launch, _, rest = text.partition(".")
        pairs = [field.split("=") for field in rest.split("/")]
        return Change(launch=launch, fields=tuple((name, int(value)) for name, value in pairs))

    def of(self, transport: SymmetricTransport) -> SymmetricTransport:
        if self.chunks:
            return replace(transport, chunks=self.chunks)
        now = {"push": transport.push, "take": transport.take, "back": transport.back, "sum": transport.sum}[
            self.launch
        ]
        return replace(transport, **{self.launch: replace(now, **dict(self.fields))})


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One routing at one size, and what it must move."""

    shape: Shape
    tokens: int
    kind: str
    x_TD: Tensor
    routing: Routing
    useful_bytes: float
    bound: float

    @staticmethod
    def draw(machine: Machine, shape: Shape, tokens: int, kind: str) -> "Traffic":
        experts_TK = choices(kind, shape, tokens, machine.axis, machine.device)
        rank_TK = experts_TK // (shape.E // machine.axis.size)
        needed_TW = torch.zeros(tokens, machine.axis.size, dtype=torch.bool, device=machine.device)
        needed_TW.scatter_(1, rank_TK, True)
        needed_TW[:, machine.axis.rank] = False
        useful = needed_TW.sum().double() * shape.D * 2
        counts_W = torch.bincount(rank_TK.flatten(), minlength=machine.axis.size)
        dist.all_reduce(useful)
        dist.all_reduce(counts_W)
        return Traffic(
            shape=shape,
            tokens=tokens,
            kind=kind,
            x_TD=torch.randn(tokens, shape.D, device=machine.device, dtype=torch.bfloat16),
            routing=Routing(torch.rand(experts_TK.shape, device=machine.device), experts_TK),
            useful_bytes=useful.item() / machine.axis.size,
            bound=1.05 * counts_W.max().item() / (tokens * shape.K),
        )

    def row(self, way: str, seconds: tuple[float, float], payload: str = "bf16") -> dict[str, Any]:
        row = {"shape": self.shape.name, "tokens": self.tokens, "routing": self.kind, "way": way, "payload": payload}
        recipe, out = PAYLOADS[payload].recipe, self.useful_bytes
        if recipe is not None:
            out *= row_bytes(self.shape.D, recipe) / (2 * self.shape.D)
        for name, time, useful in zip(("dispatch", "combine"), seconds, (out, self.useful_bytes), strict=True):
            row[f"{name}_us"] = time * 1e6
            row[f"{name}_GB/s"] = useful / time / 1e9
        return row | {"useful_MB": out / 1e6}


@torch.no_grad()
def time_both(machine: Machine, dispatcher: Dispatcher, traffic: Traffic, graph: bool) -> tuple[float, float]:
    """Seconds of a dispatch and of a combine."""
    rows, metadata = dispatcher.dispatch(traffic.x_TD, traffic.routing)
    y_RD = torch.randn(len(rows.weights_R), traffic.shape.D, device=machine.device, dtype=torch.bfloat16)
    calls = (
        lambda: dispatcher.dispatch(traffic.x_TD, traffic.routing),
        lambda: dispatcher.combine(y_RD, metadata),
    )
    first, second = (time_call(machine, call, graph) for call in calls)
    return first, second


def time_call(machine: Machine, call: Callable[[], object], graph: bool) -> float:
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
    times = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    return machine.worst(statistics.median(times)) / 1000 / calls
