"""Gradients of looked-up rows equal their definition for any ids, the same on every run, and compile for every chip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.permute import SUM_LAUNCH, add_runs, order_tokens
from penstock.kernels.tuning import KernelLaunch
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close, assert_equal
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

SMALL_TILES = {"permute.SUM_LAUNCH": KernelLaunch(block_rows=4, block_columns=16, warps=1)}


def _expected(tokens: Tensor, drows: Tensor, vocabulary: int) -> Tensor:
    sums_VD = torch.ones(vocabulary, drows.shape[-1], dtype=torch.float64)
    reference.add_token_rows(sums_VD, tokens.cpu(), drows.cpu().double())
    return sums_VD.float()


@pytest.mark.parametrize(
    "ids",
    [
        [3, 5, 5, 5, 5, 9],
        [7] * 23,
        [0, 1, 2, 3],
        [2, 2, 2, 2, 9, 9, 9, 9],  # runs end where blocks do
        [5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5],
        [49],
        [],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_inside_of_blocks_and_across_them_are_summed(
    ids: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    tokens = torch.tensor(ids, dtype=torch.int64, device=device)
    drows_TD = torch.randn(len(ids), 24, device=device, dtype=dtype)
    sums_VD = torch.ones(50, 24, device=device)
    add_runs(sums_VD, tokens, drows_TD)
    assert_close(sums_VD.cpu(), _expected(tokens, drows_TD, 50), tolerance=1e-6)


@given(ids=st.lists(st.integers(0, 99), min_size=1, max_size=60), width=st.sampled_from([1, 16, 33]))
@examples(10)
def test_any_ids_are_summed_the_same_on_every_run(ids: list[int], width: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.tensor(ids, device=device).sort().values[torch.randperm(len(ids), device=device)]
    drows = torch.randn(len(ids), width, device=device)
    found = []
    for _ in range(2):
        sums_VD = torch.ones(100, width, device=device)
        add_runs(sums_VD, tokens, drows)
        found.append(sums_VD)
    assert torch.equal(*found)
    assert_close(found[0].cpu(), _expected(tokens, drows, 100), tolerance=1e-5)


@pytest.mark.parametrize("vocabulary", [2, 257, 700])
def test_tokens_are_ordered_by_id_and_stay_in_order(vocabulary: int, device: torch.device) -> None:
    tokens = torch.randint(0, vocabulary, (300,), generator=torch.Generator().manual_seed(0)).to(device)
    ids, order = order_tokens(tokens, vocabulary)
    expected = tokens.sort(stable=True)
    assert_equal([ids, order], [expected.values, expected.indices])


@pytest.mark.gpu
def test_many_tokens_of_a_text_are_summed_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = (102_400 * torch.rand(2, 4096, generator=generator) ** 6).long().cuda()  # few ids are frequent
    drows = torch.randn(2, 4096, 2048, generator=generator).bfloat16().cuda()
    found = [torch.zeros(102_400, 2048, device="cuda") for _ in range(2)]
    for sums_VD in found:
        add_runs(sums_VD, tokens, drows)
    assert torch.equal(*found)
    expected_VD = torch.zeros(102_400, 2048, device="cuda")
    reference.add_token_rows(expected_VD, tokens, drows)
    assert_close(found[0], expected_VD, tolerance=1e-5)


def test_a_dry_run_makes_no_gradient_of_the_size_of_the_vocabulary() -> None:
    with OpRecorder() as recorder:
        add_runs(on_meta(1000, 64, dtype=torch.float32), on_meta(2, 32, dtype=torch.int64), on_meta(2, 32, 64))
    names = [one.name for one in recorder.cut()]
    assert names[-2:] == ["sum_runs_kernel", "join_runs_kernel"] and "index_put_" not in names


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str) -> None:
    given = on_meta(102_400, 2048, dtype=torch.float32), on_meta(8192, dtype=torch.int64), on_meta(8192, 2048)
    compiled = compile_without_spills(target, lambda: add_runs(*given))
    assert {one.kernel for one in compiled} >= {"count_kernel", "sum_runs_kernel", "join_runs_kernel"}
    assert SUM_LAUNCH.block_rows == 16
