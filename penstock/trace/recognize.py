"""Kernels whose names say too little: communication found by structure, and names that a file maps to phases.

A kernel with an unknown name communicates if at least two of three signs say so, by the larger part of its time:

    annotation   dispatch or combine is open around its launch: a span (`dispatch(...)`), an operator (`FusedDispatch`)
    operator     no operator of PyTorch launched it: it is the transport, not a copy or an index beside it
    stream       it runs on another stream than most computing

Without the annotation its own name must say that something travels (`acme_send_rows`), or nothing but collectives is
known on its stream. A name that is known to move data inside a device (`row_copy`) needs all three signs. Everything
else stays unknown, and `penstock trace` lists the kernels that take `TELLS` of the step, for `--names FILE`. The file
is TOML, a phase for each pattern:

    'acme::fused_block' = "attention"          a regular expression, searched in the name of the kernel's function
    'acme::rows_(out|back)' = "dispatch"       the first pattern that matches decides, before spans and operators

A kernel that is mapped to dispatch, combine or a collective communicates; one that is mapped to another phase computes.
"""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.base.errors import TraceError, did_you_mean, did_you_mean_path
from penstock.base.files import read_toml
from penstock.base.spans import Span
from penstock.trace.events import NONE, Flags, GpuKind, Trace
from penstock.trace.kernel_names import ATEN, COLLECTIVES, Category, function_of, generic_category, specific_category
from penstock.trace.tree import CATEGORIES, FRAMES, SPANS, place

TELLS = 0.02  # share of the step from which an unknown kernel is listed
WORTH_A_LOOK = 0.001  # share of all time on the device from which unknown kernels are examined together
HALF = 0.5

TRAVELS = re.compile(
    r"dispatch|combine|all_?to_?all|a2a|send|recv|(?<![a-z])[pg][ue]t_|notify|barrier|signal|rdma|remote|peer"
)
"""Parts of names that say that something travels; they decide only together with other signs."""

MOVES = frozenset({Category.COPY, Category.LOOK_UP})  # operations that can be the transport, or stay on the device
TOKENS = frozenset({Category.DISPATCH, Category.COMBINE, Category.WAIT})
COMMUNICATION = TOKENS | frozenset(COLLECTIVES) | {f"{Span.COMBINE} waiting"}  # phases whose kernels communicate

PHASE_NAMES = tuple(dict.fromkeys((*(span.value for span in Span if span not in FRAMES), *map(str, Category))))
"""Phases that a file of names can give."""


EXAMPLE = """write a line such as 'acme::send' = "dispatch" for each pattern"""


PhaseNames = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns of kernels' functions, with their phases, in the order of a file."""


def read_phase_names(path: Path) -> PhaseNames:
    """The patterns of a file. Raises a TraceError if it cannot be read or has a wrong pattern or phase."""
    try:
        table = read_toml(path)
    except FileNotFoundError as error:
        raise TraceError(f"there is no file {path}", fix=did_you_mean_path(path)) from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is not TOML: {error}", fix=EXAMPLE) from error
    if not table:
        raise TraceError(f"{path} names no kernel", fix=EXAMPLE)
    return tuple(_entry(path, pattern, phase) for pattern, phase in table.items())


def _entry(path: Path, pattern: str, phase: object) -> tuple[re.Pattern[str], str]:
    if not isinstance(phase, str):
        what = f"{path}: {pattern!r} needs the name of a phase"
        raise TraceError(what, got=phase, fix="put patterns with dots, colons or brackets in quotes")
    if phase not in PHASE_NAMES:
        fix = did_you_mean(phase, PHASE_NAMES)
        raise TraceError(f"{path}: {pattern!r} has no such phase", got=phase, allowed=", ".join(PHASE_NAMES), fix=fix)
    try:
        return re.compile(pattern, re.IGNORECASE), phase
    except re.error as error:
        raise TraceError(
            f"{path}: {pattern!r} is no regular expression: {error}", fix="escape ( ) [ ] * + ?"
        ) from error


def recognized(trace: Trace, names: PhaseNames | None = None) -> Trace:
    """The trace with the kinds of kernels by structure and by a file of names; a note tells the former."""
    trace = trace if trace.is_host else _by_structure(trace)
    if names is None:
        return trace
    gpu = trace.gpu
    used = [gpu.names[number] for number in np.unique(gpu.name_id[gpu.is_kernel])]
    mapped: dict[str, str] = {}
    for pattern, phase in reversed(names):  # the first one that matches decides
        mapped |= {kernel: phase for kernel in used if pattern.search(function_of(kernel))}
    kind = gpu.kind.copy()
    talks = gpu.called(*(kernel for kernel, phase in mapped.items() if phase in COMMUNICATION))
    kind[gpu.called(*mapped)] = GpuKind.COMPUTE
    kind[talks] = GpuKind.COMMUNICATION
    return replace(trace, gpu=replace(gpu, kind=kind), mapped=mapped)


def _by_structure(trace: Trace) -> Trace:
    gpu = trace.gpu
    is_open: Flags = (gpu.kind == GpuKind.COMPUTE) & gpu.named(_may_travel)
    time_us = gpu.duration_us
    if time_us[is_open].sum() <= WORTH_A_LOOK * time_us.sum():
        return trace
    rows = np.flatnonzero(is_open)
    is_own, is_collective = (flags[rows] for flags in _own_streams(trace, is_open))
    talks = _talks(replace(trace, gpu=gpu.take(rows)), is_own, is_collective)
    total_us = np.bincount(gpu.name_id[rows], time_us[rows], len(gpu.names))
    talking_us = np.bincount(gpu.name_id[rows], time_us[rows] * talks, len(gpu.names))
    kernels = np.flatnonzero(talking_us > HALF * total_us)  # names, not events: one kernel has one kind
    if not len(kernels):
        return trace
    kind = gpu.kind.copy()
    kind[is_open & np.isin(gpu.name_id, kernels)] = GpuKind.COMMUNICATION
    longest = sorted(kernels.tolist(), key=lambda kernel: -total_us[kernel])
    text = ", ".join(
        f"{function_of(gpu.names[kernel])[:60]} ({total_us[kernel] / 1e3:,.3f} ms)" for kernel in longest[:4]
    )
    note = f"{len(kernels)} kernels count as communication by what is around them: {text}"
    return replace(trace, gpu=replace(gpu, kind=kind), notes=(*trace.notes, note))


def _may_travel(kernel: str) -> bool:
    """The name does not say that the kernel computes."""
    return specific_category(kernel) is None and (generic_category(kernel) or Category.COPY) in MOVES


def _own_streams(trace: Trace, is_open: Flags) -> tuple[Flags, Flags]:
    """For each GPU event, whether its stream is not that of most known computing, and has known collectives only."""
    gpu = trace.gpu
    computes = (gpu.kind == GpuKind.COMPUTE) & ~is_open
    streams, stream = np.unique(gpu.stream, return_inverse=True)
    busy_us = np.bincount(stream, gpu.duration_us * computes, len(streams))
    talking_us = np.bincount(stream, gpu.duration_us * (gpu.kind == GpuKind.COMMUNICATION), len(streams))
    is_main = stream == busy_us.argmax()
    is_own = ~is_main if busy_us.any() else np.zeros(len(gpu), dtype=bool)
    return is_own, is_own & ((busy_us == 0) & (talking_us > 0))[stream]


def _talks(trace: Trace, is_own_stream: Flags, is_collective_stream: Flags) -> Flags:
    """For each of these kernels, whether the signs say that it communicates."""
    gpu, host, placement = trace.gpu, trace.host, place(trace)
    is_token = np.array([category in TOKENS for category in CATEGORIES] + [False])
    is_exchange = np.array([span in (Span.DISPATCH, Span.COMBINE) for span in SPANS] + [False])
    annotated = is_exchange[placement.span] | is_token[placement.category]  # NONE is -1 and reads the appended False
    is_aten = np.append(host.named(lambda name: name.startswith(ATEN)), False)[placement.operator]
    without_operator = ~is_aten & (gpu.launch != NONE)
    unknown = gpu.named(lambda name: generic_category(name) is None)
    travels = gpu.named(lambda name: TRAVELS.search(function_of(name).lower()))
    signs = annotated.astype(int) + without_operator + is_own_stream
    return np.where(unknown, (signs >= 2) & (annotated | travels | is_collective_stream), signs == 3) & ~is_aten


@dataclass(frozen=True, kw_only=True)
class UnknownKernel:
    """A kernel without a known phase."""

    name: str
    kernel_us: float  # of all recorded steps
    share: float  # of the device's time
    count: int
    streams: tuple[int, ...]


def unknown_kernels(trace: Trace, is_other: Flags, total_us: float) -> tuple[UnknownKernel, ...]:
    """Kernels that take `TELLS` of `total_us` and have no phase (`is_other`, by GPU event), the longest first."""
    gpu = trace.gpu
    rows_of: dict[str, list[int]] = {}
    for number in np.unique(gpu.name_id[is_other]).tolist():
        rows_of.setdefault(function_of(gpu.names[number]) or gpu.names[number], []).append(number)
    kernels = []
    for name, ids in rows_of.items():
        rows = is_other & np.isin(gpu.name_id, ids)
        kernel_us = float(gpu.duration_us[rows].sum())
        if kernel_us > TELLS * total_us:
            kernels.append(
                UnknownKernel(
                    name=name,
                    kernel_us=kernel_us,
                    share=kernel_us / total_us,
                    count=int(rows.sum()),
                    streams=tuple(np.unique(gpu.stream[rows]).tolist()),
                )
            )
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.kernel_us, kernel.name)))
