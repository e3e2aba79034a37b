"""Parts of parameters: slices of all ranks tile the whole, and rectangles are checked and parsed."""

from itertools import product
from math import prod
from operator import add, mul
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.grid import Method, SequenceLayout, multiple_of
from penstock.layout.sharding import (
    Cut,
    LocalSlice,
    Rectangle,
    local_shape,
    local_slices,
    not_the_whole,
    parse_rectangle,
    row_width,
    rows_of_chunk,
    rows_of_shard,
)

Index = tuple[int, ...]


def elements(piece: LocalSlice) -> list[tuple[int, Index]]:
    """(place in the local tensor, place in the whole) of every element of a piece."""
    steps = product(*map(range, piece.sizes))
    return [(piece.offset + sum(map(mul, piece.strides, one)), tuple(map(add, piece.whole, one))) for one in steps]


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
def test_slices_of_all_ranks_and_shards_tile_the_whole_and_each_local_tensor(
    division: tuple[Index, list[Cut]], shards: int
) -> None:
    shape, cuts = division
    found: list[Index] = []
    rectangles: list[Rectangle] = []
    for part in all_parts(cuts):
        here = local_shape(shape, part)
        for index in range(shards):
            first, end = rows_of_shard(prod(here) // row_width(here), index, shards)
            held = local_slices(shape, part, (first, end))
            pairs = [pair for piece in held for pair in elements(piece)]
            assert sorted(place for place, _ in pairs) == list(range((end - first) * row_width(here)))
            found += [whole for _, whole in pairs]
            rectangles += [Rectangle(piece.whole, piece.sizes) for piece in held]
    assert sorted(found) == list(product(*(range(size) for size in shape)))
    assert not_the_whole(shape, rectangles) is None
    assert not_the_whole(shape, rectangles[1:]) is not None


@given(division=divisions(), data=st.data())
def test_rows_of_a_part_are_those_rows_of_all_its_pieces(
    division: tuple[Index, list[Cut]], data: st.DataObject
) -> None:
    shape, cuts = division
    part = data.draw(st.sampled_from(all_parts(cuts)))
    local = local_shape(shape, part)
    width = row_width(local)
    rows = prod(local) // width
    first = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(first, rows))
    whole = dict(pair for piece in local_slices(shape, part) for pair in elements(piece))
    some = dict(pair for piece in local_slices(shape, part, (first, end)) for pair in elements(piece))
    assert some == {at - first * width: where for at, where in whole.items() if first * width <= at < end * width}


def test_each_block_is_cut_by_itself() -> None:
    held = [local_slices((8, 3), (Cut(0, index, 2, blocks=2),)) for index in range(2)]
    assert held[0] == (LocalSlice(0, (3, 1), (0, 0), (2, 3)), LocalSlice(6, (3, 1), (4, 0), (2, 3)))
    assert held[1] == (LocalSlice(0, (3, 1), (2, 0), (2, 3)), LocalSlice(6, (3, 1), (6, 0), (2, 3)))
    assert local_slices((8, 3), (Cut(0, 1, 2, blocks=2),), rows=(1, 3)) == (
        LocalSlice(0, (3, 1), (3, 0), (1, 3)),
        LocalSlice(3, (3, 1), (6, 0), (1, 3)),
    )
    assert local_slices((), ()) == (LocalSlice(0, (), (), ()),), "a scalar"
    assert rows_of_shard(0, 2, 3) == (0, 0)
    with pytest.raises(AssertionError, match="is not divided"):
        local_shape((6, 3), (Cut(0, 0, 2, blocks=2),))
    with pytest.raises(AssertionError, match="cut twice"):
        local_slices((4, 4), (Cut(0, 0, 2), Cut(0, 1, 2)))


def test_a_range_of_rows_begins_and_ends_inside_experts() -> None:
    assert local_slices((3, 5, 2), (), rows=(3, 12)) == (
        LocalSlice(0, (4, 2, 1), (0, 3, 0), (1, 2, 2)),
        LocalSlice(4, (10, 2, 1), (1, 0, 0), (1, 5, 2)),
        LocalSlice(14, (4, 2, 1), (2, 0, 0), (1, 2, 2)),
    )


@given(rows=st.integers(0, 40), count=st.integers(1, 12))
def test_shards_differ_by_at_most_a_row_and_chunks_are_those_of_torch(rows: int, count: int) -> None:
    shards = [range(*rows_of_shard(rows, index, count)) for index in range(count)]
    assert [row for shard in shards for row in shard] == list(range(rows))
    assert len(shards[0]) - len(shards[-1]) in (0, 1)
    assert len(shards[0]) == max(map(len, shards)) == -(-rows // count)
    chunks = [list(range(*rows_of_chunk(rows, index, count))) for index in range(count)]
    assert [chunk for chunk in chunks if chunk] == [one.tolist() for one in torch.arange(rows).chunk(count) if len(one)]


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def rectangles(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    """Any part of a tensor that is not empty."""
    begin = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, begin, strict=True))
    return Rectangle(begin, sizes)


def _drawn(shape: tuple[int, ...], parts: list[Rectangle]) -> torch.Tensor:
    """How many of the rectangles hold each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for one in parts:
        counts[one.within((0,) * len(shape))] += 1
    return counts


@given(st.data(), SHAPES)
def test_rectangles_are_the_whole_just_when_each_element_is_in_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(st.lists(rectangles(shape), max_size=3))
    assert (not_the_whole(shape, parts) is None) == bool((_drawn(shape, parts) == 1).all())


@given(st.data(), SHAPES)
def test_the_overlap_is_what_both_hold(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(rectangles(shape)), data.draw(rectangles(shape))
    common = one.overlap(other)
    expected = _drawn(shape, [one, other]) == 2
    assert torch.equal(_drawn(shape, [common] if common else []) == 1, expected)
    assert common == other.overlap(one)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "0 of 8 elements are there"),
        ([Rectangle((0, 0), (2, 2))], "4 of 8 elements are there"),
        ([Rectangle((0, 0), (4, 1)), Rectangle((3, 0), (1, 2))], r"[0:4, 0:1] and [3:4, 0:2] overlap"),
        ([Rectangle((0, 0), (4, 2)), Rectangle((0, 0), (4, 2))], r"[0:4, 0:2] and [0:4, 0:2] overlap"),
        ([Rectangle((3, 0), (2, 2))], "[3:5, 0:2] does not lie in [4, 2]"),
        ([Rectangle((-1, 0), (1, 2))], "[-1:0, 0:2] does not lie in [4, 2]"),
        ([Rectangle((0,), (4,))], "[0:4] does not lie in [4, 2]"),
    ],
)
def test_what_is_wrong_is_said(parts: list[Rectangle], reason: str) -> None:
    assert not_the_whole((4, 2), parts) == reason


def test_a_scalar_is_one_rectangle_and_an_empty_tensor_is_none() -> None:
    scalar = Rectangle((), ())
    assert not_the_whole((), [scalar]) is None
    assert not_the_whole((), []) == "0 of 1 elements are there"
    assert not_the_whole((), [scalar, scalar]) == "[] and [] overlap"
    assert not_the_whole((0, 3), []) is None


@pytest.mark.parametrize("one", [Rectangle((), ()), Rectangle((3,), (4,)), Rectangle((0, 12), (2, 1))])
def test_a_rectangle_is_read_from_its_text(one: Rectangle) -> None:
    assert parse_rectangle(str(one)) == one


@pytest.mark.parametrize("text", ["", "0:2", "[0]", "[0:1:2]", "[a:b]", "[0:2,]"])
def test_another_text_is_no_rectangle(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rectangle(text)


def test_of_many_row_shards_each_is_compared_with_its_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Mock(side_effect=Rectangle.overlap)
    monkeypatch.setattr(Rectangle, "overlap", lambda one, other: compared(one, other))
    parts = [Rectangle((row, 0), (1, 7)) for row in range(5_000)]
    assert not_the_whole((5_000, 7), parts) is None
    assert compared.call_count < 3 * len(parts)


@st.composite
def layouts(draw: st.DrawFn, method: Method | None = None) -> SequenceLayout:
    """Rows of up to a few hundred positions."""
    context, tensor = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    method = method or draw(st.sampled_from(("all-gather", "ulysses")))
    length = multiple_of(context, tensor, method) * draw(st.integers(1, 5))
    return SequenceLayout(length=length, context=context, tensor=tensor, method=method)


@given(layout=layouts())
def test_ranks_divide_the_row_evenly_in_ascending_order(layout: SequenceLayout) -> None:
    held = []
    for context in range(layout.context):
        parts = [layout.of_rank(context, tensor) for tensor in range(layout.tensor)]
        assert {len(part) for part in parts} == {layout.length // (layout.context * layout.tensor)}
        joined = tuple(position for part in parts for position in part)
        assert joined == layout.of_context(context) == tuple(sorted(joined))
        held += joined
    assert sorted(held) == list(range(layout.length))


@given(layout=layouts("all-gather"))
def test_causal_work_is_equal_on_every_context_rank(layout: SequenceLayout) -> None:
    for rank in range(layout.context):
        held = set(layout.of_context(rank))
        assert {layout.length - 1 - position for position in held} == held, "an early chunk and its mirror image"


@given(layout=layouts("ulysses"))
def test_ulysses_cuts_the_row_plainly(layout: SequenceLayout) -> None:
    held = [position for rank in range(layout.context) for position in layout.of_context(rank)]
    assert held == list(range(layout.length))


@pytest.mark.parametrize(("length", "method"), [(6, "all-gather"), (5, "ulysses")])
def test_a_length_that_does_not_divide_makes_no_layout(length: int, method: Method) -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        SequenceLayout(length=length, context=2, method=method)
