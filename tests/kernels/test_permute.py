"""Index build, unpermute and the local order against their references, and compiled for every chip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import permute as permute_module
from penstock.kernels import reference
from penstock.kernels.permute import order_local_rows, order_rows, unpermute
from penstock.kernels.reference import RowOrder
from penstock.kernels.tuning import KernelLaunch
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_near, assert_parity

SMALL_TILES = {
    "permute.LAUNCH": KernelLaunch(block_rows=1, block_columns=16, warps=1),
    "permute.ORDER_LAUNCH": KernelLaunch(block_rows=4, block_columns=2, warps=1),  # tiles end inside rows
}


def _experts(tokens: int, top_k: int, experts: int, device: torch.device, dropped: float = 0.0) -> Tensor:
    """K different experts for each token; each slot is dropped (id E) with the given probability."""
    experts_TK = torch.rand(tokens, experts).argsort(-1)[:, :top_k]
    return torch.where(torch.rand(tokens, top_k) < dropped, experts, experts_TK).to(device)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(13, 3, 7), (1, 1, 1), (1, 4, 9), (40, 2, 16), (0, 2, 5)])
@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_the_order_equals_a_stable_sort(
    tokens: int, top_k: int, experts: int, dropped: float, device: torch.device
) -> None:
    experts_TK = _experts(tokens, top_k, experts, device, dropped)
    got = order_rows(experts_TK, experts)
    expected = reference.order_rows(experts_TK, experts)
    for name, a, b in zip(RowOrder._fields, got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{name} differs"


def test_chunks_of_several_tiles_and_one_hot_expert_keep_the_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(permute_module, "CHUNKS", 2)
    for experts_TK in (_experts(17, 3, 6, device, dropped=0.2), torch.full((30, 1), 4, device=device)):
        got, expected = order_rows(experts_TK, 6), reference.order_rows(experts_TK, 6)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), "51 slots in 2 chunks of 7 tiles"


def test_the_example_of_the_reference_holds(device: torch.device) -> None:
    order = order_rows(torch.tensor([[1, 0], [1, 2]], device=device), 3)
    assert order.slots_R.tolist() == [1, 0, 2, 3]
    assert order.places_TK.tolist() == [[1, 0], [2, 3]]
    assert order.counts_E.tolist() == [1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top_k", "width", "dropped"), [(9, 3, 40, 0.0), (5, 2, 7, 0.4), (1, 1, 16, 0.0), (6, 3, 24, 1.0)]
)
def test_unpermute_and_its_gradients_equal_the_reference(
    tokens: int, top_k: int, width: int, dropped: float, weighted: bool, dtype: torch.dtype, device: torch.device
) -> None:
    order = reference.order_rows(_experts(tokens, top_k, 6, device, dropped), 6)
    y_RD = torch.randn(tokens * top_k, width, device=device, dtype=dtype)
    weights_TK = torch.rand(tokens, top_k, device=device) if weighted else None
    assert_parity(
        lambda y, w: unpermute(y, order, w),
        lambda y, w: reference.unpermute(y, order, w),
        [y_RD, weights_TK],
    )


def test_nan_in_rows_of_dropped_slots_is_never_used(device: torch.device) -> None:
    order = reference.order_rows(_experts(8, 3, 6, device, dropped=0.5), 6)
    used = int(order.counts_E.sum())
    assert 0 < used < 24, "the case needs dropped slots"
    weights_TK = torch.rand(8, 3, device=device, requires_grad=True)
    y_RD = torch.randn(24, 16, device=device)
    y_RD[used:] = float("nan")
    y_RD.requires_grad_()
    y_TD = unpermute(y_RD, order, weights_TK)
    y_TD.sum().backward()
    assert y_RD.grad is not None and weights_TK.grad is not None
    assert y_TD.isfinite().all() and weights_TK.grad.isfinite().all(), "a dropped slot's row must not be used"
    assert y_RD.grad.isfinite().all() and not y_RD.grad[used:].any(), "its gradient is zero"


@pytest.mark.parametrize("weighted", [False, True])
def test_dropped_slots_may_share_a_place_in_an_order_of_fewer_rows(weighted: bool, device: torch.device) -> None:
    whole = reference.order_rows(_experts(9, 3, 4, device), 4)
    rows = 11
    ends_E = whole.counts_E.cumsum(0).clamp(max=rows)
    order = reference.RowOrder(
        whole.slots_R[: rows + 1], whole.places_TK.clamp(max=rows), ends_E.diff(prepend=ends_E.new_zeros(1)).int()
    )
    y_RD = torch.randn(rows + 1, 24, device=device)
    y_RD[rows] = float("nan")  # the place that dropped slots share
    weights_TK = torch.rand(9, 3, device=device) if weighted else None
    results = []
    for sum_rows in (unpermute, reference.unpermute):
        leaves = [leaf.clone().requires_grad_() for leaf in (y_RD, weights_TK) if leaf is not None]
        y_TD = sum_rows(leaves[0], order, *leaves[1:])
        results.append((y_TD, *torch.autograd.grad(y_TD.square().sum(), leaves)))
    for name, got, expected in zip(("y", "dy", "dweights"), *results, strict=False):
        last = rows if name == "dy" else len(got)
        assert_near(got[:last], expected[:last], name)


def test_misfits_are_refused(device: torch.device) -> None:
    order = reference.order_rows(_experts(4, 2, 3, device), 3)
    with pytest.raises(KernelError, match="places"):
        unpermute(torch.zeros(8, 8, device=device), order._replace(places_TK=order.places_TK.T))
    with pytest.raises(KernelError, match="one row for each place"):
        unpermute(torch.zeros(7, 8, device=device), order)
    with pytest.raises(KernelError, match="weights"):
        unpermute(torch.zeros(8, 8, device=device), order, torch.zeros(4, 3, device=device))


@pytest.mark.often("256-sm_90")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("experts", [64, 256])
def test_the_index_build_compiles_without_spills(experts: int, target: str) -> None:
    experts_TK = on_meta(40_001, 7, dtype=torch.int64)
    assert len(compile_without_spills(target, lambda: order_rows(experts_TK, experts))) == 3


@pytest.mark.often("2048-64-6-gfx942")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "experts", "top_k"), [(2048, 64, 6), (7168, 256, 8)])
def test_the_copies_compile_without_spills(width: int, experts: int, top_k: int, target: str) -> None:
    experts_TK, weights_TK = on_meta(64, top_k, dtype=torch.int64), on_meta(64, top_k, dtype=torch.float32)
    y_RD = on_meta(64 * top_k, width)

    def both_passes() -> None:
        order = RowOrder(experts_TK.flatten(), experts_TK, on_meta(experts, dtype=torch.int32))
        unpermute(y_RD.requires_grad_(), order, weights_TK.requires_grad_()).sum().backward()

    assert len(compile_without_spills(target, both_passes)) == 2


def test_the_example_of_the_local_order_holds(device: torch.device) -> None:
    experts_NK = torch.tensor([[1, 0], [1, 2], [3, 1]], dtype=torch.int32, device=device)
    meter = torch.tensor([1, 3], device=device)
    weights_NK = torch.arange(6.0, device=device).view(3, 2)
    local = order_local_rows(experts_NK, weights_NK, range(1, 3), 3, meter)
    assert local.places_NK.tolist() == [[0, 3], [1, 3], [3, 2]] and local.counts_e.tolist() == [3, 0]
    assert local.slots_R.tolist() == [0, 2, 5, 0] and local.index_R.tolist() == [0, 1, 2, 0]
    assert local.weights_R.tolist() == [0, 2, 5, 0] and meter.tolist() == [2, 4]


@examples(20, deadline=None)
@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    per_rank=st.integers(1, 5),
    rank=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_a_local_order_with_room_for_all_rows_equals_the_reference(
    device: torch.device, tokens: int, top_k: int, per_rank: int, rank: int, seed: int
) -> None:
    torch.manual_seed(seed)
    experts_NK = torch.randint(0, 3 * per_rank + 1, (tokens, top_k), dtype=torch.int32, device=device)
    own, weights_NK = range(rank * per_rank, (rank + 1) * per_rank), torch.rand(tokens, top_k, device=device)
    local = order_local_rows(experts_NK, weights_NK, own, tokens * top_k)
    local_NK = torch.where((experts_NK >= own.start) & (experts_NK < own.stop), experts_NK - own.start, per_rank)
    order = reference.order_rows(local_NK.long(), per_rank)
    used = int(order.counts_E.sum())
    assert torch.equal(local.counts_e, order.counts_E)
    assert torch.equal(local.slots_R[:used], order.slots_R[:used]) and not local.slots_R[used:].any()
    assert torch.equal(local.index_R, local.slots_R // top_k)
    assert torch.equal(local.weights_R[:used], weights_NK.flatten()[order.slots_R[:used]])
    assert not local.weights_R[used:].any()
    is_own_NK = local_NK < per_rank
    assert torch.equal(local.places_NK[is_own_NK], order.places_TK[is_own_NK])
    assert (local.places_NK[~is_own_NK] == tokens * top_k - 1).all()


@pytest.mark.often("*sm_90*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_local_order_compiles_without_spills(target: str) -> None:
    experts_NK, weights_NK = (on_meta(32_768, 8, dtype=dtype) for dtype in (torch.int32, torch.float32))
    given = experts_NK, weights_NK, range(64, 128), 100_001, on_meta(2, dtype=torch.int64)
    assert len(compile_without_spills(target, lambda: order_local_rows(*given))) == 3
