"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are expanded from one narrow latent; position lives in a separate part of the head, whose key all heads
share. Queries may come from a latent too (V2, V3) or straight from the hidden states (V2-Lite).
"""

from torch import Tensor, nn

from penstock.config.model import LatentAttention
from penstock.kernels.attention import causal_attention
from penstock.kernels.operators import Operators
from penstock.models.frame import Frame
from penstock.models.norm import RMSNorm
from penstock.models.rope import softmax_scale

LATENT_NORM_EPSILON = 1e-6
"""The published models fix it for the norms of the latents, whatever the model's own epsilon is."""


class LatentQuery(nn.Module):
    """Queries through a latent: down, norm, up.

    Args:
        config: sizes.
        hidden_size: D.
        operators: kernels to run on.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, operators: Operators) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, config.q_latent, bias=False)
        self.norm = RMSNorm(config.q_latent, LATENT_NORM_EPSILON, operators)
        self.up = nn.Linear(config.q_latent, config.heads * config.head_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Project to all query heads. Returns B x S x (H N)."""
        q: Tensor = self.up(self.norm(self.down(x_BSD)))
        return q


class LatentLayer(nn.Module):
    """Multi-head latent attention.

    Args:
        config: sizes.
        hidden_size: D.
        operators: kernels to run on.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, operators: Operators) -> None:
        super().__init__()
        self.config = config
        self.operators = operators
        self.scale = softmax_scale(config.rope, config.head_dim)
        self.query: nn.Module
        if config.q_latent:
            self.query = LatentQuery(config, hidden_size, operators)
        else:
            self.query = nn.Linear(hidden_size, config.heads * config.head_dim, bias=False)
        self.kv_down = nn.Linear(hidden_size, config.kv_latent + config.rotary_head_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_latent, LATENT_NORM_EPSILON, operators)
        self.kv_up = nn.Linear(
            config.kv_latent, config.heads * (config.plain_head_dim + config.value_head_dim), bias=False
        )
        self.out = nn.Linear(config.heads * config.value_head_dim, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, frame: Frame) -> Tensor:
        """Attend. Returns B x S x D."""
        config = self.config
        q_BSHN = self.query(x_BSD).unflatten(-1, (config.heads, -1))
        latent_BSC, k_rotary_BSP = self.kv_down(x_BSD).split([config.kv_latent, config.rotary_head_dim], dim=-1)
        kv_BSHN = self.kv_up(self.kv_norm(latent_BSC)).unflatten(-1, (config.heads, -1))
        q_BSHN, k_BSHN, v_BSHM = self.operators.mla_heads(q_BSHN, kv_BSHN, k_rotary_BSP, frame.cos_BSP, frame.sin_BSP)
        o_BSHM = causal_attention(
            q_BSHN,
            k_BSHN,
            v_BSHM,
            scale=self.scale,
            allowed_BSS=frame.allowed_BSS,
            backend=self.operators.attention_backend,
        )
        out_BSD: Tensor = self.out(o_BSHM.flatten(-2))
        return out_BSD
