"""Grouped-query attention, with what families do to queries and keys on their way.

    project, add biases -> norm over a head or over all heads -> rotate -> norm without weights -> grow -> attend

Each is there or not by the layer's configuration and number. Layers of one model may differ in two things: how far back
they look (`reach`), and whether they know positions. Masks and growth are the frame's, made once for all layers.
"""

from functools import partial

import torch
from torch import Tensor, nn

from penstock.config.model import GroupedQueryAttention, LocalAttention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.linear import Linear, cut_over
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import RMSNorm, TensorParallelNorm, norm_together
from penstock.models.rope import softmax_scale
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend, attend_locally
from penstock.parallel.layer_context import LayerContext


class GroupedQueryLayer(nn.Module):
    """Attention whose query heads share key/value heads.

    Tensor-parallel ranks hold some heads each and see every position that the context-parallel rank holds.

    Args:
        config: sizes.
        hidden_size: D.
        layer_context: kernels and ranks.
        layer: number in the model, from 0; layers of multi-token prediction count on.
        epsilon: of norms.

    Attributes:
        reach: how far back it looks; None for all of the row.
        is_tempered: its queries grow with their position in the row.
        sinks_H: a logit of each of our heads that takes part in the softmax; None without.
    """

    def __init__(
        self,
        config: GroupedQueryAttention,
        hidden_size: int,
        layer_context: LayerContext,
        *,
        layer: int,
        epsilon: float,
    ) -> None:
        super().__init__()
        local, is_global = config.local, config.is_global(layer)
        self.config = config
        self.layer_context = layer_context
        self.epsilon = epsilon
        self.scale = softmax_scale(config.rope, config.head_dim)
        self.reach = None if local is None or is_global else reach_of(local)
        self.is_rotated = config.rotates(layer)
        self.is_tempered = local is not None and is_global and local.global_temperature > 0
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = Linear(hidden_size, queries, layer_context, split="outputs", bias=config.bias)
        self.key = Linear(hidden_size, keys, layer_context, split="outputs", bias=config.bias)
        self.value = Linear(hidden_size, keys, layer_context, split="outputs", bias=config.bias)
        self.out = Linear(queries, hidden_size, layer_context, split="inputs", bias=config.bias)
        self.query_norm, self.key_norm = (self._norm(width) for width in (queries, keys))
        tensor = layer_context.axes.tensor
        self.cuts = {"sinks_H": cut_over(tensor, dim=0)}
        self.sinks_H = nn.Parameter(torch.empty(config.heads // tensor.size)) if config.sinks else None

    def _norm(self, width: int) -> RMSNorm | None:
        """The norm with weights of queries or keys, if they have one."""
        if self.config.qk_norm == "head":
            return RMSNorm(self.config.head_dim, self.epsilon, self.layer_context.operators)
        return (
            TensorParallelNorm(width, self.epsilon, self.layer_context) if self.config.qk_norm == "projection" else None
        )

    @property
    def reads_ready(self) -> bool:
        """Whether products read what comes in in 8 bits; what ranks gather they quantize behind that."""
        return self.query.float8 is not None and self.layer_context.axes.tensor.size == 1

    @property
    def reads_plain(self) -> bool:
        """Whether something reads it in 16 bits."""
        return not self.reads_ready or any(one.float8 is None for one in (self.key, self.value))

    def forward(self, x_BSD: Tensor, frame: ForwardContext, ready: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D, our own positions.

        Args:
            x_BSD: our own positions.
            frame: the micro-batch.
            ready: x in 8 bits, if it is there.
        """
        tensor = self.layer_context.axes.tensor
        if tensor.size > 1:
            x_BSD = all_gather(x_BSD, tensor, dim=1)
            ready = self.query.quantize_input(x_BSD)
        q_BSHN, k_BSGN = self._positioned(*self._projected(x_BSD, ready), frame)
        v_BSGN = self.value(x_BSD, ready).unflatten(-1, (-1, self.config.head_dim))
        o_BSHN = self.layer_context.run("attention", partial(self._attended, frame=frame), q_BSHN, k_BSGN, v_BSGN)
        return self.out.shifted(reduce_scatter(self.out(o_BSHN.flatten(-2)), tensor, dim=1))

    def _projected(self, x_BSD: Tensor, ready: RowColQuantized | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys by head, normed if they are so before they are rotated."""
        q, k, split = self.query(x_BSD, ready), self.key(x_BSD, ready), (-1, self.config.head_dim)
        query_norm, key_norm = self.query_norm, self.key_norm
        if isinstance(query_norm, TensorParallelNorm) and isinstance(key_norm, TensorParallelNorm):
            q, k = norm_together(((query_norm, q), (key_norm, k)), self.layer_context.axes.tensor)
        q_BSHN, k_BSGN = q.unflatten(-1, split), k.unflatten(-1, split)
        if self.config.qk_norm == "head":
            assert query_norm is not None and key_norm is not None, "norms of heads have weights"
            q_BSHN, k_BSGN = query_norm(q_BSHN), key_norm(k_BSGN)
        return q_BSHN, k_BSGN

    def _positioned(self, q_BSHN: Tensor, k_BSGN: Tensor, frame: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries and keys that know where they stand, as far as they do in this layer."""
        if self.is_rotated:
            rotate = self.layer_context.operators.rotate
            q_BSHN, k_BSGN = (rotate(x, frame.cos_BSP, frame.sin_BSP) for x in (q_BSHN, k_BSGN))
            if self.config.qk_norm == "rotated-head":
                q_BSHN, k_BSGN = self._plainly_normed(q_BSHN), self._plainly_normed(k_BSGN)
        if self.is_tempered:
            assert frame.tempered_S is not None, "a frame says how queries grow"
            q_BSHN = (q_BSHN * frame.tempered_S[:, None, None]).to(q_BSHN.dtype)
        return q_BSHN, k_BSGN

    def _plainly_normed(self, x_BSHN: Tensor) -> Tensor:
        """The norm of each head without weights."""
        return self.layer_context.operators.rms_norm(x_BSHN, x_BSHN.new_ones(x_BSHN.shape[-1]), self.epsilon)

    def _attended(self, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGN: Tensor, frame: ForwardContext) -> Tensor:
        """Core attention. Sinks are read here, because weights that ranks divide are elsewhere when it runs again."""
        sinks_H = self.sinks_H
        heads, layer_context, scale = (q_BSHN, k_BSGN, v_BSGN), self.layer_context, self.scale
        if self.reach is None or not frame.nears:
            return attend(*heads, layer_context, scale=scale, allowed_BSS=frame.allowed_BSS, sinks_H=sinks_H)
        return attend_locally(*heads, layer_context, scale=scale, nears=frame.nears, sinks_H=sinks_H)


def reach_of(local: LocalAttention) -> AttentionWindow:
    """How far back layers look that see a part of the row."""
    return AttentionWindow(kind=local.kind, size=local.size)


def temperature(local: LocalAttention, places_S: Tensor) -> Tensor:
    """What queries grow by in layers that see the whole row (arXiv 2501.19399), float32.

    Args:
        local: reads `global_temperature` and `temperature_floor`.
        places_S: where in the row they stand, from 0.
    """
    steps_S = ((places_S.float() + 1) / local.temperature_floor).floor()
    return steps_S.log1p() * local.global_temperature + 1
