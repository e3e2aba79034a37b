"""Rows that are packed for a journey: the kernels give what the definitions give, and compile for every chip."""

import re

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8 import quantize, quantize_kernels, quantized, reference
from penstock.kernels.float8.operators import REFERENCE
from penstock.kernels.float8.quantized import as_quantized, row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, MXFP8, ROWWISE, Format, Recipe
from penstock.kernels.float8.reference import dequantize
from tests.closeness import assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_for
from tests.kernels.float8.draw_quantized import assert_same

FORMS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)
RECIPES = (BLOCKWISE, MXFP8)


def _hostile(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of all sizes; rows of zeros, of huge and tiny numbers, with NaN and with infinities."""
    x_TD = torch.randn(rows, width) * torch.exp(4 * torch.randn(rows, width))
    x_TD[1] = 0
    x_TD[2] *= 1e30
    # The interpreter misreads bfloat16 below the normal numbers.
    x_TD[3] *= 1e-38 if dtype == torch.float32 else 1e-30
    x_TD[4, 0], x_TD[5, 1], x_TD[6, width - 1] = float("nan"), float("inf"), -float("inf")
    return x_TD.to(device, dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype))
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("width", "dtype"), [(256, torch.bfloat16), (200, torch.float32), (8, torch.bfloat16)])
def test_one_kernel_gives_the_bits_that_the_definition_gives(
    width: int, dtype: torch.dtype, recipe: Recipe, form: Format, device: torch.device
) -> None:
    x_TD = _hostile(9, width, dtype, device)
    packed, expected = quantize.pack_rows(x_TD, recipe, form), reference.pack_rows(x_TD, recipe, form)
    assert packed.shape == expected.shape == (9, row_bytes(width, recipe))
    found = as_quantized(packed, width, recipe, form)
    assert_same(found, as_quantized(expected, width, recipe, form))
    assert_same(found, REFERENCE.quantize_rows(x_TD, recipe, form).rows)
    opened_TD = quantize.unpack_rows(packed, width, recipe, form, dtype)
    wanted_TD = dequantize(found).to(dtype)
    assert_equal(opened_TD, wanted_TD)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_packed_rows_are_operands_as_they_lie(recipe: Recipe) -> None:
    x_TD = torch.randn(5, 384)
    packed = reference.pack_rows(x_TD, recipe, E4M3)
    found = as_quantized(packed, 384, recipe, E4M3)
    assert found.values.untyped_storage().data_ptr() == found.scales.untyped_storage().data_ptr() == packed.data_ptr()
    assert found.values.stride() == (packed.shape[1], 1) and packed.shape[1] % 32 == 0
    assert found.scales.shape == (5, 384 // recipe.rows[1])
    assert torch.equal(dequantize(found), dequantize(REFERENCE.quantize_rows(x_TD, recipe, E4M3).rows))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("width", "size"), [(2048, 2112), (7168, 7392), (2880, 2976), (8, 32)])
def test_a_row_takes_a_byte_for_each_number_and_a_byte_for_32(width: int, size: int, recipe: Recipe) -> None:
    assert row_bytes(width, recipe) == size


def test_no_rows_are_no_bytes(device: torch.device) -> None:
    assert quantize.pack_rows(torch.zeros(0, 64, device=device), BLOCKWISE, E4M3).shape == (0, 96)


def test_rows_whose_scales_are_not_their_own_cannot_travel() -> None:
    with pytest.raises(AssertionError, match="do not travel by the recipe rowwise"):
        row_bytes(64, ROWWISE)


def test_on_the_meta_device_rows_take_the_memory_that_they_take() -> None:
    packed = quantize.pack_rows(torch.empty(7, 256, dtype=torch.bfloat16, device="meta"), BLOCKWISE, E4M3)
    assert packed.untyped_storage().nbytes() == 7 * 288
    assert quantize.unpack_rows(packed, 256, BLOCKWISE, E4M3, torch.bfloat16).shape == (7, 256)


@pytest.mark.often("7168-*-sm_90", "2880-*-gfx942")
# 2880 is gpt-oss's: its last block of 128 is half a block.
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "recipe"), [(7168, BLOCKWISE), (2880, BLOCKWISE), (2048, MXFP8)])
def test_packing_compiles_without_spills_with_wide_loads_and_stores(target: str, width: int, recipe: Recipe) -> None:
    is_nvidia, (_, depth) = TARGETS[target].backend == "cuda", recipe.rows
    row = {
        "D": width,
        "BLOCKS": quantized.blocks_of(width, recipe),
        "BYTES": row_bytes(width, recipe),
        "SCALES_AT": quantized.scales_at(width),
        "E8M0": recipe is MXFP8,
        "BLOCK_R": quantize.PACKING.block_rows * quantize.PACKING.block_columns // depth,
        "DEPTH": depth,
    }
    value = "fp8e4b8" if target == "gfx942" else "fp8e4nv"
    signature = {"x_ptr": "*bf16:16", "packed_ptr": f"*{value}:16", "rows": "i32:16"}
    wide = (r"ld\.global\S*\.v4", r"st\.global\S*\.v[24]") if is_nvidia else (r"load_dwordx4", r"store_dwordx[24]")
    for kernel, options in (
        (quantize_kernels.pack_rows_kernel, {"LARGEST": 448.0, "POWER": True}),
        (quantize_kernels.unpack_rows_kernel, {}),
    ):
        compiled = compile_for(kernel, signature, row | options, TARGETS[target], num_warps=quantize.PACKING.warps)
        assert compiled.spills == 0, compiled.summary
        loads, stores = (
            wide if kernel is quantize_kernels.pack_rows_kernel else (r"load|ld\.global", wide[0].replace("ld", "st"))
        )
        assert re.search(loads, compiled.asm) and re.search(stores, compiled.asm), f"narrow on {target}"
