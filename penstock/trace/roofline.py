"""The speed of each different call against the device: FLOP/s, bytes/s, and the limit that applies.

`penstock.trace.work` gives the FLOPs and bytes of a call. The roof of a call is the longer of its FLOPs at the peak of
its dtype and its bytes at the memory bandwidth (penstock.base.devices); `reached` is the roof over the time of its
kernels. A short kernel reaches little of either, because its start-up time is not in the roof.

Calls are grouped (penstock.trace.operators), so a model of work runs once for each different call. Calls without a
model have a time and no FLOPs; `modelled_share` is the share of the time that has a model.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.base.devices import Chip, chip_named
from penstock.trace.events import NONE, GpuKind, Trace
from penstock.trace.operators import OperatorCall, calls_made
from penstock.trace.tree import Placement, place
from penstock.trace.work import CallWork, work_of

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """All calls of an operator on the same shapes."""

    operator: str
    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    count: int
    kernel_us: float
    share: float  # of the time of all compute kernels
    flops: float | None  # of one call, or None without a model
    bytes: float | None  # that one call has to read and write at least, or None
    flops_per_second: float | None
    bytes_per_second: float | None
    bound: Bound | None  # the limit of its roof, or None if the work or the device is unknown
    reached: float | None
    inferred: bool  # some of its kernels are of a CUDA graph, and the operator is that of an eager pass


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The table, longest first."""

    rows: tuple[RooflineRow, ...]
    chip: Chip | None  # source of the peaks, or None if the trace's device is unknown
    modelled_share: float  # share of the time with a model of its work


def roofline(trace: Trace, placement: Placement | None = None, *, used_rows: float = 1.0) -> Roofline:
    """Work and time of every different call whose kernels compute.

    `used_rows` is the share of the rows of grouped products that held tokens (penstock.trace.experts).
    """
    placement = place(trace) if placement is None else placement
    gpu, table = trace.gpu, calls_made(trace, placement)
    # A copy on the device is work of an operator; copies from and to the host are not.
    is_counted = (gpu.kind == GpuKind.COMPUTE) | gpu.called("Memcpy DtoD (Device -> Device)")
    total = float(gpu.duration_us[is_counted].sum())
    is_counted &= (table.call_of != NONE) & (~placement.is_replayed | placement.is_inferred)
    chip = None if trace.device_name is None else chip_named(trace.device_name)
    if not is_counted.any():
        return Roofline(rows=(), chip=chip, modelled_share=0.0)
    call_of = table.call_of[is_counted]
    # By call: time of its kernels, whether some of them are of a graph, and number of executions.
    kernel_us = np.bincount(call_of, gpu.duration_us[is_counted], len(table.calls)).tolist()
    inferred = (np.bincount(call_of, placement.is_inferred[is_counted], len(table.calls)) > 0).tolist()
    # Executions of a call differ in the row of the operator; in a graph, in the launch of the graph.
    graph = np.where(placement.is_replayed, gpu.launch, NONE)[is_counted]
    executions = np.unique(np.stack([call_of, table.row_of[is_counted], graph]), axis=1)
    counts = np.bincount(executions[0], minlength=len(table.calls)).tolist()
    rows = [
        _row(call, us, count, chip, total, used_rows=used_rows, inferred=is_inferred)
        for call, us, count, is_inferred in zip(table.calls, kernel_us, counts, inferred, strict=True)
        if count
    ]
    modelled = sum(row.kernel_us for row in rows if row.flops is not None)
    ordered = sorted(rows, key=lambda row: (-row.kernel_us, row.operator))
    return Roofline(rows=tuple(ordered), chip=chip, modelled_share=modelled / total if total else 0.0)


def _row(
    call: OperatorCall,
    kernel_us: float,
    count: int,
    chip: Chip | None,
    total_us: float,
    *,
    used_rows: float,
    inferred: bool,
) -> RooflineRow:
    seconds, work = kernel_us * 1e-6, work_of(call, used_rows=used_rows)
    roof = None if work is None or chip is None else _roof(work, chip)
    known = work is not None and seconds > 0
    return RooflineRow(
        operator=call.name,
        shapes=call.shapes,
        types=call.types,
        count=count,
        kernel_us=kernel_us,
        share=kernel_us / total_us if total_us else 0.0,
        flops=None if work is None else work.flops,
        bytes=None if work is None else work.bytes,
        flops_per_second=work.flops * count / seconds if work is not None and known else None,
        bytes_per_second=work.bytes * count / seconds if work is not None and known else None,
        bound=None if roof is None else roof[1],
        reached=roof[0] * count / seconds if roof is not None and known else None,
        inferred=inferred,
    )


def _roof(work: CallWork, chip: Chip) -> tuple[float, Bound]:
    """Seconds that one call needs at least, and the limit. An unknown peak counts as that of bfloat16."""
    peak = {"fp8": chip.fp8, "fp32": chip.fp32, "bf16": chip.bf16}[work.dtype] or chip.bf16
    computing, moving = work.flops / peak, work.bytes / chip.memory
    return (computing, "compute") if computing > moving else (moving, "memory")
