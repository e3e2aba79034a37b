"""FLOPs and bytes of operator calls, from the shapes and types of their arguments, and their speed under the roofline.

A multiply-add counts as two FLOPs. Bytes are those that must be read and written at least once. Models are in a table
by name: matrix products, grouped products, attention, convolution, and pointwise operators by their reads and writes.
Only PyTorch's operators and Penstock's functions have a model.

Products in 8 bits: operands are quantized before the product or inside its function, and results are written in 16
bits. The bytes of quantization are not counted, so its cost shows as a lower share of the roof.

Assumptions where a trace has too little: attention without a recorded mask is not causal; tensors in lists, whose dtype
is not recorded, are float32 where they are updated and 16 bits wide elsewhere.

The roof of a call is the longer of its FLOPs at the peak of its dtype and its bytes at the memory bandwidth
(penstock.base.devices); `reached` is the roof over the time of its kernels. A short kernel reaches little of either,
because its start-up time is not in the roof. Calls without a model have a time and no FLOPs.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import numpy as np

from penstock.base.devices import Chip, chip_named
from penstock.trace.events import NONE, GpuKind, Trace
from penstock.trace.tables import OperatorCall, calls_made
from penstock.trace.tree import Placement, place

BYTES: Mapping[str, int] = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "char"), 1),
    **{f"c10::Float8_{suffix}": 1 for suffix in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}


@dataclass(frozen=True, kw_only=True)
class CallTensor:
    """A tensor argument: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    width: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.width


class UnknownShapeError(Exception):
    """An argument is missing or has no shape, so the work of the call is unknown."""


FlopsAndBytes = tuple[float, float]  # FLOPs and bytes


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, and the share of expert rows that held tokens."""

    call: OperatorCall
    used_rows: float

    def get(self, index: int) -> CallTensor | None:
        """An argument, or None if it is missing or no tensor of a known type."""
        shapes, types = self.call.shapes, self.call.types
        shape = shapes[index] if index < len(shapes) else None
        width = BYTES.get(types[index] if index < len(types) else "")
        return CallTensor(shape=shape, width=width) if width is not None and _is_shape(shape) else None

    def need(self, index: int, dims: int = 0) -> CallTensor:
        """An argument that must be a tensor with at least so many dims."""
        tensor = self.get(index)
        if tensor is None or len(tensor.shape) < dims:
            raise UnknownShapeError
        return tensor

    @property
    def tensors(self) -> list[CallTensor]:
        known = (self.get(index) for index in range(len(self.call.shapes)))
        return [tensor for tensor in known if tensor is not None]


Model = Callable[[Arguments], FlopsAndBytes]


def _is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


# ----------------------------------------------------------------------------------------------------------------- work


@dataclass(frozen=True, kw_only=True)
class CallWork:
    """Work of one call. `dtype` selects the peak."""

    flops: float
    bytes: float
    dtype: Literal["bf16", "fp8", "fp32"]


def work_of(call: OperatorCall, *, used_rows: float = 1.0) -> CallWork | None:
    """The work of a call, or None without a model or recorded arguments; `used_rows` as in `Arguments`."""
    model, of = _model(call.name), Arguments(call, used_rows)
    if model is None or not call.shapes:
        return None
    try:
        flops, moved = model(of)
    except (UnknownShapeError, IndexError):
        return None
    dtype = "fp8" if call.name.removesuffix("Backward") in _FLOAT8 else _dtype(of.tensors)
    return CallWork(flops=float(flops), bytes=float(moved), dtype=dtype)


def _dtype(tensors: list[CallTensor]) -> Literal["bf16", "fp8", "fp32"]:
    """The narrowest type of the matrices: an accumulator is wider than the operands."""
    width = min((tensor.width for tensor in tensors if len(tensor.shape) > 1), default=2)
    return "fp8" if width == 1 else "bf16" if width == 2 else "fp32"


def _product(of: Arguments, *, first: int = 0) -> FlopsAndBytes:
    """A product of arguments `first` and `first + 1`, matrices or batches of them; an argument before them is added."""
    a, b = of.need(first, 2), of.need(first + 1, 2)
    batch, (rows, depth), columns = math.prod(a.shape[:-2]), a.shape[-2:], b.shape[-1]
    added = of.get(0) if first else None
    width = max(a.width, 2) if added is None else added.width  # products of 8 bits write 16
    moved = a.bytes + b.bytes + batch * rows * columns * width + (added.bytes if added is not None else 0)
    return 2 * batch * rows * depth * columns, moved


def _grouped(of: Arguments) -> FlopsAndBytes:
    """`aten::_grouped_mm`: the rows of a 2D argument, or the depth of two, are divided into groups."""
    a, b = of.need(0, 2), of.need(1, 2)
    ends = of.get(2)
    groups = ends.shape[-1] if ends is not None and ends.shape else 1
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    if len(a.shape) == len(b.shape) == 3:
        return _product(of)
    written = rows * columns * (groups if len(a.shape) == len(b.shape) == 2 else 1)  # 2D x 2D: weight gradients
    return of.used_rows * 2 * rows * depth * columns, a.bytes + b.bytes + 2 * written


def _row_count(x: CallTensor, index: CallTensor | None) -> int:
    """Rows that a grouped product reads: those that an index selects, or all."""
    return index.shape[0] if index is not None and index.shape else x.shape[0]


def _grouped_gemm(of: Arguments) -> FlopsAndBytes:
    """Penstock's grouped product: x_RD, w_eFD, counts_e, index_R."""
    x, w = of.need(0, 2), of.need(1, 3)
    rows = of.used_rows * _row_count(x, of.get(3))
    return 2 * rows * w.shape[1] * w.shape[2], w.bytes + rows * (w.shape[1] + w.shape[2]) * x.width


def _networks(of: Arguments) -> FlopsAndBytes:
    """Both products of experts, in 16 or 8 bits: x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R.

    Or of a dense network in 8 bits: x_TD, gate_up_FD, down_DF.
    """
    is_dense, is_float8 = of.call.name == "_Float8Network", of.call.name in _FLOAT8
    x, gate_up, down = (of.need(index, dims) for index, dims in enumerate((2, 2, 2) if is_float8 else (2, 3, 3)))
    if is_dense:
        _check_arguments(of, limit=5)
    rows = x.shape[0] if is_dense else of.used_rows * _row_count(x, of.get(5) or of.get(4))
    wide, hidden, narrow = gate_up.shape[-2], gate_up.shape[-1], down.shape[-1]
    weights = gate_up.numel + down.numel if is_float8 else gate_up.bytes + down.bytes
    read = (hidden + narrow) * (1 if is_float8 else x.width)  # inputs of both products
    return 2 * rows * hidden * (wide + narrow), weights + rows * (read + (wide + hidden) * x.width)


def _float8_linear(of: Arguments) -> FlopsAndBytes:
    """A dense product: x_D, w_FD."""
    x, w = of.need(0, 2), of.need(1, 2)
    rows = x.numel // max(x.shape[-1], 1)  # x can have more dims
    _check_arguments(of, limit=4)
    return 2 * rows * w.numel, x.numel + w.numel + rows * w.shape[0] * x.width


def _check_arguments(of: Arguments, *, limit: int) -> None:
    """Functions of the same name in other libraries have more arguments; Penstock's objects are not recorded."""
    if len(of.call.shapes) > limit:
        raise UnknownShapeError


_FLOAT8: Mapping[str, Model] = {
    "_Float8ExpertFfn": _networks,
    "_Float8Linear": _float8_linear,
    "_Float8Network": _networks,
}
"""By the name of the autograd function."""


def _twice_the_forward(of: Arguments) -> FlopsAndBytes:
    """Both gradients of products: twice the FLOPs and bytes of the forward."""
    made = None if of.call.made_by is None else work_of(of.call.made_by, used_rows=of.used_rows)
    if made is None:
        raise UnknownShapeError
    return 2 * made.flops, 2 * made.bytes


_ATTENTION: Mapping[str, tuple[int, int, bool]] = {
    "aten::_cudnn_attention_forward": (0, 10, True),
    "aten::_cudnn_attention_backward": (1, 14, True),
    "aten::_scaled_dot_product_cudnn_attention": (0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, 14, True),
    "aten::_scaled_dot_product_flash_attention": (0, 4, True),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 11, True),
    "aten::_scaled_dot_product_efficient_attention": (0, 6, True),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, 11, True),
    "aten::_flash_attention_forward": (0, 8, False),
    "aten::_flash_attention_backward": (1, 11, False),
    "aten::_efficient_attention_forward": (0, 9, False),
    "aten::_efficient_attention_backward": (1, 14, False),
}
"""Index of the queries, index of the causal flag, and whether heads come before positions in the shapes."""


def _attention(of: Arguments) -> FlopsAndBytes:
    """Two products forward, five backward; half of each if causal (FlashAttention-2, arXiv 2307.08691)."""
    first, causal, heads_first = _ATTENTION[of.call.name]
    q, k, v = (of.need(first + offset, 4) for offset in range(3))
    positions = 2 if heads_first else 1
    batch, heads = q.shape[0], q.shape[3 - positions]
    scores = float(batch * heads * q.shape[positions] * k.shape[positions])
    is_causal = causal < len(of.call.plain) and of.call.plain[causal] in ("True", "1", "2")  # 1, 2: custom_mask_type
    scores /= 2 if is_causal else 1
    out = v.bytes * heads // max(v.shape[3 - positions], 1)  # groups of query heads share a head of keys and values
    if first == 0:  # backward has the gradient of the output before the queries
        return 2 * scores * (q.shape[-1] + v.shape[-1]), q.bytes + k.bytes + v.bytes + out
    return 2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1]), 2 * (q.bytes + k.bytes + v.bytes) + 2 * out


def _convolution(of: Arguments, *, plain: int) -> FlopsAndBytes:
    """Forward; padding, stride and dilation are the arguments from `plain` on, followed by the groups."""
    x, w = of.need(0, 3), of.need(1, 3)
    padding, stride, dilation = (_numbers(of, plain + offset, len(x.shape) - 2) for offset in range(3))
    extents = zip(x.shape[2:], w.shape[2:], padding, stride, dilation, strict=True)
    out = [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, pad, step, gap in extents]
    written = x.shape[0] * w.shape[0] * math.prod(out)
    return 2 * written * math.prod(w.shape[1:]), x.bytes + w.bytes + written * x.width


def _convolution_backward(of: Arguments) -> FlopsAndBytes:
    """Gradients of the input and of the weights, those that the mask requests."""
    dy, x, w = (of.need(index, 3) for index in range(3))
    mask = of.call.plain[10] if len(of.call.plain) > 10 else "[True, True"  # gradients of input, weights and bias
    asked = [flag.strip() == "True" for flag in mask.strip("[]").split(",")[:2]]
    moved = sum(dy.bytes + x.bytes + w.bytes for flag in asked if flag)
    return sum(asked) * 2 * dy.numel * math.prod(w.shape[1:]), moved


def _numbers(of: Arguments, index: int, count: int) -> list[int]:
    numbers = [int(number) for number in re.findall(r"-?\d+", of.call.plain[index])]
    if len(numbers) not in (1, count):
        raise UnknownShapeError
    return numbers * (count // len(numbers))


def _streaming(reads: float, writes: float, flops: float) -> Model:
    """Multiples of the first argument's bytes read and written, with `flops` for each of its elements."""
    return lambda of: (flops * of.need(0).numel, (reads + writes) * of.need(0).bytes)


def _everything(of: Arguments) -> FlopsAndBytes:
    """All tensors are read once, and one of the size of the largest is written, or the first one if in place."""
    known = of.tensors
    if not known:
        raise UnknownShapeError
    is_in_place = of.call.name.endswith("_") and not of.call.name.endswith("__")
    written = known[0] if is_in_place else max(known, key=lambda tensor: tensor.numel)  # broadcast to the largest
    return written.numel, sum(tensor.bytes for tensor in known) + written.bytes


def _copying(of: Arguments) -> FlopsAndBytes:
    return 0.0, of.need(0).bytes + of.need(1).bytes


def _rows_looked_up(of: Arguments, *, by: int) -> FlopsAndBytes:
    """Rows of the first argument at the indices of argument `by`: each is read and written once."""
    source, index = of.need(0, 1), of.need(by)
    per_index = 1 if len(index.shape) == len(source.shape) else source.shape[-1]  # gather: elements; else rows
    return 0.0, 2 * index.numel * per_index * source.width + index.bytes


def _lists(reads: Sequence[int], writes: int, flops: float, *, width: int = 4) -> Model:
    """Lists of tensors: the indices of those read, and the number written, each of the size of the first.

    `width` is that of an element, because dtypes in lists are not recorded.
    """

    def model(of: Arguments) -> FlopsAndBytes:
        lists = [shapes if isinstance(shapes, tuple) else () for shapes in of.call.shapes]
        sizes = [sum(math.prod(shape) for shape in shapes if _is_shape(shape)) for shapes in lists]
        if not sizes or not sizes[0]:
            raise UnknownShapeError
        read = sum(sizes[read] for read in reads if read < len(sizes))
        return flops * sizes[0], width * (read + writes * sizes[0])

    return model


def _loss(of: Arguments) -> FlopsAndBytes:
    """Logits are read once and overwritten by their gradients; the products are calls of their own."""
    x, head = of.need(0, 2), of.need(1, 2)
    logits = x.shape[0] * head.shape[0]  # elements: tokens x vocabulary
    return 5 * logits, 2 * logits * x.width


def _unpermute(of: Arguments) -> FlopsAndBytes:
    """Rows are read once and summed per token: y_RD, weights_TK, places_TK."""
    y, places = of.need(0, 2), of.need(2, 2)
    return 2 * places.numel * y.shape[1], (places.numel + places.shape[0]) * y.shape[1] * y.width


_EVERYTHING = "_RmsNorm _RmsNormBeside _Float8Norm _AddThree _FanOutBackward _MlaHeads _MlaHeadsBackward _Route"
"""Penstock's functions that read and write every tensor once."""

MODELS: Mapping[str, Model] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), _product),
    **dict.fromkeys(("aten::addmm", "aten::_addmm_activation", "aten::baddbmm"), partial(_product, first=1)),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped),
    "_GroupedGemm": _grouped_gemm,
    "_ExpertFfn": _networks,
    **_FLOAT8,
    **{f"{name}Backward": _twice_the_forward for name in ("_GroupedGemm", "_ExpertFfn", *_FLOAT8)},
    **dict.fromkeys(_ATTENTION, _attention),
    "aten::miopen_convolution": partial(_convolution, plain=3),
    "aten::cudnn_convolution": partial(_convolution, plain=2),
    "aten::convolution_backward": _convolution_backward,
    **dict.fromkeys(_EVERYTHING.split(), _everything),
    "_RmsNormBackward": _streaming(2, 1, 8),
    **dict.fromkeys(("_RmsNormBesideBackward", "_Float8NormBackward"), _streaming(3, 1, 9)),
    "_Swiglu": _streaming(1, 0.5, 4),
    "_SwigluBackward": _streaming(3, 2, 10),
    "_Unpermute": _unpermute,
    "_LinearCrossEntropy": _loss,
    "aten::copy_": _copying,
    **dict.fromkeys(("aten::fill_", "aten::zero_"), _streaming(0, 1, 0)),
    **dict.fromkeys(("aten::sum", "aten::mean"), _streaming(1, 0, 1)),
    **dict.fromkeys(("aten::gather", "aten::index_select"), partial(_rows_looked_up, by=2)),
    "aten::embedding": partial(_rows_looked_up, by=1),
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), _streaming(1, 1, 5)),
    "aten::native_layer_norm": _streaming(1, 1, 8),
    "aten::native_layer_norm_backward": _streaming(2, 1, 12),
    "aten::_fused_rms_norm": _streaming(1, 1, 4),
    **dict.fromkeys(("aten::native_batch_norm", "aten::miopen_batch_norm"), _streaming(2, 1, 8)),
    "aten::cat": _lists((0,), 1, 0, width=2),
    **dict.fromkeys(("aten::_fused_adamw_", "aten::_fused_adam_"), _lists((0, 1, 2, 3), 3, 15)),
    "aten::_foreach_copy_": _lists((1,), 1, 0),
    "aten::_foreach_zero_": _lists((), 1, 0),
    "aten::_foreach_norm": _lists((0,), 0, 2),
}
"""By the name of the operator or autograd function; `_model` adds operators by pattern."""

_UPDATE = re.compile(r"^aten::_foreach_\w+_$")
_ANY = re.compile(
    r"^aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sigmoid|tanh|silu|gelu|relu|clamp|clamp_min|clamp_max|where|eq|ne|lt"
    r"|gt|le|ge|maximum|minimum|abs|cos|sin|reciprocal|masked_fill|lerp|addcmul|addcdiv|bitwise_\w+|logical_\w+"
    r"|\w+_backward|native_batch_norm_backward|cumsum|floor_divide|remainder|hardtanh)_?$"
)


def _model(name: str) -> Model | None:
    if name in MODELS:
        return MODELS[name]
    if _UPDATE.match(name):
        return _lists((0, 1, 2), 1, 2)
    return _everything if _ANY.match(name) else None


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
