"""Grouped-query attention."""

from torch import Tensor, nn

from penstock.config.model import GroupedQueryAttention
from penstock.kernels.attention import causal_attention
from penstock.kernels.operators import Operators
from penstock.models.frame import Frame
from penstock.models.rope import softmax_scale


class GroupedQueryLayer(nn.Module):
    """Attention whose query heads share key/value heads.

    Args:
        config: sizes.
        hidden_size: D.
        operators: kernels to run on.
    """

    def __init__(self, config: GroupedQueryAttention, hidden_size: int, operators: Operators) -> None:
        super().__init__()
        self.config = config
        self.operators = operators
        self.scale = softmax_scale(config.rope, config.head_dim)
        self.query = nn.Linear(hidden_size, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """Attend. Returns B x S x D."""
        split = (-1, self.config.head_dim)
        q_BSHN = self.operators.rotate(self.query(x_BSD).unflatten(-1, split), frame.cos_BSP, frame.sin_BSP)
        k_BSGN = self.operators.rotate(self.key(x_BSD).unflatten(-1, split), frame.cos_BSP, frame.sin_BSP)
        v_BSGN = self.value(x_BSD).unflatten(-1, split)
        o_BSHN = causal_attention(
            q_BSHN,
            k_BSGN,
            v_BSGN,
            scale=self.scale,
            allowed_BSS=frame.allowed_BSS,
            backend=self.operators.attention_backend,
        )
        out_BSD: Tensor = self.out(o_BSHN.flatten(-2))
        return out_BSD
