"""What every layer must know about a micro-batch besides its hidden states. Made once a forward pass, never changed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.moe.routing import Scope


@dataclass(frozen=True)
class Frame:
    """Positions, attention borders and share of a micro-batch.

    Attributes:
        cos_BSP: float32 cosine of each rotary pair's angle, P / 2 wide.
        sin_BSP: float32 sine.
        allowed_BSS: boolean, True where a query position (first S) may look at a key position; None for plain causal.
        scope: what balance losses must know.
    """

    cos_BSP: Tensor
    sin_BSP: Tensor
    allowed_BSS: Tensor | None
    scope: Scope


def attention_borders(documents_BS: Tensor | None) -> Tensor | None:
    """Where attention may look when it stays inside a document.

    Args:
        documents_BS: document id of each position, or None if attention may cross documents.

    Returns:
        Boolean B x S x S, causal and inside equal ids; None if there are no borders.
    """
    if documents_BS is None:
        return None
    S = documents_BS.shape[1]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=documents_BS.device).tril()
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS & causal_SS
