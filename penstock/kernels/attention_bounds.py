"""Bounds of attention: which keys a query sees where rows have several documents, a sliding window or chunks.

A query sees the keys from `first` up to its own position, and `first` never falls from one query to the next:

    documents   0 0 0 1 1 1 1        window of 3    0 1 2 3 4 5 6        chunks of 3    0 1 2 3 4 5 6
    first       0 0 0 3 3 3 3        first          0 0 0 1 2 3 4        first          0 0 0 3 3 3 6

Where several apply, the largest counts; chunks begin with their document. Bounds are made once for a micro-batch, two
integers for a position instead of a mask of the square. The kernel is in `penstock.kernels.bounded_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.language import power_of_two

NAME = "triton"  # value of `kernels.attention`
# Chips on which `auto` takes the kernel, because it was faster there.
MEASURED = ("sm_90",)
NARROWEST, WIDEST = 16, 256  # columns of a part of a head
_MOST = "MOST="


@dataclass(frozen=True)
class AttentionBounds:
    """Bounds of queries up to the position of the last key; those of one row may stand for all rows."""

    first_BQ: Tensor  # int32, first key that a query sees
    last_BK: Tensor  # int32, last query that sees a key, counted from the first query; -1 for none
    most: int  # keys that a query sees at most

    @classmethod
    def of(cls, first_BQ: Tensor, keys: int, window: AttentionWindow | None = None) -> "AttentionBounds":
        """From the first key of each query; a window or chunk, if there is one, is in them already."""
        first_BQ = first_BQ.contiguous()
        key_BK = torch.arange(keys, dtype=torch.int32, device=first_BQ.device).repeat(first_BQ.shape[0], 1)
        last_BK = torch.searchsorted(first_BQ, key_BK, right=True, out_int32=True) - 1
        return cls(first_BQ, last_BK, keys if window is None else min(keys, window.size))

    @property
    def keys(self) -> int:
        return self.last_BK.shape[1]

    def seen_BQK(self) -> Tensor:
        """The mask: True where a query sees a key."""
        key_K = torch.arange(self.keys, device=self.first_BQ.device)
        place_Q = key_K[self.keys - self.first_BQ.shape[1] :]
        return (key_K >= self.first_BQ[:, :, None]) & (key_K <= place_Q[:, None])


def parts_of(width: int) -> tuple[int, int]:
    """A head as one or two powers of two of columns, (width, 0) or the parts."""
    larger = power_of_two(width + 1) // 2
    return larger, width - larger


def has_kernel(keys: int, values: int) -> bool:
    """Whether the kernel takes heads of these widths."""
    parts = *parts_of(keys), values
    return all(part == power_of_two(part) and NARROWEST <= part <= WIDEST for part in parts if part) and bool(values)


def noted(limit: int) -> str:
    """The note of a launch that says how many keys a query sees at most."""
    return f"{_MOST}{limit}"


def most_of(notes: Sequence[str]) -> int:
    """The number in `noted`."""
    return next(int(note.removeprefix(_MOST)) for note in notes if note.startswith(_MOST))


def first_keys(
    documents_BS: Tensor | None, window: AttentionWindow | None, length: int, device: torch.device
) -> Tensor:
    """First key that each position sees, int32 B x S, or 1 x S without documents, which are runs of one number."""
    place_S = torch.arange(length, dtype=torch.int32, device=device)
    first_BS = torch.zeros_like(place_S)[None]
    if documents_BS is not None:
        is_begin_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0))
        first_BS = (place_S * is_begin_BS).cummax(1).values
    if window is None:
        return first_BS
    if window.kind == "chunk":
        return place_S - (place_S - first_BS) % window.size
    return torch.maximum(first_BS, place_S - (window.size - 1))


def attention_by_mask(
    q_BQHN: Tensor,
    k_BKGN: Tensor,
    v_BKGM: Tensor,
    bounds: AttentionBounds,
    *,
    scale: float,
    sinks_H: Tensor | None = None,  # a logit of each query head that takes part in the softmax
) -> Tensor:
    """Definition of `penstock.kernels.bounded_attention.bounded_attention`: all scores, and a mask of the bounds."""
    seen_BQK = bounds.seen_BQK().expand(q_BQHN.shape[0], -1, -1)
    return causal_attention(q_BQHN, k_BKGN, v_BKGM, scale=scale, allowed_BSS=seen_BQK, backend="math", sinks_H=sinks_H)
