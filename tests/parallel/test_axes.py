"""Ranks that share experts, divided by the nodes that they are on."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from penstock.layout.grid import Grid
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.collectives import JsonGroup
from tests.parallel.simulated import every_rank


@pytest.mark.parametrize(
    ("grid", "per_node", "on_node"),
    [
        (Grid(world=8, expert=8), 4, 4),
        (Grid(world=8, expert=8), 2, 2),  # four nodes
        (Grid(world=8, expert=8), 1, 1),  # each rank its own node
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
    every = list(every_rank(grid, ranks_per_node=per_node))
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
def test_on_unequal_nodes_each_rank_counts_as_a_node(grid: Grid, per_node: int) -> None:
    for rank, axes in enumerate(every_rank(grid, ranks_per_node=per_node)):
        assert axes.expert_node.ranks == (rank,)
        assert axes.expert_across.ranks == axes.expert.ranks


def test_a_group_that_fits_its_node_crosses_nothing_and_all_ranks_are_on_one_by_default() -> None:
    for axes in (*every_rank(Grid(world=12, expert=2), ranks_per_node=4), *every_rank(Grid(world=4, expert=4))):
        assert axes.expert_node.ranks == axes.expert.ranks
        assert axes.expert_across.size == 1
    assert (ALONE.expert_node.size, ALONE.expert_across.size) == (1, 1)


GRID = Grid(world=16, tensor=2, expert=4)


def _every_rank(monkeypatch: pytest.MonkeyPatch, shard_size: int) -> tuple[list[Axes], list[list[tuple[int, ...]]]]:
    """Axes of all ranks, and the groups that each took part in making."""
    axes, made, new_group = [], [list[tuple[int, ...]]()], dist.new_group

    def record(ranks: list[int], **options: Any) -> object:
        made[-1].append(tuple(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", record)
    for one in every_rank(GRID, shard_size=shard_size):  # one after the other
        axes.append(one)
        made.append([])
    return axes, made[:-1]  # behind the last rank nothing is made


@pytest.mark.parametrize("name", ["dense_data", "expert_data"])
def test_shards_are_neighbours_and_replicas_stand_at_the_same_place(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    every, made = _every_rank(monkeypatch, shard_size=2)
    assert all(own == made[0] for own in made), "every rank makes every group in the same order"
    for rank, axes in enumerate(every):
        axis = getattr(axes, name)
        shard, replicate = axis.shard, axis.replicate
        assert (shard.size, replicate.size) == (2, axis.size // 2)
        assert set(shard.ranks) & set(replicate.ranks) == {rank}
        assert axis.ranks.index(rank) == replicate.rank * 2 + shard.rank
        first = axis.ranks.index(shard.ranks[0])
        assert axis.ranks[first : first + 2] == shard.ranks
        assert (shard.group is None, replicate.group is None) == (False, axis.size == 2)
        assert all(getattr(every[other], name).shard.ranks == shard.ranks for other in shard.ranks)
        assert all(getattr(every[other], name).replicate.ranks == replicate.ranks for other in replicate.ranks)


@pytest.mark.parametrize("shard_size", [0, 8, 64])  # all; exactly dense_data's 8 ranks; more than there are
def test_without_hybrid_sharding_all_ranks_of_an_axis_divide_one_copy(
    monkeypatch: pytest.MonkeyPatch, shard_size: int
) -> None:
    for axes in _every_rank(monkeypatch, shard_size)[0]:
        for axis in (axes.dense_data, axes.expert_data):
            assert axis.shard == axis and (axis.replicate.size, axis.replicate.group) == (1, None)


def test_every_group_has_the_timeout_of_the_run_and_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def record(ranks: list[int], timeout: timedelta | None = None, **options: Any) -> object:
        found.append(timeout)
        return dist.group.WORLD

    monkeypatch.setattr(dist, "new_group", record)
    for axes in every_rank(GRID, (0,), shard_size=2, timeout=timedelta(minutes=7)):
        assert axes.world.timeout == timedelta(minutes=7)
        JsonGroup(axes.world)
    assert set(found) == {timedelta(minutes=7)}
