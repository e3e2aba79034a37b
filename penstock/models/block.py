"""One decoder layer: attention and a feed-forward network, each behind a norm and around a residual sum."""

from torch import Tensor, nn

from penstock.models.attention import GroupedQueryLayer
from penstock.models.ffn import FeedForward
from penstock.models.frame import Frame
from penstock.models.mla import LatentLayer
from penstock.models.norm import RMSNorm
from penstock.moe.layer import MoE
from penstock.parallel.kit import Kit


class Block(nn.Module):
    """A pre-norm decoder layer.

    Args:
        attention_norm: norm before attention.
        attention: grouped-query or latent attention.
        ffn_norm: norm before the feed-forward network.
        ffn: dense network or mixture of experts.
        kit: what becomes of activations.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: GroupedQueryLayer | LatentLayer,
        ffn_norm: RMSNorm,
        ffn: FeedForward | MoE,
        kit: Kit,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.kit = kit

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """Returns the residual stream after the layer, B x S x D."""
        with self.kit.recompute.discarding():
            return self.kit.run("layer", self._forward, x_BSD, frame)

    def _forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        run = self.kit.run
        attended_BSD = self.attention(run("norm", self.attention_norm, x_BSD), frame)
        if self.kit.recompute.recomputes("norm"):
            # Made again from the sum alone; the fused form would keep both of its terms.
            x_BSD = attended_BSD + x_BSD
            normed_BSD = run("norm", self.ffn_norm, x_BSD)
        else:
            normed_BSD, x_BSD = self.ffn_norm.add(attended_BSD, x_BSD)
        x_TD = normed_BSD.flatten(0, 1)
        if isinstance(self.ffn, MoE):
            y_TD = run("moe", self.ffn, x_TD, frame.scope)
        else:
            y_TD = run("dense", self.ffn, x_TD)
        return x_BSD + y_TD.view_as(x_BSD)
