"""Grouped-query attention, and the step that it shares with latent attention: attending among several ranks."""

from functools import partial

from torch import Tensor, nn

from penstock.config.model import GroupedQueryAttention
from penstock.models.frame import Frame
from penstock.models.linear import Linear
from penstock.models.rope import softmax_scale
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend
from penstock.parallel.kit import Kit


class GroupedQueryLayer(nn.Module):
    """Attention whose query heads share key/value heads.

    Tensor-parallel ranks hold some heads each and see every position that the context-parallel rank holds.

    Args:
        config: sizes.
        hidden_size: D.
        kit: kernels and ranks.
    """

    def __init__(self, config: GroupedQueryAttention, hidden_size: int, kit: Kit) -> None:
        super().__init__()
        self.config = config
        self.kit = kit
        self.scale = softmax_scale(config.rope, config.head_dim)
        self.query = Linear(hidden_size, config.heads * config.head_dim, kit, split="outputs")
        self.key = Linear(hidden_size, config.kv_heads * config.head_dim, kit, split="outputs")
        self.value = Linear(hidden_size, config.kv_heads * config.head_dim, kit, split="outputs")
        self.out = Linear(config.heads * config.head_dim, hidden_size, kit, split="inputs")

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """Attend. Returns B x S x D, our own positions."""
        tensor = self.kit.axes.tensor
        x_BSD = all_gather(x_BSD, tensor, dim=1)
        split = (-1, self.config.head_dim)
        rotate = self.kit.operators.rotate
        q_BSHN = rotate(self.query(x_BSD).unflatten(-1, split), frame.cos_BSP, frame.sin_BSP)
        k_BSGN = rotate(self.key(x_BSD).unflatten(-1, split), frame.cos_BSP, frame.sin_BSP)
        v_BSGN = self.value(x_BSD).unflatten(-1, split)
        function = partial(attend, kit=self.kit, scale=self.scale, allowed_BSS=frame.allowed_BSS)
        o_BSHN = self.kit.run("attention", function, q_BSHN, k_BSGN, v_BSGN)
        return reduce_scatter(self.out(o_BSHN.flatten(-2)), tensor, dim=1)
