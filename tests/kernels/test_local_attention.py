"""Attention by blocks equals attention with all scores in memory: outputs and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.local_attention import block_masks, local_attention
from tests.closeness import assert_close
from tests.examples import examples
from tests.kernels.eager_attention import eager_attention, random_documents, random_heads, seen_by, with_gradients

SCALE = 0.3
CPU = torch.device("cpu")


def _by_blocks(
    leaves: list[Tensor], reach: AttentionWindow, part: slice, documents_BS: Tensor | None, backend: str = "auto"
) -> Tensor:
    q, k, v, *sinks = leaves
    allowed_BSS = None if documents_BS is None else seen_by(None, k.shape[1], documents_BS)[:, part]
    seen = block_masks(reach, part.start, part.stop - part.start, allowed_BSS, rows=q.shape[0], device=CPU)
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
    reach, length = AttentionWindow(kind=kind, size=size), 13
    part = slice(ends[0], min(length, sum(ends)))
    q, k, v, sinks_H, direction = random_heads(rows, length)
    documents_BS = random_documents(rows, length) if has_documents else None
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks_H) if has_sinks else (q, k, v))]
    seen_BSS = seen_by(reach, length, documents_BS)
    expected_BSHM = eager_attention(q, k, v, seen_BSS, SCALE, sinks_H if has_sinks else None)[:, part]
    expected = with_gradients(expected_BSHM, direction[:, part], leaves)
    got = with_gradients(_by_blocks(leaves, reach, part, documents_BS), direction[:, part], leaves)
    for name, one, other in zip(("output", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        # A query that sees one key alone has no gradient but rounding.
        assert_close(one, other, least=0.1, what=name)


@pytest.mark.parametrize(
    "reach", [AttentionWindow(kind="window", size=3), AttentionWindow(kind="chunk", size=5)], ids=lambda x: x.kind
)
def test_all_scores_may_be_asked_for(reach: AttentionWindow) -> None:
    q, k, v, sinks_H, direction = random_heads(2, 11)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks_H)]
    documents_BS = random_documents(2, 11)
    expected = with_gradients(
        eager_attention(q, k, v, seen_by(reach, 11, documents_BS), SCALE, sinks_H), direction, leaves
    )
    got = with_gradients(_by_blocks(leaves, reach, slice(0, 11), documents_BS, "math"), direction, leaves)
    assert_close(got, expected)


def test_whole_chunks_of_one_document_need_no_mask() -> None:
    reach = AttentionWindow(kind="chunk", size=4)
    assert block_masks(reach, 0, 12, None, rows=2, device=CPU).masks == (None,)
    assert block_masks(reach, 0, 10, None, rows=2, device=CPU).masks == (None, None)


def test_masks_grow_with_what_is_seen_and_not_with_the_square_of_the_row() -> None:
    reach = AttentionWindow(kind="window", size=8)
    (mask,) = block_masks(reach, 0, 800, None, rows=1, device=CPU).masks
    assert mask is not None
    assert mask.numel() == 800 * 16


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_no_tensor_of_a_pass_has_the_square_of_the_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, largest = 64, 0
    reach = AttentionWindow(kind=kind, size=4)

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple) else (result,):
                largest = max(largest, one.numel() if isinstance(one, Tensor) else 0)
            return result

    leaves = [x.requires_grad_() for x in random_heads(1, length)[:4]]
    with Sizes():
        _by_blocks(leaves, reach, slice(0, length), None).sum().backward()
    assert largest < length * length
