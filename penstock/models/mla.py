"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are expanded from one narrow latent; position lives in a separate part of the head, whose key all heads
share. Queries may come from a latent too (V2, V3) or straight from the hidden states (V2-Lite).
"""

from functools import partial

import torch
from torch import Tensor, nn

from penstock.config.model import LatentAttention
from penstock.kernels.float8.gradient_side_channel import GradientSideChannel, HandedHeads, obstacle
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.linear import Linear
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import RMSNorm
from penstock.models.rope import softmax_scale
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend, attend_to_row, gather_positions
from penstock.parallel.layer_context import LayerContext

LATENT_NORM_EPSILON = 1e-6
"""The published models fix it for the norms of the latents, whatever the model's own epsilon is."""


class LatentQuery(nn.Module):
    """Queries through a latent: down, norm, up. Tensor-parallel ranks exchange the narrow latent.

    Args:
        config: sizes.
        hidden_size: D.
        layer_context: kernels and ranks.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self.axis = layer_context.axes.tensor
        self.down = Linear(hidden_size, config.q_lora_rank, layer_context)
        self.norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPSILON, layer_context.operators)
        self.up = Linear(config.q_lora_rank, config.heads * config.head_dim, layer_context, split="outputs")

    @property
    def reads_plain(self) -> bool:
        """Whether hidden states are read in 16 bits."""
        return self.down.float8 is None

    @property
    def is_in_8_bits(self) -> bool:
        """Whether the product that gives queries is."""
        return self.up.float8 is not None

    def forward(
        self, x_BSD: Tensor, ready: RowColQuantized | None = None, handed: GradientSideChannel | None = None
    ) -> Tensor:
        """The latent of every position of the tensor-parallel ranks, from our own (`ready`: in 8 bits)."""
        return all_gather(self.norm(self.down(x_BSD, ready)), self.axis, dim=1)

    def expand(self, latent_BSC: Tensor, handed: GradientSideChannel | None = None) -> Tensor:
        """The queries of our heads, B x S x (H N), whose gradient may be `handed` over."""
        q: Tensor = self.up(latent_BSC, handed=handed)
        return q


class DirectQuery(Linear):
    """Queries straight from the hidden states, which tensor-parallel ranks exchange.

    Args:
        config: sizes.
        hidden_size: D.
        layer_context: kernels and ranks.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(hidden_size, config.heads * config.head_dim, layer_context, split="outputs")
        self.axis = layer_context.axes.tensor

    @property
    def reads_plain(self) -> bool:
        """Whether hidden states are read in 16 bits, as they travel."""
        return self.float8 is None or self.axis.size > 1

    @property
    def is_in_8_bits(self) -> bool:
        """Whether the product that gives queries is."""
        return self.float8 is not None

    def forward(
        self, x_BSD: Tensor, ready: RowColQuantized | None = None, handed: GradientSideChannel | None = None
    ) -> Tensor:
        """The queries of our heads at every position of the tensor-parallel ranks, from our own positions."""
        ready = ready if self.axis.size == 1 else None
        return super().forward(all_gather(x_BSD, self.axis, dim=1), ready, handed)

    def expand(self, q: Tensor, handed: GradientSideChannel | None = None) -> Tensor:
        """Nothing is left to do."""
        return q


class LatentLayer(nn.Module):
    """Multi-head latent attention.

    Tensor-parallel ranks hold some heads each; what they exchange is the latent, which is narrower than hidden states,
    keys or values. Context-parallel ranks that gather keys and values gather the latent too, and expand it at every
    position: some more products for far fewer bytes.

    Args:
        config: sizes.
        hidden_size: D.
        layer_context: kernels and ranks.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.layer_context = layer_context
        self.heads = config.heads // layer_context.axes.tensor.size
        self.scale = softmax_scale(config.rope, config.head_dim)
        self.query = (LatentQuery if config.q_lora_rank else DirectQuery)(config, hidden_size, layer_context)
        self.kv_down = Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, layer_context)
        self.kv_norm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPSILON, layer_context.operators)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.kv_up = Linear(config.kv_lora_rank, config.heads * per_head, layer_context, split="outputs")
        self.out = Linear(config.heads * config.v_head_dim, hidden_size, layer_context, split="inputs")

    @property
    def reads_ready(self) -> bool:
        """Whether products read what comes in in 8 bits."""
        return self.kv_down.float8 is not None

    @property
    def reads_plain(self) -> bool:
        """Whether something reads it in 16 bits."""
        return self.kv_down.float8 is None or self.query.reads_plain

    def forward(self, x_BSD: Tensor, frame: ForwardContext, ready: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D, our own positions.

        Args:
            x_BSD: our own positions.
            frame: the micro-batch.
            ready: x in 8 bits, if it is there.
        """
        config, tensor, run = self.config, self.layer_context.axes.tensor, self.layer_context.run
        handed = self._handed()
        query = self.query(x_BSD, ready, handed.q)
        latent_BSC, k_rotary_BSP = self.kv_down(x_BSD, ready).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        latent_BSC = run("norm", self.kv_norm, latent_BSC)
        if tensor.size > 1:
            latent_BSC, k_rotary_BSP = self._gathered(latent_BSC, k_rotary_BSP)
        heads = self._heads_of_row if self.is_by_row else partial(self._heads, handed=handed)
        attend_by = attend_to_row if self.is_by_row else attend
        q_BSHN, k_BSHN, v_BSHM = run("latent-up", heads, query, latent_BSC, k_rotary_BSP, frame)
        function = partial(attend_by, layer_context=self.layer_context, scale=self.scale, allowed_BSS=frame.allowed_BSS)
        o_BSHM = run("attention", function, q_BSHN, k_BSHN, v_BSHM)
        return reduce_scatter(self.out(o_BSHM.flatten(-2)), tensor, dim=1)

    @property
    def is_by_row(self) -> bool:
        """Whether context-parallel ranks hold keys and values of the whole row."""
        return self.layer_context.axes.context.size > 1 and self.layer_context.context_method == "all-gather"

    def _handed(self) -> HandedHeads:
        """Where the heads hand their gradients over in 8 bits to the products before them."""
        config, operators, recipe = self.config, self.layer_context.float8.operators, self.layer_context.float8.dense
        widths = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        are_in_8_bits = self.query.is_in_8_bits and self.kv_up.float8 is not None
        have_kernel = (
            self.layer_context.operators.mla_heads_is_fused and operators.mla_heads is not None and not self.is_by_row
        )
        if recipe is None or not are_in_8_bits or not have_kernel or obstacle(recipe, self.heads, *widths) is not None:
            return HandedHeads()
        return HandedHeads(GradientSideChannel(), GradientSideChannel())

    def _gathered(self, latent_BSC: Tensor, k_rotary_BSP: Tensor) -> tuple[Tensor, Tensor]:
        """The same at the positions of all tensor-parallel ranks."""
        joined_BSC = all_gather(torch.cat((latent_BSC, k_rotary_BSP), dim=-1), self.layer_context.axes.tensor, dim=1)
        latent_BSC, k_rotary_BSP = joined_BSC.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return latent_BSC, k_rotary_BSP

    def _heads(
        self, query: Tensor, latent_BSC: Tensor, k_rotary_BSP: Tensor, frame: ForwardContext, handed: HandedHeads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, keys and values at the positions that this rank holds."""
        float8 = self.layer_context.float8
        q_BSHN = self.query.expand(query, handed.q).unflatten(-1, (self.heads, -1))
        kv_BSHN = self.kv_up(latent_BSC, handed=handed.kv).unflatten(-1, (self.heads, -1))
        inputs = q_BSHN, kv_BSHN, k_rotary_BSP, frame.cos_BSP, frame.sin_BSP
        if handed.q is None or float8.operators.mla_heads is None:
            return self.layer_context.operators.mla_heads(*inputs)
        return float8.operators.mla_heads(*inputs, handed, float8.gradient)

    def _heads_of_row(
        self, query: Tensor, latent_BSC: Tensor, k_rotary_BSP: Tensor, frame: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries at the positions that this rank holds, keys and values at every position of the row."""
        config, rotate = self.config, self.layer_context.operators.rotate
        cos_BSP, sin_BSP = frame.cos_BSP, frame.sin_BSP
        q_BSHN = self.query.expand(query).unflatten(-1, (self.heads, -1))
        q_plain, q_rotary = q_BSHN.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        q_BSHN = torch.cat((q_plain, rotate(q_rotary, cos_BSP, sin_BSP)), dim=-1)
        k_rotary_BSP = rotate(k_rotary_BSP[:, :, None], cos_BSP, sin_BSP)[:, :, 0]
        joined_BSC = gather_positions(torch.cat((latent_BSC, k_rotary_BSP), dim=-1), self.layer_context.axes.context)
        latent_BSC, k_rotary_BSP = joined_BSC.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        kv_BSHN = self.kv_up(latent_BSC).unflatten(-1, (self.heads, -1))
        k_plain, v_BSHM = kv_BSHN.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k_BSHN = torch.cat((k_plain, k_rotary_BSP[:, :, None].expand(-1, -1, self.heads, -1)), dim=-1)
        return q_BSHN, k_BSHN, v_BSHM
