"""Hopper's own kernels: what the compiler makes of them, what they are launched with."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import launches, products, triton_operators
from penstock.kernels.float8.launches import CANDIDATES, Product, ProductLaunch, dense_launch, in_triton
from penstock.kernels.float8.products import multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantized import as_quantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, ROWWISE, format_on
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.gluon import float8_launches
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import multiprocessors_of, target_of
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for
from tests.kernels.float8.draw_quantized import TAIL, draw_columns, draw_rows, draw_weight

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from penstock.kernels.gluon.float8_gemm_kernels import float8_matrices_kernel, float8_rows_kernel

QUICKLY_COMPILED = {
    ("rows", "gluon_three"),
    ("dense", "gluon_double"),
    ("columns", "gluon"),
    ("columns_square", "gluon_three"),
    ("dense_square", "gluon_double"),
}
"""What is compiled in every run of the tests; the rest in the slow ones."""

LAUNCHES = [
    pytest.param(
        product, launch, id=f"{product}-{name}", marks=[] if (product, name) in QUICKLY_COMPILED else [pytest.mark.slow]
    )
    for product, candidates in CANDIDATES["sm_90"].items()
    for name, launch in candidates.items()
    if launch.engine == "gluon"
]


HOPPERS_OF_ROWS = [
    pytest.param(one, id=name, marks=[] if ("rows", name) in QUICKLY_COMPILED else [pytest.mark.slow])
    for name, one in CANDIDATES["sm_90"]["rows"].items()
    if one.engine == "gluon"
]


MOST_REGISTERS = {2: REGISTERS, 3: float8_launches.TRIOS_REGISTERS}
"""Of a thread at the start, by how many consumers there are."""

SPILLED_BY_TRITON_3_9 = 8
"""Bytes. A number of the producer's is put away once, before its loop; Triton 3.6 finds a register for it."""


@pytest.mark.slow
@pytest.mark.parametrize("launch", HOPPERS_OF_ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_nothing_spills_where_rows_are_kept(dtype: str, launch: ProductLaunch) -> None:
    check_warps(compile_kernel("rows", launch, is_kept=True, dtype=dtype), launch)


@pytest.mark.slow
@pytest.mark.parametrize("launch", HOPPERS_OF_ROWS)
def test_nothing_spills_where_scales_stand_behind_rows(launch: ProductLaunch) -> None:
    check_warps(compile_kernel("rows", launch, is_packed=True), launch)


@pytest.mark.often("rows-gluon_three")
@pytest.mark.parametrize(("product", "launch"), LAUNCHES)
def test_multipliers_never_wait_for_each_other_and_nothing_spills(product: Product, launch: ProductLaunch) -> None:
    check_warps(compile_kernel(product, launch), launch)


def check_warps(compiled: Compiled, launch: ProductLaunch) -> None:
    instructions = re.findall(r"wgmma\.mma_async\S*m64n128k32\.f32\.e4m3\.e4m3", compiled.asm)
    consumers = launch.block_rows // PIECE_ROWS
    assert len(instructions) >= 4 * consumers * launch.steps, compiled.summary
    assert compiled.spills <= SPILLED_BY_TRITON_3_9, compiled.summary
    assert compiled.registers == MOST_REGISTERS[consumers], compiled.summary
    assert compiled.shared_bytes <= TARGETS["sm_90"].shared_bytes, compiled.summary
    handed_on = {2: {"240", "24"}, 3: {"160", "32"}}[consumers]
    assert set(re.findall(r"setmaxnreg\.(?:inc|dec)\S+\s+(\d+)", compiled.asm)) >= handed_on
    threads = re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+\w+, (\d+);", compiled.asm)
    assert set(threads) == {"128"}, "a barrier of others than one consumer's four warps"
    turns = re.findall(r"wgmma\.fence(.*?)mbarrier\.arrive", compiled.asm, re.DOTALL)
    assert turns and not any("barrier.sync" in turn for turn in turns), "a barrier of all warps"


def test_the_first_of_two_sums_is_there_before_the_second() -> None:
    asm = compile_kernel("rows", CANDIDATES["sm_90"]["rows"]["gluon_double"]).asm
    order = re.findall(r"wgmma\.(commit_group|wait_group)\.sync\.aligned\s*(\d*);", asm)
    turn, rest = [("commit_group", ""), ("commit_group", ""), ("wait_group", "1"), ("wait_group", "0")], order[:]
    while turn[0] in rest and rest[: len(turn)] != turn:
        rest = rest[1:]
    assert rest[: len(turn)] == turn, order


def compile_kernel(
    product: Product, launch: ProductLaunch, *, is_kept: bool = False, is_packed: bool = False, dtype: str = "bf16"
) -> Compiled:
    """Compile as the launchers would for widths that are multiples of 128; rows are written in a dtype."""

    def operand(dtype: str, bits: int, *block: int) -> str:
        width = min(128, block[-1] * bits // 8)
        layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(block))
        return f"tensordesc<{dtype}{list(block)},{layout!r}>"

    constants: dict[str, int | bool | None] = {
        "STAGES": launch.stages,
        "STEPS": launch.steps,
        "GROUP": launch.group,
        "CONSUMERS": launch.block_rows // PIECE_ROWS,
    }
    piece = float8_launches.WIDTH // launch.pieces
    signature = {"rows": "i32", "columns": "i32:16", "depth": "i32:16", "experts": "i32"}
    is_dense = product.startswith("dense")
    if is_dense:
        constants["experts"] = 1
        del signature["experts"]
    table: tuple[str, ...] = ("starts_ptr",)
    if product in ("rows", "rows_gathered", "dense"):
        signature |= {
            "x": operand("fp8e4nv", 8, 64, 128),
            "w": operand("fp8e4nv", 8, 1, 128, 128),
            "y_ptr": f"*{dtype}:16",
            **dict.fromkeys(("x_scales", "w_scales"), "*fp32:16"),
            **dict.fromkeys(("w_scale_expert", "w_scale_depth"), "i32"),
            "x_scale_outer" if is_packed else "x_scale_depth": "i32",
        }
        signature |= {"y": operand("bf16", 16, 1, 1, 64, piece)} if dtype == "bf16" else {}
        signature |= {"first_ptr": "*i64:16"} if is_kept else {}
        constants |= {"w_scale_outer": 1, "ONLY_LAST": False}
        constants |= {"x_scale_depth" if is_packed else "x_scale_outer": 1}
        table += ("owners_ptr", "block_count_ptr")
        kernel = float8_rows_kernel
    else:
        signature |= {
            "a": operand("fp8e4nv", 8, 64, 128),
            "b": operand("fp8e4nv", 8, 128, 128),
            "c": operand("fp32", 32, 1, 64, piece),
            "c_ptr": "*fp32:16",
            **dict.fromkeys(("a_scales", "b_scales"), "*fp32:16"),
            **dict.fromkeys(("a_scale_depth", "b_scale_depth"), "i32:16"),
        }
        constants |= {"a_scale_outer": 1, "b_scale_outer": 1, "SQUARE": product.endswith("square"), "WHOLE": True}
        kernel = float8_matrices_kernel
    if is_dense:
        constants |= dict.fromkeys(table)
    else:
        signature |= dict.fromkeys(table, "*i32:16")
    registers = MOST_REGISTERS[launch.block_rows // PIECE_ROWS]
    return compile_for(kernel, signature, constants, TARGETS["sm_90"], launch.warps, maxnreg=registers)


CPU = torch.device("cpu")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What kernels were launched with, on a CPU that is taken for a Hopper."""
    found: list[dict[str, object]] = []

    def start_kernel(kernel, grid, *arguments, **constants):
        constants = {name: value for name, value in constants.items() if name.isupper()}
        assert list(kernel.arg_names[len(arguments) :]) == list(constants), "constants follow the arguments"
        found.append(dict(zip(kernel.arg_names, arguments, strict=False)) | constants | {"kernel": kernel.__name__})

    monkeypatch.setattr(float8_launches, "start_kernel", start_kernel)
    for module in (products, launches):
        monkeypatch.setattr(module, "target_of", lambda device: "sm_90")
    return found


def table_of(counts: list[int]) -> TileTable:
    """One of the right shapes."""
    starts_e = torch.zeros(len(counts) + 1, dtype=torch.int32)
    return TileTable(
        starts_e,
        starts_e,
        torch.arange(len(BLOCK_SIZES), dtype=torch.int32),
        torch.zeros(len(BLOCK_SIZES), 9, 4, dtype=torch.int32),
    )


def test_rows_of_experts_are_launched_with_their_table(launched: list[dict[str, object]]) -> None:
    counts, launch = [70, 0, 3], CANDIDATES["sm_90"]["rows"]["gluon_double"]
    x, w = draw_rows(sum(counts) + TAIL, 200, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), 136, 200)
    tiles = table_of(counts)
    multiply_groups(x, w, torch.tensor(counts), dtype=torch.bfloat16, tiles=tiles, launch=launch)
    found = launched[0]
    assert [found[name] for name in ("rows", "columns", "depth", "experts")] == [sum(counts) + TAIL, 136, 200, 3]
    assert [found[name] for name in ("x_scale_outer", "x_scale_depth")] == [1, sum(counts) + TAIL]
    assert [found[name] for name in ("w_scale_expert", "w_scale_outer", "w_scale_depth")] == [4, 1, 2]
    assert isinstance(found["block_count_ptr"], Tensor) and found["block_count_ptr"][0] == 1, "of blocks of 128 rows"
    assert (found["STAGES"], found["STEPS"], found["CONSUMERS"]) == (6, 2, 2)
    multiply_groups(x, w, torch.tensor(counts), dtype=torch.bfloat16, tiles=tiles)
    assert launched[1]["block_count_ptr"][0] == 2, "of blocks of 192 rows"
    assert (launched[1]["STEPS"], launched[1]["CONSUMERS"]) == (1, 3)


def test_rows_that_travelled_are_launched_where_they_lie(launched: list[dict[str, object]]) -> None:
    counts, launch = [70, 0, 3], CANDIDATES["sm_90"]["rows"]["gluon_double"]
    packed = pack_rows(torch.randn(sum(counts) + TAIL, 200), BLOCKWISE, E4M3)
    x, w = as_quantized(packed, 200, BLOCKWISE, E4M3), draw_weight(BLOCKWISE, CPU, len(counts), 136, 200)
    multiply_groups(x, w, torch.tensor(counts), dtype=torch.bfloat16, tiles=table_of(counts), launch=launch)
    (found,) = launched
    assert tuple(found["x"].strides) == (packed.shape[1], 1) and found["x"].base.data_ptr() == packed.data_ptr()
    assert found["x_scales"] is x.scales and x.scales.data_ptr() == packed.data_ptr() + 208
    assert [found[name] for name in ("x_scale_outer", "x_scale_depth")] == [packed.shape[1] // 4, 1]


def test_rows_that_are_kept_are_launched_with_their_first(launched: list[dict[str, object]]) -> None:
    counts, launch = [70, 0, 3], CANDIDATES["sm_90"]["rows"]["gluon_double"]
    x, w = draw_rows(sum(counts) + TAIL, 200, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), 136, 200)
    place = SavedRows(torch.empty(400, 136, dtype=torch.bfloat16), torch.tensor([37]), len(x.values))
    given, tiles = (x, w, torch.tensor(counts)), replace(table_of(counts), only_last=True)
    for keep in (place, None):
        multiply_groups(*given, dtype=torch.bfloat16, tiles=tiles, keep=keep, launch=launch)
    kept, own = launched
    assert kept["first_ptr"] is place.first and own["first_ptr"] is None
    assert kept["y_ptr"] is place.rows_SF
    assert kept["rows"] == own["rows"] == len(x.values), "those that are multiplied, not those of the buffer"
    assert kept["ONLY_LAST"] is own["ONLY_LAST"] is True


def test_a_dense_product_with_a_weight_needs_no_table(launched: list[dict[str, object]]) -> None:
    launch = CANDIDATES["sm_90"]["dense"]["gluon"]
    multiply(draw_rows(70, 200, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 136, 200), torch.float32, launch=launch)
    (found,) = launched
    assert found["kernel"] == "float8_rows_kernel" and found["owners_ptr"] is None
    assert found["y"] is None, "float32 is written through pointers"
    assert [found[name] for name in ("rows", "columns", "depth", "experts")] == [70, 136, 200, 1]
    assert found["first_ptr"] is None and found["ONLY_LAST"] is False


@pytest.mark.parametrize("width", [136, 256])
def test_gradients_are_launched_with_where_experts_begin(width: int, launched: list[dict[str, object]]) -> None:
    counts, launch = [70, 0, 3], CANDIDATES["sm_90"]["dense_gradient"]["gluon"]
    dy, x = (draw_columns(one, counts, BLOCKWISE, CPU) for one in (width, 128))
    sums = torch.zeros(len(counts), width, 128)
    arguments = {"dtype": torch.float32, "accumulate_into": sums, "tiles": table_of(counts), "launch": launch}
    assert multiply_columns(dy, x, torch.tensor(counts), **arguments) is sums
    (found,) = launched
    assert [found[name] for name in ("rows", "columns", "depth", "experts")] == [width, 128, dy.values.shape[1], 3]
    assert [found[name] for name in ("a_scale_outer", "a_scale_depth", "b_scale_depth")] == [1, width, 128]
    assert (found["WHOLE"], found["SQUARE"], found["STAGES"]) == (width == 256, False, 5)
    assert found["c"] is not None, "the copy engine adds"


@pytest.mark.parametrize("added", [False, True])
def test_gradients_of_squares_are_launched_with_a_scale_for_128_rows(
    added: bool, launched: list[dict[str, object]]
) -> None:
    counts, launch = [70, 0, 3], CANDIDATES["sm_90"]["columns_square"]["gluon_double"]
    dy, x = draw_columns(256, counts, BLOCKWISE, CPU), draw_columns(384, counts, BLOCKWISE_SQUARE, CPU)
    into = torch.zeros(len(counts), 256, 384) if added else None
    multiply_columns(dy, x, torch.tensor(counts), dtype=torch.float32, accumulate_into=into, launch=launch)
    one, square = draw_rows(256, 512, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 384, 512)
    launch = CANDIDATES["sm_90"]["dense_square"]["gluon_double"]
    multiply(one, square, torch.float32, accumulate_into=into[0] if into is not None else None, launch=launch)
    of_experts, dense = launched
    assert [of_experts[name] for name in ("b_scale_outer", "b_scale_depth")] == [1, 3]
    assert (of_experts["SQUARE"], of_experts["STEPS"], of_experts["c"] is None) == (True, 2, not added)
    assert dense["kernel"] == ("float8_matrices_kernel" if added else "float8_rows_kernel")


@pytest.mark.parametrize(
    ("product", "rows", "columns", "consumers"),
    [
        ("dense", 8192, 32768, 3),  # keys and values up of DeepSeek-V3, forward
        ("dense", 8192, 512, 2),  # and their input's gradient
        ("dense_square", 2048, 2048, 2),  # gradient of V2-Lite's output projection
        ("dense_square", 36864, 7168, 3),  # of a dense network of V3
    ],
)
def test_few_tiles_are_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, product: Product, rows: int, columns: int, consumers: int
) -> None:
    monkeypatch.setattr(launches, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(launches, "programs_of", lambda launch, device: 132)
    assert dense_launch(product, rows, columns, CPU).block_rows == 64 * consumers


def test_torch_multiplies_what_no_kernel_of_ours_does_as_fast(
    monkeypatch: pytest.MonkeyPatch, launched: list[dict[str, object]]
) -> None:
    monkeypatch.setattr(triton_operators, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(launches, "programs_of", lambda launch, device: 132)
    monkeypatch.setattr(triton_operators.torch_products, "multiply", lambda *operands, **options: "torch")
    x, w = draw_rows(64, 256, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 128, 256)
    assert triton_operators.multiply_with_torch(x, draw_rows(128, 256, BLOCKWISE, CPU), torch.bfloat16) == "torch"
    triton_operators.multiply_with_torch(x, w, torch.bfloat16)
    assert [found["kernel"] for found in launched] == ["float8_rows_kernel"]


def test_what_the_kernels_cannot_do_is_said_and_done_in_triton() -> None:
    x, w = draw_rows(70, 200, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 136, 200)
    assert float8_launches.gemm_obstacle(x, w, "sm_90") is None
    assert "sm_100" in str(float8_launches.gemm_obstacle(x, w, "sm_100"))
    by_rows = draw_rows(70, 200, ROWWISE, CPU), draw_weight(ROWWISE, CPU, 136, 200)
    assert "blockwise" in str(float8_launches.gemm_obstacle(*by_rows, "sm_90"))
    assert in_triton(CANDIDATES["sm_90"]["rows"]["gluon"]).engine == "triton"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("width", [328, 384])
@pytest.mark.parametrize("counts", [[700, 0, 3, 1025, 256], [0, 0, 0], [0, 128, 0], [40000, 1, 9000]], ids=str)
def test_results_are_those_of_triton_bit_for_bit(counts: list[int], width: int, programs: int) -> None:
    device = torch.device("cuda")
    if target_of(device) != "sm_90":
        pytest.skip("the kernels are Hopper's")
    counts_e, depth = torch.tensor(counts, device=device), 640
    x = draw_rows(sum(counts) + TAIL, depth, BLOCKWISE, device)
    w = draw_weight(BLOCKWISE, device, len(counts), width, depth)
    one, other = draw_weight(BLOCKWISE, device, width, depth), draw_rows(width, depth, BLOCKWISE, device)
    wide = draw_rows(width, depth, BLOCKWISE, device, format_on("e5m2", "sm_90"))
    dy, columns = (draw_columns(each, counts, BLOCKWISE, device) for each in (width, depth))
    squares = draw_columns(depth, counts, BLOCKWISE_SQUARE, device)
    of, into = CANDIDATES["sm_90"], {"dtype": torch.float32}

    def all_of(names: Sequence[str]) -> list[Tensor]:
        """Results by launches of weights, of gradients and of squares."""
        weights, gradients, of_squares = names

        def by(product: Product, name: str) -> ProductLaunch:
            return replace(of[product][name], idle_units=multiprocessors_of(device) - programs)

        drawn = torch.Generator(device).manual_seed(0)
        sums = torch.randn(2, len(counts), width, depth, generator=drawn, device=device)
        total = torch.randn(len(x.values), width, generator=drawn, device=device)
        return [
            *(
                multiply_groups(x, w, counts_e, dtype=dtype, launch=by("rows", weights))
                for dtype in (torch.bfloat16, torch.float32)
            ),
            multiply(x, one, torch.bfloat16, launch=by("dense", weights)),
            multiply(x, one, torch.float32, accumulate_into=total, launch=by("dense_square", of_squares)),
            *(multiply(x, rows, torch.bfloat16, launch=by("dense_gradient", gradients)) for rows in (other, wide)),
            multiply_columns(dy, columns, counts_e, dtype=torch.bfloat16, launch=by("columns", gradients)),
            multiply_columns(dy, columns, counts_e, **into, accumulate_into=sums[0], launch=by("columns", gradients)),
            multiply_columns(dy, squares, counts_e, dtype=torch.bfloat16, launch=by("columns_square", of_squares)),
            multiply_columns(
                dy, squares, counts_e, **into, accumulate_into=sums[1], launch=by("columns_square", of_squares)
            ),
        ]

    expected = all_of(["pair"] * 3)
    for names in (["gluon"] * 3, ["gluon_double", "gluon", "gluon_double"], ["gluon_three", "gluon", "gluon_three"]):
        for place, (found, wanted) in enumerate(zip(all_of(names), expected, strict=True)):
            assert torch.equal(found, wanted), f"{names}, result {place}"
