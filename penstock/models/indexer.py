"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556 section 2.1).

Queries come from the latent of attention's queries, keys and weights of heads from the hidden states; both inputs are
detached. The definition's Hadamard transform does not change products, and 8-bit scores are left to kernels.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.config.model import Indexer
from penstock.kernels.float8.operators import NO_FLOAT8
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
from penstock.models.linear import Linear
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import LayerNorm
from penstock.parallel.layer_context import LayerContext

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
