"""Blocks of queries have every key that a position may see, and no block is larger than it must be."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.attention_window import AttentionWindow, QueryBlocks, blocks_of

REACHES = st.builds(AttentionWindow, kind=st.sampled_from(("window", "chunk")), size=st.integers(1, 12))


def _seen(reach: AttentionWindow, position: int) -> set[int]:
    """By the words of the configuration."""
    if reach.kind == "window":
        return {key for key in range(position + 1) if position - key < reach.size}
    return {key for key in range(position + 1) if key // reach.size == position // reach.size}


@given(REACHES, st.integers(0, 60))
def test_the_first_position_seen_is_the_least_of_those_seen(reach: AttentionWindow, position: int) -> None:
    assert _seen(reach, position) == set(range(reach.first_seen(position), position + 1))


@given(REACHES, st.integers(0, 40), st.integers(1, 40))
def test_every_query_stands_in_one_block_that_has_all_keys_that_it_sees(
    reach: AttentionWindow, first: int, count: int
) -> None:
    found = []
    for blocks in blocks_of(reach, first, count):
        for number in range(blocks.count):
            begin = blocks.first + number * blocks.queries
            queries = range(begin, begin + blocks.queries)
            keys = range(queries.stop - blocks.keys, queries.stop)
            for position in queries:
                if position < first + count:
                    found.append(position)
                    assert _seen(reach, position) <= set(keys)
                    assert not blocks.is_square or _seen(reach, position) == set(range(keys.start, position + 1))
    assert found == list(range(first, first + count))


@given(REACHES, st.integers(0, 40), st.integers(1, 40))
def test_chunks_that_may_begin_anywhere_have_the_blocks_of_a_window(
    reach: AttentionWindow, first: int, count: int
) -> None:
    window = AttentionWindow(kind="window", size=reach.size)
    assert blocks_of(reach, first, count, by_document=True) == blocks_of(window, first, count)


@given(REACHES, st.integers(0, 40), st.integers(1, 40))
def test_only_blocks_of_a_window_reach_over_the_ends_of_the_range(
    reach: AttentionWindow, first: int, count: int
) -> None:
    for blocks in blocks_of(reach, first, count):
        if reach.kind == "chunk" or blocks.count == 1:
            assert blocks.end <= first + count and blocks.first + blocks.queries >= blocks.keys
        else:
            assert blocks.end - first - count < reach.size


@given(REACHES, st.integers(1, 50))
def test_pairs_are_those_of_all_positions_with_half_of_their_own(reach: AttentionWindow, length: int) -> None:
    assert reach.pairs(length) == sum(len(_seen(reach, position)) - 0.5 for position in range(length))


def test_a_row_of_eight_is_cut_as_the_file_says() -> None:
    assert blocks_of(AttentionWindow(kind="chunk", size=3), 0, 8) == (QueryBlocks(0, 2, 3, 3), QueryBlocks(6, 1, 2, 2))
    assert blocks_of(AttentionWindow(kind="window", size=3), 0, 8) == (QueryBlocks(0, 3, 3, 6),)
    assert blocks_of(AttentionWindow(kind="window", size=8), 0, 8) == (QueryBlocks(0, 1, 8, 8),)
    assert blocks_of(AttentionWindow(kind="chunk", size=4), 6, 7) == (
        QueryBlocks(6, 1, 2, 4),
        QueryBlocks(8, 1, 4, 4),
        QueryBlocks(12, 1, 1, 1),
    )
