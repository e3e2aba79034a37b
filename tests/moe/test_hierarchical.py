"""What crosses between nodes, and how often; that all comes out right is in test_dispatch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.operators import REFERENCE
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.moe.balance import Routing
from penstock.moe.dispatch.collective import AllGatherDispatcher, HierarchicalDispatcher, NodePlacement
from penstock.parallel.axes import Axis, make_axes
from tests.distributed.pool import Pool
from tests.moe.mixture import D, Gloo, dispatchers_on_a_rank, problem, random_routing, with_room


@given(
    sizes=st.sampled_from([(4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 4, 2), (4, 2, 4), (8, 1, 4), (2, 2, 1), (6, 1, 3)]),
    per_place=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_a_token_needs_the_nodes_that_hold_a_part_of_its_experts(
    sizes: tuple[int, int, int], per_place: int, seed: int
) -> None:
    expert, expert_tensor, per_node = sizes
    placement = ExpertPlacement(experts=per_place * expert, expert=expert, expert_tensor=expert_tensor)
    count = placement.places // per_node
    nodes = NodePlacement(placement, _axis("node", per_node), _axis("across", count))
    experts_TK = random_routing(9, placement.experts, min(2, placement.experts), seed, dropped=0.3).experts_TK
    for choices, found in zip(experts_TK.tolist(), nodes.needed(experts_TK).tolist(), strict=True):
        holders = (place for place in range(placement.places) if {*choices} & {*placement.experts_of(place)})
        needed = {place // per_node for place in holders}
        assert found == [node if node in needed else count for node in range(count)]
    for node in range(count):
        held = {one for place in range(node * per_node, (node + 1) * per_node) for one in placement.experts_of(place)}
        assert set(nodes.experts_of(node)) == held


def _axis(name: str, size: int) -> Axis:
    return Axis(name=name, ranks=tuple(range(size)))


def _crossed(way: Gloo, experts_TK: Tensor) -> tuple[tuple[int, ...] | None, int, tuple[int, ...]]:
    """On a rank: tokens that went to each node, tokens that came, and the rows that the experts read from."""
    placement = ExpertPlacement(experts=8, expert=4)
    (dispatcher,), place = dispatchers_on_a_rank(way, [with_room(placement)])
    own = problem(placement, Routing(torch.ones(experts_TK.shape), experts_TK)).of(place)
    rows, metadata = dispatcher.dispatch(own.x_TD, Routing(own.weights_TK, own.experts_TK))
    return metadata.exchange.send, metadata.arrived, tuple(rows.x_ND.shape)


CHOICES = torch.tensor(
    [
        *([0, 1, 2], [0, 4, 5]),  # of rank 0: node 0; both
        *([8, 8, 8], [6, 7, 5]),  # of rank 1: none; node 1
        *([3, 8, 8], [1, 2, 3]),  # of rank 2, on node 1: node 0 twice
        *([8, 8, 8], [8, 8, 8]),  # of rank 3: none
    ]
)


@pytest.mark.parametrize("way", ["by node, sent", "by node, gathered"])
def test_a_token_crosses_once_to_each_node_that_it_needs_and_stays_where_it_needs_none(ranks: Pool, way: Gloo) -> None:
    found = ranks.run(4, _crossed, way, CHOICES)
    assert [send for send, _, _ in found] == [(2, 1), (0, 1), (2, 0), (0, 0)]
    assert [arrived for _, arrived, _ in found] == [4, 0, 1, 1]
    if way == "by node, gathered":  # ranks of a node must have equally many tokens: those of the fullest
        assert [shape for _, _, shape in found] == [(2 * 4, D)] * 2 + [(2 * 1, D)] * 2


def test_without_counts_everything_goes_everywhere_whatever_was_chosen(ranks: Pool) -> None:
    for choices in (CHOICES, torch.full_like(CHOICES, 8)):
        for send, arrived, shape in ranks.run(4, _crossed, "by node, worst case", choices):
            assert (send, arrived, shape) == (None, 2 * 2, (2 * 2 * 2, D))


@pytest.mark.parametrize("is_counted", [False, True])
def test_sums_over_nodes_are_taken_in_float32(ranks: Pool, is_counted: bool) -> None:
    for y_TD, dx_TD in ranks.run(4, _summed, is_counted):
        # In bfloat16 256 + 1 is 256, however often; the sum of all is 259, and that is 260.
        assert torch.equal(y_TD, torch.full_like(y_TD, 260.0))
        assert torch.equal(dx_TD, torch.full_like(dx_TD, 260.0))


def _summed(is_counted: bool) -> tuple[Tensor, Tensor]:
    """On a rank, alone on its node: every expert gives 256 or 1 for every row, and the same as gradient."""
    axes = make_axes(Grid(world=4, expert=4), ranks_per_node=1)
    nodes = NodePlacement(ExpertPlacement(experts=4, expert=4), axes.expert_node, axes.expert_across)
    inner = AllGatherDispatcher(nodes.placement.block(1), axes.expert_node, REFERENCE)
    dispatcher = HierarchicalDispatcher(nodes, inner, REFERENCE, is_counted=is_counted)
    x_TD = torch.zeros(2, D, dtype=torch.bfloat16, requires_grad=True)
    rows, metadata = dispatcher.dispatch(x_TD, Routing(torch.ones(2, 4), torch.arange(4).expand(2, 4)))
    number = 256.0 if axes.expert.rank == 0 else 1.0
    read_RD = rows.x_ND[rows.index_R]
    y_TD = dispatcher.combine(torch.full_like(read_RD, number), metadata)
    (read_RD[: int(rows.counts_e.sum())] * number).sum().backward()
    return y_TD.detach(), x_TD.grad
