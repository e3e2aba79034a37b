"""Ranks that share a row attend as one process does that holds all of it: outputs and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import AttentionBounds, attention_by_mask
from penstock.kernels.operators import REFERENCE
from penstock.layout.grid import Grid, Method, SequenceLayout
from penstock.models.model_inputs import attention_mask
from penstock.parallel.axes import ALONE, Axes, make_axes
from penstock.parallel.context import attend, attend_to_row, gather_positions, held_positions, nears_of
from penstock.parallel.layer_context import LayerContext
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.kernels.eager_attention import eager_attention, seen_by, with_gradients

SCALE = 0.3

SHAPES = {"grouped-query": (1, 8, 4, 6, 6), "grouped-query, three rows": (3, 4, 4, 6, 6), "latent": (2, 4, 4, 12, 8)}
"""Rows; heads of queries and of keys; widths of keys and of values."""

LENGTH = 16  # 4 ranks have 2 chunks of 2 positions each


def _heads(shape: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, G, N, M = SHAPES[shape]  # rows, heads of queries and keys, widths of keys and values
    generator = torch.Generator().manual_seed(3)
    sizes = ((H, N), (G, N), (G, M), (H, M))
    q, k, v, direction = (torch.randn(B, LENGTH, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return q, k, v, direction


def _documents(documents: bool, rows: int) -> Tensor | None:
    """Borders inside chunks and at their edges, other ones in each row."""
    starts, places = torch.tensor([0, 3, 4, 9, 14]), torch.arange(LENGTH)
    found = [torch.searchsorted(starts + row, places, right=True) for row in range(rows)]
    return torch.stack(found) if documents else None


def _axes(size: int) -> Axes:
    return make_axes(Grid(world=size, context=size))


def _own(axes: Axes, method: Method) -> list[int]:
    return list(SequenceLayout(length=LENGTH, context=axes.context.size, method=method).of_context(axes.context.rank))


REACHES = {
    "the whole row": None,
    "window within a chunk of a rank": AttentionWindow(kind="window", size=3),
    "window over several": AttentionWindow(kind="window", size=7),
    "chunks within one": AttentionWindow(kind="chunk", size=2),
    "chunks over several": AttentionWindow(kind="chunk", size=6),
}
SINKS_H = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.1, 0.2, -0.3, 1.0], dtype=torch.float64)


def _cases(shape: str) -> tuple[dict[str, AttentionWindow | None], tuple[Tensor, ...]]:
    """Reaches of a shape, and its sinks."""
    return (REACHES, (SINKS_H,)) if shape == "grouped-query" else ({"the whole row": None}, ())


def _on_a_rank(size: int, shape: str, method: Method, documents: bool, bounded: bool) -> list[list[Tensor]]:
    """Of each reach: output and gradients; the sinks' gradient last, which ranks have parts of."""
    axes = _axes(size)
    own = _own(axes, method)
    q, k, v, direction = (whole[:, own] for whole in _heads(shape))
    allowed_BSS = attention_mask(_documents(documents, len(q)))
    if allowed_BSS is not None and method == "all-gather":
        allowed_BSS = allowed_BSS[:, own]
    operators = replace(REFERENCE, bounded_attention=attention_by_mask if bounded else None)
    layer_context = replace(LayerContext(), axes=axes, context_method=method, operators=operators)
    assert held_positions(layer_context, len(own), torch.device("cpu")).tolist() == own
    reaches, sinks = _cases(shape)
    found = []
    for reach in reaches.values():
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
        nears = nears_of(layer_context, reach, len(own), _documents(documents, len(q)), q.device)
        has_middle = bounded and method == "all-gather" and size > 1
        assert bool(nears) == (documents or reach is not None or has_middle)
        assert not has_middle or all(isinstance(near, AttentionBounds) for near in nears), "no mask of the square"
        if reach is None and not bounded:
            nears = ()  # the whole row's mask serves
        options = {"scale": SCALE, "allowed_BSS": allowed_BSS, "nears": nears, "sinks_H": (*leaves[3:], None)[0]}
        found.append(with_gradients(attend(*leaves[:3], layer_context, **options), direction, leaves))
    return found


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["ulysses", "all-gather"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_attend_together_as_one_does_alone(
    ranks: Pool, size: int, method: Method, shape: str, documents: bool
) -> None:
    _check_ranks(ranks, size, method, shape, documents, bounded=False)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("shape", ["grouped-query, three rows", "latent"])
@pytest.mark.parametrize("method", ["ulysses", "all-gather"])
def test_ranks_attend_between_bounds_as_one_does_alone(
    ranks: Pool, method: Method, shape: str, documents: bool
) -> None:
    _check_ranks(ranks, 2, method, shape, documents, bounded=True)


def _check_ranks(ranks: Pool, size: int, method: Method, shape: str, documents: bool, *, bounded: bool) -> None:
    *inputs, direction = _heads(shape)
    layout = SequenceLayout(length=LENGTH, context=size, method=method)
    results = ranks.run(size, _on_a_rank, size, shape, method, documents, bounded)
    reaches, sinks = _cases(shape)
    for number, (name, reach) in enumerate(reaches.items()):
        leaves = [x.clone().requires_grad_() for x in (*inputs, *sinks)]
        seen_BSS = seen_by(reach, LENGTH, _documents(documents, len(direction)))
        o_BSHM = eager_attention(*leaves[:3], seen_BSS, SCALE, *leaves[3:])
        expected = with_gradients(o_BSHM, direction, leaves)
        of_ranks = [found[number] for found in results]
        for rank, got in enumerate(of_ranks):
            own = list(layout.of_context(rank))
            for what, mine, whole in zip(("output", "dq", "dk", "dv"), got[:4], expected[:4], strict=True):
                assert_close(mine, whole[:, own], what=f"{name}: {what} of rank {rank}")
        if sinks:
            assert_close(sum(found[4] for found in of_ranks), expected[4], what=f"{name}: dsinks")


def _gathered_positions(size: int) -> tuple[Tensor, Tensor]:
    """What is gathered, and the gradient where rank r uses it r + 1 times."""
    axes = _axes(size)
    own_BS = torch.tensor([_own(axes, "all-gather")] * 3, dtype=torch.float64).requires_grad_()
    row_BS = gather_positions(own_BS, axes.context)
    (gradient_BS,) = torch.autograd.grad((row_BS * row_BS.detach() * (axes.context.rank + 1)).sum(), own_BS)
    return row_BS.detach(), gradient_BS


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_positions_stand_in_the_order_of_the_row(ranks: Pool, size: int) -> None:
    uses = sum(range(1, size + 1))  # rank r uses what it gathered r + 1 times
    layout = SequenceLayout(length=LENGTH, context=size)
    for rank, (row_BS, gradient_BS) in enumerate(ranks.run(size, _gathered_positions, size)):
        assert row_BS.tolist() == [list(range(LENGTH))] * 3
        assert gradient_BS.tolist() == [[position * uses for position in layout.of_context(rank)]] * 3


def test_one_rank_alone_attends_to_its_row() -> None:
    q, k, v, _ = _heads("latent")
    allowed_BSS = attention_mask(_documents(True, 2))
    expected = causal_attention(q, k, v, scale=SCALE, allowed_BSS=allowed_BSS, backend="math")
    layer_context = LayerContext(axes=ALONE)
    assert_close(attend(q, k, v, layer_context, scale=SCALE, allowed_BSS=allowed_BSS), expected)
    assert_close(attend_to_row(q, k, v, layer_context, scale=SCALE, allowed_BSS=allowed_BSS), expected)
    assert gather_positions(k, ALONE.context) is k


def test_a_row_no_longer_than_the_reach_needs_no_masks_and_whole_chunks_need_none() -> None:
    layer_context, device = LayerContext(), torch.device("cpu")
    assert nears_of(layer_context, AttentionWindow(kind="window", size=LENGTH), LENGTH, None, device) == ()
    (mask_BQK,) = nears_of(layer_context, AttentionWindow(kind="window", size=LENGTH - 1), LENGTH, None, device)
    assert isinstance(mask_BQK, Tensor) and mask_BQK.sum() == LENGTH * (LENGTH + 1) // 2 - 1
    assert nears_of(layer_context, AttentionWindow(kind="chunk", size=4), LENGTH, None, device) == (4,)
    (mask_BQK,) = nears_of(layer_context, AttentionWindow(kind="chunk", size=5), LENGTH, None, device)
    assert isinstance(mask_BQK, Tensor) and mask_BQK.sum() == 3 * 15 + 1
