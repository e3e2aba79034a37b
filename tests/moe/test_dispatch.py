"""The promises of a dispatcher, kept by every one of them.

On one rank a dispatcher is compared with the mixture written out token by token; on several, with one rank that holds
all experts and all tokens.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.model import Balance, Moe
from penstock.kernels import expert_kernels as networks
from penstock.kernels.expert_ffn import expert_ffn as fused_expert_ffn
from penstock.kernels.operators import REFERENCE, TORCH
from penstock.kernels.reference import expert_ffn
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.moe.balance import Routing, capacity
from penstock.moe.dispatch.build import make_dispatcher
from penstock.moe.dispatch.collective import PaddedAllToAllDispatcher, each_part
from penstock.moe.dispatch.contract import Dispatcher, LocalDispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity, make_room
from penstock.parallel.axes import ALONE, make_axes
from penstock.parallel.layer_context import LayerContext
from tests.closeness import assert_close, assert_equal
from tests.distributed.pool import Pool
from tests.examples import examples
from tests.layout.test_grid import placements
from tests.moe.mixture import (
    BY_NODE,
    FLAT,
    OVER_GLOO,
    D,
    F,
    Family,
    Gloo,
    Problem,
    Way,
    compare,
    dispatchers_on_a_rank,
    mix,
    problem,
    random_routing,
    solve,
    token_by_token,
    weights_of,
)
from tests.parallel.simulated import fake_rank

WHOLE = ExpertPlacement(experts=8)
"""All on one rank."""


@examples(25, deadline=None)
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
    routing = random_routing(tokens, experts, min(top_k, experts), seed, dropped)
    # a factor of E gives every expert room for all slots, so padding itself drops none
    placement = ExpertPlacement(experts=experts)
    padding = PaddedAllToAllDispatcher(placement, ALONE.expert, TORCH, factor=float(experts))
    dispatcher: Dispatcher = padding if padded else LocalDispatcher(experts, REFERENCE)
    x_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    leaves = (x_TD, routing.weights_TK, *weights_of(experts))
    rows, metadata = dispatcher.dispatch(x_TD, routing)
    y_RD = expert_ffn(rows.x_ND, *leaves[2:], rows.counts_e, rows.weights_R, rows.index_R)
    outputs = dispatcher.combine(y_RD, metadata), token_by_token(x_TD, routing, *leaves[2:])
    assert_close(*outputs, tolerance=1e-4)
    direction_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed + 1))
    got, expected = (
        list(torch.autograd.grad((y_TD * direction_TD).sum(), leaves, allow_unused=True, materialize_grads=True))
        for y_TD in outputs
    )
    for gradients in (got, expected):
        gradients[1] = gradients[1][routing.experts_TK < experts]  # of kept slots only
    assert_close(got, expected, tolerance=1e-4, what="gradients of x, weights, gate_up, down")


def test_what_unused_rows_hold_never_reaches_a_token() -> None:
    routing = random_routing(6, 3, 2, seed=2, dropped=0.5)
    dispatcher = LocalDispatcher(3, REFERENCE)
    rows, metadata = dispatcher.dispatch(torch.randn(6, D), routing)
    y_RD = torch.zeros(12, D)
    y_RD[int(rows.counts_e.sum()) :] = float("nan")
    assert torch.isfinite(dispatcher.combine(y_RD, metadata)).all()


# On several ranks. Tokens and experts are divided; what comes out is put together again.


def adversarial(kind: str, tokens: int) -> Routing:
    """Routings of 8 experts; all but two have 2 choices."""
    top_k = {"one choice": 1, "all experts": 8}.get(kind, 2)
    routing = random_routing(tokens, 8, top_k, seed=5, dropped=0.4 if kind == "some dropped" else 0.0)
    experts_TK, kept_TK = routing.experts_TK, torch.ones(tokens, top_k, dtype=torch.bool)
    match kind:
        case "skewed":
            experts_TK = torch.where(torch.arange(tokens)[:, None] % 5 == 0, experts_TK, torch.tensor([3, 4]))
        case "all on the last rank":
            experts_TK = torch.tensor([7, 6]).expand(tokens, 2)
        case "one expert":
            experts_TK, kept_TK = torch.full((tokens, 2), 5), torch.tensor([True, False]).expand(tokens, 2)
        case "all dropped":
            kept_TK = torch.zeros(tokens, 2, dtype=torch.bool)
        case "one sender":
            kept_TK = (torch.arange(tokens) < tokens // 4)[:, None].expand(tokens, 2)
    return Routing(routing.weights_TK * kept_TK, experts_TK.masked_fill(~kept_TK, 8))


KINDS = (
    *("even", "skewed", "all on the last rank", "one expert", "some dropped", "all dropped", "one sender"),
    *("one choice", "all experts"),
)
SIMULATED: tuple[Way, ...] = ("pushed", "by node, pushed")
FEW = ("skewed", "some dropped")

# Ranks that share the experts, and ranks that share each of them: their products divide F and are at most 8 ranks.
PROMISES: tuple[tuple[int, int, tuple[Way, ...], tuple[str, ...]], ...] = (
    (1, 1, ("alone", *FLAT), KINDS),
    (2, 1, FLAT, KINDS),
    (1, 2, FLAT, KINDS),
    (4, 1, (*OVER_GLOO, "pushed"), KINDS),
    (4, 1, ("by node, pushed",), (*FEW, "one sender", "all experts")),
    (2, 2, OVER_GLOO, KINDS),
    (2, 2, SIMULATED, FEW),
    (1, 4, OVER_GLOO, KINDS),
    (4, 2, OVER_GLOO, KINDS),
)


def _hold(ranks: Pool, way: Way, flights: list[list[Problem]], **options: Any) -> None:
    """Compare every problem with one rank that holds everything."""
    if way in SIMULATED and torch.cuda.is_available():
        pytest.skip("ranks are simulated in Triton's interpreter")
    by_rank = solve(ranks, way, flights, **options)
    for whole, *got in zip([one for problems in flights for one in problems], *by_rank, strict=True):
        compare(whole, got)


@pytest.mark.often(
    *(
        "4-2-sent-",
        "4-2-gathered, bounded-",
        "4-2-by node, *",
        "1-1-alone-",
        "1-2-sent-",
        "2-1-sent-",
        "4-1-pushed-",
        "2-2-by node, pushed-",
        "1-4-sent-",
    ),
    *("1-4-by node, gathered-", "4-1-padded-", "4-1-gathered, worst case-"),
)
@pytest.mark.parametrize(
    ("expert", "expert_tensor", "way", "kinds"),
    [(*sizes, way, kinds) for *sizes, ways, kinds in PROMISES for way in ways],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_whatever_was_chosen_ranks_that_share_the_experts_give_what_one_rank_gives(
    ranks: Pool, expert: int, expert_tensor: int, way: Way, kinds: tuple[str, ...]
) -> None:
    """All routings are layers of one model and in flight together."""
    placement = ExpertPlacement(experts=8, expert=expert, expert_tensor=expert_tensor)
    tokens = 8 if way in SIMULATED else 16
    _hold(ranks, way, [[problem(placement, adversarial(kind, tokens)) for kind in kinds]])


@pytest.mark.often("*-2-2", "sent-2-1", "pushed-1-2")
@pytest.mark.parametrize(("expert", "expert_tensor"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("way", [*FLAT, "by node, sent", "by node, bounded", "pushed"])
def test_experts_of_any_family_are_divided_by_every_way(ranks: Pool, way: Way, expert: int, expert_tensor: int) -> None:
    placement = ExpertPlacement(experts=8, expert=expert, expert_tensor=expert_tensor)
    families: tuple[Family, ...] = ("gpt-oss", "llama4")
    tokens, kinds = 8 if way in SIMULATED else 16, ("some dropped", "one choice")
    _hold(ranks, way, [[problem(placement, adversarial(kind, tokens), one) for kind in kinds for one in families]])


@pytest.mark.often("gathered, bounded", "pushed")
@pytest.mark.parametrize("way", [*OVER_GLOO, *SIMULATED])
def test_many_steps_with_changing_routing_leave_no_trace(ranks: Pool, way: Way) -> None:
    placement, steps = ExpertPlacement(experts=8, expert=4), 2 if way in SIMULATED else 20
    routings = [random_routing(8, 8, 3, seed=seed, dropped=0.2) for seed in range(2 * steps)]
    _hold(ranks, way, [[problem(placement, one) for one in routings[2 * s : 2 * s + 2]] for s in range(steps)])


@examples(20)
@given(
    layout=st.sampled_from([(2, 1), (2, 2), (4, 1)]),
    tokens=st.integers(1, 9),
    per_rank=st.integers(1, 3),
    top_k=st.integers(1, 4),
    dropped=st.sampled_from([0.0, 0.3]),
    way=st.sampled_from(OVER_GLOO),
    seed=st.integers(0, 1000),
)
def test_any_number_of_tokens_and_experts_travels(
    ranks: Pool, layout: tuple[int, int], tokens: int, per_rank: int, top_k: int, dropped: float, way: Way, seed: int
) -> None:
    placement = ExpertPlacement(experts=per_rank * layout[0], expert=layout[0], expert_tensor=layout[1])
    top_k = min(top_k, placement.experts)
    routing = random_routing(tokens * placement.places, placement.experts, top_k, seed, dropped)
    _hold(ranks, way, [[problem(placement, routing)]])


@pytest.mark.often("*-2", "by node, sent-1")
@pytest.mark.parametrize("expert_tensor", [1, 2])
@pytest.mark.parametrize(
    "way", ["sent", "gathered, counted", "gathered, worst case", "by node, sent", "by node, bounded"]
)
def test_our_kernels_order_and_sum_what_travels(ranks: Pool, expert_tensor: int, way: Way) -> None:
    expert = 4 if way in BY_NODE else 2
    placement = ExpertPlacement(experts=8, expert=expert // expert_tensor, expert_tensor=expert_tensor)
    kinds = ("skewed", "some dropped", "all on the last rank")
    _hold(ranks, way, [[problem(placement, adversarial(kind, 16)) for kind in kinds]], triton=True)


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "per_node"), [(8, 1, 2), (4, 1, 1), (4, 1, 4), (2, 4, 2), (2, 2, 1)]
)
@pytest.mark.parametrize("way", ["by node, sent", "by node, bounded"])
def test_nodes_may_be_many_or_one_and_hold_experts_whole_or_in_part(
    ranks: Pool, way: Way, expert: int, expert_tensor: int, per_node: int
) -> None:
    placement = ExpertPlacement(experts=8, expert=expert, expert_tensor=expert_tensor)
    problems = [problem(placement, adversarial(kind, 16)) for kind in ("even", "some dropped", "one sender")]
    _hold(ranks, way, [problems], per_node=per_node)


@pytest.mark.parametrize(
    ("way", "expert_tensor"), [("gathered, bounded", 1), ("gathered, bounded", 2), ("by node, bounded", 2)]
)
@pytest.mark.parametrize(
    ("kind", "triton"), [("even", False), ("skewed", True), ("all on the last rank", False), ("all dropped", False)]
)
def test_rows_that_find_no_room_are_counted_and_pass_when_there_is_as_much_as_came(
    ranks: Pool, kind: str, triton: bool, way: Gloo, expert_tensor: int
) -> None:
    placement = ExpertPlacement(experts=8, expert=2, expert_tensor=expert_tensor)
    whole = problem(placement, adversarial(kind, 64))
    results = ranks.run(placement.places, _without_and_with_room, way, whole, triton)
    row_capacity = RowCapacity(placement, 1.0).rows(64, 2)
    assert row_capacity == 79  # 64 x 2 / 2 rows and the row of dropped slots, in sixteens
    for place, (left_out, still_left_out, _) in enumerate(results):
        experts = placement.experts_of(place)
        arriving = int(((whole.experts_TK >= experts.start) & (whole.experts_TK < experts.stop)).sum())
        assert (left_out, still_left_out) == (max(0, arriving - row_capacity), 0)
    if kind == "all on the last rank":
        assert any(left_out for left_out, _, _ in results)
    compare(whole, [tensors for _, _, tensors in results])


def _without_and_with_room(way: Gloo, whole: Problem, triton: bool) -> tuple[int, int, list[Tensor]]:
    """On a rank: rows that found no room, those that found none with room for them, and what came out then."""
    row_capacity = RowCapacity(whole.placement, 1.0)
    dispatchers, place = dispatchers_on_a_rank(way, [row_capacity], triton)
    (first,) = mix(dispatchers, [whole], place)
    assert all(torch.isfinite(tensor).all() for tensor in first), "rows without room spoil others"
    left_out = int(row_capacity.left_out)
    make_room([row_capacity])
    row_capacity.reset()
    (again,) = mix(dispatchers, [whole], place)
    return left_out, int(row_capacity.left_out), again


def test_a_padded_rank_sends_and_gets_the_same_whatever_the_routing() -> None:
    dispatcher = PaddedAllToAllDispatcher(WHOLE, ALONE.expert, REFERENCE, factor=2.0)
    for kind, kept in (("even", 40), ("all dropped", 0)):
        rows, _ = dispatcher.dispatch(torch.randn(20, D), adversarial(kind, 20))
        assert rows.counts_e.tolist() == [10] * 8  # 20 tokens x 2 choices / 8 experts x 2
        assert rows.x_ND.shape == (80, D)
        assert (rows.weights_R != 0).sum().item() == kept


@pytest.mark.parametrize(
    # The capacity with factor * sharing for one rank is another one: 11 instead of 12, and 40 instead of 39.
    ("sharing", "tokens", "factor", "experts"),
    [(5, 20, 1.1, 10), (3, 50, 1.3, 5)],
)
def test_a_padded_rank_has_room_for_all_slots_that_the_router_kept(
    sharing: int, tokens: int, factor: float, experts: int
) -> None:
    balance = Balance(capacity_factor=factor, pad_to_capacity=True)
    moe = Moe(experts=experts, top_k=1, moe_intermediate_size=F, balance=balance)
    limit = capacity(tokens * sharing, 1, experts, factor)  # the router's
    assert limit < tokens, "all tokens of one rank choose one expert, and some are dropped"
    experts_TK = torch.where(torch.arange(tokens) < limit, 0, experts)[:, None]
    x_TD = torch.randn(tokens, D)
    with fake_rank(0, sharing):
        axes = make_axes(Grid(world=sharing, context=sharing))
        dispatcher, _ = make_dispatcher(moe, LayerContext(axes=axes))
        rows, metadata = dispatcher.dispatch(x_TD, Routing(torch.ones(tokens, 1), experts_TK))
        assert rows.counts_e.tolist() == [limit] * experts
        y_TD = dispatcher.combine(rows.x_ND[rows.index_R], metadata)
    assert_equal(y_TD, x_TD * (experts_TK < experts))


@pytest.mark.parametrize(
    "kernels", [networks.REFERENCE, networks.TORCH, networks.TRITON], ids=["reference", "torch", "triton"]
)
def test_experts_without_a_single_row_have_gradients_of_zero(kernels: networks.ExpertKernels) -> None:
    leaves = [torch.zeros(0, D, requires_grad=True), *weights_of(3), torch.zeros(0, requires_grad=True)]
    nothing_R, counts_e = torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    y_RD = fused_expert_ffn(*leaves[:3], counts_e, leaves[3], nothing_R, places_TK=nothing_R[:, None], kernels=kernels)
    assert y_RD.shape == (0, D)
    assert_equal(torch.autograd.grad(y_RD.sum(), leaves), [torch.zeros_like(leaf) for leaf in leaves])


@given(placement=placements())
@example(ExpertPlacement(experts=8, expert=2, expert_tensor=2))
def test_virtual_experts_of_a_place_are_consecutive_and_in_the_order_of_its_experts(placement: ExpertPlacement) -> None:
    experts_TK = torch.arange(placement.experts)[:, None]
    numbers = each_part(Routing(torch.ones(experts_TK.shape), experts_TK), placement).experts_TK
    for place in range(placement.places):
        own = [numbers[expert, place % placement.expert_tensor].item() for expert in placement.experts_of(place)]
        assert own == list(range(place * placement.per_place, (place + 1) * placement.per_place))
    if placement.experts == 8 and placement.expert_tensor == placement.expert == 2:
        assert numbers[5].tolist() == [9, 13], "the example of the file"


@given(placement=placements())
def test_each_part_has_the_weight_of_its_slot_and_a_dropped_one_the_number_past_the_last(
    placement: ExpertPlacement,
) -> None:
    routing = Routing(torch.tensor([[0.25, 0.0]]), torch.tensor([[0, placement.experts]]))
    parts = each_part(routing, placement)
    assert parts.weights_TK.tolist() == [[0.25] * placement.expert_tensor + [0.0] * placement.expert_tensor]
    dropped = parts.experts_TK[0, placement.expert_tensor :]
    assert dropped.tolist() == [placement.virtual_experts] * placement.expert_tensor
