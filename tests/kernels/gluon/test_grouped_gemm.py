"""Hopper's own kernels of the grouped GEMM: their numbers, and the compiled code.

On a CPU `warps_in_torch` runs their source.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import RINGS, ROWS_RINGS
from penstock.kernels import grouped_gemm, reference
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.gluon.support import HAS_GLUON, REGISTERS
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
    hopper_obstacle,
)
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import GROUPED_GEMM, GemmProduct, in_triton, multiprocessors_of
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS
from tests.kernels.gluon.warps_in_torch import launched_on_cpu
from tests.kernels.parity import assert_near
from tests.kernels.test_grouped_gemm import compile_product

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

CPU = torch.device("cpu")
TAIL = 23  # rows behind the last expert's
COUNTS = {
    "ends of all kinds": [140, 64, 1, 133, 128],
    "empty experts": [0, 170, 0, 33, 0],
    "no rows": [0, 0],
    "one expert": [295],
}
RINGS_OF: dict[GemmProduct, Any] = {"forward": ROWS_RINGS, "input_gradient": ROWS_RINGS, "weight_gradient": RINGS}
RINGS_OF["weight_gradient_accumulated"] = RINGS  # the gradient is added to a float32 sum
# Blocks that torch multiplies quickly.
SMALL = {product: replace(rings["ring"], block_depth=16, stages=3, group=2) for product, rings in RINGS_OF.items()}
every_product = pytest.mark.parametrize("product", RINGS_OF)
# Rings that are in no table are compiled by slow tests.
TAKEN = [launch for by_size in GROUPED_GEMM["sm_90"].values() for _, launch in by_size]


def draw(product: GemmProduct, counts: list[int], width: int, depth: int, device: torch.device) -> tuple[Tensor, ...]:
    """Operands, counts and the result in 64 bits; rows past the last expert's are NaN."""
    drawn = {"generator": torch.Generator(device).manual_seed(1), "device": device, "dtype": torch.bfloat16}
    used, counts_e = sum(counts), torch.tensor(counts, dtype=torch.int32, device=device)
    x_RD = torch.randn(used + TAIL, depth, **drawn)
    x_RD[used:] = torch.nan
    if RINGS_OF[product] is ROWS_RINGS:
        back = product == "input_gradient"
        w_eFD = torch.randn(len(counts), *((depth, width) if back else (width, depth)), **drawn)
        true_RF = reference.grouped_gemm(x_RD.double(), (w_eFD.mT if back else w_eFD).double(), counts_e)
        return x_RD, w_eFD, counts_e, true_RF
    dy_RF = torch.randn(used + TAIL, width, **drawn)
    dy_RF[used:] = torch.nan
    pieces = zip(dy_RF.double().split([*counts, TAIL]), x_RD.double().split([*counts, TAIL]), strict=True)
    return dy_RF, x_RD, counts_e, torch.stack([dy.T @ x for dy, x in pieces][:-1])


def check(product: GemmProduct, counts: list[int], width: int, depth: int, launch: Any, device: torch.device) -> None:
    """One launch against products in 64 bits; forward also into saved rows, between rows of other layers."""
    one, other, counts_e, true = draw(product, counts, width, depth, device)
    used = sum(counts)
    if product == "weight_gradient":
        assert_near(grouped_gemm_weight_gradient(one, other, counts_e, launch=launch), true, f"{launch}")
    elif product == "weight_gradient_accumulated":
        before_eFD = torch.randn(true.shape, device=device)
        sum_eFD = before_eFD.clone()
        assert grouped_gemm_weight_gradient(one, other, counts_e, accumulate_into=sum_eFD, launch=launch) is sum_eFD
        # Hopper's matrix unit truncates its sums.
        assert_close(sum_eFD, before_eFD + true, by="norm", tolerance=1e-4, same_dtype=False)
        assert torch.equal(sum_eFD[counts_e == 0], before_eFD[counts_e == 0])
    elif product == "input_gradient":
        assert_near(grouped_gemm_input_gradient(one, other, counts_e, launch=launch), true, f"{launch}")
    else:
        y_RF = grouped_gemm_forward(one, other, counts_e, launch=launch)
        assert_near(y_RF, true, f"{launch}")
        assert not y_RF[used:].any(), "rows of the tail must be zero"
        kept_SF = torch.full((37 + len(one) + 3, width), 5.0, dtype=torch.bfloat16, device=device)
        place = SavedRows(kept_SF, torch.tensor([37], device=device), len(one))
        assert grouped_gemm_forward(one, other, counts_e, keep=place, launch=launch) is kept_SF
        assert torch.equal(kept_SF[37 : 37 + used], y_RF[:used])
        assert kept_SF[:37].eq(5).all() and kept_SF[37 + used :].eq(5).all(), "no tail is written"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Options of each launch; torch runs the kernels, on a CPU that passes for a Hopper."""
    monkeypatch.setattr(grouped_gemm, "target_of", lambda device: "sm_90")
    return launched_on_cpu(
        monkeypatch, grouped_gemm, grouped_gemm.hopper, "expert_rows_kernel", "weight_gradient_kernel"
    )


@every_product
@pytest.mark.parametrize("name", COUNTS)
def test_products_equal_those_in_64_bits(name: str, product: str, launched: list[Mapping[str, Any]]) -> None:
    is_rows = RINGS_OF[product] is ROWS_RINGS
    # Rows are the contracted dim of a weight gradient, so a quarter of them has as many ends.
    counts = COUNTS[name] if is_rows else [-(-count // 4) for count in COUNTS[name]]
    check(product, counts, 200, 136, SMALL[product], CPU)
    assert len(launched) == (2 if product == "forward" else 1)  # forward once more into saved rows
    if is_rows:
        assert all(one["DEPTH_FIRST"] == (product == "input_gradient") for one in launched)
    assert all(one["programs"] < 4 * len(counts) for one in launched), "programs must have several tiles"


@pytest.mark.often("wide forward-2-4", "square input_gradient-4-8", "tall weight_gradient_accumulated-4-8")
@pytest.mark.parametrize(("stages", "pieces"), [(2, 4), (4, 8)])
@pytest.mark.parametrize(
    ("product", "shape"),
    [
        pytest.param(product, shape, id=f"{name} {product}")
        for product in RINGS_OF
        for name, shape in (("wide", (64, 256)), ("square", (128, 128)), ("tall", (256, 64)))
        if (name == "tall") <= (RINGS_OF[product] is RINGS) and (name == "square") <= (RINGS_OF[product] is ROWS_RINGS)
    ],
)
def test_tiles_of_other_shapes_and_rings_of_other_sizes_do_the_same(
    product: str, shape: tuple[int, int], stages: int, pieces: int, launched: list[Mapping[str, Any]]
) -> None:
    rows, columns = shape
    is_rows = RINGS_OF[product] is ROWS_RINGS
    changes = {"block_rows": rows, "block_columns": columns, "stages": stages, "pieces": pieces if is_rows else 8}
    launch = replace(SMALL[product], **changes, idle_units=2)
    given = ([290, 0, 131], 520, 40) if is_rows else ([50, 0, 31], 264, 264)
    check(product, *given, launch, CPU)
    assert launched[0]["programs"] == 1 and launched[0]["STAGES"] == stages


def test_gathered_rows_are_copied_first(launched: list[Mapping[str, Any]]) -> None:
    counts = COUNTS["ends of all kinds"]
    index_R = torch.arange(sum(counts) - 1, -1, -1)
    x_RD, w_eFD, counts_e, true_RF = draw("forward", counts, 64, 72, CPU)
    source_RD, true_RF = x_RD[: sum(counts)].flip(0), true_RF[: sum(counts)]  # the index turns it round again
    y_RF = grouped_gemm_forward(source_RD, w_eFD, counts_e, index_R, launch=SMALL["forward"])
    assert_near(y_RF, true_RF, "rows")
    dy_RF, x_RD, counts_e, true_eFD = draw("weight_gradient", counts, 64, 72, CPU)
    given = dy_RF[: sum(counts)], x_RD[: sum(counts)].flip(0), counts_e, index_R
    assert_near(grouped_gemm_weight_gradient(*given, launch=SMALL["weight_gradient"]), true_eFD, "gradient")
    assert len(launched) == 2


def test_with_only_last_just_the_last_row_of_the_tail_is_set_to_zero(launched: list[Mapping[str, Any]]) -> None:
    dy_RF, w_eFD, counts_e, _ = draw("input_gradient", [130, 3], 1032, 16, CPU)
    tiles, launch = tile_table(counts_e, len(dy_RF)), replace(SMALL["forward"], block_columns=256)
    whole, last = (torch.full((len(dy_RF), 1032), 7.0, dtype=torch.bfloat16) for _ in range(2))
    grouped_gemm._launch_rows(dy_RF, w_eFD, whole, None, tiles, launch, depth_first=True)
    grouped_gemm._launch_rows(dy_RF, w_eFD, last, None, replace(tiles, only_last=True), launch, depth_first=True)
    assert whole[133:].eq(0).all()
    assert torch.equal(last[:133], whole[:133])
    assert last[133:-1].eq(7).all() and last[-1].eq(0).all()
    assert [one["ONLY_LAST"] for one in launched] == [False, True]


def test_obstacles_are_named_and_triton_replaces_the_kernels() -> None:
    x_RD, index_R = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    ring, rows_ring = RINGS["ring"], ROWS_RINGS["ring"]
    assert hopper_obstacle(x_RD, None, "sm_90", y=x_RD) is None
    assert "sm_100" in str(hopper_obstacle(x_RD, None, "sm_100"))
    assert "float16" in str(hopper_obstacle(x_RD.half(), None, "sm_90"))
    assert "gathered" in str(hopper_obstacle(x_RD, index_R, "sm_90"))
    assert "float32" in str(hopper_obstacle(x_RD, None, "sm_90", y=x_RD.float()))
    assert "bias" in str(hopper_obstacle(x_RD, None, "sm_90", y=x_RD, bias=x_RD))
    for matrix in (1 << 20, 1 << 24):
        triton = in_triton(replace(rows_ring, idle_units=7), "forward", matrix)
        assert (triton.engine, triton.idle_units, triton.copy_gathered) == ("triton", 7, False)
    triton = in_triton(ring, "weight_gradient")
    assert triton.engine == "triton" and triton.copy_gathered
    assert in_triton(triton, "weight_gradient") == triton


def test_only_hopper_takes_rings_for_all_products_but_gathered_rows() -> None:
    taken = {
        (target, product)
        for target, products in GROUPED_GEMM.items()
        for product, launches in products.items()
        if any(launch.engine == "gluon" for _, launch in launches)
    }
    assert taken == {("sm_90", product) for product in GROUPED_GEMM["sm_90"] if product != "forward_gathered"}


@pytest.mark.often("forward-True-ring", "weight_gradient_accumulated-False-ring")
@pytest.mark.parametrize(
    ("product", "kept", "name"),
    [
        pytest.param(
            product, kept, name, marks=() if ring in TAKEN else pytest.mark.slow, id=f"{product}-{kept}-{name}"
        )
        for product, rings in RINGS_OF.items()
        for kept in ((True, False) if product == "forward" else (False,))
        for name, ring in rings.items()
    ],
)
def test_products_run_one_after_the_other_and_nothing_spills(product: GemmProduct, kept: bool, name: str) -> None:
    launch = RINGS_OF[product][name]
    compiled = compile_product(product, launch, "sm_90", is_kept=kept)
    products = re.findall(rf"wgmma\.mma_async\S*m64n{launch.block_columns}k16\.f32\.bf16\.bf16", compiled.asm)
    # Each of two consumers has a source of its own; an instruction multiplies 64 rows and a depth of 16.
    each = launch.block_rows // 64 * launch.block_depth // 16
    assert len(products) == 2 * each == compiled.matrix_instructions, compiled.summary
    assert compiled.spills == 0, compiled.summary
    assert compiled.registers == REGISTERS, compiled.summary
    assert compiled.shared_bytes <= TARGETS["sm_90"].shared_bytes, compiled.summary
    assert set(re.findall(r"setmaxnreg\.dec\S+\s+(\d+)", compiled.asm)) >= {"240", "24"}  # consumers, the producer
    threads = re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+\w+, (\d+);", compiled.asm)
    assert set(threads) == {"128"}, "barriers are of one consumer's four warps"
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);", compiled.asm)
    assert sorted(waits) == ["0", "0", "1", "1"], "the matrix unit runs dry between two blocks"


@pytest.mark.gpu
@every_product
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("counts", [[700, 0, 3, 1025, 256], [0, 0, 0], [0, 128, 0], [9000, 1, 4000]], ids=str)
def test_every_launch_computes_the_product_on_a_hopper(
    counts: list[int], programs: int, product: str, hopper: torch.device
) -> None:
    for launch in RINGS_OF[product].values():
        check(product, counts, 712, 328, replace(launch, idle_units=multiprocessors_of(hopper) - programs), hopper)
