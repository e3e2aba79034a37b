"""Quantization, packed rows and transposed weights equal their definitions bit for bit, and compile for every chip."""

import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.float8 import quantize, reference
from penstock.kernels.float8.operators import REFERENCE
from penstock.kernels.float8.quantize import (
    TRANSPOSING,
    group_tiles,
    quantize_groups,
    quantize_rows,
    quantize_weight,
    transpose_weight,
)
from penstock.kernels.float8.quantized import (
    ALIGNMENT,
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    MXFP8,
    ROWWISE,
    TENSORWISE,
    Format,
    Quantized,
    Recipe,
    RowColQuantized,
    WeightCopies,
    as_quantized,
    format_on,
    row_bytes,
)
from penstock.kernels.float8.reference import dequantize
from tests.closeness import assert_equal
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, compile_without_spills, on_meta
from tests.kernels.float8.draw_quantized import assert_all_same, assert_same, without_tail

# Infinity times zero, in the interpreter's own arithmetic.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

RECIPES = [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, ROWWISE, TENSORWISE]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
every_recipe_and_form = pytest.mark.parametrize(
    ("recipe", "form"),
    [(recipe, E4M3) for recipe in RECIPES] + [(BLOCKWISE, form) for form in (E5M2, E4M3_FNUZ, E5M2_FNUZ)],
    ids=[recipe.name for recipe in RECIPES] + ["e5m2", "e4m3fnuz", "e5m2fnuz"],
)

SIZES_OF_GPUS = [pytest.param(shape, marks=pytest.mark.gpu) for shape in ((400, 576), (384, 576), (300, 136))]


def assert_whole_rows_apart(copy: Quantized) -> None:
    """Addresses of rows are multiples of 16 bytes, and scales of neighbouring rows are neighbours."""
    assert copy.values.stride(-2) % 16 == 0 and copy.values.stride(-1) == 1
    assert copy.scales.stride(-2) == 1


def skip_unless_known(form: Format, device: torch.device) -> None:
    """NVIDIA's chips have no FNUZ forms; the interpreter has all."""
    if device.type == "cuda" and torch.version.hip is None and "fnuz" in str(form.dtype):
        pytest.skip("this chip has no such format")


def both_copies(x_RD: Tensor, recipe: Recipe, form: Format) -> tuple[RowColQuantized, RowColQuantized]:
    """Of activations, ours and those of the definition."""
    given = x_RD, recipe, form
    return quantize_rows(*given, columns=recipe.columns), reference.quantize_rows(*given, columns=recipe.columns)


def rows(count: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of very different sizes."""
    return (torch.randn(count, width, device=device) * torch.randn(count, 1, device=device).mul(4).exp()).to(dtype)


@pytest.mark.parametrize("shape", [(130, 200), (1, 1), (33, 16), *SIZES_OF_GPUS], ids=str)
@every_recipe_and_form
def test_rows_and_columns_equal_the_definition(
    recipe: Recipe, form: Format, shape: tuple[int, int], device: torch.device
) -> None:
    skip_unless_known(form, device)
    for dtype in (torch.bfloat16, torch.float32):
        x_RD = rows(*shape, device, dtype)
        found, expected = both_copies(x_RD, recipe, form)
        assert_all_same(found, expected)
        assert_whole_rows_apart(found.rows)
        assert_whole_rows_apart(found.columns)
        assert_same(quantize_rows(x_RD, recipe, form).rows, expected.rows)


def test_rows_may_lie_apart_and_in_columns(device: torch.device) -> None:
    wide_RD = rows(20, 160, device)
    for x_RD in (wide_RD[:, 16:144], rows(128, 20, device).T):
        assert_same(quantize_rows(x_RD, BLOCKWISE, E4M3).rows, reference.quantize_rows(x_RD, BLOCKWISE, E4M3).rows)


def test_no_rows_give_no_rows(device: torch.device) -> None:
    found, columns = quantize_rows(torch.empty(0, 256, device=device), BLOCKWISE, E4M3, columns=BLOCKWISE.columns)
    assert found.values.shape == (0, 256) and found.scales.shape == (0, 2)
    assert columns.values.shape == (256, 0) and columns.scales.shape == (256, 0)


@pytest.mark.often("blockwise", "mxfp8", "e4m3fnuz", "rowwise", "e5m2")
@every_recipe_and_form
def test_scales_are_right_at_every_power_of_two(recipe: Recipe, form: Format, device: torch.device) -> None:
    """Each row is one block, whose largest number stands just below, at and just above where the scale doubles."""
    skip_unless_known(form, device)
    power = torch.arange(-126, 119, device=device)
    size = torch.ldexp(torch.full_like(power, form.largest, dtype=torch.float32).frexp().mantissa, power)
    x_R = torch.cat([size, size.nextafter(size * 0), size.nextafter(size * 2)])
    x_RD = x_R[:, None] * torch.tensor([1.0, -0.37, 0.0, 2.0**-9], device=device)
    if recipe is TENSORWISE:
        x_RD = x_RD[:1]
    assert_same(quantize_rows(x_RD, recipe, form).rows, reference.quantize_rows(x_RD, recipe, form).rows)


@every_recipe_and_form
def test_nan_infinity_zero_and_tiny_numbers_equal_the_definition(
    recipe: Recipe, form: Format, device: torch.device
) -> None:
    skip_unless_known(form, device)
    x_RD = torch.randn(12, 256, device=device)
    if recipe is not TENSORWISE:
        x_RD[0, 3], x_RD[1, 200], x_RD[2, 0] = math.nan, math.inf, -math.inf
    x_RD[3], x_RD[4], x_RD[5], x_RD[6] = 0.0, -0.0, 2.0**-140, -(2.0**-126)
    x_RD[7], x_RD[8, 8] = 1e37, 3e38
    assert_all_same(*both_copies(x_RD, recipe, form))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_number_is_seen_in_the_scale_of_the_whole(value: float, device: torch.device) -> None:
    x_RD = torch.randn(40, 200, device=device)
    x_RD[33, 150] = value
    found, expected = (module(x_RD, TENSORWISE, E4M3) for module in (quantize_rows, reference.quantize_rows))
    assert_same(found.rows, expected.rows)
    assert not found.rows.scales.isfinite().any()


@pytest.mark.often("blockwise-square-*", "mxfp8-*", "tensorwise-*", "blockwise-(130*")
@pytest.mark.parametrize(
    ("recipe", "shape"),
    [(recipe, (2, 40, 144)) for recipe in RECIPES]
    + [(BLOCKWISE, (130, 200)), (BLOCKWISE, (128, 256))]
    + [pytest.param(recipe, (3, 256, 576), marks=pytest.mark.gpu) for recipe in (BLOCKWISE, TENSORWISE, ROWWISE)]
    + [pytest.param(BLOCKWISE, (10944, 2048), marks=pytest.mark.gpu)],
    ids=lambda value: value.name if isinstance(value, Recipe) else str(value),
)
def test_weights_equal_the_definition_and_are_filled_in_place(
    recipe: Recipe, shape: tuple[int, ...], device: torch.device
) -> None:
    copies = quantize_weight(torch.zeros(shape, device=device), recipe, E4M3)
    memory = [tensor.data_ptr() for copy in copies for tensor in copy[:2]]
    w_eFD = torch.randn(shape, device=device) * 100
    w_eFD[..., 0, 0] = 1e4
    expected = reference.quantize_weight(w_eFD, recipe, E4M3)
    filled = quantize_weight(w_eFD, recipe, E4M3, into=copies)
    assert filled is copies and [tensor.data_ptr() for copy in filled for tensor in copy[:2]] == memory
    fresh = quantize_weight(w_eFD, recipe, E4M3)
    assert_all_same([*filled, *fresh], [*expected] * 2)
    assert_whole_rows_apart(fresh.forward)
    assert_whole_rows_apart(fresh.backward)


def test_contiguous_copies_of_a_weight_are_filled_too(device: torch.device) -> None:
    w_eFD = torch.randn(2, 140, 256, device=device).bfloat16()
    expected = reference.quantize_weight(w_eFD, BLOCKWISE, E4M3)
    copies = WeightCopies(*(one._replace(values=torch.zeros_like(one.values)) for one in expected))
    quantize_weight(w_eFD, BLOCKWISE, E4M3, into=copies)
    assert_all_same(copies, expected)


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [(recipe, [5, 0, 130, 1]) for recipe in RECIPES]
    + [pytest.param(recipe, [300, 0, 1, 128, 70], marks=pytest.mark.gpu) for recipe in (BLOCKWISE, BLOCKWISE_SQUARE)]
    + [(BLOCKWISE, [0, 0]), (BLOCKWISE, [140]), (MXFP8, [128, 0])],
    ids=lambda value: value.name if isinstance(value, Recipe) else str(value),
)
def test_experts_rows_are_aligned_and_padded_with_zeros(
    recipe: Recipe, counts: list[int], device: torch.device
) -> None:
    counts_e = torch.tensor(counts, device=device)
    x_RD = rows(sum(counts) + 4, 576 if device.type == "cuda" else 40, device)
    x_RD[sum(counts) :] = math.nan
    expected = without_tail(reference.quantize_groups(x_RD, counts_e, recipe, E5M2), counts_e)
    assert_same(without_tail(quantize_groups(x_RD, counts_e.int(), recipe, E5M2), counts_e), expected)
    both = quantize_rows(x_RD, recipe, E5M2, columns=recipe.columns, counts_e=counts_e)
    assert_same(without_tail(both.columns, counts_e), expected)
    if used := sum(counts):
        alone = reference.quantize_rows(x_RD[:used], recipe, E5M2).rows
        scales = both.rows.scales if recipe is TENSORWISE else both.rows.scales[:used]
        assert_same(Quantized(both.rows.values[:used], scales, recipe.rows), alone)
        whole = quantize_rows(x_RD, recipe, E5M2, counts_e=counts_e).rows
        assert_same(Quantized(whole.values[:used], scales, recipe.rows), alone)


@every_recipe
def test_rows_in_8_bits_are_gathered_and_quantized_again(recipe: Recipe, device: torch.device) -> None:
    """Whichever way their scales lie."""
    counts_e = torch.tensor([70, 0, 3], device=device)
    index_R = torch.randint(0, 50, (80,), device=device)
    source = quantize_rows(rows(50, 576 if device.type == "cuda" else 160, device), recipe, E4M3).rows
    travelled = Quantized(source.values, source.scales.contiguous(), source.block)
    expected = without_tail(reference.quantize_groups(travelled, counts_e, recipe, E4M3, index_R), counts_e)
    for one in (source, travelled):
        assert_same(without_tail(quantize_groups(one, counts_e, recipe, E4M3, index_R), counts_e), expected)


def test_gradients_are_transposed_by_blocks_of_rows(device: torch.device) -> None:
    dy_RD, counts_e = rows(60, 40, device), torch.tensor([50, 0, 10], device=device)
    given, block = (BLOCKWISE_SQUARE, E5M2), BLOCKWISE_SQUARE.rows
    expected = without_tail(reference.quantize_groups(dy_RD, counts_e, *given, block=block), counts_e)
    assert_same(without_tail(quantize_groups(dy_RD, counts_e, *given, block=block), counts_e), expected)
    both = quantize_rows(dy_RD, *given, columns=block, counts_e=counts_e)
    assert_same(without_tail(both.columns, counts_e), expected)


def test_bad_numbers_in_8_bits_and_scales_are_seen_again(device: torch.device) -> None:
    x_RD = torch.randn(6, 256, device=device)
    x_RD[1, 103], x_RD[4, 130] = math.nan, math.inf
    counts_e = torch.tensor([2, 4], device=device)
    for recipe in RECIPES:
        source = reference.quantize_rows(x_RD[:, 100:180], recipe, E4M3).rows
        expected = without_tail(reference.quantize_groups(source, counts_e, recipe, E4M3), counts_e)
        assert_same(without_tail(quantize_groups(source, counts_e, recipe, E4M3), counts_e), expected)


@examples(25)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=9), st.integers(0, 200))
def test_a_tile_holds_rows_of_one_expert_and_all_rows_have_a_place(
    device: torch.device, counts: list[int], spare: int
) -> None:
    found = group_tiles(torch.tensor(counts, device=device), sum(counts) + spare).tolist()
    expected, first = [], 0
    for count in counts:
        expected += [[first + start, min(count - start, ALIGNMENT)] for start in range(0, count, ALIGNMENT)]
        first += count
    assert found[: len(expected)] == expected
    assert all(filled == 0 for _, filled in found[len(expected) :])
    assert found.pop() == [len(expected), 0], "behind all tiles"
    assert len(found) * ALIGNMENT == reference.aligned_rows(sum(counts) + spare, len(counts))


@every_recipe
def test_tensors_without_memory_have_the_shapes_of_the_definition(recipe: Recipe) -> None:
    x_RD = torch.empty(300, 200, dtype=torch.bfloat16, device="meta")
    counts_e = torch.empty(4, dtype=torch.int32, device="meta")
    found = quantize_groups(quantize_rows(x_RD, recipe, E4M3).rows, counts_e, recipe, E4M3)
    expected = reference.quantize_groups(x_RD, counts_e, recipe, E4M3)
    assert (found.values.shape, found.scales.shape) == (expected.values.shape, expected.scales.shape)
    copies = quantize_weight(torch.empty(3, 40, 64, device="meta"), recipe, E4M3)
    assert quantize_weight(torch.empty(3, 40, 64, device="meta"), recipe, E4M3, into=copies) is copies


def test_misfits_are_refused(device: torch.device) -> None:
    odd = reference.quantize(torch.zeros(4, 96), (1, 48), E4M3, "float32")
    weight = reference.quantize_weight(torch.randn(32, 32, device=device), BLOCKWISE, E4M3).forward
    part = weight._replace(values=weight.values[:, :16])
    for says, call in (
        ("a matrix of rows", lambda: quantize_rows(torch.zeros(2, 3, 4), BLOCKWISE, E4M3)),
        ("a stack", lambda: quantize_weight(torch.zeros(4), BLOCKWISE, E4M3)),
        ("fit into tiles", lambda: quantize_groups(odd, torch.tensor([4]), BLOCKWISE, E4M3)),
        ("contiguous", lambda: transpose_weight(part, part)),
    ):
        with pytest.raises(KernelError, match=says):
            call()


def compiled(
    target: str, recipe: Recipe, *, weight: bool = False, columns: bool = True, gathers: bool = False
) -> Compiled:
    """`quantize_kernel` as it is launched for bfloat16; with `gathers` for rows in 8 bits, transposed only."""
    form, x_RD, counts_e = format_on("e4m3", target), on_meta(8192, 2048), on_meta(63, dtype=torch.int32)
    if gathers:
        source, index_R = quantize_rows(x_RD, recipe, form).rows, on_meta(8192, dtype=torch.int64)
        launches = partial(quantize_groups, source, counts_e, recipe, form, index_R, launch=TRANSPOSING)
    elif weight:
        launches = partial(quantize_weight, x_RD, recipe, form, launch=TRANSPOSING)
    else:
        options = {"columns": recipe.columns, "launch": TRANSPOSING} if columns else {}
        launches = partial(quantize_rows, x_RD, recipe, form, **options)
    return compile_launches(target, launches)[-1]


def wide(kind: str, asm: str) -> int:
    """Loads or stores of 16 bytes in assembly."""
    return len(
        re.findall(rf"{kind[0]}[dt]\.global(?:\.\w+)*\.v4\.b32|global_{kind}_dwordx4|buffer_{kind}_dwordx4", asm)
    )


CASES = {
    "rows and columns": {"recipe": BLOCKWISE},
    "rows": {"recipe": BLOCKWISE, "columns": False},
    "weight": {"recipe": BLOCKWISE, "weight": True},
    "gathered, in 8 bits": {"recipe": BLOCKWISE, "gathers": True},
    "squares of columns": {"recipe": BLOCKWISE_SQUARE},
    "gathered, squares": {"recipe": BLOCKWISE_SQUARE, "gathers": True},
    "small blocks": {"recipe": MXFP8},
    "one scale": {"recipe": TENSORWISE},
}


@pytest.mark.often("sm_90-rows and columns", "sm_90-gathered, squares", "gfx942-weight")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_are_moved_16_bytes_at_a_time_without_spills(target: str, case: dict[str, object]) -> None:
    if case["recipe"] is MXFP8 and target in ("sm_90", "gfx942"):
        pytest.skip("this chip does not multiply blocks of 32")
    found = compiled(target, **case)
    # Four registers of 128, where the limit makes room for a second program.
    assert found.spills <= (16 if case["recipe"] is MXFP8 else 0), found.summary
    limited = target.startswith("sm_") and case["recipe"] is not TENSORWISE
    assert not limited or found.registers <= TRANSPOSING.registers, found.summary
    loads, stores = (4, 2) if case.get("columns") is False else (4, 4) if case.get("gathers") else (8, 8)
    assert wide("load", found.asm) >= loads, "each thread's numbers"
    assert wide("store", found.asm) >= stores, "each thread's copies"
    assert found.shared_bytes <= 32 * 1024, found.summary


@pytest.mark.often("sm_90-rows and columns", "sm_90-gathered, squares")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_no_pair_of_8_bit_numbers_is_used_whole_and_in_bytes(target: str, case: dict[str, object]) -> None:
    """What NVIDIA's assembler makes of such a pair is wrong; see `pair_neighbours`."""
    if case["recipe"] is MXFP8 and target == "sm_90":
        pytest.skip("this chip does not multiply blocks of 32")
    asm = compiled(target, **case).asm
    make = r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)"
    pairs, whole, apart = set(re.findall(make, asm)), set(), set()
    for line in asm.splitlines():
        if not re.search(make, line):
            used = whole if re.search(r"mov\.b32\s+%r\d+, \{", line) else apart
            used |= pairs.intersection(re.findall(r"%rs\d+", line))
    assert pairs and pairs == whole | apart
    assert not whole & apart


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_small_kernels_compile_without_spills(target: str) -> None:
    x_RD, counts_e, form = on_meta(8192, 2048), on_meta(160, dtype=torch.int32), format_on("e4m3", target)
    found = compile_without_spills(target, lambda: quantize_groups(x_RD, counts_e, TENSORWISE, form))
    assert [one.kernel for one in found] == ["group_tiles_kernel", "measure_kernel", "quantize_kernel"]


FORMS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)
packed_recipe = pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)


def hostile(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of all sizes; rows of zeros, of huge and tiny numbers, with NaN and with infinities."""
    x_TD = torch.randn(rows, width) * torch.exp(4 * torch.randn(rows, width))
    x_TD[1] = 0
    x_TD[2] *= 1e30
    # The interpreter misreads bfloat16 below the normal numbers.
    x_TD[3] *= 1e-38 if dtype == torch.float32 else 1e-30
    x_TD[4, 0], x_TD[5, 1], x_TD[6, width - 1] = float("nan"), float("inf"), -float("inf")
    return x_TD.to(device, dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype))
@packed_recipe
@pytest.mark.parametrize(("width", "dtype"), [(256, torch.bfloat16), (200, torch.float32), (8, torch.bfloat16)])
def test_one_kernel_gives_the_bits_that_the_definition_gives(
    width: int, dtype: torch.dtype, recipe: Recipe, form: Format, device: torch.device
) -> None:
    x_TD = hostile(9, width, dtype, device)
    packed, expected = quantize.pack_rows(x_TD, recipe, form), reference.pack_rows(x_TD, recipe, form)
    assert packed.shape == expected.shape == (9, row_bytes(width, recipe))
    found = as_quantized(packed, width, recipe, form)
    assert_same(found, as_quantized(expected, width, recipe, form))
    assert_same(found, REFERENCE.quantize_rows(x_TD, recipe, form).rows)
    opened_TD = quantize.unpack_rows(packed, width, recipe, form, dtype)
    wanted_TD = dequantize(found).to(dtype)
    assert_equal(opened_TD, wanted_TD)


def test_a_packed_row_takes_a_byte_for_each_number_and_a_byte_for_32(device: torch.device) -> None:
    for recipe in (BLOCKWISE, MXFP8):
        assert [row_bytes(width, recipe) for width in (2048, 7168, 2880, 8)] == [2112, 7392, 2976, 32]
    with pytest.raises(AssertionError, match="do not travel by the recipe rowwise"):
        row_bytes(64, ROWWISE)
    assert quantize.pack_rows(torch.zeros(0, 64, device=device), BLOCKWISE, E4M3).shape == (0, 96)
    packed = quantize.pack_rows(torch.empty(7, 256, dtype=torch.bfloat16, device="meta"), BLOCKWISE, E4M3)
    assert packed.untyped_storage().nbytes() == 7 * 288
    assert quantize.unpack_rows(packed, 256, BLOCKWISE, E4M3, torch.bfloat16).shape == (7, 256)


@packed_recipe
def test_packed_rows_are_operands_as_they_lie(recipe: Recipe) -> None:
    x_TD = torch.randn(5, 384)
    packed = reference.pack_rows(x_TD, recipe, E4M3)
    found = as_quantized(packed, 384, recipe, E4M3)
    assert found.values.untyped_storage().data_ptr() == found.scales.untyped_storage().data_ptr() == packed.data_ptr()
    assert found.values.stride() == (packed.shape[1], 1) and packed.shape[1] % 32 == 0
    assert found.scales.shape == (5, 384 // recipe.rows[1])
    assert torch.equal(dequantize(found), dequantize(REFERENCE.quantize_rows(x_TD, recipe, E4M3).rows))


@pytest.mark.often("2880-*-gfx942")
# 2880 is gpt-oss's: its last block of 128 is half a block.
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "recipe"), [(7168, BLOCKWISE), (2880, BLOCKWISE), (2048, MXFP8)])
def test_packing_compiles_without_spills_with_wide_loads_and_stores(target: str, width: int, recipe: Recipe) -> None:
    x_TD, form, is_nvidia = on_meta(8191, width), format_on("e4m3", target), TARGETS[target].backend == "cuda"

    def both_ways() -> None:
        quantize.unpack_rows(quantize.pack_rows(x_TD, recipe, form), width, recipe, form, torch.bfloat16)

    # Values of a block are stored at once; they are loaded as bytes, and written as many numbers.
    wide = (r"ld\.global\S*\.v4", r"st\.global\S*\.v[24]") if is_nvidia else (r"load_dwordx4", r"store_dwordx[24]")
    packs, unpacks = (one.asm for one in compile_without_spills(target, both_ways))
    assert re.search(wide[0], packs) and re.search(wide[1], packs), f"narrow on {target}"
    assert re.search(wide[0].replace("ld", "st").replace("load", "store"), unpacks), f"narrow on {target}"


@pytest.mark.parametrize("shape", [(144, 48), (3, 16, 272), pytest.param((3, 256, 576), marks=pytest.mark.gpu)])
def test_transposed_bytes_equal_the_quantized_transpose(shape: tuple[int, ...], device: torch.device) -> None:
    copies = reference.quantize_weight(torch.randn(shape, device=device), BLOCKWISE, E4M3)
    memory = torch.full_like(copies.backward.values.view(torch.uint8), 7, memory_format=torch.contiguous_format)
    transpose_weight(copies.forward, Quantized(memory.view(E4M3.dtype), copies.backward.scales, BLOCKWISE.weights))
    assert torch.equal(memory, copies.backward.values.view(torch.uint8))
    assert torch.equal(copies.forward.scales.transpose(-1, -2), copies.backward.scales)


@pytest.mark.often("sm_90")
@pytest.mark.parametrize("target", TARGETS)
def test_every_chip_moves_wide_words_without_spilling(target: str) -> None:
    shapes = (8, 2048, 1408), (8, 1408, 2048)
    weight, into = (Quantized(on_meta(*shape, dtype=E4M3.dtype), None, None) for shape in shapes)
    (compiled,) = compile_without_spills(target, lambda: transpose_weight(weight, into))
    assert wide("load", compiled.asm) and wide("store", compiled.asm)
