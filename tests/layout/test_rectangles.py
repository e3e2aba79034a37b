"""Rectangles of a tensor are the whole of it, or one line says why not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.sharding import Cut, Rectangle, local_slices, not_the_whole, parse_rectangle

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


@pytest.mark.parametrize(("blocks", "count"), [(1, 4), (2, 2), (3, 4)])
def test_the_pieces_of_all_ranks_are_the_whole(blocks: int, count: int) -> None:
    shape = (24, 6)
    ranks = [
        local_slices(shape, (Cut(0, rank, count, blocks), Cut(1, side, 2))) for rank in range(count) for side in (0, 1)
    ]
    parts = [Rectangle(piece.whole, piece.sizes) for own in ranks for piece in own]
    assert not_the_whole(shape, parts) is None
    assert not_the_whole(shape, parts[1:]) is not None


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


@pytest.mark.timeout(10)
def test_many_row_shards_are_checked_fast() -> None:
    parts = [Rectangle((row, 0), (1, 7)) for row in range(5_000)]
    assert not_the_whole((5_000, 7), parts) is None
