"""Dispatch and combine alone, on the GPUs of one node: right first, then fast.

    torchrun --nproc-per-node 4 -m benchmarks.dispatch --output dispatch.json
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --only exact,steps              # minutes at most, to begin with
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --only vdev --output vdev.json  # in processes of its own
    torchrun --nproc-per-node 4 -m benchmarks.dispatch --payload bf16,float8           # rows in 16 bits, and in 8

    exact     outputs and gradients of `symmetric` on adversarial routings, in whole numbers: bit for bit
    close     the same in bfloat16 through real experts, against `all_to_all`
    steps     1,000 steps with changing routing, two layers in flight, ranks delayed at random: bit for bit again
    launches  how many programs, chunks and rows at a time
    pack      rows quantized into what travels, and dequantized, alone
    speed     dispatch and combine of `symmetric` (launched one by one, and replayed from a graph) and of `all_to_all`
    engines   all tokens to all ranks by the GPUs' copy engines, which take no multiprocessor
    vdev      torch's all_to_all_vdev_2d of the same rows, without de-duplication

Times are those of the slowest rank. Useful bytes are those that must leave a rank: each row once for each other rank
that needs it; `GB/s` divides them by the time. In 8 bits a dispatch quantizes rows in its time and sends their scales
along; a combine's rows are in 16. A section ends after `--patience` seconds; what was measured stays.
"""

import argparse
import faulthandler
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from benchmarks import record
from benchmarks.dispatch_cases import KINDS, SMALL, V2_LITE, V3, Exact, choices, wrong_numbers
from benchmarks.dispatch_traffic import (
    KERNELS,
    PAYLOADS,
    Change,
    Machine,
    Traffic,
    begin,
    dequantized,
    symmetric,
    time_both,
    time_call,
)
from penstock.kernels.float8 import quantize
from penstock.kernels.symmetric import PUSH_LAUNCH, RETURN_LAUNCH, SUM_LAUNCH, TAKE_LAUNCH
from penstock.kernels.triton_operators import TRITON
from penstock.moe.dispatch.collective import AllToAllDispatcher
from penstock.moe.routing import Routing
from penstock.parallel.symmetric import SymmetricBuffers

CHANGES = (
    "push.programs=16,push.programs=32,push.programs=132,take.programs=32,take.programs=132,back.programs=32,"
    "back.programs=64,back.programs=264,sum.programs=32,sum.programs=132,chunks=1,chunks=4,chunks=8"
)
"""Of the launches: which one, its field and the value; or the number of chunks."""


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="exact,close,steps,launches,speed", help="sections, in this order")
    parser.add_argument("--patience", type=int, default=240, help="seconds of a section")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--top-k", default="1,4,8", help="of the exact section")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="of a rank")
    parser.add_argument("--shapes", type=int, default=2, help="1 leaves V3 out of launches and speed")
    parser.add_argument("--payload", default="bf16", help=f"what rows travel as: some of {', '.join(PAYLOADS)}")
    parser.add_argument("--changes", default=CHANGES, help="launches that are tried")
    record.add_arguments(parser)
    return parser.parse_args()


def number_text(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def exact(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for payload, top_k in itertools.product(options.payload.split(","), options.top_k.split(",")):
        shape = replace(SMALL, K=int(top_k))
        buffers = machine.buffers(shape, 512, torch.float32)
        dispatcher = symmetric(machine, shape, buffers, wire_format=dequantized(payload))
        for kind in KINDS:
            for tokens in (1, 7, 512):
                layer = Exact.draw(shape, choices(kind, shape, tokens, machine.axis, machine.device))
                wrong = machine.worst(float(wrong_numbers(dispatcher, [layer])))
                buffers.check()
                row = {"payload": payload, "routing": kind, "top_k": shape.K, "tokens": tokens}
                yield row | {"wrong_numbers": wrong}
                assert wrong == 0, "rows were lost or mixed up"


def steps(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for payload in options.payload.split(","):
        yield from steps_of(machine, options.steps, payload)


def steps_of(machine: Machine, count: int, payload: str) -> Iterator[dict[str, Any]]:
    buffers = machine.buffers(SMALL, 1024, torch.float32)
    dispatcher = symmetric(machine, SMALL, buffers, wire_format=dequantized(payload))
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    delays = torch.Generator().manual_seed(machine.axis.rank)
    for step in range(1, count + 1):
        kinds = (KINDS[step % 2], KINDS[step % len(KINDS)])
        layers = [
            Exact.draw(SMALL, choices(kind, SMALL, 1024, machine.axis, machine.device, 2 * step + n))
            for n, kind in enumerate(kinds)
        ]
        torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
        wrong += wrong_numbers(dispatcher, layers)
        if step % 100 == 0:
            buffers.check()
            row = {"payload": payload, "steps": step, "wrong_numbers": machine.worst(float(wrong))}
            yield row
            assert row["wrong_numbers"] == 0, "rows were lost or mixed up"


def close(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for payload in options.payload.split(","):
        yield from close_by(machine, payload)


def close_by(machine: Machine, payload: str) -> Iterator[dict[str, Any]]:
    shape, tokens, width = V2_LITE, 2048, 256
    buffers, wire_format = machine.buffers(shape, tokens, torch.bfloat16), dequantized(payload)
    placement = machine.placement(shape)
    dispatchers = (
        symmetric(machine, shape, buffers, wire_format=wire_format),
        AllToAllDispatcher(placement, machine.axis, TRITON, wire_format=wire_format),
    )
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
            rows, metadata = dispatcher.dispatch(x_TD, Routing(weights, experts_TK))
            y_RD = TRITON.expert_ffn(
                rows.x_ND, *matrices, rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
            )
            y_TD = dispatcher.combine(y_RD, metadata)
            gradients = torch.autograd.grad((y_TD * direction_TD).sum(), (x_TD, weights, *matrices))
            results.append((y_TD, gradients[0], gradients[1] * (experts_TK < shape.E), *gradients[2:]))
        gaps = [relative_gap(one.float(), other.float()) for one, other in zip(*results, strict=True)]
        buffers.check()
        names = ("y", "dx", "dweights", "dgate_up", "ddown")
        row = {name: machine.worst(gap) for name, gap in zip(names, gaps, strict=True)}
        yield {"payload": payload, "routing": kind, **row}
        assert max(row.values()) < 0.02, "further apart than bfloat16 rounds"


def relative_gap(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-20)).item()


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
        for tokens, kind in itertools.product(sizes, ("even", "skewed")):
            traffic = Traffic.draw(machine, shape, tokens, kind)
            for payload in options.payload.split(","):
                yield from speed_of(machine, traffic, buffers, payload)
                buffers.check()
        del buffers


def speed_of(machine: Machine, traffic: Traffic, buffers: SymmetricBuffers, payload: str) -> Iterator[dict[str, Any]]:
    wire_format = PAYLOADS[payload]
    ours = symmetric(machine, traffic.shape, buffers, traffic.bound, wire_format=wire_format)
    theirs = AllToAllDispatcher(machine.placement(traffic.shape), machine.axis, TRITON, wire_format=wire_format)
    used = {"programs": [launch.programs for launch in (PUSH_LAUNCH, TAKE_LAUNCH, RETURN_LAUNCH, SUM_LAUNCH)]}
    yield traffic.row("all_to_all", time_both(machine, theirs, traffic, False), payload)
    yield traffic.row("symmetric", time_both(machine, ours, traffic, False), payload) | used
    yield traffic.row("symmetric, graph", time_both(machine, ours, traffic, True), payload) | used


@torch.no_grad()
def pack(machine: Machine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """GB/s counts what is read and what is written."""
    wire_format = PAYLOADS["float8"]
    assert wire_format.recipe is not None
    for shape in (V2_LITE, V3)[: options.shapes]:
        for tokens in (int(size) for size in options.tokens.split(",")):
            x_TD = torch.randn(tokens, shape.D, device=machine.device, dtype=torch.bfloat16)
            how = shape.D, wire_format.recipe, wire_format.form, x_TD.dtype
            packed = KERNELS.pack_rows(x_TD, wire_format.recipe, wire_format.form)
            seconds = (
                time_call(
                    machine, lambda x_TD=x_TD: KERNELS.pack_rows(x_TD, wire_format.recipe, wire_format.form), True
                ),
                time_call(machine, lambda of=packed, how=how: KERNELS.unpack_rows(of, *how), True),
            )
            row = {"shape": shape.name, "tokens": tokens, "launch": str(quantize.PACKING)}
            for name, time in zip(("pack", "unpack"), seconds, strict=True):
                row |= {f"{name}_us": time * 1e6, f"{name}_GB/s": (x_TD.nbytes + packed.nbytes) / time / 1e9}
            yield row


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
    "pack": pack,
    "speed": speed,
    "engines": engines,
    "vdev": vdev,
}


if __name__ == "__main__":
    main()
