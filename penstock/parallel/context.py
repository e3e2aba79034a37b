"""Attention over rows that ranks share (context parallelism); `penstock/layout/grid.py` has the placement.

    ulysses      all-to-all swaps positions for heads: each rank attends over the whole row with a part of the heads,
                 and swaps back. Four exchanges; the heads must divide.
    all-gather   keys and values of the whole row are gathered, and each rank attends with its own queries. Any heads;
                 gathered tensors may be narrower than keys and values (latent attention).

With all-gather a rank has two chunks of queries, one from the front and one from the back of the row, and each sees the
keys up to its own end. Simpler than ring attention, which hides the exchange behind the products and merges partial
softmaxes. Layers with a window need only some keys, but gather all.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import AttentionBounds, first_keys
from penstock.layout.grid import SequenceLayout
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, all_to_all
from penstock.parallel.layer_context import LayerContext

LocalMask = AttentionBounds | Tensor | int
"""Which keys consecutive queries see: bounds where a kernel reads them, else a boolean mask, B (or 1) x queries x keys;
or a number of positions, if rows are whole chunks of so many and each sees its own."""


def attend(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    layer_context: LayerContext,
    *,
    scale: float,
    allowed_BSS: Tensor | None = None,
    nears: tuple[LocalMask, ...] = (),
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of our own positions over the row, by `layer_context.context_method`. Returns o_BSHM.

    allowed_BSS is boolean: which query position (first S) may look at which of the row's key positions; None for plain
    causal. Its queries are all positions of the row with ulysses, ours with all-gather. `nears` of `nears_of` replaces
    it if each position sees a part of the row only. sinks_H belong to our heads.
    """
    axis, backend = layer_context.axes.context, layer_context.operators.attention_backend
    gathers = axis.size > 1 and layer_context.context_method == "all-gather"
    if gathers:
        k_BSGN, v_BSGM = gather_positions(k_BSGN, axis), gather_positions(v_BSGM, axis)
    else:  # from all heads of our positions to our part of the heads over the whole row
        q_BSHN, k_BSGN, v_BSGM = (all_to_all(x, axis, split_dim=2, join_dim=1) for x in (q_BSHN, k_BSGN, v_BSGM))
        sinks_H = sinks_H if sinks_H is None or axis.size == 1 else sinks_H.chunk(axis.size)[axis.rank]
    if nears or gathers:
        o_BSHM = attend_to_row(
            q_BSHN, k_BSGN, v_BSGM, layer_context, scale=scale, allowed_BSS=allowed_BSS, nears=nears, sinks_H=sinks_H
        )
    else:
        o_BSHM = causal_attention(
            q_BSHN, k_BSGN, v_BSGM, scale=scale, allowed_BSS=allowed_BSS, backend=backend, sinks_H=sinks_H
        )
    return o_BSHM if gathers else all_to_all(o_BSHM, axis, split_dim=1, join_dim=2)


def _attend_near(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    near: LocalMask,
    layer_context: LayerContext,
    *,
    scale: float,
    sinks_H: Tensor | None,
) -> Tensor:
    operators, heads = layer_context.operators, (q_BSHN, k_BSGN, v_BSGM)
    options: dict[str, Any] = {"scale": scale, "sinks_H": sinks_H}
    if isinstance(near, AttentionBounds):
        assert operators.bounded_attention is not None, "bounds are made for the operator that reads them"
        return operators.bounded_attention(q_BSHN, k_BSGN[:, : near.keys], v_BSGM[:, : near.keys], near, **options)
    options["backend"] = operators.attention_backend
    if isinstance(near, Tensor):
        keys = near.shape[2]
        return causal_attention(q_BSHN, k_BSGN[:, :keys], v_BSGM[:, :keys], allowed_BSS=near, **options)
    # Chunks are rows of a batch of plain attention, for which every backend is fast.
    q_BSHN, k_BSGN, v_BSGM = (x.unflatten(1, (-1, near)).flatten(0, 1) for x in heads)
    o_BSHM = causal_attention(q_BSHN, k_BSGN, v_BSGM, allowed_BSS=None, **options)
    return o_BSHM.unflatten(0, (heads[0].shape[0], -1)).flatten(1, 2)


def nears_of(
    layer_context: LayerContext,
    reach: AttentionWindow | None,
    held: int,
    documents_BS: Tensor | None,
    device: torch.device,
) -> tuple[LocalMask, ...]:
    """What the queries of a micro-batch see, for `attend`, equal for all layers with one window: one for each range.

    `documents_BS` are those of whole rows. Empty for plain causal attention, also where the window is the whole row.
    Queries from the middle of a row get bounds all the same: kernels of plain attention would need a mask of them.
    """
    layout = _layout(layer_context, held)
    ranges, kernel = _ranges(layer_context, layout), layer_context.operators.bounded_attention
    is_whole = documents_BS is None if reach is None else layout.length <= reach.size
    if is_whole and (len(ranges) == 1 or kernel is None or documents_BS is not None):
        return ()
    is_chunk = reach is not None and reach.kind == "chunk" and documents_BS is None
    if reach is not None and is_chunk and len(ranges) == 1 and layout.length % reach.size == 0:
        return (reach.size,)
    first_BS = first_keys(documents_BS, reach, layout.length, device)
    bounds = [AttentionBounds.of(first_BS[:, span.start : span.stop], span.stop, reach) for span in ranges]
    return tuple(bounds) if kernel is not None else tuple(bound.seen_BQK() for bound in bounds)


def held_positions(layer_context: LayerContext, held: int, device: torch.device) -> Tensor:
    """Where in the row the positions of this context-parallel rank stand, int64."""
    chunks = _layout(layer_context, held).chunks(layer_context.axes.context.rank)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def _ranges(layer_context: LayerContext, layout: SequenceLayout) -> tuple[range, ...]:
    """Positions of this rank's queries in attention: with ulysses those of the whole row."""
    if layer_context.context_method == "ulysses":
        return (range(layout.length),)
    return tuple(layout.chunks(layer_context.axes.context.rank))


def _layout(layer_context: LayerContext, held: int) -> SequenceLayout:
    context = layer_context.axes.context.size
    return SequenceLayout(length=held * context, context=context, method=layer_context.context_method)


def gather_positions(x_BS: Tensor, axis: Axis) -> Tensor:
    """Gather all ranks' chunks in the order of the row; gradients are summed over the ranks."""
    return x_BS if axis.size == 1 else _in_row_order(all_gather(x_BS, axis, dim=1), axis)


def _in_row_order(x_BS: Tensor, axis: Axis) -> Tensor:
    """The chunks of all ranks come as 0, 2c-1, 1, 2c-2, ...: the near ones count up, the far ones down."""
    chunks = x_BS.chunk(2 * axis.size, dim=1)
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim=1)


def _in_rank_order(x_BS: Tensor, axis: Axis) -> Tensor:
    """The inverse of `_in_row_order`."""
    chunks = x_BS.chunk(2 * axis.size, dim=1)
    pairs = zip(chunks[: axis.size], reversed(chunks[axis.size :]), strict=True)
    return torch.cat([chunk for pair in pairs for chunk in pair], dim=1)


def heads_for_positions(parts: tuple[Tensor, ...], layer_context: LayerContext) -> tuple[Tensor, ...]:
    """From all heads of our positions to our part of the heads at all positions of the row, in one exchange.

    Each part is B x S x features, with heads side by side.
    """
    axis = layer_context.axes.context
    if axis.size == 1:
        return parts
    widest = parts[0]
    for part in parts[1:]:
        widest = widest if torch.promote_types(widest.dtype, part.dtype) == widest.dtype else part
    by_rank = [part.to(widest.dtype).unflatten(-1, (axis.size, -1)) for part in parts]
    joined_BSD = torch.cat(by_rank, dim=-1).flatten(-2)  # what goes to a rank stands together
    joined_BSD = all_to_all(joined_BSD, axis, split_dim=2, join_dim=1)
    if layer_context.context_method == "all-gather":
        joined_BSD = _in_row_order(joined_BSD, axis)
    return joined_BSD.split([part.shape[-1] // axis.size for part in parts], dim=-1)


def positions_for_heads(x_BSH: Tensor, layer_context: LayerContext) -> Tensor:
    """The way back for one tensor with heads in dim 2."""
    axis = layer_context.axes.context
    if axis.size == 1:
        return x_BSH
    if layer_context.context_method == "all-gather":
        x_BSH = _in_rank_order(x_BSH, axis)
    return all_to_all(x_BSH, axis, split_dim=1, join_dim=2)


def attend_to_row(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    layer_context: LayerContext,
    *,
    scale: float,
    allowed_BSS: Tensor | None,
    nears: tuple[LocalMask, ...] = (),
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of our ranges of queries over the whole row; arguments as in `attend`."""
    if not nears:  # two chunks, near before far
        axis, size = layer_context.axes.context, q_BSHN.shape[1] // 2
        assert k_BSGN.shape[1] == 2 * size * axis.size, (
            f"{k_BSGN.shape[1]} keys for {axis.size} ranks with 2 x {size} queries"
        )
        ends = [(chunk + 1) * size for chunk in (axis.rank, 2 * axis.size - 1 - axis.rank)]  # of the keys before them
        if allowed_BSS is None:
            square = partial(torch.ones, dtype=torch.bool, device=q_BSHN.device)
            nears = tuple(square(1, size, end).tril(end - size) for end in ends)
        else:
            nears = tuple(mask[:, :, :end] for mask, end in zip(allowed_BSS.split(size, dim=1), ends, strict=True))
    parts = [
        _attend_near(queries_BSHN, k_BSGN, v_BSGM, near, layer_context, scale=scale, sinks_H=sinks_H)
        for queries_BSHN, near in zip(q_BSHN.chunk(len(nears), dim=1), nears, strict=True)
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
