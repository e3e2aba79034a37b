"""The order of all ranks' slots as one rank's experts see it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels import reference
from penstock.kernels.local_order import count_arrivals_kernel, order_local_rows, place_arrivals_kernel
from penstock.kernels.tuning import KernelLaunch
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, compile_for

SMALL = KernelLaunch(block_rows=4, block_columns=2, warps=1)
"""Many chunks, and tiles that end inside rows."""


def test_the_example_of_the_docstring(device: torch.device) -> None:
    experts_NK = torch.tensor([[1, 0], [1, 2], [3, 1]], dtype=torch.int32, device=device)
    meter = torch.tensor([1, 3], device=device)
    weights_NK = torch.arange(6.0, device=device).view(3, 2)
    arrivals = order_local_rows(experts_NK, weights_NK, range(1, 3), 3, meter, launch=SMALL)
    assert arrivals.places_NK.tolist() == [[0, 3], [1, 3], [3, 2]] and arrivals.counts_e.tolist() == [3, 0]
    assert arrivals.slots_R.tolist() == [0, 2, 5, 0] and arrivals.index_R.tolist() == [0, 1, 2, 0]
    assert arrivals.weights_R.tolist() == [0, 2, 5, 0] and meter.tolist() == [2, 4]


@examples(20, deadline=None)
@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    per_rank=st.integers(1, 5),
    rank=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_with_room_for_all_it_is_the_reference_order(
    device: torch.device, tokens: int, top_k: int, per_rank: int, rank: int, seed: int
) -> None:
    torch.manual_seed(seed)
    experts_NK = torch.randint(0, 3 * per_rank + 1, (tokens, top_k), dtype=torch.int32, device=device)
    own, weights_NK = range(rank * per_rank, (rank + 1) * per_rank), torch.rand(tokens, top_k, device=device)
    arrivals = order_local_rows(experts_NK, weights_NK, own, tokens * top_k, launch=SMALL)
    local_NK = torch.where((experts_NK >= own.start) & (experts_NK < own.stop), experts_NK - own.start, per_rank)
    order = reference.order_rows(local_NK.long(), per_rank)
    used = int(order.counts_E.sum())
    assert torch.equal(arrivals.counts_e, order.counts_E)
    assert torch.equal(arrivals.slots_R[:used], order.slots_R[:used]) and not arrivals.slots_R[used:].any()
    assert torch.equal(arrivals.index_R, arrivals.slots_R // top_k)
    assert torch.equal(arrivals.weights_R[:used], weights_NK.flatten()[order.slots_R[:used]])
    assert not arrivals.weights_R[used:].any()
    is_own_NK = local_NK < per_rank
    assert torch.equal(arrivals.places_NK[is_own_NK], order.places_TK[is_own_NK])
    assert (arrivals.places_NK[~is_own_NK] == tokens * top_k - 1).all()


@pytest.mark.often("*sm_90*", "*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_without_spills(target: str) -> None:
    ids: dict[str, str] = {"ids_ptr": "*i32:16", "first": "i32", "slots": "i32:16", "tiles": "i32"}
    sizes: dict[str, Any] = {"EXPERTS": 64, "BINS": 128, "BLOCK_R": 128}
    counted = compile_for(count_arrivals_kernel, ids | {"tallies_ptr": "*i32:16"}, sizes, TARGETS[target])
    tables = dict.fromkeys(("earlier_ptr", "totals_ptr", "counts_ptr"), "*i32:16")
    orders = dict.fromkeys(("slots_ptr", "index_ptr", "places_ptr", "meter_ptr"), "*i64:16")
    weights = dict.fromkeys(("weights_ptr", "out_weights_ptr"), "*fp32:16")
    signature = ids | tables | orders | weights | {"rows": "i32", "places": "i32:16"}
    placed = compile_for(place_arrivals_kernel, signature, sizes | {"K": 8}, TARGETS[target])
    assert counted.spills == placed.spills == 0
