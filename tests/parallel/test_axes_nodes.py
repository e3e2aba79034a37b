"""Ranks that share experts, divided by the nodes that they are on."""

import pytest

from penstock.layout.grid import Grid
from penstock.parallel.axes import ALONE, Axes
from tests.parallel.simulated import every_rank


def _every(grid: Grid, per_node: int) -> list[Axes]:
    return list(every_rank(grid, ranks_per_node=per_node))


@pytest.mark.parametrize(
    ("grid", "per_node", "on_node"),
    [
        (Grid(world=8, expert=8), 4, 4),
        (Grid(world=8, expert=8), 2, 2),
        (Grid(world=8, expert=8), 1, 1),
        (Grid(world=16, expert=4), 8, 4),  # a node holds two groups whole
        (Grid(world=16, expert=8), 4, 4),
        (Grid(world=16, expert=4, expert_tensor=2), 4, 4),
        (Grid(world=16, expert=2, expert_tensor=4), 2, 2),  # each expert on two nodes
        (Grid(world=16, pipeline=2, expert=8), 4, 4),
        (Grid(world=16, tensor=2, pipeline=2, expert=4), 2, 2),
    ],
)
def test_every_rank_knows_the_ranks_of_its_node_and_those_at_its_place_of_others(
    grid: Grid, per_node: int, on_node: int
) -> None:
    every = _every(grid, per_node)
    for rank, axes in enumerate(every):
        expert, node, across = axes.expert, axes.expert_node, axes.expert_across
        assert (node.size, across.size) == (on_node, expert.size // on_node)
        assert node.ranks == tuple(one for one in expert.ranks if one // per_node == rank // per_node)
        assert set(node.ranks) & set(across.ranks) == {rank}
        assert (node.ranks[node.rank], across.ranks[across.rank]) == (rank, rank)
        # A place on the axis is the node's place, and ours on it: what the placement of experts counts on.
        assert expert.rank == across.rank * node.size + node.rank
        assert (node.group is None, across.group is None) == (node.size == 1, across.size == 1)
        assert all(every[other].expert_node.ranks == node.ranks for other in node.ranks)
        assert all(every[other].expert_across.ranks == across.ranks for other in across.ranks)


@pytest.mark.parametrize(
    ("grid", "per_node"),
    [
        (Grid(world=6, expert=6), 4),  # 4 and 2
        (Grid(world=8, expert=8), 3),  # 3, 3 and 2
        (Grid(world=12, expert=6), 4),  # 4 and 2, then 2 and 4
    ],
)
def test_ranks_of_unequal_parts_count_as_nodes_of_their_own(grid: Grid, per_node: int) -> None:
    for rank, axes in enumerate(_every(grid, per_node)):
        assert axes.expert_node.ranks == (rank,)
        assert axes.expert_across.ranks == axes.expert.ranks


def test_a_group_that_fits_its_node_crosses_nothing_whatever_the_others_do() -> None:
    for axes in _every(Grid(world=12, expert=2), 4):
        assert axes.expert_node.ranks == axes.expert.ranks
        assert axes.expert_across.size == 1


def test_all_ranks_are_on_one_node_by_default() -> None:
    for axes in _every(Grid(world=4, expert=4), 0):
        assert (axes.expert_node.size, axes.expert_across.size) == (4, 1)
    assert (ALONE.expert_node.size, ALONE.expert_across.size) == (1, 1)
