"""Hopper's own kernel for gradients of experts' weights: its numbers, and what the compiler makes of it.

On a CPU its source is run by `warps_in_torch`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import grouped_gemm
from penstock.kernels.gluon import grouped_gemm as hopper
from penstock.kernels.gluon.grouped_gemm import weights_obstacle as obstacle
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS
from penstock.kernels.grouped_gemm import grouped_gemm_weight_gradient
from penstock.kernels.tuning import (
    GROUPED_GEMM,
    RINGS,
    RingLaunch,
    RowsRingLaunch,
    in_triton,
    multiprocessors_of,
    target_of,
)
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for, those_taken_first
from tests.kernels.gluon.warps_in_torch import launched_on_cpu
from tests.kernels.parity import assert_near

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernel knows")

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from penstock.kernels.gluon.grouped_gemm_kernels import weight_gradient_kernel

RING = RINGS["ring"]
SMALL = replace(RING, block_depth=16, stages=3, group=2)
"""Of blocks that torch multiplies quickly."""

COUNTS = {
    "ends of all kinds": [40, 16, 1, 33],
    "empty experts": [0, 70, 0, 33, 0],
    "no rows": [0, 0],
    "one expert": [95],
}
TAIL = 23
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
either_result = pytest.mark.parametrize("added", [False, True], ids=["written", "added"])


def draw(counts: list[int], width: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and counts; rows past the last expert's are NaN."""
    generator = torch.Generator(device).manual_seed(sum(counts))
    rows = sum(counts) + TAIL
    dy_RF, x_RD = (
        torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        for columns in (width, depth)
    )
    dy_RF[sum(counts) :] = x_RD[sum(counts) :] = float("nan")
    return dy_RF, x_RD, torch.tensor(counts, dtype=torch.int32, device=device)


def true_gradient(dy_RF: Tensor, x_RD: Tensor, counts: list[int]) -> Tensor:
    pieces = zip(dy_RF.double().split([*counts, TAIL]), x_RD.double().split([*counts, TAIL]), strict=True)
    return torch.stack([dy.T @ x for dy, x in pieces][:-1])


def check(counts: list[int], width: int, depth: int, launch: RingLaunch, device: torch.device, *, added: bool) -> None:
    """Of one launch against products in 64 bits; a sum keeps its bits where an expert has no rows."""
    dy_RF, x_RD, counts_e = draw(counts, width, depth, device)
    true_eFD = true_gradient(dy_RF, x_RD, counts)
    if not added:
        dw_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, launch=launch)
        assert_near(dw_eFD, true_eFD, f"{launch}")
        return
    before_eFD = torch.randn(true_eFD.shape, device=device)
    sum_eFD = before_eFD.clone()
    assert grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, accumulate_into=sum_eFD, launch=launch) is sum_eFD
    # Hopper's matrix unit cuts its sums off.
    assert_close(sum_eFD, before_eFD + true_eFD, by="norm", tolerance=1e-4, same_dtype=False)
    assert torch.equal(sum_eFD[counts_e == 0], before_eFD[counts_e == 0])


@pytest.fixture
def cpu_as_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What the kernel was launched with; torch runs it, on a CPU that is taken for a Hopper."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda device: "sm_90")
    return launched_on_cpu(monkeypatch, hopper, "weight_gradient_kernel")


@either_result
@every_count
def test_gradients_are_those_of_each_experts_rows(
    counts: list[int], added: bool, cpu_as_hopper: list[Mapping[str, Any]]
) -> None:
    check(counts, 200, 136, SMALL, torch.device("cpu"), added=added)
    (launched,) = cpu_as_hopper
    assert launched["programs"] < 4 * len(counts), "programs must have several tiles"


@pytest.mark.often("tall-4-added")
@either_result
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64)], ids=["wide", "tall"])
def test_tiles_of_other_shapes_and_rings_of_other_sizes_do_the_same(
    shape: tuple[int, int], stages: int, added: bool, cpu_as_hopper: list[Mapping[str, Any]]
) -> None:
    launch = replace(SMALL, block_rows=shape[0], block_columns=shape[1], stages=stages, pieces=8, idle_units=2)
    check([50, 0, 31], 264, 264, launch, torch.device("cpu"), added=added)
    (launched,) = cpu_as_hopper
    assert launched["programs"] == 1 and launched["STAGES"] == stages


def test_rows_that_are_gathered_are_copied_first(cpu_as_hopper: list[Mapping[str, Any]]) -> None:
    counts = COUNTS["ends of all kinds"]
    dy_RF, x_RD, counts_e = draw(counts, 64, 72, torch.device("cpu"))
    source_ND = x_RD[: sum(counts)].flip(0)
    index_R = torch.arange(sum(counts) - 1, -1, -1)
    dw_eFD = grouped_gemm_weight_gradient(dy_RF[: sum(counts)], source_ND, counts_e, index_R, launch=SMALL)
    assert_near(dw_eFD, true_gradient(dy_RF, x_RD, counts), "gathered")
    assert len(cpu_as_hopper) == 1


def test_obstacles_are_named_and_triton_replaces_the_kernel() -> None:
    dy_RF, index_R = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    assert obstacle(dy_RF, None, "sm_90") is None
    assert "sm_100" in str(obstacle(dy_RF, None, "sm_100"))
    assert "float16" in str(obstacle(dy_RF.half(), None, "sm_90"))
    assert "gathered" in str(obstacle(dy_RF, index_R, "sm_90"))
    assert not isinstance(in_triton(RING), RingLaunch) and in_triton(RING).copy_gathered
    assert in_triton(in_triton(RING)) == in_triton(RING)


def test_only_hopper_takes_rings_for_all_products_but_gathered_rows() -> None:
    taken = {
        (target, product)
        for target, products in GROUPED_GEMM.items()
        for product, launches in products.items()
        if any(isinstance(launch, (RingLaunch, RowsRingLaunch)) for _, launch in launches)
    }
    assert taken == {("sm_90", product) for product in GROUPED_GEMM["sm_90"] if product != "forward_gathered"}


@pytest.mark.often("added-ring")
@pytest.mark.parametrize("name", those_taken_first(RINGS))
@pytest.mark.parametrize("added", [pytest.param(False, marks=pytest.mark.slow), True], ids=["written", "added"])
def test_products_run_one_after_the_other_and_nothing_spills(name: str, added: bool) -> None:
    launch = RINGS[name]
    compiled = compile_kernel(launch, added=added)
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


def compile_kernel(launch: RingLaunch, *, added: bool) -> Compiled:
    """Compile as the launcher would for widths that are multiples of 16."""
    result, bits = ("fp32", 32) if added else ("bf16", 16)
    depth = launch.block_depth
    piece = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS * 32 // bits

    def operand(dtype: str, bits: int, *block: int) -> str:
        layout = NVMMASharedLayout(
            swizzle_byte_width=min(128, block[-1] * bits // 8), element_bitwidth=bits, rank=len(block)
        )
        return f"tensordesc<{dtype}{list(block)},{layout!r}>"

    signature = {
        "dy": operand("bf16", 16, 1, 1, depth, launch.block_rows),
        "x": operand("bf16", 16, 1, 1, depth, launch.block_columns),
        "dw": operand(result, bits, 1, PIECE_ROWS, piece),
        "starts_ptr": "*i32:16",
        **dict.fromkeys(("rows", "columns"), "i32:16"),
        "experts": "i32",
    }
    constants = {"STAGES": launch.stages, "GROUP": launch.group, "ACCUMULATE": added}
    return compile_for(weight_gradient_kernel, signature, constants, TARGETS["sm_90"], launch.warps, maxnreg=REGISTERS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@either_result
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("counts", [[700, 0, 3, 1025, 256], [0, 0, 0], [0, 128, 0], [9000, 1, 4000]], ids=str)
def test_every_launch_gives_the_gradients_on_a_hopper(counts: list[int], programs: int, added: bool) -> None:
    device = torch.device("cuda")
    if target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    for launch in RINGS.values():
        launch = replace(launch, idle_units=multiprocessors_of(device) - programs)
        check(counts, 712, 328, launch, device, added=added)
