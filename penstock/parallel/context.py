"""Attention over rows that ranks share (context parallelism); `penstock/layout/sequence.py` says who holds what.

    ulysses      positions are swapped for heads: each rank attends over the whole row with a part of the heads, and
                 swaps back. Four exchanges of what one rank holds; the heads must divide.
    all-gather   keys and values of the whole row are gathered, and each rank attends with its own queries. Any heads;
                 what is gathered may be narrower than keys and values (latent attention), the row's keys must fit.

With all-gather a rank has two chunks of queries, one from the front and one from the back of the row, and each sees the
keys up to its own end. Simpler than ring attention, which hides the exchange behind the products and merges partial
softmaxes for it.
"""

import torch
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, swap
from penstock.parallel.kit import Kit


def attend(
    q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, kit: Kit, *, scale: float, allowed_BSS: Tensor | None
) -> Tensor:
    """Causal attention of our own positions over the whole row, by the method of the kit.

    Args:
        q_BSHN: queries of our positions; all positions where no ranks share the row.
        k_BSGN: keys of our positions.
        v_BSGM: values of our positions.
        kit: kernels and ranks.
        scale: factor on the scores.
        allowed_BSS: boolean, which query position (first S) may look at which of the row's key positions. Its queries
            are all positions of the row with ulysses, ours with all-gather. None for plain causal.

    Returns:
        o_BSHM of our positions.
    """
    axis, backend = kit.axes.context, kit.operators.attention_backend
    if axis.size == 1:
        return causal_attention(q_BSHN, k_BSGN, v_BSGM, scale=scale, allowed_BSS=allowed_BSS, backend=backend)
    if kit.context_method == "all-gather":
        k_BSGN, v_BSGM = gather_positions(k_BSGN, axis), gather_positions(v_BSGM, axis)
        return attend_to_row(q_BSHN, k_BSGN, v_BSGM, kit, scale=scale, allowed_BSS=allowed_BSS)
    q_BSHN, k_BSGN, v_BSGM = (swap(x, axis, split_dim=2, join_dim=1) for x in (q_BSHN, k_BSGN, v_BSGM))
    o_BSHM = causal_attention(q_BSHN, k_BSGN, v_BSGM, scale=scale, allowed_BSS=allowed_BSS, backend=backend)
    return swap(o_BSHM, axis, split_dim=1, join_dim=2)


def gather_positions(x_BS: Tensor, axis: Axis) -> Tensor:
    """Gather what all ranks have for their two chunks of a row, and put it in the order of the row.

    Args:
        x_BS: ours, near chunk before far chunk; any dims may follow.
        axis: ranks that share the row.

    Returns:
        The same for every position of the row. Its gradients are summed over the ranks.
    """
    if axis.size == 1:
        return x_BS
    chunks = all_gather(x_BS, axis, dim=1).chunk(2 * axis.size, dim=1)
    # They come as 0, 2c-1, 1, 2c-2, ...: the near ones count up, the far ones down.
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim=1)


def attend_to_row(
    q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, kit: Kit, *, scale: float, allowed_BSS: Tensor | None
) -> Tensor:
    """Causal attention of our two chunks over keys and values of the whole row.

    Args:
        q_BSHN: queries of our positions, near chunk before far chunk.
        k_BSGN: keys of every position, in order.
        v_BSGM: values of every position.
        kit: kernels and ranks.
        scale: factor on the scores.
        allowed_BSS: boolean, our query positions x all key positions, causal already; None for plain causal.

    Returns:
        o_BSHM of our positions.
    """
    axis = kit.axes.context
    size = q_BSHN.shape[1] // 2
    assert k_BSGN.shape[1] == 2 * size * axis.size, (
        f"{k_BSGN.shape[1]} keys for {axis.size} ranks with 2 x {size} queries"
    )
    chunks = []
    for part, number in enumerate((axis.rank, 2 * axis.size - 1 - axis.rank)):
        own, end = slice(part * size, (part + 1) * size), (number + 1) * size
        if allowed_BSS is None:
            allowed = torch.ones(1, size, end, dtype=torch.bool, device=q_BSHN.device).tril(end - size)
        else:
            allowed = allowed_BSS[:, own, :end]
        chunks.append(
            causal_attention(
                q_BSHN[:, own],
                k_BSGN[:, :end],
                v_BSGM[:, :end],
                scale=scale,
                allowed_BSS=allowed,
                backend=kit.operators.attention_backend,
            )
        )
    return torch.cat(chunks, dim=1)
