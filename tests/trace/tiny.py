"""A trace of a few events, written by hand, for tests that change it."""

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.trace.events import Trace
from penstock.trace.load import decode_trace, read_text

TIME_US = 1_000_000.0


def event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    """An event that lasts; `start` counts from the beginning of the trace. Events of the GPU name `stream`."""
    device = {"device": 0} if "stream" in args else {}
    place = {"pid": 0, "tid": args["stream"]} if device else {"pid": 77, "tid": 77}
    times = {"ts": TIME_US + start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": {**device, **args}}


def kernel(name: str, start: float, duration: float, *, correlation: int, stream: int = 7) -> dict[str, Any]:
    return event("kernel", name, start, duration, stream=stream, correlation=correlation)


def launch(start: float, *, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", start, 2.0, correlation=correlation)


def started(start: float, number: int, name: str = "some_kernel", lasts: float = 10.0) -> list[dict[str, Any]]:
    """A launch and, 1,000 us later, its kernel."""
    call = event("cuda_runtime", "cudaLaunchKernel", start, 1, correlation=number)
    return [call, kernel(name, start + 1000, lasts, correlation=number)]


def ran(name: str, launched: float, start: float, lasts: float, stream: int = 7, **args: Any) -> list[dict[str, Any]]:
    """A kernel with its launch; launches of one trace begin at different microseconds."""
    number = 1000 + int(launched)
    there = event("kernel", name, start, lasts, stream=stream, correlation=number, **args)
    return [launch(launched, correlation=number), there]


def operator(name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, start, duration, **args)


def span(name: str, start: float, duration: float) -> dict[str, Any]:
    return event("user_annotation", name, start, duration)


def trace_of(*events: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8},
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "ts": 0, "args": {"name": "thread 77 (python)"}},
            *events,
        ],
    }


def tiny(rank: int = 0) -> dict[str, Any]:
    """Two steps of a product, an all-reduce on a stream of its own, a copy and a fill; one kernel has no launch.

    On the device, from the first event: leaked 0-10, product 20-60, all-reduce 40-90, copy 80-100, fill 110-115; and
    the same without the leaked one 200 us later.
    """
    events = [kernel("leaked_kernel", 10, 10, correlation=999)]
    for step in range(2):
        host, gpu, at = 200.0 * step, 200.0 * step + 10, 10 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step + 3}", host, 190),
            event("cpu_op", "aten::mm", host + 1, 6, **{"External id": at + 1, "Sequence number": 5}),
            launch(host + 2, correlation=at + 1),
            launch(host + 8, correlation=at + 2),
            event("cuda_runtime", "cudaMemcpyAsync", host + 11, 2, correlation=at + 3),
            event("cuda_runtime", "cudaMemsetAsync", host + 14, 2, correlation=at + 4),
            event("python_function", "train.py(1): step", host, 180),
            kernel("ampere_bf16_gemm", gpu + 20, 40, correlation=at + 1),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", gpu + 40, 50, correlation=at + 2, stream=20),
            event("gpu_memcpy", "Memcpy DtoD", gpu + 80, 20, stream=7, correlation=at + 3, bytes=4096),
            event("gpu_memset", "Memset (Device)", gpu + 110, 5, stream=7, correlation=at + 4),
        ]
    return trace_of(*copy.deepcopy(events), rank=rank)


def text_of(trace: Any) -> bytes:
    return json.dumps(trace).encode()


def read(content: Any) -> Trace:
    """The trace of a file with this content."""
    return decode_trace(text_of(content), path=Path("rank-0.json"))


def load_trace(path: Path) -> Trace:
    """The trace of one file, whose rank is None if its content does not say it."""
    return decode_trace(read_text(path), path=path)


def decoded(*events: dict[str, Any], **more: Any) -> Trace:
    """The trace of a file with these events, and more entries beside them."""
    return read(trace_of(*events) | more)


def write(path: Path, trace: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = text_of(trace)
    path.write_bytes(gzip.compress(text, 1) if path.name.endswith(".gz") else text)
    return path


STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, -(2**63) - 1, 2**64 - 1, 10**40, 1.5, -1e300, 1e308, "", "7", "\ud800", "\u00e9", [],
    {}, [[]], {"a": 1}, [1, None], "kernel", "X",
)  # fmt: skip
_TOKENS = (*b"NaN inf -Infinity 1e999 null { } , \xff \x00 \\u12".split(b" "), b'"', b"[" * 3000)


def damaged(trace: dict[str, Any], random_: random.Random) -> bytes:
    """The bytes of a file in which something is wrong, or by luck nothing."""
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: _spoiled(text_of(trace), random_),
        lambda: text_of(_with_strange_values(trace, random_)),
        lambda: _spoiled(gzip.compress(text_of(trace), 1), random_),
    )
    return random_.choice(ways)()


def _spoiled(text: bytes, random_: random.Random) -> bytes:
    """Bytes flipped, cut out, cut off, doubled or replaced by tokens."""
    for _ in range(random_.randint(1, 3)):
        at, length = random_.randrange(len(text) + 1), random_.choice((1, 1, 5, 200))
        piece = text[at : at + length]
        replacement = random_.choice(
            (b"", random_.randbytes(len(piece)), piece * 2, random_.choice(_TOKENS), piece + random_.choice(_TOKENS))
        )
        text = text[:at] + replacement + (b"" if random_.random() < 0.1 else text[at + length :])
    return text


def _with_strange_values(trace: dict[str, Any], random_: random.Random) -> Any:
    """JSON that is right, with values that are not."""
    changed = copy.deepcopy(trace)
    for holder, key in random_.sample(list(places(changed)), random_.randint(1, 4)):
        if random_.random() < 0.2:
            holder[key] = [holder[key]]
        else:
            holder[key] = random_.choice(STRANGE)
    return random_.choice((changed, changed, changed, changed["traceEvents"]))


def places(node: Any) -> Any:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])
