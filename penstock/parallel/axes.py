"""The process groups of a run, by the axes of its grid.

    tensor       share each dense matrix             expert       share a layer's experts and each of them (EP x ETP)
    context      share each row                      expert_data  hold the same experts, train on different tokens
    sequence     context x tensor: together hold     pipeline     hold the other stages of the same rows
                 every position of the same rows     stage        all ranks of one pipeline stage
    data         train on different rows             world        all ranks
    dense_data   data x context: hold the same dense matrices, see different tokens
    embedding    those of `pipeline` that hold the embedding, if several stages do
    pipeline_back    the ranks of `pipeline` in a second group, for messages to lower ranks
    expert_node      those of `expert` on our node; expert_across: those at our place on the other nodes

An axis of one rank has no group, and collectives return at once there. Axes with the same ranks share a group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from penstock.layout.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One rank's group on one axis."""

    name: str
    ranks: tuple[int, ...] = (0,)  # global ranks, in the group's order
    rank: int = 0  # our place among them
    group: dist.ProcessGroup | None = None  # None for one rank
    inner: "Axis | None" = None  # with hybrid sharding, the ranks that divide one copy
    outer: "Axis | None" = None  # and those with our part of the other copies
    timeout: timedelta | None = None  # of the collectives of new groups; None is torch's

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def shard(self) -> "Axis":
        """Ranks that divide one copy, ourselves included."""
        return self if self.inner is None else self.inner

    @property
    def replicate(self) -> "Axis":
        """Ranks with the same part of a copy, ourselves included."""
        return Axis(name="alone", ranks=(self.ranks[self.rank],)) if self.outer is None else self.outer


NO_AXIS = Axis(name="none")  # an axis of one rank
_AXES: dict[str, tuple[str, ...]] = {  # coordinates of the grid that vary inside a group
    "tensor": ("tensor",),
    "context": ("context",),
    "sequence": ("context", "tensor"),
    "data": ("data",),
    "dense_data": ("data", "context"),
    "stage": ("data", "context", "tensor"),
    "pipeline": ("pipeline",),
    "expert": ("expert", "expert_tensor"),
    "expert_data": ("expert_data",),
    "world": ("pipeline", "data", "context", "tensor"),
}


@dataclass(frozen=True, kw_only=True)
class Axes:
    """All axes of one rank."""

    grid: Grid = field(default_factory=Grid)
    rank: int = 0
    tensor: Axis = Axis(name="tensor")
    context: Axis = Axis(name="context")
    sequence: Axis = Axis(name="sequence")
    data: Axis = Axis(name="data")
    dense_data: Axis = Axis(name="dense_data")
    stage: Axis = Axis(name="stage")
    pipeline: Axis = Axis(name="pipeline")
    expert: Axis = Axis(name="expert")
    expert_data: Axis = Axis(name="expert_data")
    world: Axis = Axis(name="world")
    pipeline_back: Axis = Axis(name="pipeline_back")
    embedding: Axis = Axis(name="embedding")
    expert_node: Axis = Axis(name="expert_node")
    expert_across: Axis = Axis(name="expert_across")


ALONE = Axes()  # one rank that holds everything


class _Groups:
    """Groups by their ranks; None for ranks without this process. `me` is the rank where only its groups are made."""

    def __init__(self, timeout: timedelta | None, me: int | None = None) -> None:
        self.by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.timeout = timeout
        self.me = me

    def make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A new group. Without a timeout of its own it would have torch's, not that of the group of all ranks."""
        return dist.new_group(list(ranks), timeout=self.timeout)

    def make_missing(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Every rank makes every group, in the same order, as torch requires."""
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self.by_ranks and (self.me is None or self.me in ranks):
                self.by_ranks[ranks] = self.make(ranks)


def make_axes(
    grid: Grid,
    embedding_places: tuple[int, ...] = (0,),
    shard_size: int = 0,
    ranks_per_node: int = 0,
    timeout: timedelta | None = None,
    is_dry: bool = False,
) -> Axes:
    """Make every group of a grid. All ranks call it, after `init_process_group`.

    `embedding_places` on `pipeline` hold the embedding, ascending. `shard_size` neighbours on `dense_data` and on
    `expert_data` divide one copy, `ranks_per_node` share a machine; 0 means all. `timeout` is that of collectives. With
    `is_dry` no other rank exists, so the groups without this one are not made.
    """
    if grid.world == 1:
        return ALONE
    assert dist.get_world_size() == grid.world, f"{dist.get_world_size()} processes for {grid}"
    rank = dist.get_rank()
    # `new_group` is collective: from here on all ranks make all groups of the grid in one order, also those of others.
    made = _Groups(timeout, rank if is_dry else None)
    made.by_ranks[tuple(range(grid.world))] = dist.group.WORLD
    axes = {name: _own_axis(name, grid.groups(parts), rank, made) for name, parts in _AXES.items()}
    for name in ("dense_data", "expert_data"):
        axes[name] = _divide(axes[name], grid.groups(_AXES[name]), shard_size, made)
    axes |= _by_node(axes["expert"], grid.groups(_AXES["expert"]), ranks_per_node or grid.world, made)
    if grid.pipeline > 1:
        # Messages up and down would wait for each other in one communicator, so these groups are not shared in `made`.
        back = {ranks: made.make(ranks) for ranks in grid.groups(("pipeline",))}
        axes["pipeline_back"] = replace(axes["pipeline"], name="pipeline_back", group=back[axes["pipeline"].ranks])
    if len(embedding_places) > 1:
        holders = tuple(tuple(ranks[position] for position in embedding_places) for ranks in grid.groups(("pipeline",)))
        made.make_missing(holders)
        if any(rank in ranks for ranks in holders):  # stages between hold no embedding
            axes["embedding"] = _own_axis("embedding", holders, rank, made)
    return Axes(grid=grid, rank=rank, **axes)


def place_on(grid: Grid, axis: str, rank: int) -> int:
    """Place of any rank on an axis of `_AXES`."""
    return 0 if grid.world == 1 else grid.group(rank, _AXES[axis]).index(rank)


def _divide(axis: Axis, groups: Sequence[tuple[int, ...]], size: int, made: _Groups) -> Axis:
    """Copies go to blocks of neighbours; ranks at the same place of their blocks hold the same part."""
    if not 0 < size < axis.size:
        return axis
    assert axis.size % size == 0, f"{axis.size} ranks of {axis.name} are not divided by {size}"
    me = axis.ranks[axis.rank]
    blocks = [ranks[first : first + size] for ranks in groups for first in range(0, axis.size, size)]
    same_places = [ranks[position::size] for ranks in groups for position in range(size)]
    inner = _own_axis(f"{axis.name}_shard", blocks, me, made)
    return replace(axis, inner=inner, outer=_own_axis(f"{axis.name}_replicate", same_places, me, made))


def _by_node(axis: Axis, groups: Sequence[tuple[int, ...]], per_node: int, made: _Groups) -> dict[str, Axis]:
    """Ranks of an axis on our node, and those at our place on other nodes; unequal nodes count each rank as a node."""
    me = axis.ranks[axis.rank]
    parts: dict[str, list[tuple[int, ...]]] = {"node": [], "across": []}
    for ranks in groups:
        nodes = [tuple(rank for rank in ranks if rank // per_node == node) for node in {r // per_node for r in ranks}]
        if len(set(map(len, nodes))) > 1:
            nodes = [(rank,) for rank in ranks]
        parts["node"] += sorted(nodes)  # a set has no order, and all ranks need the same one
        parts["across"] += zip(*sorted(nodes), strict=True)  # one rank of each node, at the same place
    return {f"expert_{name}": _own_axis(f"expert_{name}", parts[name], me, made) for name in parts}


def _own_axis(name: str, groups: Sequence[tuple[int, ...]], me: int, made: _Groups) -> Axis:
    made.make_missing(groups)
    members = next(ranks for ranks in groups if me in ranks)
    group = made.by_ranks[members] if len(members) > 1 else None
    return Axis(name=name, ranks=members, rank=members.index(me), group=group, timeout=made.timeout)
