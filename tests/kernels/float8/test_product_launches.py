"""Every launch of a product of 8-bit numbers: what it computes on this chip, and what it becomes on every other."""

import re

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8 import reference
from penstock.kernels.float8.launches import CANDIDATES, PRODUCTS, Product, ProductLaunch, in_triton
from penstock.kernels.float8.product_kernels import float8_matrices_kernel, float8_rows_kernel
from penstock.kernels.float8.products import Scaling, multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.recipes import BLOCKWISE_SQUARE, DEPTH, MXFP8, ROWWISE, TENSORWISE, Recipe, obstacle
from penstock.kernels.tuning import target_of
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for
from tests.kernels.float8.draw_quantized import TAIL, draw_columns, draw_rows, draw_weight

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
"""What is compiled in every run of the tests; the rest in the slow ones."""

MATRIX_INSTRUCTIONS = {
    ("sm_90", False): r"wgmma\.mma_async.*\.e4m3\.e4m3",
    ("sm_100", False): r"tcgen05\.mma.*kind::f8f6f4",
    ("sm_100", True): r"tcgen05\.mma.*kind::mxf8f6f4\.block_scale",
    ("gfx942", False): r"v_mfma_f32_\w+_fp8_fp8",
    ("gfx950", False): r"v_mfma_f32_\w+_fp8_fp8|v_mfma_\w*f8f6f4",
    ("gfx950", True): r"v_mfma_scale_f32_\w+_f8f6f4",
}
"""By target, and whether they apply scales themselves."""

REGISTERS_OF_SM_90 = 64 * 1024
"""Of a multiprocessor."""


def launches_of(target: str) -> list[tuple[str, Product, ProductLaunch]]:
    """Those of the table, or what is taken where their kernels cannot be had, and all candidates for each product."""
    found = [("table", product, in_triton(launch)) for product, launch in PRODUCTS[target].items()]
    for product, candidates in CANDIDATES.get(target, {}).items():
        found += [(name, product, launch) for name, launch in candidates.items()]
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


SCALED_BY: dict[str, tuple[Scaling, ...]] = {
    "sm_90": ("promoted", "behind"),
    "sm_100": ("promoted", "behind", "inside"),
    "gfx942": ("promoted", "behind"),
    "gfx950": ("promoted", "behind", "inside"),
}
"""When scales are applied on a chip."""

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
"""In Triton; `tests/kernels/gluon` has the rest."""


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


def compile_product(product: Product, launch: ProductLaunch, target: str, scaling: Scaling, **more: str) -> Compiled:
    """Compile as launchers would for widths that are multiples of 16, gradients with sums; `more` may be None there."""
    float8 = "fp8e4b8" if target == "gfx942" else "fp8e4nv"
    scale = "*u8:16" if scaling == "inside" else "*fp32:16"
    rows, columns, pieces = launch.block_rows, launch.block_columns, launch.pieces

    def operand(*block: int, dtype: str = float8) -> str:
        return f"tensordesc<{dtype}{list(block)}>" if launch.descriptors else f"*{dtype}:16"

    constants = {
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "AHEAD": launch.ahead and scaling == "promoted",
        "SCALING": scaling,
        "GROUP": launch.group,
        "PIECES": pieces,
        "DESCRIPTORS": launch.descriptors,
    }
    signature = {"rows": "i32:16", "columns": "i32:16", "depth": "i32:16", "experts": "i32", **more}
    if product.startswith("rows"):
        gathered = product == "rows_gathered"
        signature |= {
            "x": f"*{float8}:16" if gathered else operand(rows, DEPTH),
            "w": operand(1, columns, DEPTH),
            "y": operand(1, 1, rows, columns // pieces, dtype="bf16"),
            "y_ptr": "*bf16:16",
            **dict.fromkeys(("x_scales", "w_scales"), scale),
            **dict.fromkeys(("starts_ptr", "owners_ptr"), "*i32:16"),
            "block_count_ptr": "*i32",
            **dict.fromkeys(("x_stride", "w_expert", "w_stride", "x_scale_depth"), "i32:16"),
            **dict.fromkeys(("w_scale_expert", "w_scale_outer", "w_scale_depth"), "i32"),
        }
        signature |= {"index_ptr": "*i64:16"} if gathered else {}
        constants |= {} if gathered else {"index_ptr": None}
        constants |= {"W_OUTER": DEPTH if scaling == "promoted" else 1, "GATHER": gathered, "WHOLE_DEPTH": True}
        constants |= {"x_scale_outer": 1, "ONLY_LAST": False}
        return compile_for(float8_rows_kernel, signature, constants, TARGETS[target], launch.warps, launch.stages)
    is_sum, is_square = product != "dense", product == "dense" or product.endswith("square")
    of_experts = product.startswith("columns")
    signature |= {
        "a": operand(rows, DEPTH),
        "b": operand(columns, DEPTH),
        "c": operand(1, rows, columns // pieces, dtype="fp32" if is_sum else "bf16"),
        **dict.fromkeys(("a_scales", "b_scales"), scale),
        **dict.fromkeys(("a_stride", "b_stride", "a_scale_depth"), "i32:16"),
        "b_scale_depth": "i32" if is_square else "i32:16",
    }
    signature |= {"starts_ptr": "*i32:16"} if of_experts else {}
    signature |= {"b_scale_outer": "i32"} if is_square else {}
    constants |= {} if of_experts else {"starts_ptr": None}
    constants |= {} if is_square else {"b_scale_outer": 1}
    constants |= {"a_scale_outer": 1, "ACCUMULATE": is_sum, "WHOLE": True}
    constants |= {"B_OUTER": DEPTH if is_square and scaling == "promoted" else 1}
    return compile_for(float8_matrices_kernel, signature, constants, TARGETS[target], launch.warps, launch.stages)
