"""`swiglu` and `swiglu_backward` of `penstock.kernels.float8.operators`, one kernel each; Hopper has one of its own.

They are fused where blocks lie in a tile (those of `blockwise` and `mxfp8` in a row of it, and squares of
`blockwise-square` fill it), and gate ends where a block does.
Other scales reach over more numbers than a program has: there the activation is written in 16 bits
(`penstock.kernels.swiglu`) and quantized by passes of its own. So is the gradient of an activation with clamps,
which takes more registers than a thread has, and one that biases sum in 16 bits.

A routing weight's gradient is a sum over a whole row, of which a program has 128 columns: each writes its part, and the
parts are added in one order always.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import swiglu as in_16_bits
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import quantize
from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantized import Quantized, RowColQuantized
from penstock.kernels.float8.recipes import DEPTH, Recipe
from penstock.kernels.float8.reference import aligned_rows
from penstock.kernels.float8.swiglu_kernels import swiglu_backward_float8_kernel, swiglu_float8_kernel
from penstock.kernels.float8.tile_launches import BACKWARD, BACKWARD_TAKEN, BackwardLaunch
from penstock.kernels.gluon import float8_quantize
from penstock.kernels.language import triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.reference import ExpertRule
from penstock.kernels.tuning import KernelLaunch, target_of

ROWS_ONLY = KernelLaunch(block_rows=32, block_columns=128, warps=4)
"""Where nothing is transposed: two loads of 16 bytes of gate and of up for each thread."""

TRANSPOSING = KernelLaunch(block_rows=128, block_columns=128, warps=16)
"""A block of rows by a block of columns, 32 numbers a thread. Of twice as many a thread of sm_90 spills."""

RUN = 2
"""Neighbouring rows that a thread of `TRANSPOSING` loads, of 16 columns each."""


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

    Args:
        gate_up_RF: R x 2F, 16 or 32 bits; or where it is kept, which goes with `counts_e` only.
        weights_R: float32 routing weights, or None for 1.
        rule: which activation, and where the weight stands.
        recipe: whose blocks.
        form: of the values.
        columns: also transposed.
        counts_e: rows of each expert; those past them are not read, and hold anything in what comes back.

    Raises:
        KernelError: odd width, or not one weight for each row; `columns` of rows of experts.
    """
    if columns and counts_e is not None:
        raise KernelError("swiglu: rows of experts are transposed by swiglu_backward", fix="pass columns=False")
    source_SF, first, rows = _given(gate_up_RF, weights_R)
    assert first is None or counts_e is not None, "behind the rows that are kept here stand others'"
    width, block = source_SF.shape[1] // 2, recipe.columns if columns else None
    if not _is_fused(recipe, 1):
        h_RF = in_16_bits.swiglu_forward(gate_up_RF, weights_R, rule, used=_used(counts_e))
        return quantize.quantize_rows(h_RF, recipe, form, columns=block, counts_e=counts_e)
    by_row = quantize.empty_copy(source_SF, (rows, width), recipe.rows, form, recipe.scaling)
    by_column = block and quantize.empty_copy(source_SF, (width, rows), block, form, recipe.scaling)
    launch, experts = (TRANSPOSING if columns else ROWS_ONLY), 0 if counts_e is None else counts_e.numel()
    start_kernel(
        swiglu_float8_kernel,
        (triton.cdiv(width, launch.block_columns), triton.cdiv(rows, launch.block_rows)),
        source_SF.contiguous(),
        first,
        None if weights_R is None else weights_R.contiguous(),
        None if counts_e is None else counts_e.contiguous(),
        by_row.values,
        quantize.memory_of(by_row.scales),
        None if by_column is None else by_column.values,
        None if by_column is None else quantize.memory_of(by_column.scales),
        rows,
        by_row.values.stride(0),
        0 if by_column is None else by_column.values.stride(0),
        experts,
        width,
        BLOCK_E=triton.next_power_of_2(max(experts, 1)),
        COLUMNS_OUTER=recipe.columns[0],
        LARGEST=form.largest,
        RUN=RUN if columns else 1,
        **_constants(recipe, launch),
        **in_16_bits.rule_constants(rule),
        num_warps=quantize.warps_of(launch, source_SF.device),
    )
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
    launch: BackwardLaunch = BACKWARD_TAKEN,
) -> SwigluForBackward:
    """What the experts' backward needs around their activation, from one read of both tensors.

    Args:
        gate_up_RF: as given to `swiglu`.
        weights_R: as given to `swiglu`.
        dh_RF: gradient of h; of rows past the experts' it is not read.
        counts_e: rows of each expert.
        rule: as given to `swiglu`.
        recipe: whose blocks.
        forward: format of h.
        gradient: format of gradients.
        keep_plain: also the gradient in the dtype of `dh`, which is that of `gate_up`.
        launch: how it is cut.

    Returns:
        Transposed copies are zero where no row stands. Rows past the experts' hold anything in the row-wise copy and in
        the plain gradient; their weights' gradients are zero.

    Raises:
        KernelError: odd width, or not one weight for each row.
    """
    given = gate_up_RF, weights_R, dh_RF.contiguous(), counts_e, rule, recipe, forward, gradient
    is_fused = launch.engine != "passes" and rule.limit is None and _is_fused(recipe, dh_RF.shape[1])
    if keep_plain or not is_fused:
        return _in_passes(*given, keep_plain)
    return _in_one_pass(*given, launch)


def _in_one_pass(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    counts_e: Tensor,
    rule: ExpertRule,
    recipe: Recipe,
    forward: Format,
    gradient: Format,
    launch: BackwardLaunch,
) -> SwigluForBackward:
    """`swiglu_backward` whose tiles never leave the multiprocessor."""
    source_SF, first, rows = _given(gate_up_RF, weights_R)
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
    sources = source_SF.contiguous(), first, None if weights_R is None else weights_R.contiguous(), dh_RF
    given, forms = (sources, quantize.group_tiles(counts_e, rows), copies, products_PR), (forward, gradient)
    if _is_hoppers(source_SF, recipe, forms, launch):
        float8_quantize.launch_swiglu_backward(*given, forms, launch, weighs_input=rule.weighs_input)
    else:
        launch = BACKWARD if launch.engine == "gluon" else launch
        _start_tritons(*given, recipe, forms, launch, weighs_input=rule.weighs_input)
    by_row, by_column, h_by_column = copies
    return SwigluForBackward(by_row, by_column, h_by_column, None if products_PR is None else products_PR.sum(0), None)


def _is_hoppers(gate_up_RF: Tensor, recipe: Recipe, forms: tuple[Format, Format], launch: BackwardLaunch) -> bool:
    """A launch asks for Hopper's own kernel, and it can."""
    if launch.engine != "gluon" or gate_up_RF.dtype != torch.bfloat16:
        return False
    width, target = gate_up_RF.shape[1] // 2, target_of(gate_up_RF.device)
    return float8_quantize.obstacle((recipe.rows, recipe.columns), recipe.scaling, forms, width, target) is None


def _start_tritons(
    sources: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    tiles: Tensor,
    copies: list[Quantized],
    products_PR: Tensor | None,
    recipe: Recipe,
    forms: tuple[Format, Format],
    launch: BackwardLaunch,
    *,
    weighs_input: bool,
) -> None:
    """Run the kernel of `swiglu_kernels`; as `float8_quantize.launch_swiglu_backward`."""
    by_row, by_column, _ = copies
    rows, width = sources[3].shape
    start_kernel(
        swiglu_backward_float8_kernel,
        (triton.cdiv(width, launch.block_columns), len(tiles) - 1),
        *sources,
        tiles,
        *(memory for one in copies for memory in (one.values, quantize.memory_of(one.scales))),
        products_PR,
        rows,
        by_row.values.stride(0),
        by_column.values.stride(0) // 4,
        width,
        H_OUTER=recipe.columns[0],
        LARGEST=forms[1].largest,
        H_LARGEST=forms[0].largest,
        WEIGHS_INPUT=weighs_input,
        STEP=launch.step,
        **_constants(recipe, launch),
        num_warps=quantize.warps_of(launch, tiles.device),
        **(quantize.register_limit(launch, tiles.device) if recipe.rows[1] == DEPTH else {}),
    )


def _in_passes(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    counts_e: Tensor,
    rule: ExpertRule,
    recipe: Recipe,
    forward: Format,
    gradient: Format,
    keep_plain: bool,
) -> SwigluForBackward:
    """`swiglu_backward` by way of 16 bits."""
    plain_RF, dweights_R, h_RF = in_16_bits.swiglu_backward(
        gate_up_RF, weights_R, dh_RF, rule, recompute=True, used=_used(counts_e)
    )
    assert h_RF is not None, "asked for"
    both = quantize.quantize_rows(plain_RF, recipe, gradient, columns=recipe.rows, counts_e=counts_e)
    assert both.columns is not None, "asked for"
    return SwigluForBackward(
        d_gate_up=both.rows,
        d_gate_up_columns=both.columns,
        h_columns=quantize.quantize_groups(h_RF, counts_e, recipe, forward),
        dweights_R=dweights_R,
        plain_d_gate_up_RF=plain_RF if keep_plain else None,
    )


def _is_fused(recipe: Recipe, width: int) -> bool:
    """Whether a tile has whole blocks of rows, of columns, and of gate."""
    outer, depth = recipe.rows
    fits = recipe.columns in (recipe.rows, (TRANSPOSING.block_columns, TRANSPOSING.block_rows))
    return outer == 1 and depth in (32, 128) and fits and (width == 1 or width % depth == 0)


def _constants(recipe: Recipe, launch: KernelLaunch) -> dict[str, Any]:
    """What both kernels are compiled with."""
    return {
        "DEPTH": recipe.rows[1],
        "POWER": recipe.scaling != "float32",
        "BLOCK_R": launch.block_rows,
        "BLOCK_F": launch.block_columns,
    }


def _used(counts_e: Tensor | None) -> Tensor | None:
    """Rows of all experts together, on the device; None if all rows count."""
    return None if counts_e is None else counts_e.sum(dtype=torch.int32)


def _given(gate_up_RF: Tensor | SavedRows, weights_R: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """The rows, the number of the first one on the device if it is not 0, and how many there are at most."""
    if isinstance(gate_up_RF, SavedRows):
        source_SF, first, rows = gate_up_RF.rows_SF, gate_up_RF.first, gate_up_RF.room
    else:
        source_SF, first, rows = gate_up_RF, None, gate_up_RF.shape[0]
    if source_SF.ndim != 2 or source_SF.shape[1] % 2:
        raise KernelError("swiglu: takes rows of gate and up", got=tuple(source_SF.shape), allowed="an even width")
    if weights_R is not None and (weights_R.shape != (rows,) or weights_R.dtype != torch.float32):
        raise KernelError(
            "swiglu: weights must be float32, one for each row",
            got=f"{weights_R.dtype} {tuple(weights_R.shape)} for {rows} rows",
        )
    return source_SF, first, rows
