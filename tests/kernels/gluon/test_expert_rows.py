"""Hopper's own kernel for products of experts' rows: its numbers, and what the compiler makes of it.

On a CPU its source is run by `warps_in_torch`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import grouped_gemm, reference
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.gluon import grouped_gemm as hopper
from penstock.kernels.gluon.grouped_gemm import rows_obstacle as obstacle
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS
from penstock.kernels.grouped_gemm import grouped_gemm_forward, grouped_gemm_input_gradient
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import ROWS_RINGS, RowsRingLaunch, in_triton, multiprocessors_of, target_of
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for, those_taken_first
from tests.kernels.gluon.warps_in_torch import launched_on_cpu
from tests.kernels.parity import assert_near

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernel knows")

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from penstock.kernels.gluon.grouped_gemm_kernels import expert_rows_kernel

RING = ROWS_RINGS["ring"]
SMALL = replace(RING, block_depth=16, stages=3, group=2)
"""Of blocks that torch multiplies quickly."""

COUNTS = {
    "ends of all kinds": [140, 64, 1, 133, 128],
    "empty experts": [0, 170, 0, 33, 0],
    "no rows": [0, 0],
    "one expert": [295],
}
TAIL = 23
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
either_product = pytest.mark.parametrize("back", [False, True], ids=["forward", "input gradient"])


def draw(counts: list[int], width: int, depth: int, device: torch.device, back: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, experts' matrices and counts; rows past the last expert's are NaN."""
    generator = torch.Generator(device).manual_seed(sum(counts))
    drawn = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    x_RD = torch.randn(sum(counts) + TAIL, depth, **drawn)
    x_RD[sum(counts) :] = float("nan")
    w_eFD = torch.randn(len(counts), *((depth, width) if back else (width, depth)), **drawn)
    return x_RD, w_eFD, torch.tensor(counts, dtype=torch.int32, device=device)


def true_rows(x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, back: bool) -> Tensor:
    w_eFD = w_eFD.double()
    return reference.grouped_gemm(x_RD.double(), w_eFD if not back else w_eFD.transpose(1, 2), counts_e)


def check(counts: list[int], width: int, depth: int, launch: RowsRingLaunch, device: torch.device, back: bool) -> None:
    """Of one launch against products in 64 bits, on rows in a tensor of their own and on kept ones."""
    x_RD, w_eFD, counts_e = draw(counts, width, depth, device, back)
    true_RF = true_rows(x_RD, w_eFD, counts_e, back)
    if back:
        assert_near(grouped_gemm_input_gradient(x_RD, w_eFD, counts_e, launch=launch), true_RF, f"{launch}")
        return
    y_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, launch=launch)
    assert_near(y_RF, true_RF, f"{launch}")
    assert not y_RF[sum(counts) :].any(), "rows of the tail must be zero"
    kept_SF = torch.full((37 + len(x_RD) + 3, width), 5.0, dtype=torch.bfloat16, device=device)
    place = SavedRows(kept_SF, torch.tensor([37], device=device), len(x_RD))
    assert grouped_gemm_forward(x_RD, w_eFD, counts_e, keep=place, launch=launch) is kept_SF
    assert torch.equal(kept_SF[37 : 37 + sum(counts)], y_RF[: sum(counts)])
    assert kept_SF[:37].eq(5).all() and kept_SF[37 + sum(counts) :].eq(5).all(), "also what would be its tail"


@pytest.fixture
def cpu_as_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What the kernel was launched with; torch runs it, on a CPU that is taken for a Hopper."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda device: "sm_90")
    return launched_on_cpu(monkeypatch, hopper, "expert_rows_kernel")


@either_product
@every_count
def test_rows_are_multiplied_with_the_matrix_of_their_expert(
    counts: list[int], back: bool, cpu_as_hopper: list[Mapping[str, Any]]
) -> None:
    check(counts, 200, 136, SMALL, torch.device("cpu"), back)
    assert len(cpu_as_hopper) == (1 if back else 2)
    assert all(launched["DEPTH_FIRST"] == back and launched["programs"] == 3 for launched in cpu_as_hopper)


@pytest.mark.often("4-wide-2-forward", "8-square-4-input gradient")
@either_product
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("shape", [(64, 256), (128, 128)], ids=["wide", "square"])
@pytest.mark.parametrize("pieces", [4, 8])
def test_tiles_of_other_shapes_and_rings_of_other_sizes_do_the_same(
    pieces: int, shape: tuple[int, int], stages: int, back: bool, cpu_as_hopper: list[Mapping[str, Any]]
) -> None:
    rows, columns = shape
    launch = replace(SMALL, block_rows=rows, block_columns=columns, stages=stages, pieces=pieces, idle_units=2)
    check([290, 0, 131], 520, 40, launch, torch.device("cpu"), back)
    assert cpu_as_hopper[0]["programs"] == 1 and cpu_as_hopper[0]["STAGES"] == stages


def test_rows_that_are_gathered_are_copied_first(cpu_as_hopper: list[Mapping[str, Any]]) -> None:
    counts = COUNTS["ends of all kinds"]
    x_RD, w_eFD, counts_e = draw(counts, 64, 72, torch.device("cpu"), False)
    index_R = torch.arange(sum(counts) - 1, -1, -1)
    y_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, index_R, launch=SMALL)
    assert_near(y_RF, true_rows(x_RD[index_R], w_eFD, counts_e, False), "gathered")
    assert len(cpu_as_hopper) == 1


def test_with_only_last_the_last_row_of_the_tail_is_set_to_zero(cpu_as_hopper: list[Mapping[str, Any]]) -> None:
    counts = [130, 3]
    dy_RF, w_eFD, counts_e = draw(counts, 1032, 16, torch.device("cpu"), True)
    tiles, launch = tile_table(counts_e, len(dy_RF)), replace(SMALL, block_columns=256)
    whole, last = (torch.full((len(dy_RF), 1032), 7.0, dtype=torch.bfloat16) for _ in range(2))
    grouped_gemm._launch_rows(dy_RF, w_eFD, whole, None, tiles, launch, depth_first=True)
    grouped_gemm._launch_rows(dy_RF, w_eFD, last, None, replace(tiles, only_last=True), launch, depth_first=True)
    assert whole[133:].eq(0).all()
    assert torch.equal(last[:133], whole[:133])
    assert last[133:-1].eq(7).all() and last[-1].eq(0).all()
    assert [launched["ONLY_LAST"] for launched in cpu_as_hopper] == [False, True]


def test_obstacles_are_named_and_triton_replaces_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RD, index_R = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    assert obstacle(x_RD, x_RD, RING, "sm_90", index=index_R) is None
    assert "sm_100" in str(obstacle(x_RD, x_RD, RING, "sm_100"))
    assert "float16" in str(obstacle(x_RD.half(), x_RD, RING, "sm_90"))
    assert "float32" in str(obstacle(x_RD, x_RD.float(), RING, "sm_90"))
    assert "bias" in str(obstacle(x_RD, x_RD, RING, "sm_90", bias=x_RD))
    assert "gathered" in str(obstacle(x_RD, x_RD, replace(RING, copy_gathered=False), "sm_90", index=index_R))
    for matrix in (1 << 20, 1 << 24):
        triton = in_triton(replace(RING, idle_units=7), matrix)
        assert not isinstance(triton, RowsRingLaunch) and triton.idle_units == 7 and not triton.copy_gathered


@pytest.mark.often("forward-kept-ring")
@pytest.mark.parametrize("name", those_taken_first(ROWS_RINGS))
@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.slow), True], ids=["own", "kept"])
@either_product
def test_products_run_one_after_the_other_and_nothing_spills(name: str, kept: bool, back: bool) -> None:
    launch = ROWS_RINGS[name]
    compiled = compile_kernel(launch, kept=kept, back=back)
    width = launch.block_columns
    products = re.findall(rf"wgmma\.mma_async\S*m64n{width}k16\.f32\.bf16\.bf16", compiled.asm)
    # Two consumers, which have a source each.
    each = launch.block_rows // 64 * launch.block_depth // 16
    assert len(products) == 2 * each == compiled.matrix_instructions, compiled.summary
    assert compiled.spills == 0, compiled.summary
    assert compiled.registers == REGISTERS, compiled.summary
    assert compiled.shared_bytes <= TARGETS["sm_90"].shared_bytes, compiled.summary
    assert set(re.findall(r"setmaxnreg\.dec\S+\s+(\d+)", compiled.asm)) >= {"240", "24"}
    threads = re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+\w+, (\d+);", compiled.asm)
    assert set(threads) == {"128"}, "a barrier of others than one consumer's four warps"
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);", compiled.asm)
    assert sorted(waits) == ["0", "0", "1", "1"], "the matrix unit runs dry between two blocks"


def compile_kernel(launch: RowsRingLaunch, *, kept: bool, back: bool) -> Compiled:
    """Compile as the launcher would for widths that are multiples of 16."""
    columns, depth = launch.block_columns, launch.block_depth
    piece = launch.block_rows * columns // launch.pieces // PIECE_ROWS

    def operand(*block: int) -> str:
        layout = NVMMASharedLayout(swizzle_byte_width=min(128, 2 * block[-1]), element_bitwidth=16, rank=len(block))
        return f"tensordesc<bf16{list(block)},{layout!r}>"

    signature = {
        "x": operand(launch.block_rows, depth),
        "w": operand(1, depth, columns) if back else operand(1, columns, depth),
        "y": operand(1, 1, PIECE_ROWS, piece),
        "y_ptr": "*bf16:16",
        **dict.fromkeys(("starts_ptr", "owners_ptr"), "*i32:16"),
        "block_count_ptr": "*i32",
        **dict.fromkeys(("columns", "depth"), "i32:16"),
        **dict.fromkeys(("rows", "experts"), "i32"),
    }
    constants: dict[str, int | None] = {"DEPTH_FIRST": back, "STAGES": launch.stages, "GROUP": launch.group}
    constants |= {"ONLY_LAST": False}
    if kept:
        signature["first_ptr"] = "*i64:16"
    else:
        constants["first_ptr"] = None
    return compile_for(expert_rows_kernel, signature, constants, TARGETS["sm_90"], launch.warps, maxnreg=REGISTERS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@either_product
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("counts", [[700, 0, 3, 1025, 256], [0, 0, 0], [0, 128, 0], [9000, 1, 4000]], ids=str)
def test_every_launch_multiplies_rows_on_a_hopper(counts: list[int], programs: int, back: bool) -> None:
    device = torch.device("cuda")
    if target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    for launch in ROWS_RINGS.values():
        launch = replace(launch, idle_units=multiprocessors_of(device) - programs)
        check(counts, 712, 328, launch, device, back)
