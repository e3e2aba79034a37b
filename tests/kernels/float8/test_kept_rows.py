"""Rows in a buffer of several layers, in 8 bits: the kernels that write and read there."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import BACKWARD_LAUNCHES, CANDIDATES
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8.products import _launch_rows, multiply_groups
from penstock.kernels.float8.quantize import PRODUCTS, Product, ProductLaunch, in_triton
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, TENSORWISE, Recipe, obstacle
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import target_of
from tests.kernels.ahead_of_time import TARGETS
from tests.kernels.float8.draw_quantized import (
    assert_all_same,
    assert_same,
    draw_rows,
    draw_weight,
    form_on,
    transposed,
)
from tests.kernels.float8.test_products import DESCRIPTORS, POINTERS, compile_product
from tests.kernels.float8.test_swiglu import compiled as compile_activation

COUNTS = (64, 0, 90, 19)
WIDTH = 128
CLAMPED = ExpertRule(limit=0.7, alpha=1.702)


def launches_on(device: torch.device, product: Product, dtype: torch.dtype) -> dict[str, ProductLaunch]:
    """The table's launch on a GPU, and with 16-bit results all candidates there; two of Triton's on a CPU."""
    if device.type == "cpu":
        return {"pointers": POINTERS, "descriptors": DESCRIPTORS}
    target = target_of(device)
    tried = CANDIDATES.get(target, {}).get(product, {}) if dtype == torch.bfloat16 else {}
    return {"table": PRODUCTS[target][product], **tried}


def test_with_only_last_just_the_last_row_of_the_tail_is_set_to_zero(device: torch.device) -> None:
    counts = [130, 0, 70] if device.type == "cuda" else [3, 60]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts_e, used, room = torch.tensor(counts, dtype=torch.int32, device=device), sum(counts), sum(counts) + 17
    x, w = draw_rows(room, 640, BLOCKWISE, device), draw_weight(BLOCKWISE, device, len(counts), 384, 640)
    tiles = tile_table(counts_e, room)
    for name, launch in launches_on(device, "rows", dtype).items():
        whole, last = (torch.full((room, 384), 7.0, dtype=dtype, device=device) for _ in range(2))
        _launch_rows(x, w, whole, None, tiles, launch, "promoted", None)
        _launch_rows(x, w, last, None, replace(tiles, only_last=True), launch, "promoted", None)
        assert whole[used:].eq(0).all(), name
        assert torch.equal(last[:used], whole[:used]), name
        assert last[used:-1].eq(7).all() and last[-1].eq(0).all(), name


@pytest.mark.often("*blockwise*")
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("counts", "before", "dtype"),
    [
        ([64, 0, 90, 19], 37, torch.float32),
        *(
            pytest.param(counts, before, dtype, marks=pytest.mark.gpu)
            for counts in ([700, 0, 3, 1025, 256], [0, 0, 0], [4000, 1, 900])
            for before in (37, 2**31 // 384 + 5)
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
    ids=str,
)
def test_every_launch_writes_where_rows_are_kept_and_nothing_beside_it(
    counts: list[int], before: int, dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    if device.type == "cuda" and obstacle(recipe, target_of(device)):
        pytest.skip("this chip does not multiply blocks of 32")
    counts_e, used, room = torch.tensor(counts, device=device), sum(counts), sum(counts) + 13
    width, depth = (384, 640) if device.type == "cuda" else (72, 160)
    x, w = draw_rows(room, depth, recipe, device), draw_weight(recipe, device, len(counts), width, depth)
    rows_SF = torch.full((before + room + 200, width), 5.0, dtype=dtype, device=device)
    place, first = SavedRows(rows_SF, torch.tensor([before], device=device), room), min(before, 300)
    around = rows_SF[before - first :]
    index: dict[Product, Tensor | None] = {"rows": None, "rows_gathered": torch.randint(room, (room,), device=device)}
    for product, index_R in index.items():
        for name, launch in launches_on(device, product, dtype).items():
            multiply = partial(multiply_groups, x, w, counts_e, index_R, dtype=dtype, launch=launch)
            rows_SF.fill_(5)
            own_RN, kept_SF = multiply(), multiply(keep=place)
            assert kept_SF is rows_SF
            assert torch.equal(around[first : first + used], own_RN[:used]), f"{product}, {name}"
            assert around[:first].eq(5).all() and around[first + used :].eq(5).all(), f"{product}, {name}"
            assert not own_RN[used:].any(), f"{product}, {name}"


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str) -> None:
    recipe, scaling = (MXFP8, "inside") if target in ("sm_100", "gfx950") else (BLOCKWISE, "promoted")
    for product in ("rows", "rows_gathered"):
        made = compile_product(product, in_triton(PRODUCTS[target][product]), target, scaling, is_kept=True)
        assert made.spills == 0, f"{product}: {made.summary}"
    for which in ("rows", "backward"):
        made = compile_activation(target, recipe, SWIGLU, which, is_kept=True)
        assert made.spills == 0, f"{which}: {made.summary}"
        if target == "sm_90" and which == "rows":
            assert "ld.global.v4" in made.asm, "rows that are kept are loaded sixteen bytes at a time too"


@pytest.mark.often("squares-37")
@pytest.mark.parametrize("before", [37, pytest.param(2**31 // 2816 + 5, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("recipe", "rule"),
    [(BLOCKWISE, SWIGLU), (BLOCKWISE_SQUARE, SWIGLU), (MXFP8, SWIGLU), (TENSORWISE, SWIGLU), (BLOCKWISE, CLAMPED)],
    ids=["blocks", "squares", "mxfp8", "in passes", "clamped"],
)
def test_the_activation_and_its_gradients_are_those_of_the_kept_rows(
    recipe: Recipe, rule: ExpertRule, before: int, device: torch.device
) -> None:
    """The rows before and behind them are NaN."""
    is_gpu, form = device.type == "cuda", form_on(device)
    counts, width, dtype = ((700, 0, 3, 1025, 256), 1408, torch.bfloat16) if is_gpu else (COUNTS, WIDTH, torch.float32)
    counts_e, used, room = torch.tensor(counts, dtype=torch.int32, device=device), sum(counts), sum(counts) + 7
    own_RF = torch.randn(room, 2 * width, device=device).to(dtype)
    rows_SF = torch.full((before + room + 3, 2 * width), math.nan, dtype=dtype, device=device)
    rows_SF[before : before + used] = own_RF[:used]
    place = SavedRows(rows_SF, torch.tensor([before], device=device), room)
    weights_R, dh_RF = torch.rand(room, device=device), torch.randn(room, width, device=device).to(dtype)
    own_RF[used:] = dh_RF[used:] = weights_R[used:] = math.nan
    own, kept = (swiglu(rows, weights_R, rule, recipe, form, counts_e=counts_e) for rows in (own_RF, place))
    assert kept.rows.values.shape == (room, width)
    assert_same(kept.rows, own.rows, used)
    given = weights_R, dh_RF, counts_e, rule, recipe, form, form
    for launch in list(BACKWARD_LAUNCHES.values())[: None if is_gpu else 1]:
        options = {"keep_plain": rule.limit is not None, "launch": launch}
        own, kept = (swiglu_backward(rows, *given, **options) for rows in (own_RF, place))
        assert_same(kept.d_gate_up, own.d_gate_up, used)
        assert_all_same(transposed(kept, counts_e), transposed(own, counts_e))
        assert torch.equal(kept.dweights_R, own.dweights_R)
        assert not kept.dweights_R[used:].any(), "these weights belong to no expert"
        if rule.limit is not None:
            assert torch.equal(kept.plain_d_gate_up_RF[:used], own.plain_d_gate_up_RF[:used])
