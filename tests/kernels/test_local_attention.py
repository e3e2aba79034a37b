"""Attention by blocks equals attention with all scores in memory: outputs and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.attention_window import AttentionWindow, QueryBlocks, blocks_of
from penstock.kernels.local_attention import block_masks, local_attention
from tests.closeness import assert_close
from tests.examples import examples
from tests.kernels.eager_attention import eager_attention, random_documents, random_heads, seen_by, with_gradients

WINDOWS = st.builds(AttentionWindow, kind=st.sampled_from(("window", "chunk")), size=st.integers(1, 12))


def _seen(window: AttentionWindow, position: int) -> set[int]:
    """By the words of the configuration."""
    if window.kind == "window":
        return {key for key in range(position + 1) if position - key < window.size}
    return {key for key in range(position + 1) if key // window.size == position // window.size}


@given(WINDOWS, st.integers(0, 60))
def test_the_first_position_seen_is_the_least_of_those_seen(window: AttentionWindow, position: int) -> None:
    assert _seen(window, position) == set(range(window.first_seen(position), position + 1))


@given(WINDOWS, st.integers(0, 40), st.integers(1, 40))
def test_every_query_stands_in_one_block_that_has_all_keys_that_it_sees(
    window: AttentionWindow, first: int, count: int
) -> None:
    found = []
    for blocks in blocks_of(window, first, count):
        for number in range(blocks.count):
            begin = blocks.first + number * blocks.queries
            queries = range(begin, begin + blocks.queries)
            keys = range(queries.stop - blocks.keys, queries.stop)
            for position in queries:
                if position < first + count:
                    found.append(position)
                    assert _seen(window, position) <= set(keys)
                    assert not blocks.is_square or _seen(window, position) == set(range(keys.start, position + 1))
    assert found == list(range(first, first + count))


@given(WINDOWS, st.integers(0, 40), st.integers(1, 40))
def test_chunks_that_may_begin_anywhere_have_the_blocks_of_a_window(
    window: AttentionWindow, first: int, count: int
) -> None:
    sliding = AttentionWindow(kind="window", size=window.size)
    assert blocks_of(window, first, count, by_document=True) == blocks_of(sliding, first, count)


@given(WINDOWS, st.integers(0, 40), st.integers(1, 40))
def test_only_blocks_of_a_window_reach_over_the_ends_of_the_range(
    window: AttentionWindow, first: int, count: int
) -> None:
    for blocks in blocks_of(window, first, count):
        if window.kind == "chunk" or blocks.count == 1:
            assert blocks.end <= first + count and blocks.first + blocks.queries >= blocks.keys
        else:
            assert blocks.end - first - count < window.size


@given(WINDOWS, st.integers(1, 50))
def test_pairs_are_those_of_all_positions_with_half_of_their_own(window: AttentionWindow, length: int) -> None:
    assert window.pairs(length) == sum(len(_seen(window, position)) - 0.5 for position in range(length))


def test_a_row_of_eight_is_cut_as_the_file_says() -> None:
    assert blocks_of(AttentionWindow(kind="chunk", size=3), 0, 8) == (QueryBlocks(0, 2, 3, 3), QueryBlocks(6, 1, 2, 2))
    assert blocks_of(AttentionWindow(kind="window", size=3), 0, 8) == (QueryBlocks(0, 3, 3, 6),)
    assert blocks_of(AttentionWindow(kind="window", size=8), 0, 8) == (QueryBlocks(0, 1, 8, 8),)
    assert blocks_of(AttentionWindow(kind="chunk", size=4), 6, 7) == (
        QueryBlocks(6, 1, 2, 4),
        QueryBlocks(8, 1, 4, 4),
        QueryBlocks(12, 1, 1, 1),
    )


SCALE = 0.3
CPU = torch.device("cpu")


def _by_blocks(
    leaves: list[Tensor], window: AttentionWindow, part: slice, documents_BS: Tensor | None, backend: str = "auto"
) -> Tensor:
    q, k, v, *sinks = leaves
    allowed_BSS = None if documents_BS is None else seen_by(None, k.shape[1], documents_BS)[:, part]
    seen = block_masks(window, part.start, part.stop - part.start, allowed_BSS, rows=q.shape[0], device=CPU)
    sinks_H = sinks[0] if sinks else None
    return local_attention(q[:, part], k, v, seen, scale=SCALE, backend=backend, sinks_H=sinks_H)


@examples(150, deadline=None)
@given(
    kind=st.sampled_from(("window", "chunk")),
    size=st.integers(1, 14),
    ends=st.tuples(st.integers(0, 12), st.integers(1, 12)),
    rows=st.integers(1, 2),
    has_documents=st.booleans(),
    has_sinks=st.booleans(),
)
def test_any_range_of_queries_attends_as_if_all_scores_were_there(
    kind: str, size: int, ends: tuple[int, int], rows: int, has_documents: bool, has_sinks: bool
) -> None:
    window, length = AttentionWindow(kind=kind, size=size), 13
    part = slice(ends[0], min(length, sum(ends)))
    q, k, v, sinks_H, direction = random_heads(rows, length)
    documents_BS = random_documents(rows, length) if has_documents else None
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks_H) if has_sinks else (q, k, v))]
    seen_BSS = seen_by(window, length, documents_BS)
    expected_BSHM = eager_attention(q, k, v, seen_BSS, SCALE, sinks_H if has_sinks else None)[:, part]
    expected = with_gradients(expected_BSHM, direction[:, part], leaves)
    got = with_gradients(_by_blocks(leaves, window, part, documents_BS), direction[:, part], leaves)
    for name, one, other in zip(("output", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        # A query that sees one key alone has no gradient but rounding.
        assert_close(one, other, least=0.1, what=name)


@pytest.mark.parametrize(
    "window", [AttentionWindow(kind="window", size=3), AttentionWindow(kind="chunk", size=5)], ids=lambda x: x.kind
)
def test_all_scores_may_be_asked_for(window: AttentionWindow) -> None:
    q, k, v, sinks_H, direction = random_heads(2, 11)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks_H)]
    documents_BS = random_documents(2, 11)
    expected = with_gradients(
        eager_attention(q, k, v, seen_by(window, 11, documents_BS), SCALE, sinks_H), direction, leaves
    )
    got = with_gradients(_by_blocks(leaves, window, slice(0, 11), documents_BS, "math"), direction, leaves)
    assert_close(got, expected)


def test_chunks_of_one_document_need_no_mask_and_masks_of_windows_grow_with_the_window() -> None:
    chunk, window = AttentionWindow(kind="chunk", size=4), AttentionWindow(kind="window", size=8)
    assert block_masks(chunk, 0, 12, None, rows=2, device=CPU).masks == (None,)
    assert block_masks(chunk, 0, 10, None, rows=2, device=CPU).masks == (None, None)
    (mask,) = block_masks(window, 0, 800, None, rows=1, device=CPU).masks
    assert mask.numel() == 800 * 16


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_no_tensor_of_a_pass_has_the_square_of_the_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, largest = 64, 0
    window = AttentionWindow(kind=kind, size=4)

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple) else (result,):
                largest = max(largest, one.numel() if isinstance(one, Tensor) else 0)
            return result

    leaves = [x.requires_grad_() for x in random_heads(1, length)[:4]]
    with Sizes():
        _by_blocks(leaves, window, slice(0, length), None).sum().backward()
    assert largest < length * length
