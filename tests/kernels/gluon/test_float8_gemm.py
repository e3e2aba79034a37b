"""Hopper's own kernels for products in 8 bits, whose warps are specialized: numbers, compiled code, launches.

On a CPU `warps_in_torch` runs their source.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import CANDIDATES
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import products, quantize, reference, triton_operators
from penstock.kernels.float8.products import multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantize import Product, ProductLaunch, dense_launch, in_triton
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E5M2,
    ROWWISE,
    Quantized,
    as_quantized,
    format_on,
)
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import multiprocessors_of
from tests.kernels.ahead_of_time import TARGETS, Compiled
from tests.kernels.float8.draw_quantized import TAIL, draw_columns, draw_rows, draw_weight
from tests.kernels.float8.test_products import compile_product
from tests.kernels.gluon.warps_in_torch import launched_on_cpu
from tests.kernels.parity import assert_near

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

CPU = torch.device("cpu")
COUNTS = {"ends of all kinds": [260, 64, 1, 193, 128], "empty experts": [0, 170, 0, 33, 0], "no rows": [0, 0]}
WIDTH, DEPTH = 200, 336  # no multiples of 128
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def forms_of(product: Product) -> dict[str, ProductLaunch]:
    """Launches of the kernels that torch runs, one for each way through their source."""
    found: dict[tuple[int, int], str] = {}
    for name, launch in CANDIDATES["sm_90"][product].items():
        if launch.engine == "gluon":
            found.setdefault((launch.block_rows, launch.steps), name)
    return {name: CANDIDATES["sm_90"][product][name] for name in found.values()}


def every_form(product: Product) -> Any:
    return pytest.mark.parametrize("launch", forms_of(product).values(), ids=forms_of(product))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What kernels were launched with; torch runs them, on a CPU that is taken for a Hopper."""
    monkeypatch.setattr(products, "target_of", lambda device: "sm_90")
    names = ("float8_rows_kernel", "float8_matrices_kernel")
    return launched_on_cpu(monkeypatch, products, products.hopper, *names)


def draw_operands(counts: list[int]) -> tuple[Quantized, Quantized, Tensor]:
    """Rows with a tail, a matrix for each expert, and the counts."""
    x, w = draw_rows(sum(counts) + TAIL, DEPTH, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), WIDTH, DEPTH)
    return x, w, torch.tensor(counts)


@pytest.mark.often("gluon-empty experts", "gluon_three-ends of all kinds")
@every_count
@every_form("rows")
def test_rows_are_multiplied_with_the_matrix_of_their_expert(
    launch: ProductLaunch, counts: list[int], launched: list[Mapping[str, Any]]
) -> None:
    rows, (x, w, counts_e) = sum(counts), draw_operands(counts)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    # Behind the last expert's rows nothing was written: neither values nor scales are numbers.
    x.values[rows:].view(torch.uint8).fill_(0x7F)
    x.scales[rows:] = float("nan")
    for dtype in (torch.bfloat16, torch.float32):
        y_RF = multiply_groups(x, w, counts_e, dtype=dtype, launch=launch)
        assert_near(y_RF, expected, f"{dtype}")
        assert not y_RF[rows:].any(), "rows of the tail must be zero"
    assert [found["programs"] for found in launched] == [3, 3]


@every_form("rows")
def test_rows_that_travelled_and_gathered_rows_are_multiplied(
    launch: ProductLaunch, launched: list[Mapping[str, Any]]
) -> None:
    counts = COUNTS["ends of all kinds"]
    _, w, counts_e = draw_operands(counts)
    packed = pack_rows(torch.randn(sum(counts) + TAIL, DEPTH), BLOCKWISE, E4M3)
    x = as_quantized(packed, DEPTH, BLOCKWISE, E4M3)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    packed[sum(counts) :] = 0xFF  # NaN, values and scales
    assert_near(multiply_groups(x, w, counts_e, dtype=torch.float32, launch=launch), expected, "travelled")
    index_R, launch = torch.randint(90, (sum(counts) + TAIL,)), replace(launch, copy_gathered=True)  # no NaN rows
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    assert_near(multiply_groups(x, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected, "gathered")
    assert len(launched) == 2


@every_form("rows")
def test_rows_that_are_kept_are_written_from_the_first_one_on_and_nowhere_else(
    launch: ProductLaunch, launched: list[Mapping[str, Any]]
) -> None:
    counts, first = COUNTS["empty experts"], 37
    x, w, counts_e = draw_operands(counts)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)[: sum(counts)]
    for dtype in (torch.bfloat16, torch.float32):
        kept_SF = torch.full((first + len(expected) + 200, WIDTH), 5.0, dtype=dtype)
        keep = SavedRows(kept_SF, torch.tensor([first]), sum(counts) + TAIL)
        assert multiply_groups(x, w, counts_e, dtype=dtype, keep=keep, launch=launch) is kept_SF
        assert_near(kept_SF[first : first + sum(counts)], expected, f"{dtype}")
        assert kept_SF[:first].eq(5).all() and kept_SF[first + sum(counts) :].eq(5).all()
    assert all(found["ONLY_LAST"] is False for found in launched)


def test_with_only_last_the_last_row_of_the_tail_is_set_to_zero(launched: list[Mapping[str, Any]]) -> None:
    counts, launch = [130, 3], CANDIDATES["sm_90"]["rows"]["gluon_three"]
    x, w, counts_e = draw_operands(counts)
    tiles = replace(tile_table(counts_e, len(x.values)), only_last=True)
    y_RF = torch.full((len(x.values), WIDTH), 7.0, dtype=torch.bfloat16)
    products.launch_hopper_rows(x, w, y_RF, tiles, launch)
    assert y_RF[133:-1].eq(7).all() and y_RF[-1].eq(0).all()
    assert launched[0]["ONLY_LAST"] is True  # a constant, so other launches do not pay for it


@pytest.mark.often("e4m3-gluon_double", "e5m2-gluon_three", "e4m3-gluon")
@every_form("dense")
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_a_dense_product_equals_its_definition(
    form: Any, launch: ProductLaunch, launched: list[Mapping[str, Any]]
) -> None:
    x, w = draw_rows(410, DEPTH, BLOCKWISE, CPU, form), draw_weight(BLOCKWISE, CPU, 264, DEPTH)
    expected = reference.multiply(x, w, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        assert_near(multiply(x, w, dtype, launch=launch), expected, f"{dtype}")
    assert [found["CONSUMERS"] for found in launched] == [launch.block_rows // 64] * 2


@pytest.mark.parametrize("product", ["dense_gradient", "dense_square"])
def test_a_dense_gradient_is_written_or_added_to_its_sum(product: Product, launched: list[Mapping[str, Any]]) -> None:
    dy, x = draw_rows(264, 450, BLOCKWISE, CPU), draw_rows(WIDTH, 450, BLOCKWISE, CPU)
    if product == "dense_square":
        x = draw_weight(BLOCKWISE, CPU, WIDTH, 450)
    for name, launch in forms_of(product).items():
        total = torch.randn(264, WIDTH)
        expected = reference.multiply(dy, x, torch.float32, accumulate_into=total.clone())
        assert multiply(dy, x, torch.float32, accumulate_into=total, launch=launch) is total
        assert_near(total, expected, f"{name}, added")
        if product == "dense_gradient":
            expected = reference.multiply(dy, x, torch.float32)
            assert_near(multiply(dy, x, torch.bfloat16, launch=launch), expected, name)
    assert {found["SQUARE"] for found in launched} == {product == "dense_square"}


@pytest.mark.often("columns_square-ends of all kinds", "columns-no rows")
@every_count
@pytest.mark.parametrize("product", ["columns", "columns_square"])
def test_gradients_of_experts_are_written_or_added_to_their_sums(
    product: Product, counts: list[int], launched: list[Mapping[str, Any]]
) -> None:
    recipe = BLOCKWISE if product == "columns" else BLOCKWISE_SQUARE
    counts_e, dy = torch.tensor(counts), draw_columns(WIDTH, counts, BLOCKWISE, CPU)
    x = draw_columns(264, counts, BLOCKWISE, CPU, recipe.columns)
    expected = reference.multiply_columns(dy, x, counts_e, dtype=torch.float32)
    for name, launch in forms_of(product).items():
        given = {"dtype": torch.float32, "launch": launch}
        assert_near(multiply_columns(dy, x, counts_e, **given), expected, name)
        before = torch.randn(len(counts), WIDTH, 264)
        sums = multiply_columns(dy, x, counts_e, **given, accumulate_into=before.clone())
        assert_near(sums, before + expected, f"{name}, added")
    assert {found["CONSUMERS"] for found in launched} == ({2} if product == "columns" else {2, 3})


# What is compiled in every run of the tests; the rest in the slow ones.
QUICKLY_COMPILED = {
    ("rows", "gluon_three"),
    ("dense", "gluon_double"),
    ("columns", "gluon"),
    ("columns_square", "gluon_three"),
    ("dense_square", "gluon_double"),
}
LAUNCHES = [
    pytest.param(
        product, launch, id=f"{product}-{name}", marks=[] if (product, name) in QUICKLY_COMPILED else [pytest.mark.slow]
    )
    for product, candidates in CANDIDATES["sm_90"].items()
    for name, launch in candidates.items()
    if launch.engine == "gluon"
]
# Registers of a thread at the start, by how many consumers there are.
MOST_REGISTERS = {2: REGISTERS, 3: products.TRIOS_REGISTERS}
# Bytes. A number of the producer's is put away once, before its loop; Triton 3.6 finds a register for it.
SPILLED_BY_TRITON_3_9 = 8
VARIANTS = ({"is_kept": True}, {"is_kept": True, "dtype": torch.float32}, {"is_packed": True})


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", [name for name, one in CANDIDATES["sm_90"]["rows"].items() if one.engine == "gluon"])
def test_nothing_spills_where_rows_are_kept_or_scales_stand_behind_rows(name: str, variant: dict[str, Any]) -> None:
    launch = CANDIDATES["sm_90"]["rows"][name]
    check_warps(compile_product("rows", launch, "sm_90", "promoted", **variant), launch)


@pytest.mark.often("rows-gluon_three")
@pytest.mark.parametrize(("product", "launch"), LAUNCHES)
def test_multipliers_never_wait_for_each_other_and_nothing_spills(product: Product, launch: ProductLaunch) -> None:
    check_warps(compile_product(product, launch, "sm_90", "promoted"), launch)


def check_warps(compiled: Compiled, launch: ProductLaunch) -> None:
    # A block of 128 is four instructions deep.
    instructions = re.findall(r"wgmma\.mma_async\S*m64n128k32\.f32\.e4m3\.e4m3", compiled.asm)
    consumers = launch.block_rows // PIECE_ROWS
    assert len(instructions) >= 4 * consumers * launch.steps, compiled.summary
    assert compiled.spills <= SPILLED_BY_TRITON_3_9, compiled.summary
    assert compiled.registers == MOST_REGISTERS[consumers], compiled.summary
    assert compiled.shared_bytes <= TARGETS["sm_90"].shared_bytes, compiled.summary
    handed_on = {2: {"240", "24"}, 3: {"160", "32"}}[consumers]  # registers of consumers and of the producer
    assert set(re.findall(r"setmaxnreg\.(?:inc|dec)\S+\s+(\d+)", compiled.asm)) >= handed_on
    threads = re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+\w+, (\d+);", compiled.asm)
    assert set(threads) == {"128"}, "a barrier of others than one consumer's four warps"
    turns = re.findall(r"wgmma\.fence(.*?)mbarrier\.arrive", compiled.asm, re.DOTALL)
    assert turns and not any("barrier.sync" in turn for turn in turns), "a barrier of all warps"


def test_the_first_of_two_sums_is_there_before_the_second() -> None:
    asm = compile_product("rows", CANDIDATES["sm_90"]["rows"]["gluon_double"], "sm_90", "promoted").asm
    order = re.findall(r"wgmma\.(commit_group|wait_group)\.sync\.aligned\s*(\d*);", asm)
    # Both products are begun; the first is waited for while the second runs.
    turn, rest = [("commit_group", ""), ("commit_group", ""), ("wait_group", "1"), ("wait_group", "0")], order[:]
    while turn[0] in rest and rest[: len(turn)] != turn:
        rest = rest[1:]
    assert rest[: len(turn)] == turn, order


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
    monkeypatch.setattr(quantize, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(quantize, "programs_of", lambda launch, device: 132)  # an H100's multiprocessors
    assert dense_launch(product, rows, columns, CPU).block_rows == 64 * consumers


def test_torch_multiplies_what_no_kernel_of_ours_does_as_fast(
    monkeypatch: pytest.MonkeyPatch, launched: list[Mapping[str, Any]]
) -> None:
    for module in (triton_operators, quantize):
        monkeypatch.setattr(module, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(quantize, "programs_of", lambda launch, device: 132)
    monkeypatch.setattr(triton_operators.torch_products, "multiply", lambda *operands, **options: "torch")
    x, w = draw_rows(64, 256, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 128, 256)
    assert triton_operators.multiply_with_torch(x, draw_rows(128, 256, BLOCKWISE, CPU), torch.bfloat16) == "torch"
    triton_operators.multiply_with_torch(x, w, torch.bfloat16)
    assert len(launched) == 1


def test_what_the_kernels_cannot_do_is_said_and_done_in_triton() -> None:
    x, w = draw_rows(70, 200, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 136, 200)
    assert products.hopper_obstacle(x, w, "sm_90") is None
    assert "sm_100" in str(products.hopper_obstacle(x, w, "sm_100"))
    by_rows = draw_rows(70, 200, ROWWISE, CPU), draw_weight(ROWWISE, CPU, 136, 200)
    assert "blockwise" in str(products.hopper_obstacle(*by_rows, "sm_90"))
    assert in_triton(CANDIDATES["sm_90"]["rows"]["gluon"]).engine == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("width", [328, 384])
@pytest.mark.parametrize("counts", [[700, 0, 3, 1025, 256], [0, 0, 0], [0, 128, 0], [40000, 1, 9000]], ids=str)
def test_results_are_those_of_triton_bit_for_bit(
    counts: list[int], width: int, programs: int, hopper: torch.device
) -> None:
    device = hopper
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
