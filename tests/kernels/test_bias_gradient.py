"""Sums of each expert's rows against the definition, with and without weights, and compiled for every chip."""

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.expert_kernels import (
    REFERENCE,
    TORCH,
    TRITON,
    WALKED_COLUMNS,
    ExpertKernels,
    WeightedBias,
    bias_gradient,
)
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_near
from tests.kernels.test_grouped_gemm import COUNTS

WIDTH, TAIL = 72, 7
BACKENDS = {"reference": REFERENCE, "torch": TORCH, "triton": TRITON}


def draw(
    counts: list[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, WeightedBias]:
    """Gradients with a tail of NaN, counts, and a weighted bias."""
    rows = sum(counts) + TAIL
    dy_RF = torch.randn(rows, WIDTH, device=device, dtype=dtype)
    weights_R, dweights_R = torch.rand(rows, device=device), torch.randn(rows, device=device)
    dy_RF[sum(counts) :] = weights_R[sum(counts) :] = torch.nan
    weighted = WeightedBias(torch.randn(len(counts), WIDTH, device=device, dtype=dtype), weights_R, dweights_R)
    return dy_RF, torch.tensor(counts, dtype=torch.int32, device=device), weighted


def sums_of(dy_RF: Tensor, counts: list[int], weights_R: Tensor | None = None) -> Tensor:
    rows_RF = dy_RF[: sum(counts)].double()
    if weights_R is not None:
        rows_RF = rows_RF * weights_R[: sum(counts), None]
    return torch.stack([rows.sum(0) for rows in rows_RF.split(counts)])


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> ExpertKernels:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_of_each_expert_are_summed_and_a_tail_of_nan_is_not(
    counts: list[int], dtype: torch.dtype, kernels: ExpertKernels, device: torch.device
) -> None:
    dy_RF, counts_e, _ = draw(counts, device, dtype)
    sums_eF = kernels.bias_gradient(dy_RF, counts_e, tiles=kernels.tile_table(counts_e, len(dy_RF)))
    assert sums_eF.dtype == dtype
    assert_near(sums_eF, sums_of(dy_RF, counts), "sums")


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_weighted_bias_has_weighted_sums_and_adds_to_the_gradient_of_the_weights(
    counts: list[int], kernels: ExpertKernels, device: torch.device
) -> None:
    dy_RF, counts_e, weighted = draw(counts, device)
    before_R = weighted.dweights_R.clone()
    tiles = kernels.tile_table(counts_e, len(dy_RF))
    sums_eF = kernels.bias_gradient(dy_RF, counts_e, weighted, tiles=tiles)
    assert_near(sums_eF, sums_of(dy_RF, counts, weighted.weights_R), "weighted sums")
    used = sum(counts)
    bias_RF = torch.cat([weighted.bias_eF[e].expand(count, -1) for e, count in enumerate(counts)])
    dots_R = (dy_RF[:used] * bias_RF).sum(1)
    assert_near(weighted.dweights_R[:used], before_R[:used] + dots_R, "gradient of the weights")


def test_sums_are_added_to_a_float32_buffer(kernels: ExpertKernels, device: torch.device) -> None:
    counts = COUNTS["empty experts"]
    dy_RF, counts_e, _ = draw(counts, device)
    total_eF = torch.randn(len(counts), WIDTH, device=device)
    expected_eF = total_eF.double() + sums_of(dy_RF, counts)
    tiles = kernels.tile_table(counts_e, len(dy_RF))
    assert kernels.bias_gradient(dy_RF, counts_e, accumulate_into=total_eF, tiles=tiles) is total_eF
    assert_near(total_eF, expected_eF, "added sums")


def test_wide_rows_are_walked_by_several_programs_in_a_fixed_order(device: torch.device) -> None:
    # One row belongs to no expert; the last program has 40 columns.
    dy_RF, counts_e = torch.randn(70, WALKED_COLUMNS + 40, device=device), torch.tensor([3, 66], device=device)
    sums_eF = bias_gradient(dy_RF, counts_e)
    assert_near(sums_eF, sums_of(dy_RF, [3, 66]), "sums of wide rows")
    assert torch.equal(bias_gradient(dy_RF, counts_e), sums_eF)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias_eF": torch.zeros(2, 8)}, "bias_eF"),
        ({"weights_R": torch.zeros(3)}, "weights_R"),
        ({"dweights_R": torch.zeros(6, 2)[:, 0]}, "dweights_R"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Tensor], says: str) -> None:
    weighted = WeightedBias(torch.zeros(2, 16), torch.zeros(6), torch.zeros(6))
    with pytest.raises(KernelError, match=says):
        bias_gradient(torch.zeros(6, 16), torch.zeros(2, dtype=torch.int32), weighted._replace(**changes))
    with pytest.raises(KernelError, match="accumulate_into"):
        bias_gradient(torch.zeros(6, 16), torch.zeros(2, dtype=torch.int32), accumulate_into=torch.zeros(2, 16).half())


@pytest.mark.often("sm_90-True", "gfx942-False")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str, weighted: bool) -> None:
    weights_R, dweights_R, sums_eF = (on_meta(*size, dtype=torch.float32) for size in ((8192,), (8192,), (32, 2880)))
    dy_RF, counts_e, bias_eF = on_meta(8192, 2880), on_meta(32, dtype=torch.int32), on_meta(32, 2880)
    given = dy_RF, counts_e, WeightedBias(bias_eF, weights_R, dweights_R) if weighted else None
    assert len(compile_without_spills(target, lambda: bias_gradient(*given, accumulate_into=sums_eF))) == 3
