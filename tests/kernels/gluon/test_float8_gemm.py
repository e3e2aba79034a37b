"""Hopper's own kernels for products in 8 bits, whose warps have trades: their numbers, on a CPU, where torch runs their
source (`tests.kernels.gluon.warps_in_torch`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import products, reference
from penstock.kernels.float8.launches import CANDIDATES, Product, ProductLaunch
from penstock.kernels.float8.products import multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantized import as_quantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.gluon import float8_launches
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.tile_table import tile_table
from tests.kernels.float8.draw_quantized import TAIL, draw_columns, draw_rows, draw_weight
from tests.kernels.gluon.warps_in_torch import launched_on_cpu
from tests.kernels.parity import assert_near

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

CPU = torch.device("cpu")
COUNTS = {
    "ends of all kinds": [260, 64, 1, 193, 128],
    "empty experts": [0, 170, 0, 33, 0],
    "no rows": [0, 0],
}
WIDTH, DEPTH = 200, 336
"""No multiples of 128."""
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
    return launched_on_cpu(monkeypatch, float8_launches, *names)


def spoil(x: Tensor, scales: Tensor) -> None:
    """Fill memory that was not written with garbage."""
    x.view(torch.uint8).fill_(0x7F)
    scales.fill_(float("nan"))


@pytest.mark.often("gluon-empty experts", "gluon_three-ends of all kinds")
@every_count
@every_form("rows")
def test_rows_are_multiplied_with_the_matrix_of_their_expert(
    launch: ProductLaunch, counts: list[int], launched: list[Mapping[str, Any]]
) -> None:
    rows, counts_e = sum(counts), torch.tensor(counts)
    x, w = draw_rows(rows + TAIL, DEPTH, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), WIDTH, DEPTH)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    spoil(x.values[rows:], x.scales[rows:])
    for dtype in (torch.bfloat16, torch.float32):
        y_RF = multiply_groups(x, w, counts_e, dtype=dtype, launch=launch)
        assert_near(y_RF, expected, f"{dtype}")
        assert not y_RF[rows:].any(), "rows of the tail must be zero"
    assert [found["programs"] for found in launched] == [3, 3]


@every_form("rows")
def test_rows_that_travelled_bring_scales_behind_them(launch: ProductLaunch, launched: list[Mapping[str, Any]]) -> None:
    counts = COUNTS["ends of all kinds"]
    packed = pack_rows(torch.randn(sum(counts) + TAIL, DEPTH), BLOCKWISE, E4M3)
    x, w = as_quantized(packed, DEPTH, BLOCKWISE, E4M3), draw_weight(BLOCKWISE, CPU, len(counts), WIDTH, DEPTH)
    expected = reference.multiply_groups(x, w, torch.tensor(counts), dtype=torch.float32)
    packed[sum(counts) :] = 0xFF
    assert_near(multiply_groups(x, w, torch.tensor(counts), dtype=torch.float32, launch=launch), expected, "rows")
    assert len(launched) == 1


@every_form("rows_gathered")
def test_rows_that_are_gathered_are_copied_first(launch: ProductLaunch, launched: list[Mapping[str, Any]]) -> None:
    counts_e, index_R = torch.tensor([140, 0, 70]), torch.randint(90, (210 + TAIL,))
    x, w = draw_rows(90, DEPTH, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 3, WIDTH, DEPTH)
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    assert_near(multiply_groups(x, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected, "gathered")
    assert len(launched) == 1


@every_form("rows")
def test_rows_that_are_kept_are_written_from_the_first_one_on_and_nowhere_else(
    launch: ProductLaunch, launched: list[Mapping[str, Any]]
) -> None:
    counts, first = COUNTS["empty experts"], 37
    x, w = draw_rows(sum(counts) + TAIL, DEPTH, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), WIDTH, DEPTH)
    expected = reference.multiply_groups(x, w, torch.tensor(counts), dtype=torch.float32)[: sum(counts)]
    for dtype in (torch.bfloat16, torch.float32):
        kept_SF = torch.full((first + len(expected) + 200, WIDTH), 5.0, dtype=dtype)
        keep = SavedRows(kept_SF, torch.tensor([first]), sum(counts) + TAIL)
        assert multiply_groups(x, w, torch.tensor(counts), dtype=dtype, keep=keep, launch=launch) is kept_SF
        assert_near(kept_SF[first : first + sum(counts)], expected, f"{dtype}")
        assert kept_SF[:first].eq(5).all() and kept_SF[first + sum(counts) :].eq(5).all()
    assert all(found["ONLY_LAST"] is False for found in launched)


def test_with_only_last_the_last_row_of_the_tail_is_set_to_zero(launched: list[Mapping[str, Any]]) -> None:
    counts, launch = [130, 3], CANDIDATES["sm_90"]["rows"]["gluon_three"]
    x, w = draw_rows(sum(counts) + TAIL, DEPTH, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, len(counts), WIDTH, DEPTH)
    tiles = replace(tile_table(torch.tensor(counts), len(x.values)), only_last=True)
    y_RF = torch.full((len(x.values), WIDTH), 7.0, dtype=torch.bfloat16)
    float8_launches.launch_rows(x, w, y_RF, tiles, launch)
    assert y_RF[133:-1].eq(7).all() and y_RF[-1].eq(0).all()
    assert launched[0]["ONLY_LAST"] is True


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
