"""The largest attention logit of each head, for QK-clip (penstock/models/qk_clip.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 1 << 26
"""Scores that are computed at a time."""


@dataclass(frozen=True)
class LogitMeter:
    """The largest logits of this rank's heads since the step began."""

    largest_H: Tensor  # float32, on the device; the same tensor for the whole run

    @torch.no_grad()
    def see(self, q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> None:
        """Take queries and keys of a pass. Seeing them twice, as recomputation does, changes nothing."""
        largest_H = largest_logits(q_BSHN, k_BSGN, scale, allowed_BSS)
        self.largest_H.copy_(torch.maximum(self.largest_H, largest_H))


def largest_logits(q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> Tensor:
    """The largest scaled product of a query of each head and a key that it may see, float32; None: the causal mask."""
    batch, length, heads, _ = q_BSHN.shape
    k_BHNS = k_BSGN.repeat_interleave(heads // k_BSGN.shape[2], dim=2).permute(0, 2, 3, 1)
    places_S = torch.arange(length, device=q_BSHN.device)
    found = []
    size = max(1, SCORES // (batch * heads * length))
    for first in range(0, length, size):
        rows = slice(first, first + size)
        scores_BHSS = q_BSHN[:, rows].transpose(1, 2) @ k_BHNS
        mask = places_S[rows, None] >= places_S if allowed_BSS is None else allowed_BSS[:, None, rows]
        found.append(scores_BHSS.float().masked_fill(~mask, -torch.inf).amax(dim=(0, 2, 3)))
    return torch.stack(found).amax(0) * scale
