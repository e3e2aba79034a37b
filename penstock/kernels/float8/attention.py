"""Causal attention in 8 bits as Triton kernels; `attention_reference` says what it is. Experimental.

Forward quantizes queries, keys and values, values also transposed, and runs `attention_queries_kernel`. It keeps
numbers of 8 bits for backward: queries, keys and values with their scales, besides the output and a number for each
row. Backward makes the transposed copies of queries and keys from these, quantizes the gradient of the output both
ways, and runs `attention_queries_kernel` for dQ and `attention_keys_kernel` for dK and dV.

Positions are padded to whole blocks in what is quantized, so kernels need no mask but the causal one. Where this cannot
run is said by `penstock.kernels.float8.attention_limits` before a run starts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.float8.attention_kernels import (
    attention_keys_kernel,
    attention_queries_kernel,
    quantize_heads_kernel,
    quantize_output_gradient_kernel,
)
from penstock.kernels.float8.attention_limits import obstacle_of_widths, parts_of
from penstock.kernels.float8.attention_reference import BLOCK, LOG2_E, AttentionRule
from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.transpose import transpose_weight
from penstock.kernels.language import triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import Launch, target_of


@dataclass(frozen=True, kw_only=True)
class Launches:
    """How the three long kernels are cut: rows are queries, columns are keys."""

    forward: Launch
    queries: Launch
    keys: Launch


def _launch(queries: int, keys: int, warps: int, stages: int) -> Launch:
    return Launch(block_rows=queries, block_columns=keys, warps=warps, stages=stages)


SMALL = Launches(forward=_launch(64, 64, 4, 1), queries=_launch(64, 64, 4, 1), keys=_launch(64, 64, 4, 1))
"""For the interpreter and chips without a table."""

_HOPPER = Launches(forward=_launch(64, 128, 4, 2), queries=_launch(128, 128, 8, 2), keys=_launch(64, 128, 8, 2))
_BLACKWELL = Launches(forward=_launch(128, 128, 8, 3), queries=_launch(64, 64, 8, 2), keys=_launch(64, 64, 8, 2))
_AMD = Launches(forward=_launch(128, 128, 8, 1), queries=_launch(128, 64, 8, 1), keys=_launch(64, 64, 4, 1))

TABLE = {"sm_90": _HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "gfx942": _AMD, "gfx950": _AMD}
"""By target. That of sm_90 is measured on an H200 with the heads of DeepSeek-V2-Lite and Qwen3-30B, 4 x 4096 positions:
its tiles for keys are the fastest of all though they spill 300 bytes a thread. The others are not measured, but are the
largest that do not spill with heads of 192 and 128."""


class Heads(NamedTuple):
    """Heads in 8 bits; positions are padded to whole blocks, by zeros.

    Attributes:
        rows_BHSN: contracted over the width.
        columns_BHNS: the same numbers, contracted over positions; None if nobody needs them.
        scales: float32, B x H x blocks.
    """

    rows_BHSN: Tensor
    columns_BHNS: Tensor | None
    scales: Tensor


def attention(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    *,
    scale: float,
    forward: Format,
    gradient: Format,
    launches: Launches | None = None,
) -> Tensor:
    """`penstock.kernels.float8.attention_reference.attention`.

    Args:
        q_BSHN: queries.
        k_BSGN: keys; G divides H.
        v_BSGM: values.
        scale: factor on the scores before the softmax.
        forward: format of activations.
        gradient: format of gradients.
        launches: None for the table's.

    Raises:
        KernelError: widths or heads for which there is no kernel.
    """
    _check(q_BSHN, k_BSGN, v_BSGM)
    rule = AttentionRule(scale=scale, forward=forward, gradient=gradient)
    o_BSHM: Tensor = _Float8Attention.apply(q_BSHN, k_BSGN, v_BSGM, rule, launches or launches_for(q_BSHN))
    return o_BSHM


def launches_for(q_BSHN: Tensor) -> Launches:
    """The table's choice."""
    return TABLE.get(target_of(q_BSHN.device), SMALL)


class _Float8Attention(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, rule: AttentionRule, launches: Launches
    ) -> Tensor:
        q, k = (quantize_heads(x, rule.forward) for x in (q_BSHN, k_BSGN))
        v = quantize_heads(v_BSGM, rule.forward, columns=True)
        batch, positions, heads, _ = q_BSHN.shape
        o_BSHM = q_BSHN.new_empty(batch, positions, heads, v_BSGM.shape[-1])
        log_sums_BHS = q.scales.new_empty(q.rows_BHSN.shape[:3])
        _walk_keys((q, k, v), o_BSHM, log_sums_BHS, rule, launches.forward)
        ctx.save_for_backward(o_BSHM, log_sums_BHS, *(one for x in (q, k, v) for one in (x.rows_BHSN, x.scales)))
        ctx.rule, ctx.launches, ctx.dtypes = rule, launches, (q_BSHN.dtype, k_BSGN.dtype, v_BSGM.dtype)
        return o_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        o_BSHM, log_sums_BHS, *parts = ctx.saved_tensors
        q, k, v = (Heads(rows, None, scales) for rows, scales in zip(parts[::2], parts[1::2], strict=True))
        do, delta_BHS = quantize_output_gradient(do_BSHM, o_BSHM, ctx.rule.gradient)
        rows = (log_sums_BHS, delta_BHS)
        batch, positions = o_BSHM.shape[:2]
        dq_BSHN, dk_BSGN, dv_BSGM = (
            o_BSHM.new_empty(batch, positions, x.rows_BHSN.shape[1], x.rows_BHSN.shape[3], dtype=dtype)
            for x, dtype in zip((q, k, v), ctx.dtypes, strict=True)
        )
        # One after the other, so that one transposed copy is there at a time.
        _walk_keys((q, with_columns(k), v), dq_BSHN, log_sums_BHS, ctx.rule, ctx.launches.queries, (do, delta_BHS))
        _walk_queries((with_columns(q), k, v), do, rows, (dk_BSGN, dv_BSGM), ctx.rule, ctx.launches.keys)
        return dq_BSHN, dk_BSGN, dv_BSGM, None, None


def quantize_heads(x_BSHN: Tensor, form: Format, *, columns: bool = False) -> Heads:
    """Queries, keys or values in 8 bits, with `columns` also transposed."""
    x_BSHN = _with_dense_rows(x_BSHN)
    batch, positions, heads, width = x_BSHN.shape
    found = _new_heads(x_BSHN, form, columns=columns)
    wide, rest = parts_of(width)
    start_kernel(
        quantize_heads_kernel,
        (found.scales.shape[2], batch * heads),
        x_BSHN,
        found.rows_BHSN,
        found.rows_BHSN if found.columns_BHNS is None else found.columns_BHNS,
        found.scales,
        positions,
        heads,
        *x_BSHN.stride()[:3],
        WIDTH=width,
        WIDE=wide,
        REST=rest,
        COLUMNS=columns,
        LARGEST=form.largest,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return found


def quantize_output_gradient(do_BSHM: Tensor, o_BSHM: Tensor, form: Format) -> tuple[Heads, Tensor]:
    """The gradient of the output in 8 bits, both copies; and of each row its product with the output, B x H x S."""
    do_BSHM = _with_dense_rows(do_BSHM)
    batch, positions, heads, width = do_BSHM.shape
    do = _new_heads(do_BSHM, form, columns=True)
    delta_BHS = do.scales.new_empty(do.rows_BHSN.shape[:3])
    start_kernel(
        quantize_output_gradient_kernel,
        (do.scales.shape[2], batch * heads),
        do_BSHM,
        o_BSHM,
        do.rows_BHSN,
        do.columns_BHNS,
        do.scales,
        delta_BHS,
        positions,
        heads,
        *do_BSHM.stride()[:3],
        WIDTH=width,
        LARGEST=form.largest,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return do, delta_BHS


def with_columns(x: Heads) -> Heads:
    """The same with the transposed copy."""
    batch, heads, padded, width = x.rows_BHSN.shape
    columns_BHNS = x.rows_BHSN.new_empty(batch, heads, width, padded)
    scales = x.scales[..., None]
    transpose_weight(Quantized(x.rows_BHSN, scales, (BLOCK, 0)), Quantized(columns_BHNS, scales.mT, (0, BLOCK)))
    return x._replace(columns_BHNS=columns_BHNS)


def _walk_keys(
    operands: tuple[Heads, Heads, Heads],
    out_BSHN: Tensor,
    log_sums_BHS: Tensor,
    rule: AttentionRule,
    launch: Launch,
    incoming: tuple[Heads, Tensor] | None = None,
) -> None:
    """Run `attention_queries_kernel`: the output and its sums, or the queries' gradient.

    Args:
        operands: queries, keys, values.
        out_BSHN: what is written.
        log_sums_BHS: of forward; written by it.
        rule: of the call.
        launch: how to cut it.
        incoming: for backward, the output's gradient and delta.
    """
    q, k, v = operands
    batch, heads, padded, width = q.rows_BHSN.shape
    # What forward does not read may be any tensor.
    do, delta_BHS = (q, log_sums_BHS) if incoming is None else incoming
    form = rule.forward if incoming is None else rule.gradient
    wide, rest = parts_of(width)
    # Forward writes a sum for each row of the padding too: tiles of backward may be larger.
    rows = padded if incoming is None else out_BSHN.shape[1]
    start_kernel(
        attention_queries_kernel,
        (triton.cdiv(rows, launch.block_rows), batch * heads),
        q.rows_BHSN,
        k.rows_BHSN,
        k.rows_BHSN if k.columns_BHNS is None else k.columns_BHNS,
        v.columns_BHNS if incoming is None else v.rows_BHSN,
        do.rows_BHSN,
        q.scales,
        k.scales,
        v.scales,
        do.scales,
        out_BSHN,
        log_sums_BHS,
        delta_BHS,
        out_BSHN.shape[1],
        padded,
        heads,
        rule.scale * LOG2_E,
        WIDE=wide,
        REST=rest,
        VALUE=v.rows_BHSN.shape[-1],
        SHARE=heads // k.rows_BHSN.shape[1],
        BACKWARD=incoming is not None,
        LARGEST=form.largest,
        **_constants(launch),
    )


def _walk_queries(
    operands: tuple[Heads, Heads, Heads],
    do: Heads,
    rows: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    rule: AttentionRule,
    launch: Launch,
) -> None:
    """Run `attention_keys_kernel`: the gradients of keys and values.

    Args:
        operands: queries, keys, values.
        do: gradient of the output.
        rows: logs of sums, and delta.
        gradients: what is written.
        rule: of the call.
        launch: how to cut it.
    """
    q, k, v = operands
    batch, heads, padded, width = k.rows_BHSN.shape
    positions = gradients[0].shape[1]
    wide, rest = parts_of(width)
    start_kernel(
        attention_keys_kernel,
        (triton.cdiv(positions, launch.block_columns), batch * heads),
        k.rows_BHSN,
        q.rows_BHSN,
        q.columns_BHNS,
        v.rows_BHSN,
        do.rows_BHSN,
        do.columns_BHNS,
        q.scales,
        k.scales,
        v.scales,
        do.scales,
        *gradients,
        *rows,
        positions,
        padded,
        heads,
        rule.scale * LOG2_E,
        WIDE=wide,
        REST=rest,
        VALUE=v.rows_BHSN.shape[-1],
        SHARE=q.rows_BHSN.shape[1] // heads,
        LARGEST=rule.forward.largest,
        LARGEST_GRADIENT=rule.gradient.largest,
        **_constants(launch),
    )


def _constants(launch: Launch) -> dict[str, int]:
    """What both kernels are compiled with."""
    return {
        "BLOCK_QUERIES": launch.block_rows,
        "BLOCK_KEYS": launch.block_columns,
        "BLOCK": BLOCK,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _new_heads(x_BSHN: Tensor, form: Format, *, columns: bool) -> Heads:
    batch, positions, heads, width = x_BSHN.shape
    blocks = -(-positions // BLOCK)
    rows_BHSN = x_BSHN.new_empty(batch, heads, blocks * BLOCK, width, dtype=form.dtype)
    columns_BHNS = x_BSHN.new_empty(batch, heads, width, blocks * BLOCK, dtype=form.dtype) if columns else None
    return Heads(rows_BHSN, columns_BHNS, x_BSHN.new_empty(batch, heads, blocks, dtype=torch.float32))


def _with_dense_rows(x_BSHN: Tensor) -> Tensor:
    return x_BSHN if x_BSHN.stride(-1) == 1 else x_BSHN.contiguous()


def _check(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> None:
    """Raise KernelError where no kernel fits."""
    problem = obstacle_of_widths(q_BSHN.shape[-1], v_BSGM.shape[-1])
    if problem is not None:
        raise KernelError("attention in 8 bits", got=problem, fix="set float8.attention=none")
    batch, positions, heads, width = q_BSHN.shape
    shared = k_BSGN.shape[2]
    fits = k_BSGN.shape == (batch, positions, shared, width) and v_BSGM.shape[:3] == (batch, positions, shared)
    if not fits or heads % shared:
        got = f"queries {tuple(q_BSHN.shape)}, keys {tuple(k_BSGN.shape)}, values {tuple(v_BSGM.shape)}"
        raise KernelError("attention in 8 bits: heads do not fit each other", got=got)
