"""Dispatch and combine alone, on the GPUs of one node: right first, then fast.

    torchrun --nproc-per-node 4 -m benchmarks.dispatch --output dispatch.json
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --only exact,steps              # minutes at most, to begin with
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --only vdev --output vdev.json  # in processes of its own

    exact     outputs and gradients of `symmetric` on adversarial routings, in whole numbers: bit for bit
    close     the same in bfloat16 through real experts, against `all_to_all`
    steps     1,000 steps with changing routing, two layers in flight, ranks delayed at random: bit for bit again
    launches  how many programs, chunks and rows at a time
    speed     dispatch and combine of `symmetric` (launched one by one, and replayed from a graph) and of `all_to_all`
    engines   all tokens to all ranks by the GPUs' copy engines, which take no multiprocessor
    vdev      torch's all_to_all_vdev_2d of the same rows, without de-duplication

Times are those of the slowest rank. Useful bytes are those that must leave a rank: each row once for each other rank
that needs it; `GB/s` divides them by the time. A section ends after `--patience` seconds; what was measured stays.
"""

import argparse
import faulthandler
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from benchmarks import record
from benchmarks.dispatch_cases import KINDS, SMALL, V2_LITE, V3, Exact, Shape, choices, wrong_numbers
from penstock.kernels.symmetric import PUSH_LAUNCH, RETURN_LAUNCH, SUM_LAUNCH, TAKE_LAUNCH
from penstock.kernels.triton_operators import TRITON
from penstock.layout.experts import ExpertPlacement
from penstock.layout.grid import Grid
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.room import Room
from penstock.moe.dispatch.symmetric import Links, SymmetricDispatcher, links_of
from penstock.moe.routing import Routing
from penstock.parallel.axes import Axis, make_axes
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate

CALLS_OF_A_GRAPH = 8
RUNS = 20

CHANGES = (
    "push.programs=16,push.programs=32,push.programs=132,take.programs=32,take.programs=132,back.programs=32,"
    "back.programs=64,back.programs=264,sum.programs=32,sum.programs=132,chunks=1,chunks=4,chunks=8"
)
"""Of the launches: which one, its field and the value; or the number of chunks."""


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


def main() -> None:
    options = parse_arguments()
    machine = begin()
    numbers: dict[str, Any] = {}
    for name in options.only.split(","):
        machine.say(f"== {name}")
        # The only clock that runs while the host waits for a device that hangs.
        faulthandler.dump_traceback_later(options.patience, exit=True, file=sys.stderr)
        rows = numbers[name] = []
        for row in SECTIONS[name](machine, options):
            rows.append(row)
            machine.say("  " + "  ".join(f"{key} {number_text(value)}" for key, value in row.items()))
            if machine.axis.rank == 0:
                record.write(options, numbers, ranks=machine.axis.size)
        faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def begin() -> Machine:
    """One process of each GPU."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    axis = make_axes(Grid(world=dist.get_world_size(), expert=dist.get_world_size())).expert
    return Machine(axis=axis, device=device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="exact,close,steps,launches,speed", help="sections, in this order")
    parser.add_argument("--patience", type=int, default=240, help="seconds of a section")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--top-k", default="1,4,8", help="of the exact section")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="of a rank")
    parser.add_argument("--shapes", type=int, default=2, help="1 leaves V3 out of launches and speed")
    parser.add_argument("--changes", default=CHANGES, help="launches that are tried")
    record.add_arguments(parser)
    return parser.parse_args()


def number_text(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def exact(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for top_k in options.top_k.split(","):
        shape = replace(SMALL, K=int(top_k))
        buffers = machine.buffers(shape, 512, torch.float32)
        dispatcher = symmetric(machine, shape, buffers)
        for kind in KINDS:
            for tokens in (1, 7, 512):
                layer = Exact.draw(shape, choices(kind, shape, tokens, machine.axis, machine.device))
                wrong = machine.worst(float(wrong_numbers(dispatcher, [layer])))
                buffers.check()
                yield {"routing": kind, "top_k": shape.K, "tokens": tokens, "wrong_numbers": wrong}
                assert wrong == 0, "rows were lost or mixed up"


def steps(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    buffers = machine.buffers(SMALL, 1024, torch.float32)
    dispatcher = symmetric(machine, SMALL, buffers)
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    delays = torch.Generator().manual_seed(machine.axis.rank)
    for step in range(1, options.steps + 1):
        kinds = (KINDS[step % 2], KINDS[step % len(KINDS)])
        layers = [
            Exact.draw(SMALL, choices(kind, SMALL, 1024, machine.axis, machine.device, 2 * step + n))
            for n, kind in enumerate(kinds)
        ]
        torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
        wrong += wrong_numbers(dispatcher, layers)
        if step % 100 == 0:
            buffers.check()
            row = {"steps": step, "wrong_numbers": machine.worst(float(wrong))}
            yield row
            assert row["wrong_numbers"] == 0, "rows were lost or mixed up"


def close(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape, tokens, width = V2_LITE, 2048, 256
    buffers = machine.buffers(shape, tokens, torch.bfloat16)
    placement = machine.placement(shape)
    dispatchers = (symmetric(machine, shape, buffers), AllToAllDispatcher(placement, machine.axis, TRITON))
    torch.manual_seed(machine.axis.rank)
    normal = {"device": machine.device, "dtype": torch.bfloat16}
    gate_up = torch.randn(placement.per_place, 2 * width, shape.D, **normal) * shape.D**-0.5
    down = torch.randn(placement.per_place, shape.D, width, **normal) * width**-0.5
    for kind in KINDS:
        experts_TK = choices(kind, shape, tokens, machine.axis, machine.device)
        weights_TK = torch.rand(experts_TK.shape, device=machine.device).masked_fill(experts_TK == shape.E, 0)
        leaves = [torch.randn(tokens, shape.D, **normal), weights_TK, gate_up, down]
        direction_TD = torch.randn(tokens, shape.D, **normal)
        results = []
        for dispatcher in dispatchers:
            x_TD, weights, *matrices = [leaf.clone().requires_grad_() for leaf in leaves]
            rows, receipt = dispatcher.dispatch(x_TD, Routing(weights, experts_TK))
            y_RD = TRITON.expert_ffn(
                rows.x_ND, *matrices, rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
            )
            y_TD = dispatcher.combine(y_RD, receipt)
            gradients = torch.autograd.grad((y_TD * direction_TD).sum(), (x_TD, weights, *matrices))
            results.append((y_TD, gradients[0], gradients[1] * (experts_TK < shape.E), *gradients[2:]))
        gaps = [relative_gap(one.float(), other.float()) for one, other in zip(*results, strict=True)]
        buffers.check()
        names = ("y", "dx", "dweights", "dgate_up", "ddown")
        row = {name: machine.worst(gap) for name, gap in zip(names, gaps, strict=True)}
        yield {"routing": kind, **row}
        assert max(row.values()) < 0.02, "further apart than bfloat16 rounds"


def relative_gap(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-20)).item()


def symmetric(
    machine: Machine, shape: Shape, buffers: SymmetricBuffers, bound: float = 0, change: "Change | None" = None
) -> SymmetricDispatcher:
    placement = machine.placement(shape)
    links = links_of(placement, buffers)
    room = Room(placement, bound).to(machine.device) if bound else None
    return SymmetricDispatcher(placement, links if change is None else change.of(links), room)


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

    def of(self, links: Links) -> Links:
        if self.chunks:
            return replace(links, chunks=self.chunks)
        now = {"push": links.push, "take": links.take, "back": links.back, "sum": links.sum}[self.launch]
        return replace(links, **{self.launch: replace(now, **dict(self.fields))})


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

    def row(self, way: str, seconds: tuple[float, float]) -> dict[str, Any]:
        row = {"shape": self.shape.name, "tokens": self.tokens, "routing": self.kind, "way": way}
        for name, time in zip(("dispatch", "combine"), seconds, strict=True):
            row[f"{name}_us"] = time * 1e6
            row[f"{name}_GB/s"] = self.useful_bytes / time / 1e9
        return row | {"useful_MB": self.useful_bytes / 1e6}


@torch.no_grad()
def time_both(machine: Machine, dispatcher: Dispatcher, traffic: Traffic, graph: bool) -> tuple[float, float]:
    """Seconds of a dispatch and of a combine."""
    rows, receipt = dispatcher.dispatch(traffic.x_TD, traffic.routing)
    y_RD = torch.randn(len(rows.weights_R), traffic.shape.D, device=machine.device, dtype=torch.bfloat16)
    calls = (
        lambda: dispatcher.dispatch(traffic.x_TD, traffic.routing),
        lambda: dispatcher.combine(y_RD, receipt),
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


def launches(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in (V2_LITE, V3)[: options.shapes]:
        traffic = Traffic.draw(machine, shape, 8192, "even")
        buffers = machine.buffers(shape, 8192, torch.bfloat16)
        for text in ("", *options.changes.split(",")):
            change = Change.parse(text) if text else None
            dispatcher = symmetric(machine, shape, buffers, traffic.bound, change)
            row = traffic.row("symmetric, graph", time_both(machine, dispatcher, traffic, True))
            yield row | {"changed": text or "nothing"}
            buffers.check()


def speed(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for shape in (V2_LITE, V3)[: options.shapes]:
        sizes = [int(size) for size in options.tokens.split(",")]
        buffers = machine.buffers(shape, max(sizes), torch.bfloat16)
        for tokens in sizes:
            for kind in ("even", "skewed"):
                traffic = Traffic.draw(machine, shape, tokens, kind)
                ours = symmetric(machine, shape, buffers, traffic.bound)
                theirs = AllToAllDispatcher(machine.placement(shape), machine.axis, TRITON)
                used = {
                    "programs": [launch.programs for launch in (PUSH_LAUNCH, TAKE_LAUNCH, RETURN_LAUNCH, SUM_LAUNCH)]
                }
                yield traffic.row("all_to_all", time_both(machine, theirs, traffic, False))
                yield traffic.row("symmetric", time_both(machine, ours, traffic, False)) | used
                yield traffic.row("symmetric, graph", time_both(machine, ours, traffic, True)) | used
                buffers.check()
        del buffers, ours


@torch.no_grad()
def engines(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every row to every other rank, needed there or not: what a dispatch by copy engines would have to beat."""
    axis = machine.axis
    others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    streams = [torch.cuda.Stream(machine.device) for _ in others]
    for shape in (V2_LITE, V3)[: options.shapes]:
        for tokens in (int(size) for size in options.tokens.split(",")):
            traffic = Traffic.draw(machine, shape, tokens, "even")
            arrived = (axis.size, tokens, shape.D)
            memory = _symmetric_memory.empty(*arrived, dtype=torch.bfloat16, device=machine.device)
            mapped = _symmetric_memory.rendezvous(memory, axis.group.group_name)
            places = [mapped.get_buffer(peer, arrived, torch.bfloat16)[axis.rank] for peer in others]

            def copy(x_TD: Tensor = traffic.x_TD, places: list[Tensor] = places) -> None:
                current = torch.cuda.current_stream()
                for stream, place in zip(streams, places, strict=True):
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        place.copy_(x_TD, non_blocking=True)
                    current.wait_stream(stream)

            seconds = time_call(machine, copy, False)
            row = traffic.row("copy engines, all rows", (seconds, seconds))
            yield {key: value for key, value in row.items() if "combine" not in key}


def vdev(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each choice, already in the order of the experts: the ordering is not in the time."""
    _symmetric_memory.set_backend("NVSHMEM")
    group = machine.axis.group.group_name
    for shape in (V2_LITE, V3):
        for tokens in (1024, 8192):
            traffic = Traffic.draw(machine, shape, tokens, "even")
            slots, experts = tokens * shape.K, shape.E
            room = int(slots * traffic.bound) + 16 * experts
            make = {"dtype": torch.bfloat16, "device": machine.device}
            sent = _symmetric_memory.empty(slots, shape.D, **make)
            received = _symmetric_memory.empty(room, shape.D, **make)
            splits = _symmetric_memory.empty(experts, dtype=torch.int64, device=machine.device)
            arrived = _symmetric_memory.empty(2, experts, dtype=torch.int64, device=machine.device)
            for tensor in (sent, received, splits, arrived):
                _symmetric_memory.rendezvous(tensor, group)
            splits.copy_(torch.bincount(traffic.routing.experts_TK.flatten(), minlength=experts))
            arguments = (sent, received, splits, arrived, group)
            seconds = time_call(machine, lambda of=arguments: torch.ops.symm_mem.all_to_all_vdev_2d(*of), False)
            row = traffic.row("all_to_all_vdev_2d", (seconds, seconds))
            yield {key: value for key, value in row.items() if "combine" not in key}


SECTIONS: dict[str, Callable[[Machine, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "exact": exact,
    "close": close,
    "steps": steps,
    "launches": launches,
    "speed": speed,
    "engines": engines,
    "vdev": vdev,
}


if __name__ == "__main__":
    main()
