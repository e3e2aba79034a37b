"""Parts of parameters: together they are the whole, each element once."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.sharding import Cut, LocalSlice, local_shape, local_slices, rows_of_shard

Index = tuple[int, ...]


def elements(piece: LocalSlice) -> list[tuple[Index, Index]]:
    """(place here, place in the whole) of every element of a piece."""
    offsets = product(*(range(size) for size in piece.sizes))
    return [
        (tuple(map(sum, zip(piece.here, offset, strict=True))), tuple(map(sum, zip(piece.whole, offset, strict=True))))
        for offset in offsets
    ]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Index, list[Cut]]:
    """A shape and how some of its dims are cut; the index of each cut is 0."""
    shape, cuts = [], []
    for dim in range(draw(st.integers(1, 3))):
        count, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        shape.append(count * blocks * draw(st.integers(1, 2)))
        if draw(st.booleans()):
            cuts.append(Cut(dim, 0, count, blocks))
    return tuple(shape), cuts


def all_parts(cuts: list[Cut]) -> list[tuple[Cut, ...]]:
    """The cuts of every rank."""
    return list(product(*([Cut(cut.dim, index, cut.count, cut.blocks) for index in range(cut.count)] for cut in cuts)))


@given(division=divisions(), shards=st.integers(1, 5))
def test_pieces_of_all_ranks_and_shards_are_the_whole_each_element_once(
    division: tuple[Index, list[Cut]], shards: int
) -> None:
    shape, cuts = division
    found: list[Index] = []
    for part in all_parts(cuts):
        rows = local_shape(shape, part)[0]
        for index in range(shards):
            held = local_slices(shape, part, rows_of_shard(rows, index, shards))
            found += [whole for piece in held for _, whole in elements(piece)]
    assert sorted(found) == list(product(*(range(size) for size in shape)))


@given(division=divisions(), shards=st.integers(1, 5))
def test_pieces_fill_the_local_part_each_element_once(division: tuple[Index, list[Cut]], shards: int) -> None:
    shape, cuts = division
    for part in all_parts(cuts):
        here = local_shape(shape, part)
        for index in range(shards):
            first, end = rows_of_shard(here[0], index, shards)
            found = [place for piece in local_slices(shape, part, (first, end)) for place, _ in elements(piece)]
            assert sorted(found) == list(product(range(end - first), *(range(size) for size in here[1:])))


@given(division=divisions(), data=st.data())
def test_rows_of_a_part_are_those_rows_of_all_its_pieces(
    division: tuple[Index, list[Cut]], data: st.DataObject
) -> None:
    shape, cuts = division
    part = data.draw(st.sampled_from(all_parts(cuts)))
    rows = local_shape(shape, part)[0]
    first = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(first, rows))
    whole = dict(pair for piece in local_slices(shape, part) for pair in elements(piece))
    some = dict(pair for piece in local_slices(shape, part, (first, end)) for pair in elements(piece))
    assert some == {(row - first, *rest): at for (row, *rest), at in whole.items() if first <= row < end}


def test_each_block_is_cut_by_itself() -> None:
    held = [local_slices((8, 3), (Cut(0, index, 2, blocks=2),)) for index in range(2)]
    assert held[0] == (LocalSlice((0, 0), (0, 0), (2, 3)), LocalSlice((2, 0), (4, 0), (2, 3)))
    assert held[1] == (LocalSlice((0, 0), (2, 0), (2, 3)), LocalSlice((2, 0), (6, 0), (2, 3)))


def test_a_shard_may_hold_the_end_of_one_block_and_the_begin_of_the_next() -> None:
    assert local_slices((8, 3), (Cut(0, 1, 2, blocks=2),), rows=(1, 3)) == (
        LocalSlice((0, 0), (3, 0), (1, 3)),
        LocalSlice((1, 0), (6, 0), (1, 3)),
    )


def test_a_number_is_one_piece() -> None:
    assert local_slices((), ()) == (LocalSlice((), (), ()),)


def test_a_shape_that_a_cut_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="is not divided"):
        local_shape((6, 3), (Cut(0, 0, 2, blocks=2),))


def test_a_dim_is_cut_once() -> None:
    with pytest.raises(AssertionError, match="cut twice"):
        local_slices((4, 4), (Cut(0, 0, 2), Cut(0, 1, 2)))


@given(rows=st.integers(1, 40), count=st.integers(1, 12))
def test_shards_are_those_of_torch(rows: int, count: int) -> None:
    shards = [list(range(*rows_of_shard(rows, index, count))) for index in range(count)]
    assert [shard for shard in shards if shard] == [chunk.tolist() for chunk in torch.arange(rows).chunk(count)]


def test_no_rows_are_divided_into_nothing() -> None:
    assert [rows_of_shard(0, index, 3) for index in range(3)] == [(0, 0)] * 3
