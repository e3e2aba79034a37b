"""One decoder layer: attention and a feed-forward network, each behind a norm and around a residual sum."""

from torch import Tensor, nn

from penstock.models.attention import GroupedQueryLayer
from penstock.models.ffn import FeedForward
from penstock.models.frame import Frame
from penstock.models.mla import LatentLayer
from penstock.models.norm import RMSNorm
from penstock.moe.layer import MoE


class Block(nn.Module):
    """A pre-norm decoder layer.

    Args:
        attention_norm: norm before attention.
        attention: grouped-query or latent attention.
        ffn_norm: norm before the feed-forward network.
        ffn: dense network or mixture of experts.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: GroupedQueryLayer | LatentLayer,
        ffn_norm: RMSNorm,
        ffn: FeedForward | MoE,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """Returns the residual stream after the layer, B x S x D."""
        attended_BSD = self.attention(self.attention_norm(x_BSD), frame)
        normed_BSD, x_BSD = self.ffn_norm.add(attended_BSD, x_BSD)
        x_TD = normed_BSD.flatten(0, 1)
        y_TD = self.ffn(x_TD, frame.scope) if isinstance(self.ffn, MoE) else self.ffn(x_TD)
        return x_BSD + y_TD.view_as(x_BSD)
