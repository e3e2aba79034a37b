"""The largest attention logits of a step, for QK-clip (penstock/models/qk_clip.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.largest_logits import largest_logits


@dataclass(frozen=True)
class LogitMeter:
    """The largest logits of this rank's heads since the step began."""

    largest_H: Tensor  # float32, on the device; the same tensor for the whole run

    @torch.no_grad()
    def see(self, q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> None:
        """Take queries and keys of a pass. Seeing them twice, as recomputation does, changes nothing."""
        largest_H = largest_logits(q_BSHN, k_BSGN, scale, allowed_BSS)
        self.largest_H.copy_(torch.maximum(self.largest_H, largest_H))
