"""Attention in a window or chunk: blocks of queries, each with the keys that it may need.

`penstock.kernels.attention_window` cuts the blocks. All blocks of one shape are rows of a batch in one call of
`causal_attention`: without a mask for whole chunks of one document, with a small one elsewhere. So memory and work grow
with the window and not with the square of the row, and every backend of plain attention serves.

`block_masks` makes the masks of a micro-batch once (window, causality and document borders); all layers with the same
window read them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow, QueryBlocks, blocks_of


@dataclass(frozen=True)
class BlockMasks:
    """Consecutive blocks that cover a range of queries, and the mask of each.

    A mask is boolean, (rows x blocks) x queries x keys, rows counting slowest; None for plain causal attention.
    """

    blocks: tuple[QueryBlocks, ...]
    masks: tuple[Tensor | None, ...]


def block_masks(
    window: AttentionWindow, first: int, count: int, allowed_BSS: Tensor | None, *, rows: int, device: torch.device
) -> BlockMasks:
    """Blocks and masks for the `count` queries from position `first` on.

    `allowed_BSS` is boolean, queries of the range by positions of the row: document borders, and causal. It is None if
    each of the rows is one document.
    """
    blocks = blocks_of(window, first, count, by_document=allowed_BSS is not None)
    if allowed_BSS is None:
        return BlockMasks(blocks, tuple(None if one.is_square else _mask(window, one, rows, device) for one in blocks))
    (one,) = blocks
    return BlockMasks(blocks, (_mask_of_documents(window, one, allowed_BSS),))


def _places(blocks: QueryBlocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of each block's queries (blocks x queries x 1) and keys (blocks x 1 x keys)."""
    number = torch.arange(blocks.count, device=device)[:, None, None]
    ends = blocks.first + (number + 1) * blocks.queries
    query = ends - blocks.queries + torch.arange(blocks.queries, device=device)[:, None]
    return query, ends - blocks.keys + torch.arange(blocks.keys, device=device)


def _mask(window: AttentionWindow, blocks: QueryBlocks, rows: int, device: torch.device) -> Tensor:
    """Mask for rows of one document each."""
    query, key = _places(blocks, device)
    first = query - window.size + 1 if window.kind == "window" else query - query % window.size
    seen = (key >= first.clamp(min=0)) & (key <= query)  # keys before the row are padding
    return seen.expand(rows, -1, -1, -1).flatten(0, 1)  # (rows x blocks) x queries x keys


def _mask_of_documents(window: AttentionWindow, blocks: QueryBlocks, allowed_BSS: Tensor) -> Tensor:
    """Mask for rows of several documents: a query's document begins at the first position that it may attend to."""
    _, queries, keys = allowed_BSS.shape
    query, key = _places(blocks, allowed_BSS.device)
    # Queries after the last are padding: they have the mask of the last one, and see themselves.
    query_here = (query - blocks.first).clamp(max=queries - 1)
    allowed = allowed_BSS[:, query_here, key.clamp(0, keys - 1)] & (key >= 0)
    if window.kind == "window":
        first = query - window.size + 1
    else:
        begin_BS = allowed_BSS.to(torch.uint8).argmax(dim=-1)  # the first 1 of each query
        first = query - (query - begin_BS[:, query_here]) % window.size
    return ((allowed & (key >= first) & (key <= query)) | (key == query)).flatten(0, 1)


def local_attention(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    masks: BlockMasks,
    *,
    scale: float,
    backend: str,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention of a range of queries within their window; arguments as in `causal_attention`.

    Keys and values are those of every position of the row, queries those of the range.
    """
    begin, count = masks.blocks[0].first, q_BSHN.shape[1]
    found = []
    for one, mask in zip(masks.blocks, masks.masks, strict=True):
        heads = _cut(q_BSHN, one.first - begin, one), *(_with_keys_before(x, one) for x in (k_BSGN, v_BSGM))
        o_BSHM = causal_attention(*heads, scale=scale, allowed_BSS=mask, backend=backend, sinks_H=sinks_H)
        found.append(o_BSHM.unflatten(0, (-1, one.count)).flatten(1, 2))
    return found[0][:, :count] if len(found) == 1 else torch.cat(found, dim=1)


def _cut(x_BS: Tensor, first: int, blocks: QueryBlocks) -> Tensor:
    """Positions from `first` on as rows of blocks, padded with zeros after the last; any dims may follow."""
    end = first + blocks.count * blocks.queries
    return _padded(x_BS, first, end).unflatten(1, (blocks.count, blocks.queries)).flatten(0, 1)


def _with_keys_before(x_BS: Tensor, blocks: QueryBlocks) -> Tensor:
    """Keys or values of each block, from those of the whole row."""
    if blocks.count == 1:
        return x_BS[:, blocks.end - blocks.keys : blocks.end]
    if blocks.is_square:
        return _cut(x_BS, blocks.first, blocks)
    assert blocks.keys == 2 * blocks.queries, f"{blocks} read more than one other block"
    parts = _padded(x_BS, blocks.first - blocks.queries, blocks.end).unflatten(1, (-1, blocks.queries))
    return torch.cat((parts[:, :-1], parts[:, 1:]), dim=2).flatten(0, 1)


def _padded(x_BS: Tensor, first: int, end: int) -> Tensor:
    """Positions `first` to `end` - 1, zeros outside the row."""
    own = x_BS[:, max(first, 0) : end]
    before, behind = max(-first, 0), max(end - x_BS.shape[1], 0)
    return F.pad(own, (0, 0) * (x_BS.ndim - 2) + (before, behind)) if before or behind else own  # last dim first
