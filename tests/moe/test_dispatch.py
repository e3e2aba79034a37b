"""The promises of a dispatcher, kept by every one of them.

On one rank a dispatcher is compared with the mixture written out token by token; on several, with one rank that holds
all experts and all tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import expert_ffn as networks
from penstock.kernels.operators import REFERENCE, TORCH, Operators
from penstock.kernels.reference import expert_ffn
from penstock.kernels.triton_operators import TRITON
from penstock.layout.experts import ExpertPlacement
from penstock.layout.grid import Grid
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.local import LocalDispatcher
from penstock.moe.dispatch.room import Room, room_for_all
from penstock.moe.routing import Routing
from penstock.parallel.axes import ALONE, Axis, make_axes
from tests.distributed.pool import Pool
from tests.moe.mixture import D, random_routing, token_by_token, weights_of

WHOLE = ExpertPlacement(experts=8)
"""All on one rank."""


def _mix(dispatcher: Dispatcher, x_TD: Tensor, routing: Routing, gate_up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
    rows, receipt = dispatcher.dispatch(x_TD, routing)
    y_RD = expert_ffn(rows.x_ND, gate_up_eFD, down_eDF, rows.counts_e, rows.weights_R, rows.index_R)
    return dispatcher.combine(y_RD, receipt)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 7),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_meet_their_experts_and_return_with_the_right_gradients(
    tokens: int, experts: int, top_k: int, dropped: float, padded: bool, seed: int
) -> None:
    top_k = min(top_k, experts)
    routing = random_routing(tokens, experts, top_k, seed, dropped)
    # a factor of E gives every expert room for all slots, so padding itself drops none
    placement = ExpertPlacement(experts=experts)
    padding = PaddedAllToAllDispatcher(placement, ALONE.expert, float(experts), TORCH)
    dispatcher: Dispatcher = padding if padded else LocalDispatcher(experts, REFERENCE)
    x_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    leaves = (x_TD, routing.weights_TK, *weights_of(experts))
    got_TD = _mix(dispatcher, x_TD, routing, *leaves[2:])
    expected_TD = token_by_token(x_TD, routing, *leaves[2:])
    torch.testing.assert_close(got_TD, expected_TD, rtol=1e-4, atol=1e-4)
    direction_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed + 1))
    got = torch.autograd.grad((got_TD * direction_TD).sum(), leaves, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(
        (expected_TD * direction_TD).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    kept_TK = routing.experts_TK < experts
    for name, one, other in zip(("x", "weights", "gate_up", "down"), got, expected, strict=True):
        mine, theirs = (one[kept_TK], other[kept_TK]) if name == "weights" else (one, other)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, msg=f"gradient of {name}")


def test_rows_stand_expert_by_expert_with_their_counts() -> None:
    routing = random_routing(30, 5, 2, seed=0)
    rows, _ = LocalDispatcher(5, REFERENCE).dispatch(torch.arange(30.0)[:, None].expand(-1, D), routing)
    assert rows.index_R is not None
    assert rows.counts_e.tolist() == torch.bincount(routing.experts_TK.flatten(), minlength=5).tolist()
    start = 0
    for expert, count in enumerate(rows.counts_e.tolist()):
        tokens = rows.index_R[start : start + count].tolist()
        assert tokens == (routing.experts_TK == expert).any(1).nonzero().flatten().tolist()
        start += count


def test_a_token_all_of_whose_slots_were_dropped_gets_zero() -> None:
    routing = Routing(torch.zeros(3, 2), torch.full((3, 2), 4))
    y_TD = _mix(LocalDispatcher(4, REFERENCE), torch.randn(3, D), routing, *weights_of(4))
    assert torch.equal(y_TD, torch.zeros(3, D))


def test_what_unused_rows_hold_never_reaches_a_token() -> None:
    routing = random_routing(6, 3, 2, seed=2, dropped=0.5)
    dispatcher = LocalDispatcher(3, REFERENCE)
    rows, receipt = dispatcher.dispatch(torch.randn(6, D), routing)
    y_RD = torch.zeros(12, D)
    y_RD[int(rows.counts_e.sum()) :] = float("nan")
    assert torch.isfinite(dispatcher.combine(y_RD, receipt)).all()


@pytest.mark.parametrize("top_k", [1, 4])
def test_one_token_is_enough(top_k: int) -> None:
    routing = random_routing(1, 4, top_k, seed=3)
    x_TD, weights = torch.randn(1, D), weights_of(4)
    got = _mix(LocalDispatcher(4, REFERENCE), x_TD, routing, *weights)
    torch.testing.assert_close(got, token_by_token(x_TD, routing, *weights), rtol=1e-4, atol=1e-5)


# On several ranks. Tokens and experts are divided; what comes out is put together again.


Kind = Literal["sent", "padded", "gathered, counted", "gathered, bounded", "gathered, worst case"]
DISPATCHERS: tuple[Kind, ...] = ("sent", "padded", "gathered, counted", "gathered, bounded", "gathered, worst case")


@dataclass(frozen=True)
class Case:
    """What all ranks know: the whole problem, how its experts are divided, and who brings tokens to them.

    `bound` is that of "gathered, bounded".
    """

    placement: ExpertPlacement
    kind: Kind
    triton: bool
    bound: float
    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    direction_TD: Tensor


def _dispatcher(case: Case, axis: Axis, room: Room) -> Dispatcher:
    operators: Operators = TRITON if case.triton else REFERENCE
    if case.kind == "padded":
        # a factor of E gives every expert room for all slots, so padding itself drops none
        return PaddedAllToAllDispatcher(case.placement, axis, float(case.placement.experts), operators)
    if case.kind == "sent":
        return AllToAllDispatcher(case.placement, axis, operators)
    return AllGatherDispatcher(case.placement, axis, operators, None if case.kind == "gathered, counted" else room)


def _part(matrix: Tensor, place: int, placement: ExpertPlacement, *, dim: int, blocks: int) -> Tensor:
    """What a place holds of a stacked matrix: some experts, and of each block of `dim` its part."""
    experts = placement.experts_of(place)
    own = matrix[experts.start : experts.stop]
    parts = [block.chunk(placement.expert_tensor, dim)[placement.part_of(place)] for block in own.chunk(blocks, dim)]
    return torch.cat(parts, dim)


def _parts(matrices: tuple[Tensor, Tensor], place: int, placement: ExpertPlacement) -> tuple[Tensor, Tensor]:
    gate_up_eFD, down_eDF = matrices
    return _part(gate_up_eFD, place, placement, dim=1, blocks=2), _part(down_eDF, place, placement, dim=2, blocks=1)


def _on_a_rank(cases: list[Case]) -> list[list[Tensor]]:
    """Outputs of our tokens, and gradients of x, the weights and our matrices, for each case."""
    return [_one_case(case, Room(case.placement, case.bound)) for case in cases]


def _on_a_rank_again(case: Case) -> tuple[int, int, list[Tensor]]:
    """Rows that found no room, those that found none with room for all, and the outputs and gradients of then."""
    room = Room(case.placement, case.bound)
    first = _one_case(case, room)
    assert all(torch.isfinite(tensor).all() for tensor in first), "rows without room spoil others"
    left_out = int(room.left_out)
    room.left_out.zero_()
    with room_for_all([room]):
        again = _one_case(case, room)
    return left_out, int(room.left_out), again


def _one_case(case: Case, room: Room) -> list[Tensor]:
    placement = case.placement
    grid = Grid(world=placement.places, expert=placement.expert, expert_tensor=placement.expert_tensor)
    axis = make_axes(grid).expert
    x_TD, weights_TK, experts_TK, direction_TD = (
        whole.chunk(axis.size)[axis.rank] for whole in (case.x_TD, case.weights_TK, case.experts_TK, case.direction_TD)
    )
    matrices = [part.detach() for part in _parts(weights_of(placement.experts), axis.rank, placement)]
    leaves = [leaf.clone().requires_grad_() for leaf in (x_TD, weights_TK, *matrices)]
    dispatcher = _dispatcher(case, axis, room)
    rows, receipt = dispatcher.dispatch(leaves[0], Routing(leaves[1], experts_TK))
    y_RD = networks.expert_ffn(
        rows.x_ND, leaves[2], leaves[3], rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
    )
    y_TD = dispatcher.combine(y_RD, receipt)
    return [y_TD.detach(), *torch.autograd.grad((y_TD * direction_TD).sum(), leaves)]


def _case(
    placement: ExpertPlacement, routing: Routing, kind: Kind, *, triton: bool = False, bound: float = math.inf
) -> Case:
    T = routing.experts_TK.shape[0]
    x_TD, direction_TD = torch.randn(T, D), torch.randn(T, D)
    if kind == "gathered, bounded" and math.isinf(bound):
        bound = float(placement.expert)  # all rows on one rank
    return Case(placement, kind, triton, bound, x_TD, routing.weights_TK.detach(), routing.experts_TK, direction_TD)


def _compare(case: Case, got: list[list[Tensor]]) -> None:
    """`got` from every rank with one rank that holds everything."""
    placement = case.placement
    leaves = [
        case.x_TD.clone().requires_grad_(),
        case.weights_TK.clone().requires_grad_(),
        *weights_of(placement.experts),
    ]
    y_TD = _mix(
        LocalDispatcher(placement.experts, REFERENCE), leaves[0], Routing(leaves[1], case.experts_TK), *leaves[2:]
    )
    dx_TD, dweights_TK, *d_matrices = torch.autograd.grad((y_TD * case.direction_TD).sum(), leaves)
    kept_TK = case.experts_TK < placement.experts
    together = [torch.cat([one[index] for one in got]) for index in range(3)]
    torch.testing.assert_close(together[0], y_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1], dx_TD, rtol=1e-4, atol=1e-4, msg="gradient of x")
    torch.testing.assert_close(together[2][kept_TK], dweights_TK[kept_TK], rtol=1e-4, atol=1e-4)
    for place, one in enumerate(got):
        for mine, theirs in zip(one[3:], _parts((d_matrices[0], d_matrices[1]), place, placement), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"matrices of place {place}")


def _run(ranks: Pool, cases: list[Case]) -> None:
    by_rank = ranks.run(cases[0].placement.places, _on_a_rank, cases)
    for case, *got in zip(cases, *by_rank, strict=True):
        _compare(case, got)


def _adversarial(kind: str, tokens: int) -> Routing:
    """Routings of 8 experts, 2 choices."""
    routing = random_routing(tokens, 8, 2, seed=5, dropped=0.4 if kind == "some dropped" else 0.0)
    experts_TK, kept_TK = routing.experts_TK, torch.ones(tokens, 2, dtype=torch.bool)
    if kind == "skewed":
        experts_TK = torch.where(torch.arange(tokens)[:, None] % 5 == 0, experts_TK, torch.tensor([3, 4]))
    if kind == "all on the last rank":
        experts_TK = torch.tensor([7, 6]).expand(tokens, 2)
    if kind == "one expert":
        experts_TK, kept_TK = torch.full((tokens, 2), 5), torch.tensor([True, False]).expand(tokens, 2)
    if kind == "all dropped":
        kept_TK = torch.zeros(tokens, 2, dtype=torch.bool)
    if kind == "one sender":
        kept_TK = (torch.arange(tokens) < tokens // 4)[:, None].expand(tokens, 2)
    return Routing(routing.weights_TK * kept_TK, experts_TK.masked_fill(~kept_TK, 8))


KINDS = ("even", "skewed", "all on the last rank", "one expert", "some dropped", "all dropped", "one sender")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2))
"""Ranks that share the experts, and ranks that share each of them; their products divide F and are at most 8 ranks."""


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(("expert", "expert_tensor"), LAYOUTS)
def test_ranks_that_share_the_experts_give_what_one_rank_gives(
    ranks: Pool, expert: int, expert_tensor: int, dispatcher: Kind
) -> None:
    placement = ExpertPlacement(experts=8, expert=expert, expert_tensor=expert_tensor)
    _run(ranks, [_case(placement, _adversarial(kind, 16), dispatcher) for kind in KINDS])


@settings(max_examples=20)
@given(
    layout=st.sampled_from([(2, 1), (2, 2), (4, 1)]),
    tokens=st.integers(1, 9),
    per_rank=st.integers(1, 3),
    top_k=st.integers(1, 4),
    dropped=st.sampled_from([0.0, 0.3]),
    dispatcher=st.sampled_from(DISPATCHERS),
    seed=st.integers(0, 1000),
)
def test_any_number_of_tokens_and_experts_travels(
    ranks: Pool,
    layout: tuple[int, int],
    tokens: int,
    per_rank: int,
    top_k: int,
    dropped: float,
    dispatcher: Kind,
    seed: int,
) -> None:
    placement = ExpertPlacement(experts=per_rank * layout[0], expert=layout[0], expert_tensor=layout[1])
    top_k = min(top_k, placement.experts)
    routing = random_routing(tokens * placement.places, placement.experts, top_k, seed, dropped)
    _run(ranks, [_case(placement, routing, dispatcher)])


@pytest.mark.parametrize("dispatcher", ["sent", "gathered, counted", "gathered, worst case"])
@pytest.mark.parametrize("expert_tensor", [1, 2])
def test_our_kernels_order_and_sum_what_travels(ranks: Pool, expert_tensor: int, dispatcher: Kind) -> None:
    placement = ExpertPlacement(experts=8, expert=2, expert_tensor=expert_tensor)
    kinds = ("skewed", "some dropped", "all on the last rank")
    _run(ranks, [_case(placement, _adversarial(kind, 16), dispatcher, triton=True) for kind in kinds])


@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
@pytest.mark.parametrize("expert_tensor", [1, 2])
@pytest.mark.parametrize("kind", ["even", "skewed", "all on the last rank", "all dropped"])
def test_rows_that_find_no_room_are_counted_and_pass_when_there_is_room_for_all(
    ranks: Pool, kind: str, expert_tensor: int, triton: bool
) -> None:
    placement = ExpertPlacement(experts=8, expert=2, expert_tensor=expert_tensor)
    case = _case(placement, _adversarial(kind, 64), "gathered, bounded", triton=triton, bound=1.0)
    results = ranks.run(placement.places, _on_a_rank_again, case)
    room = Room(placement, 1.0).rows(64, 2)
    assert room == 79  # 64 x 2 / 2 rows and nobody's, in sixteens
    for place, (left_out, still_left_out, _) in enumerate(results):
        experts = placement.experts_of(place)
        arriving = int(((case.experts_TK >= experts.start) & (case.experts_TK < experts.stop)).sum())
        assert (left_out, still_left_out) == (max(0, arriving - room), 0)
    if kind == "all on the last rank":
        assert any(left_out for left_out, _, _ in results)
    _compare(case, [tensors for _, _, tensors in results])


def test_a_padded_rank_sends_and_gets_the_same_whatever_the_routing() -> None:
    dispatcher = PaddedAllToAllDispatcher(WHOLE, ALONE.expert, 2.0, REFERENCE)
    for kind, kept in (("even", 40), ("all dropped", 0)):
        rows, _ = dispatcher.dispatch(torch.randn(20, D), _adversarial(kind, 20))
        assert rows.counts_e.tolist() == [10] * 8  # 20 tokens x 2 choices / 8 experts x 2
        assert rows.x_ND.shape == (80, D)
        assert (rows.weights_R != 0).sum().item() == kept


@pytest.mark.parametrize(
    "kernels", [networks.REFERENCE, networks.TORCH, networks.TRITON], ids=["reference", "torch", "triton"]
)
def test_experts_without_a_single_row_have_gradients_of_zero(kernels: networks.ExpertKernels) -> None:
    leaves = [torch.zeros(0, D, requires_grad=True), *weights_of(3), torch.zeros(0, requires_grad=True)]
    nothing_R, counts_e = torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    y_RD = networks.expert_ffn(
        *leaves[:3], counts_e, leaves[3], nothing_R, places_TK=nothing_R[:, None], kernels=kernels
    )
    assert y_RD.shape == (0, D)
    for leaf, gradient in zip(leaves, torch.autograd.grad(y_RD.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
