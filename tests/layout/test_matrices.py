"""Matrices are put together from parts of all ranks, and their owners have about the same work."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.sharding import (
    Cut,
    Matrices,
    Rectangle,
    local_shape,
    local_slices,
    newton_schulz_flops,
    owners_of,
    parts_of,
    rows_of_shard,
)


def test_gate_and_up_of_each_expert_are_matrices() -> None:
    matrices = Matrices((4, 6, 5), blocks=2)
    assert (matrices.count, matrices.rows, matrices.columns) == (8, 3, 5)
    assert matrices.box(0) == Rectangle((0, 0, 0), (1, 3, 5))
    assert matrices.box(5) == Rectangle((2, 3, 0), (1, 3, 5))
    assert Matrices((6, 5), blocks=2).box(1) == Rectangle((3, 0), (3, 5))


@st.composite
def held_matrices(draw: st.DrawFn) -> tuple[Matrices, list[tuple[Rectangle, ...]]]:
    """Matrices, and the rectangles of ranks: a dim is cut, rows are divided, and several ranks may hold the same."""
    blocks, count, ranks = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    dim, copies = draw(st.sampled_from((-2, -1))), draw(st.integers(1, 2))
    rows, columns = draw(st.integers(1, 4)) * blocks * count, draw(st.integers(1, 3)) * count
    shape = (draw(st.integers(1, 3)), rows, columns) if draw(st.booleans()) else (rows, columns)
    held = []
    for index in range(count):
        cut = Cut(dim % len(shape), index, count, blocks if dim == -2 else 1)
        for rank in range(ranks):
            local = local_shape(shape, (cut,))
            pieces = local_slices(shape, (cut,), rows_of_shard(prod(local[:-1]), rank, ranks))
            held += [tuple(Rectangle(one.whole, one.sizes) for one in pieces)] * copies
    return Matrices(shape, blocks), held


@given(held_matrices())
def test_the_parts_of_a_matrix_are_all_of_it_once_and_with_their_holders(
    case: tuple[Matrices, list[tuple[Rectangle, ...]]],
) -> None:
    matrices, held = case
    found = parts_of(matrices, held)
    assert len(found) == matrices.count
    for number, parts in enumerate(found):
        box = matrices.box(number)
        assert sum(part.box.elements for part in parts) == box.elements
        for place, part in enumerate(parts):
            assert box.overlap(part.box) == part.box
            assert not any(part.box.overlap(other.box) for other in parts[:place])
            holders = [rank for rank, boxes in enumerate(held) if any(one.overlap(part.box) for one in boxes)]
            assert list(part.holders) == holders


def test_a_matrix_that_ranks_do_not_hold_whole_is_noticed() -> None:
    with pytest.raises(AssertionError, match="matrix 1 of .* is not whole"):
        parts_of(Matrices((4, 3), blocks=2), [(Rectangle((0, 0), (3, 3)),)])


@given(
    shapes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=60), ranks=st.integers(1, 8)
)
def test_work_of_owners_differs_by_less_than_a_matrix(shapes: list[tuple[int, int]], ranks: int) -> None:
    costs = [newton_schulz_flops(rows, columns, 5) for rows, columns in shapes]
    owners = owners_of(costs, [range(ranks)] * len(costs), ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(costs)
    # Largest first is at most 4/3 of the best division, which no sum below these two is.
    assert max(loads) <= 4 / 3 * max(max(costs), -(-sum(costs) // ranks)) + max(costs) / 3


@given(candidates=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=30))
def test_an_owner_is_a_candidate(candidates: list[set[int]]) -> None:
    owners = owners_of([1] * len(candidates), [sorted(one) for one in candidates], 6)
    assert all(owner in among for owner, among in zip(owners, candidates, strict=True))


def test_matrices_that_few_ranks_hold_are_given_out_first() -> None:
    """Ranks 0 and 1 hold two experts, which cost as much as the dense matrix of all ranks together."""
    assert owners_of([8, 4, 4, 2], [(0, 1)] * 4, 2) == [0, 1, 1, 0]
    assert owners_of([9, 5, 5], [(0, 1, 2), (0,), (1,)], 3) == [2, 0, 1]


def test_products_are_counted_for_the_shorter_side() -> None:
    # A step: X X^T and G X with 2 x 3 x 3 x 4 operations, G G with 2 x 3 x 3 x 3.
    assert newton_schulz_flops(3, 4, 1) == newton_schulz_flops(4, 3, 1) == 2 * (2 * 3 * 3 * 4) + 2 * 3 * 3 * 3
