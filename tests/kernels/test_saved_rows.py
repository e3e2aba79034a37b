"""Rows saved in a buffer of several layers: where a layer begins, and the kernels that write and read them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.expert_parts import SavedRows, claim_rows
from penstock.kernels.grouped_gemm import _launch_rows, grouped_gemm_forward
from penstock.kernels.permute import gather_columns, gather_rows
from penstock.kernels.swiglu import swiglu_backward, swiglu_forward
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import GROUPED_GEMM, GemmLaunch, KernelLaunch
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.test_grouped_gemm import BOTH_WAYS, POINTERS

SMALL = KernelLaunch(block_rows=4, block_columns=16, warps=1)
SMALL_TILES = {"permute.LAUNCH": SMALL}
ROOM, TAIL = 190, 7  # rows of a layer's buffer; those behind the last expert's
COUNTS = [64, 0, 100, 19]


@pytest.fixture
def place(device: torch.device) -> SavedRows:
    """After 37 rows of another layer, in a buffer with a few rows more; all hold 5."""
    rows_SF = torch.full((37 + ROOM + 3, 48), 5.0, device=device)
    return SavedRows(rows_SF, torch.tensor([37], device=device), ROOM)


def spoiled(rows: int, width: int, device: torch.device) -> Tensor:
    """Random rows, then some that hold NaN."""
    numbers = torch.randn(rows, width, device=device)
    numbers[rows - TAIL :] = float("nan")
    return numbers


def test_layers_are_placed_one_after_the_other_and_rows_that_do_not_fit_are_counted(device: torch.device) -> None:
    cursor, meter = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    firsts = [
        int(claim_rows(cursor, torch.tensor([rows], dtype=torch.int32, device=device), 12, meter))
        for rows in (5, 0, 7, 4, 3)
    ]
    assert firsts == [0, 5, 5, 0, 0], "the fourth and the fifth found no room"
    assert meter.tolist() == [7, 19]  # rows without room, all rows


@BOTH_WAYS
def test_a_product_is_written_to_its_saved_rows_and_nowhere_else(
    launch: GemmLaunch, place: SavedRows, device: torch.device
) -> None:
    x_RD, counts_e = spoiled(ROOM, 32, device), torch.tensor(COUNTS, dtype=torch.int32, device=device)
    w_eFD = torch.randn(len(COUNTS), 48, 32, device=device)
    used = sum(COUNTS)
    alone_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, launch=launch)
    saved_SF = grouped_gemm_forward(x_RD, w_eFD, counts_e, keep=place, launch=launch)
    assert saved_SF is place.rows_SF
    assert torch.equal(saved_SF[37 : 37 + used], alone_RF[:used])
    assert saved_SF[:37].eq(5).all() and saved_SF[37 + used :].eq(5).all(), "nor is a tail written"


def test_the_activation_reads_saved_rows_forward_and_backward(place: SavedRows, device: torch.device) -> None:
    place.rows_SF.normal_()
    own_RF = place.rows_SF[37 : 37 + ROOM].clone()
    weights_R, dh_RF = torch.rand(ROOM, device=device), torch.randn(ROOM, 24, device=device)
    used = torch.tensor([sum(COUNTS)], dtype=torch.int32, device=device)
    given = {"used": used, "launch": SMALL}
    h_RF, saved_h_RF = (swiglu_forward(rows, weights_R, **given)[:used] for rows in (own_RF, place))
    assert torch.equal(saved_h_RF, h_RF)
    own, saved = (swiglu_backward(rows, weights_R, dh_RF, recompute=True, **given) for rows in (own_RF, place))
    assert saved.d_gate_up_RF.shape == own.d_gate_up_RF.shape
    assert torch.equal(saved.d_gate_up_RF[:used], own.d_gate_up_RF[:used])
    assert torch.equal(saved.h_RF[:used], own.h_RF[:used])
    assert torch.equal(saved.dweights_R, own.dweights_R)


def test_with_only_last_just_the_last_row_of_the_tail_is_set_to_zero(device: torch.device) -> None:
    counts_e = torch.tensor([3, 60], dtype=torch.int32, device=device)
    tiles = tile_table(counts_e, 80)
    dy_RF, w_eFD = torch.randn(80, 32, device=device), torch.randn(2, 32, 48, device=device)
    whole, last = (torch.full((80, 48), 7.0, device=device) for _ in range(2))
    _launch_rows(dy_RF, w_eFD, whole, None, tiles, POINTERS, depth_first=True)
    _launch_rows(dy_RF, w_eFD, last, None, replace(tiles, only_last=True), POINTERS, depth_first=True)
    assert whole[63:].eq(0).all()
    assert torch.equal(last[:63], whole[:63])
    assert last[63:79].eq(7).all() and last[79].eq(0).all()


@pytest.mark.parametrize("used", [0, 1, 9, 20])
def test_only_used_rows_are_gathered(used: int, device: torch.device) -> None:
    x_ND, index_R = torch.randn(6, 40, device=device), torch.randint(6, (20,), device=device)
    count = torch.tensor([used], dtype=torch.int32, device=device)
    gathered_RD = gather_rows(x_ND[:, :33], index_R, count)
    assert gathered_RD.shape == (20, 33)
    assert torch.equal(gathered_RD[:used], x_ND[index_R[:used], :33])
    apart_RD = gather_rows(x_ND[:, :33], index_R, count, multiple=8)
    assert apart_RD.stride() == (40, 1)
    assert torch.equal(apart_RD[:used], gathered_RD[:used])
    gathered_DR = gather_columns(x_ND.T.contiguous(), index_R, count)
    assert gathered_DR.shape == (40, 20)
    assert torch.equal(gathered_DR[:, :used], x_ND.T[:, index_R[:used]])


@pytest.mark.often("sm_90")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str) -> None:
    used, counts_e = (on_meta(size, dtype=torch.int32) for size in (1, 64))
    cursor, meter, index_R = (on_meta(size, dtype=torch.int64) for size in (1, 2, 8191))
    weights_R, scales_DN = (on_meta(*shape, dtype=torch.float32) for shape in ((8192,), (16, 8192)))
    x_ND, w_eFD, place = on_meta(8192, 2048), on_meta(64, 2816, 2048), SavedRows(on_meta(99_999, 2816), cursor, 8192)
    ((_, launch),) = GROUPED_GEMM["gfx942"]["input_gradient"]  # any chip can run it

    def launches() -> None:
        claim_rows(cursor, used, 99_999, meter)
        gather_rows(x_ND, index_R, used)
        gather_columns(scales_DN, index_R, used)
        tiles = replace(tile_table(counts_e, 8192), only_last=True)
        grouped_gemm_forward(x_ND, w_eFD, counts_e, tiles=tiles, keep=place, launch=launch)
        swiglu_forward(place, weights_R, used=used)

    *_, activation = compile_without_spills(target, launches)
    if target == "sm_90":
        assert "ld.global.v4" in activation.asm, "saved rows are loaded 16 bytes at a time too"
