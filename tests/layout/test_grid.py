"""The ranks of a run in two views."""

from collections import Counter
from itertools import chain, combinations
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.grid import DENSE_AXES, EXPERT_AXES, ExpertPlacement, Grid
from tests.examples import examples


@st.composite
def grids(draw: st.DrawFn, largest: int = 4) -> Grid:
    """A grid whose two views are chosen apart, with at most a few hundred ranks."""
    sizes = st.integers(1, largest)
    axes = {axis: draw(sizes) for axis in ("tensor", "context", "expert", "expert_tensor", "pipeline")}
    stage = lcm(axes["tensor"] * axes["context"], axes["expert"] * axes["expert_tensor"]) * draw(st.integers(1, 3))
    return Grid(world=axes["pipeline"] * stage, **axes)


VIEWS = (DENSE_AXES, EXPERT_AXES)
SUBSETS = [axes for view in VIEWS for count in range(1, 5) for axes in combinations(view, count)]
FOLDED = Grid(world=8, tensor=2, expert=4)


@pytest.mark.parametrize("view", VIEWS)
@given(grid=grids(), data=st.data())
def test_a_place_leads_back_to_its_rank(view: tuple[str, ...], grid: Grid, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world - 1))
    place = grid.place(rank, view)
    assert tuple(place) == view
    assert all(0 <= place[axis] < getattr(grid, axis) for axis in view)
    again = 0
    for axis in view:
        again = again * getattr(grid, axis) + place[axis]
    assert again == rank


@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
@examples(20)
@given(grid=grids(largest=3))
def test_groups_are_disjoint_and_cover_all_ranks(axes: tuple[str, ...], grid: Grid) -> None:
    groups = grid.groups(axes)
    assert sorted(chain(*groups)) == list(range(grid.world))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
@examples(20)
@given(grid=grids(largest=3), data=st.data())
def test_a_group_is_what_differs_on_its_axes_only(axes: tuple[str, ...], grid: Grid, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world - 1))
    view = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES

    def others(peer: int) -> dict[str, int]:
        return {axis: place for axis, place in grid.place(peer, view).items() if axis not in axes}

    assert grid.group(rank, axes) == tuple(peer for peer in range(grid.world) if others(peer) == others(rank))
    assert grid.group(rank, axes) in grid.groups(axes)


@given(grid=grids())
def test_a_pipeline_stage_is_the_same_block_of_ranks_in_both_views(grid: Grid) -> None:
    dense = grid.groups(("data", "context", "tensor"))
    assert dense == grid.groups(("expert_data", "expert", "expert_tensor"))
    size = grid.world // grid.pipeline
    assert dense == tuple(tuple(range(stage * size, (stage + 1) * size)) for stage in range(grid.pipeline))


def test_tensor_ranks_are_neighbours_and_experts_fold_over_them() -> None:
    assert FOLDED.place(5) == {"pipeline": 0, "data": 2, "context": 0, "tensor": 1}
    assert FOLDED.place(5, EXPERT_AXES) == {"pipeline": 0, "expert_data": 1, "expert": 1, "expert_tensor": 0}
    assert FOLDED.group(5, ("tensor",)) == (4, 5)
    assert FOLDED.group(5, ("expert",)) == (4, 5, 6, 7)
    assert FOLDED.groups(("expert_data",)) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("sizes", [{"tensor": 3}, {"expert": 3}, {"pipeline": 16}])
def test_sizes_that_do_not_divide_the_ranks_make_no_grid(sizes: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        Grid(world=8, **sizes)


def test_axes_of_two_views_have_no_group_and_experts_that_do_not_divide_no_placement() -> None:
    with pytest.raises(AssertionError, match="axes of two views"):
        FOLDED.group(0, ("tensor", "expert"))
    with pytest.raises(AssertionError, match="does not divide"):
        ExpertPlacement(experts=8, expert=3)


def test_groups_of_16384_ranks_are_made_without_a_look_at_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(world=16384, tensor=8, context=2, pipeline=16, expert=64, expert_tensor=2)
    monkeypatch.delattr(Grid, "place")
    for axes in SUBSETS:
        assert sum(map(len, grid.groups(axes))) == 16384


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Up to 30 experts over up to 24 places."""
    expert, expert_tensor, per_place = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return ExpertPlacement(experts=expert * per_place, expert=expert, expert_tensor=expert_tensor)


@given(placement=placements())
def test_every_expert_has_a_place_for_each_of_its_parts(placement: ExpertPlacement) -> None:
    held = Counter(expert for place in range(placement.places) for expert in placement.experts_of(place))
    assert held == dict.fromkeys(range(placement.experts), placement.expert_tensor)
