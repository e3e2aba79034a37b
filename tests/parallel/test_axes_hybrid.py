"""Hybrid sharding: a copy is divided among neighbours, and those at the same place of their copies hold the same."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, make_axes

GRID = Grid(world=16, tensor=2, expert=4)


def _every_rank(monkeypatch: pytest.MonkeyPatch, shard_size: int) -> tuple[list[Axes], list[list[tuple[int, ...]]]]:
    """Axes of all ranks, and the groups that each took part in making."""
    axes, made = [], []
    new_group = dist.new_group
    for rank in range(GRID.world):
        own: list[tuple[int, ...]] = []

        def record(ranks: list[int], own: list[tuple[int, ...]] = own) -> object:
            own.append(tuple(ranks))
            return new_group(ranks)

        monkeypatch.setattr(dist, "new_group", record)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=GRID.world)
        axes.append(make_axes(GRID, shard_size=shard_size))
        dist.destroy_process_group()
        made.append(own)
    return axes, made


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
        for other in shard.ranks:
            assert getattr(every[other], name).shard.ranks == shard.ranks
        for other in replicate.ranks:
            assert getattr(every[other], name).replicate.ranks == replicate.ranks


@pytest.mark.parametrize("shard_size", [0, 8, 64])
def test_without_hybrid_sharding_all_ranks_of_an_axis_divide_one_copy(
    monkeypatch: pytest.MonkeyPatch, shard_size: int
) -> None:
    for axes in _every_rank(monkeypatch, shard_size)[0]:
        for axis in (axes.dense_data, axes.expert_data):
            assert axis.shard == axis
            assert axis.replicate.size == 1
            assert axis.replicate.group is None
