"""Random 8-bit operands, laid out in memory as the kernels that quantize write them."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.float8 import reference
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantized import ALIGNMENT, DEPTH, Block, Format, Quantized, Recipe, format_on
from penstock.kernels.tuning import target_of

TAIL = 9  # rows behind the last expert's


def aligned_starts(counts_e: Tensor) -> Tensor:
    """First column of each expert in a transposed copy, and the end of the last one."""
    return F.pad(((counts_e + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0), (1, 0))


def lay_out(x: Quantized, apart: int = 16) -> Quantized:
    """The same numbers, rows a multiple of 16 bytes apart, scales outer contiguous, as kernels write them."""
    *outer, depth = x.values.shape
    room = x.values.new_zeros(*outer, -(-depth // 16) * 16 + apart, dtype=torch.uint8)
    room[..., :depth] = x.values.contiguous().view(torch.uint8)
    scales = x.scales.transpose(-1, -2).contiguous().transpose(-1, -2)
    return Quantized(room.view(x.values.dtype)[..., :depth], scales, x.block)


def without_memory(x: Quantized) -> Quantized:
    parts = (torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in x[:2])
    return Quantized(*parts, x.block)


def form_on(device: torch.device) -> Format:
    return format_on("e4m3", target_of(device))


def draw_rows(rows: int, depth: int, recipe: Recipe, device: torch.device, form: Format | None = None) -> Quantized:
    x_RD = torch.randn(rows, depth, device=device)
    return lay_out(reference.quantize_rows(x_RD, recipe, form or form_on(device)).rows)


def draw_weight(recipe: Recipe, device: torch.device, *shape: int) -> Quantized:
    return lay_out(reference.quantize_weight(torch.randn(*shape, device=device), recipe, form_on(device)).forward)


def draw_columns(
    width: int, counts: list[int], recipe: Recipe, device: torch.device, block: Block | None = None
) -> Quantized:
    """Experts' rows transposed, by blocks of activations unless told; no number and no scale behind the last one's."""
    rows = torch.randn(sum(counts) + TAIL, width, device=device)
    counts_e = torch.tensor(counts, device=device)
    found = lay_out(reference.quantize_groups(rows, counts_e, recipe, form_on(device), block=block))
    end = int(aligned_starts(counts_e)[-1])
    found.values.view(torch.uint8)[:, end:] = 0x7F
    if recipe.rows[1] == DEPTH:
        found.scales[:, end // DEPTH :] = float("nan")
    return found


def draw_activation(
    counts: Sequence[int], width: int, device: torch.device, dtype: torch.dtype = torch.float32, *, tail: int = TAIL
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate and up, weights, gradient and counts; NaN behind the last expert's rows."""
    rows = sum(counts) + tail
    drawn = torch.randn(rows, 2 * width), torch.rand(rows), torch.randn(rows, width) * torch.randn(rows, 1).exp()
    for tensor in drawn:
        tensor[sum(counts) :] = math.nan
    gate_up_RF, weights_R, dh_RF = (tensor.to(device) for tensor in drawn)
    return gate_up_RF.to(dtype), weights_R, dh_RF.to(dtype), torch.tensor(counts, device=device, dtype=torch.int32)


def without_tail(columns: Quantized | None, counts_e: Tensor | None) -> Quantized:
    """The copy as far as experts' tiles reach; what kernels leave behind them is anything. All without counts."""
    if counts_e is None:
        return columns
    end, depth = int(aligned_starts(counts_e)[-1]), columns.block[1]
    scales = columns.scales[..., : end // depth] if depth else columns.scales
    return Quantized(columns.values[..., :end], scales, columns.block)


def transposed(made: SwigluForBackward, counts_e: Tensor | None) -> list[Quantized]:
    """The transposed copies of gate and up's gradient and of h, as far as experts' tiles reach."""
    return [without_tail(copy, counts_e) for copy in (made.d_gate_up_columns, made.h_columns)]


def assert_all_same(
    found: Sequence[Quantized | None], expected: Sequence[Quantized | None], rows: int | None = None
) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert_same(mine, other, rows)


def assert_same(found: Quantized | None, expected: Quantized | None, rows: int | None = None) -> None:
    """The same blocks and the same bits of the first rows; a NaN may have either sign. None equals None."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.block == expected.block
    for mine, other in zip(found[:2], expected[:2], strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        mine, other = mine[..., :rows, :].contiguous(), other[..., :rows, :].contiguous()
        is_nan = mine.float().isnan()
        assert torch.equal(is_nan, other.float().isnan())
        assert torch.equal(mine[~is_nan].view(torch.uint8), other[~is_nan].view(torch.uint8))
