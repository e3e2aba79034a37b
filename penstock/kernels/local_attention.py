"""Attention of layers that see a part of the row: blocks of queries, each with the keys that it may need.

`penstock.kernels.attention_window` says which blocks. Each kind of them is one call of `causal_attention` with the
blocks as rows of a batch: without a mask for whole chunks of one document, with a small one elsewhere. So memory and
work grow with what is seen and not with the square of the row, and every backend of plain attention serves.

What they need to know about a micro-batch is made once (`block_masks`) and read by all layers with one reach: masks
that combine reach, causality and borders of documents.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow, QueryBlocks, blocks_of


@dataclass(frozen=True)
class BlockMasks:
    """What a range of queries may look at.

    Attributes:
        blocks: that they are cut into.
        masks: for each kind of blocks what its queries may look at: boolean, (rows x blocks) x queries x keys, rows
            counting slowest; None where every query sees the keys of its own block up to itself.
    """

    blocks: tuple[QueryBlocks, ...]
    masks: tuple[Tensor | None, ...]


def block_masks(
    reach: AttentionWindow, first: int, count: int, allowed_BSS: Tensor | None, *, rows: int, device: torch.device
) -> BlockMasks:
    """What a range of queries may look at.

    Args:
        reach: of the layers.
        first: position of the first query.
        count: of queries.
        allowed_BSS: boolean, which of the range's queries may look at which position of the row: borders of documents,
            and causal. None if the row is one document.
        rows: of the micro-batch.
        device: for the masks.
    """
    blocks = blocks_of(reach, first, count, by_document=allowed_BSS is not None)
    if allowed_BSS is None:
        masks = tuple(None if one.is_square else _mask(reach, one, rows, device) for one in blocks)
        return BlockMasks(blocks, masks)
    (one,) = blocks
    return BlockMasks(blocks, (_mask_of_documents(reach, one, allowed_BSS),))


def _places(blocks: QueryBlocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the queries of each block (blocks x queries x 1), and of its keys (blocks x 1 x keys)."""
    number = torch.arange(blocks.count, device=device)[:, None, None]
    ends = blocks.first + (number + 1) * blocks.queries
    query = ends - blocks.queries + torch.arange(blocks.queries, device=device)[:, None]
    return query, ends - blocks.keys + torch.arange(blocks.keys, device=device)


def _mask(reach: AttentionWindow, blocks: QueryBlocks, rows: int, device: torch.device) -> Tensor:
    """Of rows that are one document each."""
    query, key = _places(blocks, device)
    first = query - reach.size + 1 if reach.kind == "window" else query - query % reach.size
    seen = (key >= first.clamp(min=0)) & (key <= query)
    return seen.expand(rows, -1, -1, -1).flatten(0, 1)


def _mask_of_documents(reach: AttentionWindow, blocks: QueryBlocks, allowed_BSS: Tensor) -> Tensor:
    """Of the blocks of a window; a query's document begins where it may look first."""
    _, queries, keys = allowed_BSS.shape
    query, key = _places(blocks, allowed_BSS.device)
    # Queries behind the last are padding: they look at what the last one does, and at themselves.
    query_here = (query - blocks.first).clamp(max=queries - 1)
    allowed = allowed_BSS[:, query_here, key.clamp(0, keys - 1)] & (key >= 0)
    if reach.kind == "window":
        first = query - reach.size + 1
    else:
        begin_BS = allowed_BSS.to(torch.uint8).argmax(dim=-1)
        first = query - (query - begin_BS[:, query_here]) % reach.size
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
    """Softmax attention of a range of queries over what each of them sees.

    Args:
        q_BSHN: queries of the range.
        k_BSGN: keys of every position of the row.
        v_BSGM: values of every position.
        masks: of the range.
        scale: factor on the scores.
        backend: as of `causal_attention`.
        sinks_H: likewise.

    Returns:
        o_BSHM of the range.
    """
    begin, count = masks.blocks[0].first, q_BSHN.shape[1]
    found = []
    for one, mask in zip(masks.blocks, masks.masks, strict=True):
        o_BSHM = causal_attention(
            _cut(q_BSHN, one.first - begin, one),
            *(_with_keys_before(x, one) for x in (k_BSGN, v_BSGM)),
            scale=scale,
            allowed_BSS=mask,
            backend=backend,
            sinks_H=sinks_H,
        )
        found.append(o_BSHM.unflatten(0, (-1, one.count)).flatten(1, 2))
    return found[0][:, :count] if len(found) == 1 else torch.cat(found, dim=1)


def _cut(x_BS: Tensor, first: int, blocks: QueryBlocks) -> Tensor:
    """Positions from a first one on as rows of blocks, zeros behind the last; any dims may follow."""
    end = first + blocks.count * blocks.queries
    return _padded(x_BS, first, end).unflatten(1, (blocks.count, blocks.queries)).flatten(0, 1)


def _with_keys_before(x_BS: Tensor, blocks: QueryBlocks) -> Tensor:
    """The keys of each block, from positions of the whole row."""
    if blocks.count == 1:
        return x_BS[:, blocks.end - blocks.keys : blocks.end]
    if blocks.is_square:
        return _cut(x_BS, blocks.first, blocks)
    assert blocks.keys == 2 * blocks.queries, f"{blocks} reach over more than one block"
    parts = _padded(x_BS, blocks.first - blocks.queries, blocks.end).unflatten(1, (-1, blocks.queries))
    return torch.cat((parts[:, :-1], parts[:, 1:]), dim=2).flatten(0, 1)


def _padded(x_BS: Tensor, first: int, end: int) -> Tensor:
    """Positions from `first` to before `end`, zeros where there are none."""
    own = x_BS[:, max(first, 0) : end]
    before, behind = max(-first, 0), max(end - x_BS.shape[1], 0)
    return F.pad(own, (0, 0) * (x_BS.ndim - 2) + (before, behind)) if before or behind else own
