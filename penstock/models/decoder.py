"""The decoder: embedding, blocks, final norm, output projection, and multi-token prediction beside them.

A pipeline stage will be the same class with parts missing, so each part may be None and is then passed through.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.model import Model
from penstock.models.block import Block
from penstock.models.frame import Frame, attention_borders
from penstock.models.mtp import MultiTokenPrediction
from penstock.models.norm import RMSNorm
from penstock.models.rope import angles
from penstock.moe.routing import Scope


class Hidden(NamedTuple):
    """What the output projection reads.

    Attributes:
        main_BSD: hidden states that predict the next token, after the final norm.
        mtp: hidden states of each multi-token prediction depth, after its norm; depth k predicts k tokens further on.
    """

    main_BSD: Tensor
    mtp: tuple[Tensor, ...]


class Decoder(nn.Module):
    """A decoder-only language model up to (not including) the output projection's product.

    The product with `head_VD` belongs to the loss, which never holds all logits at once.

    Args:
        config: the model.
        embed: token embedding.
        blocks: decoder layers.
        norm: final norm.
        head: output projection; None if it is the embedding itself.
        mtp: multi-token prediction layers.
    """

    def __init__(
        self,
        config: Model,
        *,
        embed: nn.Embedding,
        blocks: list[Block],
        norm: RMSNorm,
        head: nn.Linear | None,
        mtp: list[MultiTokenPrediction],
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.mtp = nn.ModuleList(mtp)

    @property
    def head_VD(self) -> Tensor:
        """Weights of the output projection."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None, share: float = 1.0
    ) -> Hidden:
        """Hidden states of every position.

        Args:
            tokens_BS: int64 token ids.
            positions_BS: int64 positions.
            documents_BS: int64 document ids if attention must stay inside a document, else None.
            share: part of the global batch that this micro-batch is; auxiliary losses are attached, scaled by it.
        """
        frame = self.frame(positions_BS, documents_BS, share)
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, frame)
        main_BSD = self.norm(x_BSD)
        previous_BSD, depths = main_BSD, []
        for depth, layer in enumerate(self.mtp, start=1):
            previous_BSD = layer(previous_BSD, self.embed(tokens_BS.roll(-depth, dims=1)), frame)
            depths.append(previous_BSD)
        return Hidden(main_BSD, tuple(depths))

    def frame(self, positions_BS: Tensor, documents_BS: Tensor | None, share: float) -> Frame:
        """Angles, borders and share of a micro-batch, computed once for all layers."""
        attention = self.config.attention
        cos_BSP, sin_BSP = angles(attention.rope, attention.rotary_dim, positions_BS)
        scope = Scope(sequences=positions_BS.shape[0], share=share)
        return Frame(cos_BSP, sin_BSP, attention_borders(documents_BS), scope)

    def logits(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """All logits of the main prediction, B x S x V, in the compute dtype. For tests, not for training."""
        return F.linear(self(tokens_BS, positions_BS).main_BSD, self.head_VD)
