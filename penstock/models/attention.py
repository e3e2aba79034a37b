"""Grouped-query attention with the options of all families.

    project, add biases -> norm per head or per projection -> rotate -> norm without weights -> temperature -> attend
    -> multiply by a gate

The layer's configuration and number decide which of these run; layers of one model may differ in their window and in
whether they rotate. Masks and temperatures are computed once per pass, in `ForwardContext`.
"""

from functools import partial

import torch
from torch import Tensor

from penstock.config.model import GroupedQueryAttention, LocalAttention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.linear import Linear
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import RMSNorm, TensorParallelNorm, norm_together
from penstock.models.qk_clip import SoftmaxAttention, factors_of_rows
from penstock.models.rope import softmax_scale
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend
from penstock.parallel.layer_context import LayerContext


class GroupedQueryLayer(SoftmaxAttention):
    """Attention whose query heads share keys; tensor-parallel ranks see all positions of their context rank."""

    def __init__(
        self,
        config: GroupedQueryAttention,
        hidden_size: int,
        layer_context: LayerContext,
        *,
        layer: int,  # number in the model, from 0; layers of multi-token prediction count on
        epsilon: float,
        zero_centred_norms: bool = False,
    ) -> None:
        super().__init__(layer_context, config.heads, softmax_scale(config.rope, config.head_dim), sinks=config.sinks)
        local, is_global = config.local, config.is_global(layer)
        self.config = config
        self.epsilon = epsilon
        self.zero_centred_norms = zero_centred_norms
        self.reach = None if local is None or is_global else reach_of(local)  # None sees the whole row
        self.is_rotated = config.rotates(layer)
        # Attention temperature tuning is for layers that see the whole row.
        self.scales_queries = local is not None and is_global and local.global_temperature > 0
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        has_bias = config.bias or config.qkv_bias
        # With a gate each head has its query, then its gate.
        in_queries = 2 * queries if config.output_gate else queries
        self.query = Linear(hidden_size, in_queries, layer_context, split="outputs", bias=has_bias)
        self.key = Linear(hidden_size, keys, layer_context, split="outputs", bias=has_bias)
        self.value = Linear(hidden_size, keys, layer_context, split="outputs", bias=has_bias)
        self.out = Linear(queries, hidden_size, layer_context, split="inputs", bias=config.bias)
        self.query_norm, self.key_norm = (self._norm(width) for width in (queries, keys))

    def _norm(self, width: int) -> RMSNorm | None:
        match self.config.qk_norm:
            case "head":
                operators, is_centred = self.layer_context.operators, self.zero_centred_norms
                return RMSNorm(self.config.head_dim, self.epsilon, operators, is_zero_centred=is_centred)
            case "projection":
                is_centred = self.zero_centred_norms
                return TensorParallelNorm(width, self.epsilon, self.layer_context, is_zero_centred=is_centred)
        return None

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input; gathered positions are quantized after the collective instead."""
        return self.query.float8 is not None and self.layer_context.axes.tensor.size == 1

    @property
    def reads_high_precision(self) -> bool:
        """Whether any product or collective reads the input in high precision."""
        return not self.reads_float8 or any(linear.float8 is None for linear in (self.key, self.value))

    def forward(self, x_BSD: Tensor, context: ForwardContext, x_float8: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D of this rank's positions; `x_float8` is a quantized copy of x, if there is one."""
        tensor = self.layer_context.axes.tensor
        if tensor.size > 1:
            x_BSD = all_gather(x_BSD, tensor, dim=1)  # S / tensor -> S positions
            x_float8 = self.query.quantize_input(x_BSD)  # once, for queries, keys and values
        q, gate_BSHN = self._queries(x_BSD, x_float8)
        q_BSHN, k_BSGN = self._positioned(*self._normed(q, self.key(x_BSD, x_float8)), context)
        if self.logits is not None and self.training:
            self.logits.see(q_BSHN, k_BSGN, self.scale, context.allowed_BSS)
        v_BSGN = self.value(x_BSD, x_float8).unflatten(-1, (-1, self.config.head_dim))  # (G N) -> G x N
        o_BSHN = self.layer_context.run("attention", partial(self._attended, context=context), q_BSHN, k_BSGN, v_BSGN)
        if gate_BSHN is not None:
            o_BSHN = o_BSHN * torch.sigmoid(gate_BSHN)
        # The products of the ranks' heads are partial sums: S -> S / tensor positions, then the bias once.
        return self.out.shifted(reduce_scatter(self.out(o_BSHN.flatten(-2)), tensor, dim=1))

    def _queries(self, x_BSD: Tensor, x_float8: RowColQuantized | None) -> tuple[Tensor, Tensor | None]:
        """Queries of all heads side by side, and gates by head, if there are any."""
        q: Tensor = self.query(x_BSD, x_float8)
        if not self.config.output_gate:
            return q, None
        q_BSHN, gate_BSHN = q.unflatten(-1, (-1, 2 * self.config.head_dim)).chunk(2, dim=-1)
        return q_BSHN.flatten(-2), gate_BSHN

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys by head, after the weighted norms."""
        split = (-1, self.config.head_dim)
        query_norm, key_norm = self.query_norm, self.key_norm
        if isinstance(query_norm, TensorParallelNorm) and isinstance(key_norm, TensorParallelNorm):
            # Norms over all heads need sums of squares from every tensor rank: one exchange for both.
            q, k = norm_together(((query_norm, q), (key_norm, k)), self.layer_context.axes.tensor)
        q_BSHN, k_BSGN = q.unflatten(-1, split), k.unflatten(-1, split)  # H N -> H x N, this rank's heads
        if self.config.qk_norm == "head":
            assert query_norm is not None and key_norm is not None, "norms of heads have weights"
            q_BSHN, k_BSGN = query_norm(q_BSHN), key_norm(k_BSGN)  # over N
        return q_BSHN, k_BSGN

    def _positioned(self, q_BSHN: Tensor, k_BSGN: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries and keys after rotation, the norm without weights, and attention temperature."""
        if self.is_rotated:
            rotate = self.layer_context.operators.rotate
            q_BSHN, k_BSGN = (rotate(x, context.cos_BSP, context.sin_BSP) for x in (q_BSHN, k_BSGN))
            if self.config.qk_norm == "rotated-head":  # Llama 4: layers that do not rotate have no norm either
                norm = self.layer_context.operators.rms_norm
                q_BSHN, k_BSGN = (norm(x, x.new_ones(x.shape[-1]), self.epsilon) for x in (q_BSHN, k_BSGN))
        if self.scales_queries:
            assert context.query_scale_S is not None, "the context has the attention temperature"
            q_BSHN = (q_BSHN * context.query_scale_S[:, None, None]).to(q_BSHN.dtype)  # float32 product
        return q_BSHN, k_BSGN

    def _attended(self, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGN: Tensor, context: ForwardContext) -> Tensor:
        # Read the parameter when this runs: FSDP2 gathers it to another address before recomputation.
        return attend(
            q_BSHN,
            k_BSGN,
            v_BSGN,
            self.layer_context,
            scale=self.scale,
            allowed_BSS=context.allowed_BSS,
            nears=(() if self.reach is None else context.nears) or context.bounds,
            sinks_H=self.sinks_H,
        )

    def clip_factors(self, factor_H: Tensor) -> dict[str, Tensor]:
        config, group = self.config, self.config.heads // self.config.kv_heads
        factor_G = factor_H.view(-1, group).amin(1).sqrt()
        factor_H = factor_G.repeat_interleave(group)
        gates = ((torch.ones_like(factor_H), config.head_dim),) if config.output_gate else ()
        queries = factors_of_rows((factor_H, config.head_dim), *gates)
        factors = {"query": queries, "key": factors_of_rows((factor_G, config.head_dim))}
        kinds = ("weight", "bias") if self.query.bias is not None else ("weight",)
        return {f"{name}.{kind}": rows for name, rows in factors.items() for kind in kinds}


def reach_of(local: LocalAttention) -> AttentionWindow:
    return AttentionWindow(kind=local.kind, size=local.size)


def query_scale(local: LocalAttention, positions_S: Tensor) -> Tensor:
    """Attention temperature of queries in global layers (arXiv 2501.19399), float32, by position in the row."""
    steps_S = ((positions_S.float() + 1) / local.temperature_floor).floor()  # + 1: the formula counts from 1
    return steps_S.log1p() * local.global_temperature + 1
