"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), and the indexer of its sparse form.

Keys and values are expanded from one narrow latent; position is in a separate part of the head, whose key all heads
share. Queries are expanded from a latent too (V2, V3) or projected from the hidden states (V2-Lite).
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.config.model import CompressedAttention, Indexer, LatentAttention
from penstock.kernels.float8.operators import NO_FLOAT8
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.sparse_attention import (
    IndexLoss,
    attach_dense_loss,
    attach_loss,
    attention_mass,
    best_keys,
    index_loss,
    index_scores,
    seen_keys,
)
from penstock.models.attention import SoftmaxAttention, factors_of_rows
from penstock.models.linear import Linear
from penstock.models.model_inputs import ForwardContext, softmax_scale
from penstock.models.norm import LayerNorm, RMSNorm
from penstock.parallel.async_transfer import deferrable
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend, attend_to_row, gather_positions
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import remembered

# The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556 section 2.1).
#
# Queries come from the latent of attention's queries, keys and weights of heads from the hidden states; both inputs are
# detached. The definition's Hadamard transform does not change products, and 8-bit scores are left to kernels.


NORM_EPSILON = 1e-6


class Chosen(NamedTuple):
    """Scores of the indexer, and the keys that attention reads."""

    scores_BSS: Tensor  # float32, differentiable
    keys_BSS: Tensor  # bool


def gathers_keys(config: Indexer, layer_context: LayerContext) -> bool:
    """Whether kernels gather the chosen keys of rows that are longer than their number."""
    return config.stage == "sparse" and layer_context.operators.sparse_attention is not None


def reads_all_keys(config: Indexer, positions: int) -> bool:
    """Whether attention is dense: in the dense stage, and where a row has no more keys than may be chosen."""
    return config.stage == "dense" or positions <= config.index_topk


class LightningIndexer(nn.Module):
    """Chooses the keys of each query, and learns from attention which ones it should have chosen."""

    def __init__(self, config: Indexer, hidden_size: int, q_lora_rank: int, layer_context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.operators = layer_context.operators
        plain = replace(layer_context, float8=NO_FLOAT8)
        self.query = Linear(q_lora_rank, config.index_n_heads * config.index_head_dim, plain)
        self.key = Linear(hidden_size, config.index_head_dim, plain)
        self.key_norm = LayerNorm(config.index_head_dim, NORM_EPSILON, layer_context.operators)
        self.weights = Linear(hidden_size, config.index_n_heads, plain)

    def forward(self, x_BSD: Tensor, latent_BSC: Tensor, context: ForwardContext) -> IndexLoss:
        """Queries, keys and weights of heads, from hidden states and the queries' latent; the factor is of the loss."""
        config, rotate = self.config, self.operators.rotate
        x_BSD, latent_BSC = x_BSD.detach(), latent_BSC.detach()
        q_BSGN = rotate(
            self.query(latent_BSC).unflatten(-1, (config.index_n_heads, -1)), context.cos_BSP, context.sin_BSP
        )
        k_BSN = rotate(self.key_norm(self.key(x_BSD))[:, :, None], context.cos_BSP, context.sin_BSP)[:, :, 0]
        scale = (config.index_n_heads * config.index_head_dim) ** -0.5
        learns = self.training and torch.is_grad_enabled()
        factor = config.loss_coef * context.scope.share / x_BSD[..., 0].numel() if learns else 0.0
        return IndexLoss(q_BSGN, k_BSN, self.weights(x_BSD).float() * scale, factor)

    def choose(self, index: IndexLoss, context: ForwardContext) -> Chosen:
        """Scores of all keys and the chosen ones, by the definition."""
        scores_BSS = index_scores(*index[:3])
        allowed_BSS = seen_keys(context.allowed_BSS, scores_BSS.shape[1], scores_BSS.device)
        return Chosen(scores_BSS, best_keys(scores_BSS, allowed_BSS, self.config.index_topk))

    def taught(
        self,
        o_BSHM: Tensor,
        index: IndexLoss,
        chosen: Chosen | None,
        q_BSHN: Tensor,
        k_BSHN: Tensor,
        context: ForwardContext,
        scale: float,
    ) -> Tensor:
        """The output of attention unchanged, with the indexer's loss attached, over the chosen keys or all of them."""
        if not index.factor:
            return o_BSHM
        if chosen is None:
            assert context.first_BS is not None, "a model with an indexer has it"
            return attach_dense_loss(o_BSHM, index, q_BSHN, k_BSHN, context.first_BS, scale)
        mass_BSS = attention_mass(q_BSHN.detach(), k_BSHN.detach(), chosen.keys_BSS, scale)
        return attach_loss(o_BSHM, index_loss(chosen.scores_BSS, mass_BSS, chosen.keys_BSS) * index.factor)


LATENT_NORM_EPSILON = 1e-6
"""The published models use it for the norms of the latents, independent of the model's `rms_norm_eps`."""


class LatentQuery(nn.Module):
    """Queries through a latent: down, norm, up. Tensor-parallel ranks exchange the narrow latent."""

    def __init__(
        self,
        config: LatentAttention | CompressedAttention,
        hidden_size: int,
        layer_context: LayerContext,
        epsilon: float = LATENT_NORM_EPSILON,
    ) -> None:
        super().__init__()
        self.axis = layer_context.axes.tensor
        self.down = Linear(hidden_size, config.q_lora_rank, layer_context)
        self.norm = RMSNorm(config.q_lora_rank, epsilon, layer_context.operators)
        self.up = Linear(config.q_lora_rank, config.heads * config.head_dim, layer_context, split="outputs")
        self.reads_high_precision = self.down.float8 is None  # reads hidden states in high precision

    def forward(self, x_BSD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """The latent of every position of the tensor-parallel ranks, from this rank's positions."""
        return all_gather(self.norm(self.down(x_BSD, x_float8)), self.axis, dim=1)  # S / tensor -> S positions

    def expand(self, latent_BSC: Tensor) -> Tensor:
        """The queries of this rank's heads, B x S x (H N)."""
        q: Tensor = self.up(latent_BSC)
        return q


class DirectQuery(Linear):
    """Queries projected from the hidden states, which tensor-parallel ranks exchange."""

    def __init__(self, config: LatentAttention, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(hidden_size, config.heads * config.head_dim, layer_context, split="outputs")
        self.axis = layer_context.axes.tensor
        self.reads_high_precision = self.float8 is None or self.axis.size > 1  # for the product or the collective

    def forward(self, x_BSD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """The queries of this rank's heads at every position of the tensor-parallel ranks."""
        x_float8 = x_float8 if self.axis.size == 1 else None  # has this rank's positions only
        return super().forward(all_gather(x_BSD, self.axis, dim=1), x_float8)

    def expand(self, q: Tensor) -> Tensor:
        """Returns q: `forward` gave the queries already."""
        return q


class LatentLayer(SoftmaxAttention):
    """Multi-head latent attention.

    Tensor-parallel ranks exchange the latent, which is narrower than hidden states, keys or values. Context-parallel
    ranks with the all-gather method gather it too and expand it at every position of the row: more products for far
    fewer bytes.
    """

    def __init__(self, config: LatentAttention, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(layer_context, config.heads, softmax_scale(config.rope, config.head_dim), sinks=config.sinks)
        self.config = config
        self.query = (LatentQuery if config.q_lora_rank else DirectQuery)(config, hidden_size, layer_context)
        self.kv_down = Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, layer_context)
        self.kv_norm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPSILON, layer_context.operators)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        indexer, rank = config.indexer, config.q_lora_rank
        self.absorbs = indexer is not None and gathers_keys(indexer, layer_context)
        # Absorbed into queries and outputs, the matrix is no operand of a product in 8 bits.
        up_context = replace(layer_context, float8=NO_FLOAT8) if self.absorbs else layer_context
        self.kv_up = Linear(config.kv_lora_rank, config.heads * per_head, up_context, split="outputs")
        self.out = Linear(config.heads * config.v_head_dim, hidden_size, layer_context, split="inputs")
        self.indexer = None if indexer is None else LightningIndexer(indexer, hidden_size, rank, layer_context)

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input."""
        return self.kv_down.float8 is not None

    @property
    def reads_high_precision(self) -> bool:
        """Whether any product or collective reads the input in high precision."""
        return self.kv_down.float8 is None or self.query.reads_high_precision or self.indexer is not None

    @property
    def gathers_row(self) -> bool:
        """Whether context-parallel ranks expand keys and values of the whole row."""
        return self.layer_context.axes.context.size > 1 and self.layer_context.context_method == "all-gather"

    def forward(self, x_BSD: Tensor, context: ForwardContext, x_float8: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D of this rank's positions; `x_float8` is a quantized copy of x, if there is one."""
        tensor, run = self.layer_context.axes.tensor, self.layer_context.run
        query = self.query(x_BSD, x_float8)
        latent_BSC, k_rope_BSP = self._split_latent(self.kv_down(x_BSD, x_float8))
        latent_BSC = run("norm", self.kv_norm, latent_BSC)  # the rotary key has no norm
        if tensor.size > 1:
            # One all-gather for both: S / tensor -> S positions.
            joined_BSC = all_gather(torch.cat((latent_BSC, k_rope_BSP), dim=-1), tensor, dim=1)
            latent_BSC, k_rope_BSP = self._split_latent(joined_BSC)
        positions = x_BSD.shape[1]
        if self.absorbs and self.indexer is not None and not reads_all_keys(self.indexer.config, positions):
            # No rank shares heads or positions.
            return self.out(self._absorbed(x_BSD, query, latent_BSC, k_rope_BSP, context).flatten(-2))
        heads = self._heads_of_row if self.gathers_row else self._heads
        q_BSHN, k_BSHN, v_BSHM = run("latent-up", heads, query, latent_BSC, k_rope_BSP, context)
        if self.logits is not None and self.training:
            self.logits.see(q_BSHN, k_BSHN, self.scale, context.allowed_BSS)
        if self.indexer is not None:
            o_BSHM = run("attention", partial(self._sparse, context=context), x_BSD, query, q_BSHN, k_BSHN, v_BSHM)
            return self.out(o_BSHM.flatten(-2))  # no rank shares heads or positions
        attend_by = partial(
            attend_to_row if self.gathers_row else attend,
            layer_context=self.layer_context,
            scale=self.scale,
            allowed_BSS=context.allowed_BSS,
            nears=context.bounds,
            sinks_H=self.sinks_H,
        )
        o_BSHM = run("attention", attend_by, q_BSHN, k_BSHN, v_BSHM)
        return reduce_scatter(self.out(o_BSHM.flatten(-2)), tensor, dim=1)  # sum over heads; S -> S / tensor

    def _sparse(
        self, x_BSD: Tensor, query: Tensor, q_BSHN: Tensor, k_BSHN: Tensor, v_BSHM: Tensor, *, context: ForwardContext
    ) -> Tensor:
        """Attention over the keys that the indexer chooses, with the loss that trains it."""
        assert self.indexer is not None, "dense attention has no indexer"
        index = self.indexer(x_BSD, query, context)
        is_dense = reads_all_keys(self.indexer.config, x_BSD.shape[1])
        chosen = None if is_dense else self.indexer.choose(index, context)
        keys_BSS, bounds = (context.allowed_BSS, context.bounds) if chosen is None else (chosen.keys_BSS, ())
        o_BSHM = attend(
            q_BSHN, k_BSHN, v_BSHM, self.layer_context, scale=self.scale, allowed_BSS=keys_BSS, nears=bounds
        )
        return self.indexer.taught(o_BSHM, index, chosen, q_BSHN, k_BSHN, context, self.scale)

    def _absorbed(
        self, x_BSD: Tensor, query: Tensor, latent_BSC: Tensor, k_rope_BSP: Tensor, context: ForwardContext
    ) -> Tensor:
        """Attention over the chosen rows of the latent, from which neither keys nor values are expanded."""
        run = self.layer_context.run
        queries = run("latent-up", partial(self._latent_queries, context=context), query, k_rope_BSP)
        o_HBSC = run("attention", partial(self._over_chosen, context=context), x_BSD, query, latent_BSC, *queries)
        return deferrable(self._expand_values, (o_HBSC,), (self.kv_up.weight,), self.layer_context.weight_grads)

    def _latent_queries(
        self, query: Tensor, k_rope_BSP: Tensor, *, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries in columns of the latent, and the rotated parts of queries and keys."""
        config, rotate = self.config, self.layer_context.operators.rotate
        q_BSHN = self._queries(query, context)
        q_nope, q_rope = q_BSHN.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        q_HBSC = deferrable(self._absorb_keys, (q_nope,), (self.kv_up.weight,), self.layer_context.weight_grads)
        q_rope_BSHP = rotate(q_rope, context.cos_BSP, context.sin_BSP)
        return q_HBSC, q_rope_BSHP, rotate(k_rope_BSP[:, :, None], context.cos_BSP, context.sin_BSP)[:, :, 0]

    def _over_chosen(
        self,
        x_BSD: Tensor,
        query: Tensor,
        latent_BSC: Tensor,
        q_HBSC: Tensor,
        q_rope_BSHP: Tensor,
        k_rope_BSP: Tensor,
        *,
        context: ForwardContext,
    ) -> Tensor:
        """The choice of the indexer, attention over it, and the loss that trains the indexer."""
        operators, first_BS = self.layer_context.operators, context.first_BS
        assert self.indexer is not None, "dense attention has no indexer"
        assert operators.choose_keys is not None and operators.sparse_attention is not None, "`absorbs` says so"
        index = self.indexer(x_BSD, query, context)
        choose = partial(operators.choose_keys, *index[:3], first_BS, self.indexer.config.index_topk)
        return operators.sparse_attention(
            *(q_HBSC, q_rope_BSHP, latent_BSC, k_rope_BSP, remembered(choose), first_BS),
            scale=self.scale,
            index=index if index.factor else None,
        )

    def _absorb_keys(self, q_BSHN: Tensor, kv_up: Tensor) -> Tensor:
        """Queries times the part of the up projection that gives keys: heads x B x S x C."""
        up_HNC = kv_up.unflatten(0, (self.heads, -1))[:, : self.config.qk_nope_head_dim]
        return (q_BSHN.flatten(0, 1).transpose(0, 1) @ up_HNC).unflatten(1, q_BSHN.shape[:2])

    def _expand_values(self, o_HBSC: Tensor, kv_up: Tensor) -> Tensor:
        """Outputs in columns of the latent times the part of the up projection that gives values: B x S x H x M."""
        up_HMC = kv_up.unflatten(0, (self.heads, -1))[:, self.config.qk_nope_head_dim :]
        return (o_HBSC.flatten(1, 2) @ up_HMC.mT).transpose(0, 1).unflatten(0, o_HBSC.shape[1:3])

    def _split_latent(self, joined_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Latent and rotary key, which one product or collective gives side by side."""
        latent_BSC, k_rope_BSP = joined_BSC.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return latent_BSC, k_rope_BSP

    def _queries(self, query: Tensor, context: ForwardContext) -> Tensor:
        """Queries of this rank's heads, before rotation, which the attention temperature may precede."""
        return context.scaled(self.query.expand(query).unflatten(-1, (self.heads, -1)))  # (H N) -> H x N

    def _heads(
        self, query: Tensor, latent_BSC: Tensor, k_rope_BSP: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, keys and values at this rank's positions."""
        q_BSHN = self._queries(query, context)
        kv_BSHN = self.kv_up(latent_BSC).unflatten(-1, (self.heads, -1))  # plain key | value
        return self.layer_context.operators.mla_heads(q_BSHN, kv_BSHN, k_rope_BSP, context.cos_BSP, context.sin_BSP)

    def _heads_of_row(
        self, query: Tensor, latent_BSC: Tensor, k_rope_BSP: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries at this rank's positions, keys and values at every position of the row."""
        config, rotate = self.config, self.layer_context.operators.rotate
        cos_BSP, sin_BSP = context.cos_BSP, context.sin_BSP
        q_BSHN = self._queries(query, context)
        q_nope, q_rope = q_BSHN.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        q_BSHN = torch.cat((q_nope, rotate(q_rope, cos_BSP, sin_BSP)), dim=-1)
        # Rotate before the gather: this rank has the angles of its own positions only.
        k_rope_BSP = rotate(k_rope_BSP[:, :, None], cos_BSP, sin_BSP)[:, :, 0]
        joined_BSC = gather_positions(torch.cat((latent_BSC, k_rope_BSP), dim=-1), self.layer_context.axes.context)
        latent_BSC, k_rope_BSP = self._split_latent(joined_BSC)  # from here on of every position of the row
        kv_BSHN = self.kv_up(latent_BSC).unflatten(-1, (self.heads, -1))
        k_nope, v_BSHM = kv_BSHN.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k_rope_BSHP = k_rope_BSP[:, :, None].expand(-1, -1, self.heads, -1)  # one rotary key for all heads
        k_BSHN = torch.cat((k_nope, k_rope_BSHP), dim=-1)
        return q_BSHN, k_BSHN, v_BSHM

    def clip_factors(self, factor_H: Tensor) -> dict[str, Tensor]:
        config, plain_H = self.config, factor_H.sqrt()
        queries = factors_of_rows((plain_H, config.qk_nope_head_dim), (factor_H, config.qk_rope_head_dim))
        keys = factors_of_rows((plain_H, config.qk_nope_head_dim), (torch.ones_like(factor_H), config.v_head_dim))
        query = "query.up.weight" if isinstance(self.query, LatentQuery) else "query.weight"
        return {query: queries, "kv_up.weight": keys}
