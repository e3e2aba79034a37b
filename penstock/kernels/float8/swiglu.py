"""SwiGLU and its gradients, from a tile in registers to 8 bits; Hopper has its own kernel for backward.

They are fused where blocks lie in a tile and gate ends where a block does. For other recipes the activation is written
in 16 bits (`penstock.kernels.swiglu`) and quantized in passes of their own. So is the gradient of an activation with
clamps, which takes more registers than a thread has, of one without a gate, and one that biases sum in 16 bits.

Forward quantizes a tile of 128 places by 128 columns along both of its sides, rounded to 16 bits before, as the
definition does (`quantize_kernels`). Backward makes of a tile of gate, up and dh

    h             transposed                   for the weight of the second product
    dgate, dup    by rows and transposed       for the rows, and for the weight of the first product

A program cannot hold these beside its inputs. So it walks the tile twice, a few rows at a time: first it writes rows
and finds the columns' largest magnitudes, then it computes all again, from lines that are still cached, and writes
columns. Each number is rounded once, to 8 bits. The rows of four steps are neighbours, so the 8-bit numbers of a
column's four places are put together in a word, and words are transposed: a quarter of the traffic in shared memory,
and 8-bit tiles are never transposed, which Triton 3.6 gets wrong on sm_90.

A routing weight's gradient is a sum over a whole row, of which a program has 128 columns: each program writes its part,
and the parts are added in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import swiglu as in_16_bits
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import quantize
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantize import BACKWARD, BACKWARD_DEFAULT, BackwardLaunch
from penstock.kernels.float8.quantize_kernels import (
    exponent_of,
    largest_of_tile,
    magnitude_bits,
    quantize_tile,
    scale_of,
    store_columns,
    store_scales,
    tile_rows,
    to_float8,
)
from penstock.kernels.float8.quantized import BLOCKWISE_SQUARE, DEPTH, Format, Recipe, RowColQuantized
from penstock.kernels.float8.reference import aligned_rows
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.reference import ExpertRule
from penstock.kernels.swiglu import activation_gradients, load_activated
from penstock.kernels.tuning import KernelLaunch, programs_of

if HAS_GLUON:
    from penstock.kernels.gluon import float8_quantize_kernels as hopper

# Where nothing is transposed: two loads of 16 bytes of gate and of up for each thread.
ROWS_ONLY = KernelLaunch(block_rows=32, block_columns=128, warps=4)
# A block of rows by a block of columns, 32 numbers a thread. With twice as many a thread of sm_90 spills.
TRANSPOSING = KernelLaunch(block_rows=128, block_columns=128, warps=16)
RUN = 2  # neighbouring rows that a thread of `TRANSPOSING` loads, of 16 columns each


def swiglu(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    rule: ExpertRule,
    recipe: Recipe,
    form: Format,
    *,
    columns: bool = False,
    counts_e: Tensor | None = None,
) -> RowColQuantized:
    """The activation of a feed-forward network, quantized.

    `gate_up_RF` is R x 2F in 16 or 32 bits, or saved rows, only together with `counts_e`. Rows past the experts' are
    not read, and hold anything in the result. `weights_R` are float32 routing weights, or None for 1. Raises
    KernelError for an odd width, if there is not one weight for each row, and for `columns` of rows of experts.
    """
    if columns and counts_e is not None:
        raise KernelError("swiglu: rows of experts are transposed by swiglu_backward", fix="pass columns=False")
    source_SF, first, rows = _given(gate_up_RF, weights_R, rule)
    assert first is None or counts_e is not None, "without counts, other layers' rows follow the saved ones"
    width, block = source_SF.shape[1] // rule.projections, recipe.columns if columns else None
    if not _is_fused(recipe, 1):
        h_RF = in_16_bits.swiglu_forward(gate_up_RF, weights_R, rule, used=_used(counts_e))
        return quantize.quantize_rows(h_RF, recipe, form, columns=block, counts_e=counts_e)
    by_row = quantize.empty_copy(source_SF, (rows, width), recipe.rows, form, recipe.scaling)
    by_column = block and quantize.empty_copy(source_SF, (width, rows), block, form, recipe.scaling)
    launch, experts = (TRANSPOSING if columns else ROWS_ONLY), 0 if counts_e is None else counts_e.numel()
    start_kernel(
        swiglu_float8_kernel, (triton.cdiv(width, launch.block_columns), triton.cdiv(rows, launch.block_rows)),
        source_SF, first, None if weights_R is None else weights_R.contiguous(),
        None if counts_e is None else counts_e.contiguous(),
        *quantize.memories_of(by_row), *quantize.memories_of(by_column),
        rows, quantize.row_stride(by_row), quantize.row_stride(by_column), experts, width,
        BLOCK_E=triton.next_power_of_2(max(experts, 1)), COLUMNS_OUTER=recipe.columns[0], LARGEST=form.largest,
        RUN=RUN if columns else 1, **_constants(recipe, launch), **in_16_bits.rule_constants(rule),
        num_warps=quantize.warps_of(launch, source_SF.device),
    )  # fmt: skip
    return RowColQuantized(by_row, by_column)


def swiglu_backward(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    counts_e: Tensor,
    rule: ExpertRule,
    recipe: Recipe,
    forward: Format,
    gradient: Format,
    *,
    keep_plain: bool = False,
    launch: BackwardLaunch = BACKWARD_DEFAULT,
) -> SwigluForBackward:
    """Gradients around the experts' activation, from one read of both tensors; arguments and errors as of `swiglu`.

    `keep_plain` also returns the gradient in the dtype of `dh`, which is that of `gate_up`. Transposed copies are zero
    in slots without a row. Rows past the experts' are not read; they hold anything in the row-wise copy and in the
    plain gradient, and the gradients of their weights are zero.
    """
    dh_RF = dh_RF.contiguous()
    is_swiglu = rule.limit is None and rule.is_gated and not rule.is_gelu
    is_fused = not launch.in_passes and is_swiglu and _is_fused(recipe, dh_RF.shape[1])
    if keep_plain or not is_fused:
        through = _through_16_bits(gate_up_RF, weights_R, dh_RF, counts_e, rule, recipe, forward, gradient)
        return through if keep_plain else through._replace(plain_d_gate_up_RF=None)
    source_SF, first, rows = _given(gate_up_RF, weights_R, rule)
    width = dh_RF.shape[1]
    places, parts = aligned_rows(rows, counts_e.numel()), triton.cdiv(width, launch.block_columns)
    copies = [
        quantize.empty_copy(dh_RF, shape, block, form, recipe.scaling)
        for shape, block, form in (
            ((rows, 2 * width), recipe.rows, gradient),
            ((2 * width, places), recipe.rows, gradient),
            ((width, places), recipe.columns, forward),
        )
    ]
    products_PR = None if weights_R is None else weights_R.new_zeros(parts, rows)
    sources = source_SF, first, None if weights_R is None else weights_R.contiguous(), dh_RF
    tiles, by_input = quantize.group_tiles(counts_e, rows), rule.weighs_input
    blocks = (recipe.rows, recipe.columns)
    is_hoppers = quantize.hopper_obstacle(source_SF, width, blocks, recipe.scaling, (forward, gradient)) is None
    if launch.engine == "gluon" and is_hoppers:
        columns, h_columns = copies[1].values.view(torch.int64), copies[2].values.view(torch.int64)
        if h_columns.numel():
            start_kernel(
                hopper.swiglu_backward_float8_kernel, (programs_of(launch, tiles.device),),
                *sources, tiles, copies[0].values.view(torch.int8), copies[0].scales.T, columns, copies[1].scales.T,
                h_columns, copies[2].scales.T, products_PR, rows, copies[0].values.stride(0), columns.stride(0), width,
                len(tiles) - 1,
                LARGEST=gradient.largest, H_LARGEST=forward.largest, WEIGHS_INPUT=by_input,
                SQUARE=recipe.columns == BLOCKWISE_SQUARE.columns, num_warps=launch.warps, maxnreg=launch.registers,
            )  # fmt: skip
    else:
        launch = BACKWARD if launch.engine == "gluon" else launch
        start_kernel(
            swiglu_backward_float8_kernel, (parts, len(tiles) - 1),
            *sources, tiles, *(memory for copy in copies for memory in quantize.memories_of(copy)), products_PR,
            rows, quantize.row_stride(copies[0]), quantize.row_stride(copies[1]) // 4, width,
            H_OUTER=recipe.columns[0], LARGEST=gradient.largest, H_LARGEST=forward.largest, WEIGHS_INPUT=by_input,
            STEP=launch.step, **_constants(recipe, launch), num_warps=quantize.warps_of(launch, dh_RF.device),
            **(quantize.register_limit(launch, dh_RF.device) if recipe.rows[1] == DEPTH else {}),
        )  # fmt: skip
    dweights_R = None if products_PR is None else products_PR.sum(0)
    return SwigluForBackward(copies[0], copies[1], copies[2], dweights_R, None)


def _through_16_bits(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    counts_e: Tensor,
    rule: ExpertRule,
    recipe: Recipe,
    forward: Format,
    gradient: Format,
) -> SwigluForBackward:
    """`swiglu_backward` in two passes: the gradients in 16 bits, then their copies."""
    plain_RF, dweights_R, h_RF = in_16_bits.swiglu_backward(
        gate_up_RF, weights_R, dh_RF, rule, recompute=True, used=_used(counts_e)
    )
    both = quantize.quantize_rows(plain_RF, recipe, gradient, columns=recipe.rows, counts_e=counts_e)
    assert h_RF is not None and both.columns is not None, "both were asked for"
    h_columns = quantize.quantize_groups(h_RF, counts_e, recipe, forward)
    return SwigluForBackward(both.rows, both.columns, h_columns, dweights_R, plain_RF)


def _is_fused(recipe: Recipe, width: int) -> bool:
    """Whether a tile has whole blocks of rows, of columns, and of gate."""
    outer, depth = recipe.rows
    fits = recipe.columns in (recipe.rows, (TRANSPOSING.block_columns, TRANSPOSING.block_rows))  # lines or squares
    return outer == 1 and depth in (32, 128) and fits and (width == 1 or width % depth == 0)


def _constants(recipe: Recipe, launch: KernelLaunch) -> dict[str, Any]:
    return {
        "DEPTH": recipe.rows[1],
        "POWER": recipe.scaling != "float32",
        "BLOCK_R": launch.block_rows,
        "BLOCK_F": launch.block_columns,
    }


def _used(counts_e: Tensor | None) -> Tensor | None:
    """Rows of all experts together, on the device; None if all rows count."""
    return None if counts_e is None else counts_e.sum(dtype=torch.int32)


def _given(
    gate_up_RF: Tensor | SavedRows, weights_R: Tensor | None, rule: ExpertRule
) -> tuple[Tensor, Tensor | None, int]:
    """`rows_given` of a matrix: the rows, the number of the first one, and the most rows there can be."""
    source_SF, first, leading = in_16_bits.rows_given(gate_up_RF, weights_R, rule)
    if len(leading) != 1:
        raise KernelError("swiglu: takes rows of gate and up", got=tuple(source_SF.shape), allowed="a matrix")
    return source_SF, first, leading[0]


@triton.jit(do_not_specialize=["R"])
def swiglu_float8_kernel(
    gate_up_ptr, first_ptr, weights_ptr, counts_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    R, rows_stride, columns_stride, experts, F,
    COLUMNS_OUTER: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, RUN: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of h by rows, and transposed if there is a pointer. Rows past the counts are left alone.

    Blocks are 1 x DEPTH, of the transposed copy COLUMNS_OUTER x DEPTH, with 1 or all of a tile. With `first_ptr` gate
    and up begin at the row stored there.
    """
    used = R
    if counts_ptr is not None:  # rows of experts: those past the counts hold anything
        expert_E = tl.arange(0, BLOCK_E)
        used = tl.minimum(tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < experts, other=0), 0).to(tl.int32), R)
        if tl.program_id(1) * BLOCK_R >= used:
            return
    if first_ptr is not None:
        gate_up_ptr += tl.load(first_ptr) * (F if SQUARES else 2 * F)
    row_R, is_row_R = tile_rows(None, used, BLOCK_R, RUN)
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_column_F = column_F < F
    inside = is_row_R[:, None] & is_column_F[None, :]
    start_R1 = row_R.to(tl.int64)[:, None]
    h_RF = load_activated(
        gate_up_ptr,
        weights_ptr,
        row_R,
        is_row_R,
        start_R1,
        column_F,
        inside,
        F,
        LIMIT,
        ALPHA,
        OFFSET,
        WEIGHS_INPUT,
        SQUARES,
    )
    # Where nothing is loaded gate is zero, and so is h.
    h_RF = h_RF.to(gate_up_ptr.dtype.element_ty)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    values_RF, scale_RQ = quantize_tile(h_RF.to(tl.float32), None, dtype, DEPTH, LARGEST, POWER)
    tl.store(rows_ptr + start_R1 * rows_stride + column_F[None, :], values_RF, mask=inside)
    store_scales(row_scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1, DEPTH, BLOCK_F)
    if columns_ptr is not None:
        store_columns(
            columns_ptr, column_scales_ptr, h_RF, column_F, is_column_F, R, F, columns_stride,
            COLUMNS_OUTER, DEPTH, LARGEST, POWER, BLOCK_R, RUN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def swiglu_backward_float8_kernel(
    gate_up_ptr, first_ptr, weights_ptr, dh_ptr, tiles_ptr, d_rows_ptr, d_row_scales_ptr, d_columns_ptr,
    d_column_scales_ptr, h_columns_ptr, h_column_scales_ptr, products_ptr,
    R, rows_stride, words_stride, F,
    H_OUTER: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr, H_LARGEST: tl.constexpr, POWER: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, STEP: tl.constexpr, WEIGHS_INPUT: tl.constexpr,
):  # fmt: skip
    """Make one tile of all five copies, and its part of the weights' gradient, STEP rows at a time.

    `words_stride` is that of transposed copies, in words of four numbers. Places of a tile without a row are zero in
    them, because gate, up and dh are zero there. A tile without rows is skipped. Blocks are 1 x DEPTH, of the
    transposed h H_OUTER x DEPTH, with 1 or all of a tile. `first_ptr` is as in forward.
    """
    if first_ptr is not None:
        gate_up_ptr += tl.load(first_ptr) * (2 * F)
    tile = tl.program_id(1)
    first, filled = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if filled == 0:
        return
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    d_type: tl.constexpr = d_columns_ptr.dtype.element_ty
    h_type: tl.constexpr = h_columns_ptr.dtype.element_ty
    # Places that have their own scales and fill whole words.
    SPAN: tl.constexpr = max(DEPTH, 4 * STEP)
    for span in tl.range(BLOCK_R // SPAN):
        h_bits = tl.zeros([STEP, BLOCK_F], tl.int32)
        dgate_bits, dup_bits = h_bits, h_bits
        # First walk: rows are written, and the largest magnitude of each column is found.
        for step in tl.range(SPAN // STEP):
            row_R, is_row_R = _rows_of(first, filled, span * SPAN // STEP + step, STEP)
            h_RF, dgate_RF, dup_RF, product_RF = _gradients(
                gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT
            )
            if weights_ptr is not None:
                tl.store(products_ptr + tl.program_id(0) * R + row_R, tl.sum(product_RF, 1), mask=is_row_R)
            h_bits = tl.maximum(h_bits, magnitude_bits(h_RF))
            dgate_bits = tl.maximum(dgate_bits, magnitude_bits(dgate_RF))
            dup_bits = tl.maximum(dup_bits, magnitude_bits(dup_RF))
            _store_rows(
                d_rows_ptr, d_row_scales_ptr, dgate_RF, row_R, is_row_R, column_F, R, F, rows_stride,
                DEPTH, LARGEST, POWER,
            )  # fmt: skip
            _store_rows(  # the copy is 2 F wide, gate first; its scales are depth blocks x rows
                d_rows_ptr + F, d_row_scales_ptr + F // DEPTH * R, dup_RF, row_R, is_row_R, column_F, R, F,
                rows_stride, DEPTH, LARGEST, POWER,
            )  # fmt: skip
        start = tile * BLOCK_R + span * SPAN
        if H_OUTER == 1:
            h_scale = _column_scales(h_column_scales_ptr, h_bits, start, column_F, F, F, DEPTH, H_LARGEST, POWER)
        else:
            h_scale = scale_of(largest_of_tile(h_bits), H_LARGEST, POWER)
            store_scales(h_column_scales_ptr, h_scale, 0, tl.program_id(0), None, tile, F, R, H_OUTER, DEPTH, BLOCK_R)
        dgate_scale = _column_scales(d_column_scales_ptr, dgate_bits, start, column_F, F, 2 * F, DEPTH, LARGEST, POWER)
        dup_scale = _column_scales(d_column_scales_ptr + F, dup_bits, start, column_F, F, 2 * F, DEPTH, LARGEST, POWER)
        # Second walk: all is computed again, and columns are written in words of four places.
        for part in tl.range(SPAN // STEP // 4):
            h_words = tl.zeros([STEP, BLOCK_F], tl.uint32)
            dgate_words, dup_words = h_words, h_words
            for byte in tl.range(4):
                row_R, is_row_R = _rows_of(first, filled, span * SPAN // STEP + 4 * part + byte, STEP)
                h_RF, dgate_RF, dup_RF, _ = _gradients(
                    gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT
                )
                h_words = _push(h_words, to_float8(h_RF, h_scale, h_type, H_LARGEST, POWER))
                dgate_words = _push(dgate_words, to_float8(dgate_RF, dgate_scale, d_type, LARGEST, POWER))
                dup_words = _push(dup_words, to_float8(dup_RF, dup_scale, d_type, LARGEST, POWER))
            word = start // 4 + part * STEP
            _store_words(h_columns_ptr, h_words, word, column_F, column_F < F, words_stride)
            _store_words(d_columns_ptr, dgate_words, word, column_F, column_F < F, words_stride)
            _store_words(d_columns_ptr, dup_words, word, column_F + F, column_F < F, words_stride)


@triton.jit
def _rows_of(first, filled, step, STEP: tl.constexpr):
    """Rows of a step, 4 apart, and which of them exist; 4 steps take 4 * STEP rows."""
    place_R = 4 * (step // 4 * STEP + tl.arange(0, STEP)) + step % 4
    return first + place_R, place_R < filled


@triton.jit
def _gradients(gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT: tl.constexpr):
    """`activation_gradients` of some rows."""
    inside = is_row_R[:, None] & (column_F < F)[None, :]
    narrow = row_R.to(tl.int64)[:, None] * F + column_F[None, :]
    wide = row_R.to(tl.int64)[:, None] * (2 * F) + column_F[None, :]
    gate_RF = tl.load(gate_up_ptr + wide, mask=inside, other=0.0).to(tl.float32)
    up_RF = tl.load(gate_up_ptr + F + wide, mask=inside, other=0.0).to(tl.float32)
    dh_RF = tl.load(dh_ptr + narrow, mask=inside, other=0.0).to(tl.float32)
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    return activation_gradients(gate_RF, up_RF, dh_RF, weight_R1, None, 1.0, 1.0, WEIGHS_INPUT)


@triton.jit
def _store_rows(
    rows_ptr, scales_ptr,
    x_RF, row_R, is_row_R, column_F, R, F, stride,
    DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Store some rows of the tile, quantized along its columns."""
    RUNS: tl.constexpr = x_RF.shape[0]
    BLOCK_F: tl.constexpr = x_RF.shape[1]
    BLOCKS: tl.constexpr = BLOCK_F // DEPTH
    scale_RQ = scale_of(tl.max(tl.reshape(magnitude_bits(x_RF), [RUNS, BLOCKS, DEPTH]), 2), LARGEST, POWER)
    scale_RF = tl.reshape(tl.broadcast_to(scale_RQ[:, :, None], [RUNS, BLOCKS, DEPTH]), [RUNS, BLOCK_F])
    values_RF = to_float8(x_RF, scale_RF, rows_ptr.dtype.element_ty, LARGEST, POWER)
    inside = is_row_R[:, None] & (column_F < F)[None, :]
    tl.store(rows_ptr + row_R.to(tl.int64)[:, None] * stride + column_F[None, :], values_RF, mask=inside)
    store_scales(scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1, DEPTH, BLOCK_F)


@triton.jit
def _column_scales(
    scales_ptr, bits_RF, start, column_F, F, width, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr
):
    """Store the scale of each column's block of places, whose maxima are `bits`; return the scale of each number."""
    STEP: tl.constexpr = bits_RF.shape[0]
    BLOCK_F: tl.constexpr = bits_RF.shape[1]
    BLOCKS: tl.constexpr = max(4 * STEP // DEPTH, 1)
    scale_QF = scale_of(tl.max(tl.reshape(bits_RF, [BLOCKS, STEP // BLOCKS, BLOCK_F]), 1), LARGEST, POWER)
    values = scale_QF
    if scales_ptr.dtype.element_ty == tl.uint8:
        values = exponent_of(scale_QF)
    block_Q = start // DEPTH + tl.arange(0, BLOCKS)
    pointers = scales_ptr + block_Q[:, None] * width + column_F[None, :]
    tl.store(pointers, values, mask=(column_F < F)[None, :] & (block_Q >= 0)[:, None])
    return tl.reshape(tl.broadcast_to(scale_QF[:, None, :], [BLOCKS, STEP // BLOCKS, BLOCK_F]), [STEP, BLOCK_F])


@triton.jit
def _push(packed_bytes, values):
    """Shift an 8-bit number into each word as its last byte; the first byte is dropped. One instruction does it."""
    return (packed_bytes >> 8) | (values.to(tl.uint8, bitcast=True).to(tl.uint32) << 24)


@triton.jit
def _store_words(columns_ptr, words_RF, word, column_F, is_column_F, stride):
    """Store words of four neighbouring places, transposed, from word `word` of each column on."""
    words_ptr = columns_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    word_R = word + tl.arange(0, words_RF.shape[0])
    pointers = words_ptr + column_F.to(tl.int64)[:, None] * stride + word_R[None, :]
    tl.store(pointers, tl.trans(words_RF), mask=is_column_F[:, None])
