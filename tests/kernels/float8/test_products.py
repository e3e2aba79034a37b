"""Products in 8 bits against their definitions: Triton's, torch's, and every launch of every chip."""

import re
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import CANDIDATES
from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import reference, torch_products, triton_operators
from penstock.kernels.float8.operators import REFERENCE, Float8Operators
from penstock.kernels.float8.products import Scaling, _gather, multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantize import PRODUCTS, Product, ProductLaunch, empty_copy, in_triton
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    DEPTH,
    E4M3,
    MXFP8,
    ROWWISE,
    TENSORWISE,
    Block,
    Quantized,
    Recipe,
    as_quantized,
    format_on,
    obstacle,
    row_bytes,
    scale_dtype,
)
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.grouped_gemm import GATHER_LIMIT
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import target_of
from penstock.plan.op_recorder import MemoryTracker, OpRecorder
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, on_meta
from tests.kernels.float8.draw_quantized import (
    TAIL,
    draw_columns,
    draw_rows,
    draw_weight,
    form_on,
    lay_out,
    without_memory,
)

POINTERS = ProductLaunch(block_rows=64, block_columns=64, stages=2, group=2, descriptors=False)
DESCRIPTORS = replace(POINTERS, pieces=2, descriptors=True, ahead=True)
BOTH_WAYS = pytest.mark.parametrize("launch", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
EVERY_RECIPE = pytest.mark.parametrize(
    "recipe", [TENSORWISE, ROWWISE, BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name
)
COUNTS = [70, 0, 1, 40]  # rows of each expert: some blocks are partly empty, one expert has none
CPU = torch.device("cpu")
DEPTH_ODD, WIDTH_ODD = 336, 72  # no multiples of 128


def assert_equal_sums(got: Tensor, expected: Tensor) -> None:
    """Only the order of float32 sums may differ: 2**-24 of each of some hundred terms, so far above 110 decibels."""
    assert_close(got, expected, by="norm", tolerance=3e-6)


@BOTH_WAYS
@EVERY_RECIPE
def test_a_dense_product_equals_its_definition(recipe: Recipe, launch: ProductLaunch, device: torch.device) -> None:
    a = draw_rows(70, DEPTH_ODD, recipe, device)
    b = draw_weight(recipe, device, 136, DEPTH_ODD)
    expected = reference.multiply(a, b, torch.float32)
    assert_equal_sums(multiply(a, b, torch.float32, launch=launch), expected)


@BOTH_WAYS
@EVERY_RECIPE
def test_rows_are_multiplied_by_the_matrix_of_their_expert(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts_e, used = torch.tensor(COUNTS, device=device), sum(COUNTS)
    x = draw_rows(used + TAIL, DEPTH_ODD, recipe, device)
    w = draw_weight(recipe, device, len(COUNTS), WIDTH_ODD, DEPTH_ODD)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    x.values.view(torch.uint8)[used:] = 0x7F  # NaN, or the largest number of FNUZ formats
    if recipe.rows == BLOCKWISE.rows:
        x.scales[used:] = float("nan")
    got = multiply_groups(x, w, counts_e, dtype=torch.float32, launch=launch)
    assert_equal_sums(got, expected)
    assert not got[used:].any(), "rows of the tail must be zero"
    travelled = lay_out(x, apart=48)._replace(scales=x.scales.contiguous())  # as rows with their scales come in
    index_R = torch.randint(used, (used + TAIL,), device=device)
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    assert_equal_sums(multiply_groups(travelled, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected)


@BOTH_WAYS
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_rows_that_travelled_are_multiplied_in_their_order(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts_e, form = torch.tensor(COUNTS, device=device), form_on(device)
    packed = pack_rows(torch.randn(sum(COUNTS) + TAIL, DEPTH_ODD, device=device), recipe, form)
    w = draw_weight(recipe, device, len(COUNTS), WIDTH_ODD, DEPTH_ODD)
    x = as_quantized(packed, DEPTH_ODD, recipe, form)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    packed[sum(COUNTS) :] = 0xFF  # NaN, values and scales
    assert_equal_sums(multiply_groups(x, w, counts_e, dtype=torch.float32, launch=launch), expected)


@EVERY_RECIPE
def test_gathered_rows_may_be_copied_first(recipe: Recipe, device: torch.device) -> None:
    counts_e, index_R = torch.tensor([40, 0, 7], device=device), torch.randint(30, (40 + 7 + TAIL,), device=device)
    x, w = draw_rows(30, DEPTH_ODD, recipe, device), draw_weight(recipe, device, 3, 64, DEPTH_ODD)
    travelled = lay_out(x, apart=48)._replace(scales=x.scales.contiguous())
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    launch = replace(POINTERS, copy_gathered=True)
    copy, _ = _gather(travelled, index_R, tile_table(counts_e, len(index_R)), launch)
    assert copy.values.stride(0) % 16 == 0, "copies of blocks take no others"
    assert_equal_sums(multiply_groups(travelled, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected)


@BOTH_WAYS
@EVERY_RECIPE
def test_weight_gradients_are_contracted_over_their_experts_rows(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts = [*COUNTS, 130]
    counts_e = torch.tensor(counts, device=device)
    dy, x = (draw_columns(width, counts, recipe, device) for width in (40, WIDTH_ODD))
    got = multiply_columns(dy, x, counts_e, dtype=torch.float32, launch=launch)
    assert_equal_sums(got, reference.multiply_columns(dy, x, counts_e, dtype=torch.float32))
    assert not got[1].any(), "no rows, no gradient"


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE], ids=lambda recipe: recipe.name)
def test_gradients_are_added_to_float32_sums(recipe: Recipe, device: torch.device) -> None:
    counts_e = torch.tensor(COUNTS, device=device)
    dy, x = (draw_columns(width, COUNTS, recipe, device) for width in (40, WIDTH_ODD))
    main_eMN = torch.randn(len(COUNTS), 40, WIDTH_ODD, device=device)
    expected = reference.multiply_columns(dy, x, counts_e, dtype=torch.float32, accumulate_into=main_eMN.clone())
    tiles = tile_table(counts_e, sum(COUNTS) + TAIL)
    got = multiply_columns(dy, x, counts_e, dtype=torch.bfloat16, accumulate_into=main_eMN, tiles=tiles)
    assert got is main_eMN, "the sums themselves must come back"
    assert_equal_sums(got, expected)

    a, b = (draw_rows(width, 300, recipe, device) for width in (40, WIDTH_ODD))
    main_MN = torch.randn(40, WIDTH_ODD, device=device)
    expected = reference.multiply(a, b, torch.float32, accumulate_into=main_MN.clone())
    assert multiply(a, b, torch.bfloat16, accumulate_into=main_MN) is main_MN
    assert_equal_sums(main_MN, expected)


def test_gradients_of_more_range_are_multiplied_with_activations_of_more_precision(device: torch.device) -> None:
    for recipe in (BLOCKWISE, MXFP8):
        dy = draw_rows(40, 256, recipe, device, format_on("e5m2", target_of(device)))
        w = draw_weight(recipe, device, 64, 256)
        assert_equal_sums(multiply(dy, w, torch.float32), reference.multiply(dy, w, torch.float32))


def test_a_result_is_rounded_to_its_dtype_and_written_where_it_is_asked_for(device: torch.device) -> None:
    a, b = draw_rows(20, 128, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 64, 128)
    out = torch.empty(20, 64, device=device, dtype=torch.bfloat16)
    assert multiply(a, b, torch.bfloat16, out=out) is out
    expected = reference.multiply(a, b, torch.float32)
    # Triton's interpreter cuts a bfloat16 off, so it may be a whole step of 2**-7 below.
    assert ((out.float() - expected).abs() <= expected.abs() * 2.0**-7).all()


def test_a_scale_that_is_no_number_spoils_its_row_only(device: torch.device) -> None:
    a, b = draw_rows(20, 256, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 64, 256)
    a.scales[3, 1] = float("nan")
    got = multiply(a, b, torch.float32)
    assert got[3].isnan().all() and got.isnan().sum() == 64  # the width of one row


def test_a_buffer_without_rows_has_an_empty_output_and_zero_gradients(device: torch.device) -> None:
    counts_e = torch.zeros(2, dtype=torch.int32, device=device)
    x, w = draw_rows(0, 128, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 2, 64, 128)
    assert multiply_groups(x, w, counts_e, dtype=torch.bfloat16).shape == (0, 64)
    dy = draw_columns(64, [0, 0], BLOCKWISE, device)
    assert not multiply_columns(dy, dy, counts_e, dtype=torch.bfloat16).any()


@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8, TENSORWISE], ids=lambda recipe: recipe.name)
def test_nothing_is_launched_for_tensors_without_memory(recipe: Recipe) -> None:
    counts_e = torch.empty(4, dtype=torch.int32, device="meta")
    x, w = without_memory(draw_rows(129, 256, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 4, 64, 256))
    assert multiply_groups(x, w, counts_e, dtype=torch.bfloat16).shape == (129, 64)
    index_R = torch.empty(50, dtype=torch.int64, device="meta")
    assert multiply_groups(x, w, counts_e, index_R, dtype=torch.bfloat16).shape == (50, 64)
    dy = without_memory(draw_columns(72, COUNTS, recipe, CPU))
    assert multiply_columns(dy, dy, counts_e, dtype=torch.float32).shape == (4, 72, 72)
    assert multiply(x, without_memory(draw_weight(recipe, CPU, 64, 256)), torch.bfloat16).shape == (129, 64)


def test_rows_are_copied_where_32_bits_cannot_count_what_they_are_gathered_from() -> None:
    index_R = torch.empty(2, dtype=torch.int64, device="meta")
    tiles = tile_table(torch.empty(1, dtype=torch.int32, device="meta"), 2)

    def source(rows: int) -> Quantized:
        values = torch.empty(rows, 2048, dtype=E4M3.dtype, device="meta")
        return Quantized(values, torch.empty(rows, 16, device="meta"), (1, DEPTH))

    assert _gather(source(GATHER_LIMIT // 2048 - 1), index_R, tiles, POINTERS)[1] is index_R
    copy, no_index = _gather(source(GATHER_LIMIT // 2048), index_R, tiles, POINTERS)
    assert copy.values.shape == (2, 2048) and copy.scales.shape == (2, 16) and no_index is None


@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_scales_behind_rows_are_copied_where_32_bits_cannot_count_them(recipe: Recipe) -> None:
    tiles, apart = tile_table(torch.empty(1, dtype=torch.int32, device="meta"), 2), row_bytes(2048, recipe)
    limit = GATHER_LIMIT // (apart // scale_dtype(recipe.scaling).itemsize)

    def scales_of(rows: int) -> Tensor:
        packed = torch.empty(rows, apart, dtype=torch.uint8, device="meta")
        return _gather(as_quantized(packed, 2048, recipe, E4M3), None, tiles, POINTERS)[0].scales

    assert scales_of(limit).stride(1) == 1
    found = scales_of(limit + 1)
    assert found.stride() == (1, limit + 1) and found.dtype == scale_dtype(recipe.scaling)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    a, b = draw_rows(8, 128, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 64, 128)
    for one, other, says in (
        (draw_rows(8, 128, ROWWISE, CPU), b, "blocks do not fit"),
        (draw_rows(8, 64, BLOCKWISE, CPU), b, "b does not fit"),
        (a, draw_weight(BLOCKWISE, CPU, 36, 128), "the result cannot be written"),  # 72 bytes a row
        (lay_out(a, apart=8), b, "a cannot be copied in blocks"),  # rows must be a multiple of 16 bytes apart
    ):
        with pytest.raises(KernelError, match=says):
            multiply(one, other, torch.bfloat16)
    w = draw_weight(BLOCKWISE, CPU, 2, 64, 128)
    with pytest.raises(KernelError, match="counts_e"):
        multiply_groups(a, w, torch.zeros(3, dtype=torch.int32), dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="the result does not fit"):
        multiply(a, a, torch.float32, accumulate_into=torch.zeros(8, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("depth", [128, 640, 1024])
@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_torch_is_given_scales_as_it_asks_for_them(recipe: Recipe, depth: int) -> None:
    # On the meta device torch checks shapes and strides of scales as it does on a GPU.
    a, b = without_memory(draw_rows(52, depth, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 384, depth))
    assert torch_products.shape_obstacle(a, b) is None
    assert torch_products.multiply(a, b, torch.bfloat16).shape == (52, 384)
    c = without_memory(draw_rows(64, depth, recipe, CPU))
    sums = torch.empty(52, 64, device="meta")
    assert torch_products.multiply(a, c, torch.bfloat16, accumulate_into=sums) is sums


def test_torch_takes_a_weights_gradient_whose_activation_has_squares() -> None:
    dy_RF, x_RD = torch.randn(384, 80), torch.randn(384, 256)
    dy = reference.quantize_rows(dy_RF, BLOCKWISE_SQUARE, E4M3, columns=BLOCKWISE_SQUARE.rows).columns
    x = reference.quantize_rows(x_RD, BLOCKWISE_SQUARE, E4M3, columns=BLOCKWISE_SQUARE.columns).columns
    a, b = (without_memory(lay_out(one)) for one in (dy, x))
    assert torch_products.shape_obstacle(a, b) is None
    sums = torch.empty(80, 256, device="meta")
    assert torch_products.multiply(a, b, torch.float32, accumulate_into=sums) is sums


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="PyTorch 2.11 has these products on GPUs alone",
)
def test_a_product_is_written_where_it_belongs() -> None:
    a, b = draw_rows(48, 256, ROWWISE, CPU), draw_rows(32, 256, ROWWISE, CPU)
    found = torch_products.multiply(a, b, torch.bfloat16)
    out = torch.zeros(48, 32, dtype=torch.bfloat16)
    assert torch_products.multiply(a, b, torch.bfloat16, out=out) is out
    apart = torch.zeros(48, 40, dtype=torch.bfloat16)[:, :32]
    assert torch_products.multiply(a, b, torch.bfloat16, out=apart) is apart
    assert torch.equal(out, found) and torch.equal(apart, found)


@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_a_rehearsed_product_with_a_place_is_one_product_and_no_copy(recipe: Recipe) -> None:
    a, b = without_memory(draw_rows(52, 512, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 384, 512))
    out, works = torch.empty(52, 384, dtype=torch.bfloat16, device="meta"), []
    for given in (None, out):
        tracker = MemoryTracker()
        tape = OpRecorder(tracker=tracker)
        with tape:
            torch_products.multiply(a, b, torch.bfloat16, out=given)
        works.append([one for one in tape.cut() if one.name == "_scaled_mm_v2" or one.name.startswith("copy")])
        passing = tracker.mark("product").passing
    assert [one.name for one in works[0]] == ["_scaled_mm_v2"] and works[1] == works[0]
    assert passing < out.nbytes, "no tensor of the result's size besides"


def test_torchs_products_say_what_they_cannot_do() -> None:
    for recipe in (BLOCKWISE, BLOCKWISE_SQUARE):
        assert torch_products.obstacle(recipe, "sm_90", "13.0") is None
    assert "12.9" in str(torch_products.obstacle(BLOCKWISE, "sm_90", "12.8"))
    for recipe, target in ((BLOCKWISE, "sm_100"), (BLOCKWISE, "gfx942"), (MXFP8, "sm_90")):
        assert recipe.name in str(torch_products.obstacle(recipe, target, "13.0"))
    w = draw_weight(BLOCKWISE, CPU, 128, 256)
    assert "4" in str(torch_products.shape_obstacle(draw_rows(5, 256, BLOCKWISE, CPU), w))
    wide = draw_weight(BLOCKWISE, CPU, 576, 256)
    assert "576" in str(torch_products.shape_obstacle(draw_rows(4, 256, BLOCKWISE, CPU), wide))
    assert "blocks" in str(torch_products.shape_obstacle(draw_rows(4, 256, ROWWISE, CPU), w))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_torchs_products_equal_their_definition(recipe: Recipe, device: torch.device) -> None:
    problem = torch_products.obstacle(recipe, target_of(device), torch.version.cuda)
    if problem is not None:
        pytest.skip(problem)
    a = draw_rows(516, 896, recipe, device)
    for b in (draw_weight(recipe, device, 384, 896), draw_rows(272, 896, recipe, device)):
        got, expected = (one(a, b, torch.bfloat16) for one in (torch_products.multiply, reference.multiply))
        out = torch.full_like(got, torch.nan)
        assert torch_products.multiply(a, b, torch.bfloat16, out=out) is out and torch.equal(out, got)
        # A matrix unit that keeps 14 bits of a sum, and a result of 8 bits.
        assert_close(got, expected, by="norm", tolerance=5e-3)


# What is compiled in every run of the tests; the rest in the slow ones.
QUICKLY_COMPILED = {
    *(("sm_90", product, "promoted") for product in PRODUCTS["sm_90"]),
    ("sm_90", "rows", "behind"),
    ("sm_100", "rows", "inside"),
    ("sm_100", "columns", "inside"),
    ("gfx942", "rows", "promoted"),
    ("gfx942", "columns", "promoted"),
    ("gfx950", "rows", "inside"),
    ("gfx950", "columns", "inside"),
}

# By target, and whether they apply scales themselves.
MATRIX_INSTRUCTIONS = {
    ("sm_90", False): r"wgmma\.mma_async.*\.e4m3\.e4m3",
    ("sm_100", False): r"tcgen05\.mma.*kind::f8f6f4",
    ("sm_100", True): r"tcgen05\.mma.*kind::mxf8f6f4\.block_scale",
    ("gfx942", False): r"v_mfma_f32_\w+_fp8_fp8",
    ("gfx950", False): r"v_mfma_f32_\w+_fp8_fp8|v_mfma_\w*f8f6f4",
    ("gfx950", True): r"v_mfma_scale_f32_\w+_f8f6f4",
}

REGISTERS_OF_SM_90 = 64 * 1024  # of a multiprocessor


def launches_of(target: str) -> list[tuple[str, Product, ProductLaunch]]:
    """Those of the table, or what is taken where their kernels cannot be had, and all candidates for each product."""
    found = [("table", product, in_triton(launch)) for product, launch in PRODUCTS[target].items()]
    for product, candidates in CANDIDATES.get(target, {}).items():
        found += [(name, product, launch) for name, launch in candidates.items()]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda one: one.name)
def test_every_launch_of_this_chip_computes_the_same(recipe: Recipe, device: torch.device) -> None:
    problem = obstacle(recipe, target_of(device))
    if problem is not None:
        pytest.skip(problem)
    counts = [700, 0, 3, 1025, 256]
    counts_e = torch.tensor(counts, device=device)
    x = draw_rows(sum(counts) + TAIL, 712, recipe, device)
    w = draw_weight(recipe, device, len(counts), 328, 712)
    one, other = draw_weight(recipe, device, 328, 712), draw_rows(328, 712, recipe, device)
    dy, columns = (draw_columns(width, counts, recipe, device, block=recipe.rows) for width in (328, 712))
    squares = draw_columns(712, counts, recipe, device)
    index_R = torch.randint(len(x.values) - TAIL, (sum(counts) + TAIL,), device=device)
    expected: dict[Product, Tensor] = {
        "dense": reference.multiply(x, one, torch.bfloat16),
        "dense_gradient": reference.multiply(x, other, torch.bfloat16),
        "rows": reference.multiply_groups(x, w, counts_e, dtype=torch.bfloat16),
        "rows_gathered": reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.bfloat16),
        "columns": reference.multiply_columns(dy, columns, counts_e, dtype=torch.float32),
    }
    if recipe is BLOCKWISE_SQUARE:
        expected["dense_square"] = reference.multiply(x, one, torch.float32)
        expected["columns_square"] = reference.multiply_columns(dy, squares, counts_e, dtype=torch.float32)
    for name, product, launch in launches_of(target_of(device)):
        if product not in expected:
            continue
        sums = torch.zeros_like(expected[product])
        if product == "dense_square":
            got = multiply(x, one, torch.float32, accumulate_into=sums, launch=launch)
        elif product.startswith("dense"):
            got = multiply(x, one if product == "dense" else other, torch.bfloat16, launch=launch)
        elif product.startswith("columns"):
            x_columns = columns if product == "columns" else squares
            got = multiply_columns(dy, x_columns, counts_e, dtype=torch.float32, accumulate_into=sums, launch=launch)
        else:
            index = index_R if product == "rows_gathered" else None
            got = multiply_groups(x, w, counts_e, index, dtype=torch.bfloat16, launch=launch)
        assert_close(got, expected[product], by="norm", tolerance=5e-3, same_dtype=False, what=f"{name}, {product}")


# When scales are applied on a chip.
SCALED_BY: dict[str, tuple[Scaling, ...]] = {
    "sm_90": ("promoted", "behind"),
    "sm_100": ("promoted", "behind", "inside"),
    "gfx942": ("promoted", "behind"),
    "gfx950": ("promoted", "behind", "inside"),
}

# In Triton; `tests/kernels/gluon` has the rest.
EVERY_KERNEL = [
    pytest.param(
        target,
        product,
        launch,
        scaling,
        id=f"{target}-{name}-{product}-{scaling}",
        marks=[] if name == "table" and (target, product, scaling) in QUICKLY_COMPILED else [pytest.mark.slow],
    )
    for target in TARGETS
    for name, product, launch in launches_of(target)
    if launch.engine == "triton"
    for scaling in SCALED_BY[target]
]


@pytest.mark.often("sm_90-table-rows_gathered-promoted", "gfx942-table-rows-promoted")
@pytest.mark.parametrize(("target", "product", "launch", "scaling"), EVERY_KERNEL)
def test_no_launch_spills_or_lacks_matrix_instructions_of_8_bits(
    target: str, product: Product, launch: ProductLaunch, scaling: Scaling
) -> None:
    compiled = compile_product(product, launch, target, scaling)
    found = re.findall(MATRIX_INSTRUCTIONS[target, scaling == "inside"], compiled.asm)
    assert found, f"no {MATRIX_INSTRUCTIONS[target, scaling == 'inside']}: {compiled.summary}"
    assert compiled.spills == 0, f"{launch} spills: {compiled.summary}"
    threads = launch.warps * TARGETS[target].warp_size * launch.residency
    assert target != "sm_90" or compiled.registers * threads <= REGISTERS_OF_SM_90, f"{launch}: {compiled.summary}"
    # NVIDIA's multiprocessors keep 1 KiB more for each program, beyond what one program can have.
    shared = (compiled.shared_bytes + 1024) * launch.residency
    assert shared <= TARGETS[target].shared_bytes + 1024, f"{launch} needs {shared} bytes of shared memory"


@pytest.mark.parametrize("product", ["rows", "columns"])
def test_no_load_of_scales_stands_between_a_product_and_its_sum(product: Product) -> None:
    """They were loaded a block ahead, so only sums and copies of blocks stand behind the wait."""
    asm = compile_product(product, in_triton(PRODUCTS["sm_90"][product]), "sm_90", "promoted").asm
    behind = asm[asm.rindex("wgmma.wait_group") :]
    assert "ld.global" in asm[: asm.index("wgmma.wait_group")]
    for load in ("ld.global", "ld.shared"):
        assert load not in behind[: behind.index("cp.async.bulk.tensor")], "where no product hides it"


def compile_product(
    product: Product,
    launch: ProductLaunch,
    target: str,
    scaling: Scaling,
    *,
    is_kept: bool = False,
    is_packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Compiled:
    """Rows are written in a dtype, by wish among rows that are kept; gradients are added to sums.

    Rows are packed if their scales stand behind them.
    """
    recipe = {"promoted": BLOCKWISE_SQUARE, "behind": ROWWISE, "inside": MXFP8}[scaling]
    form = format_on("e4m3", target)
    counts_e, options = on_meta(63, dtype=torch.int32), {"dtype": dtype, "launch": launch}
    tiles = tile_table(counts_e, 8001)

    def operand(*shape: int, block: Block = recipe.rows) -> Quantized:
        return empty_copy(counts_e, shape, block, form, recipe.scaling)

    block = recipe.rows if product in ("dense_gradient", "columns") else recipe.weights
    if product.startswith("rows"):
        packed = on_meta(8001, row_bytes(2048, recipe), dtype=torch.uint8) if is_packed else None
        x = operand(8001, 2048) if packed is None else as_quantized(packed, 2048, recipe, form)
        # A kernel of Hopper's own gets a copy of the gathered rows, so no index.
        is_gathered = product == "rows_gathered" and not launch.copy_gathered
        index_R = on_meta(8001, dtype=torch.int64) if is_gathered else None
        keep = SavedRows(on_meta(99_999, 1408, dtype=dtype), on_meta(1, dtype=torch.int64), 8001) if is_kept else None
        operands = x, operand(63, 1408, 2048, block=block), counts_e, index_R
        product_of = partial(multiply_groups, *operands, tiles=tiles, keep=keep, **options)
    elif product.startswith("columns"):
        places, sums = reference.aligned_rows(8001, 63), on_meta(63, 2048, 1408, dtype=torch.float32)
        operands = operand(2048, places), operand(1408, places, block=block), counts_e
        product_of = partial(multiply_columns, *operands, accumulate_into=sums, tiles=tiles, **options)
    else:
        sums = None if product == "dense" else on_meta(8192, 1408, dtype=torch.float32)
        operands = operand(8192, 2048), operand(1408, 2048, block=block)
        product_of = partial(multiply, *operands, accumulate_into=sums, **options)
    (compiled,) = compile_launches(target, product_of)
    return compiled


def test_each_operator_has_a_kernel_of_the_same_name() -> None:
    for name in {field.name for field in fields(Float8Operators)} - {"saves_rows"}:
        ours = vars(TRITON)[name]
        assert ours is not vars(REFERENCE)[name]
        assert ours.__name__ == name
    assert TRITON.saves_rows and not REFERENCE.saves_rows, "definitions read counts on the host"


def test_our_product_is_taken_where_torchs_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for module in (triton_operators, torch_products):
        monkeypatch.setattr(module, "multiply", lambda *_, module=module, **__: taken.append(module.__name__))
    w = draw_weight(BLOCKWISE, CPU, 128, 256)
    for rows in (4, 5):
        triton_operators.multiply_with_torch(draw_rows(rows, 256, BLOCKWISE, CPU), w, torch.bfloat16)
    assert taken == [torch_products.__name__, triton_operators.__name__]  # torch takes multiples of 4 rows only
