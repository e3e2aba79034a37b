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

    def forward(self, x_BSD: Tensor, latent_BSC: Tensor, context: ForwardContext) -> Chosen:
        """Score all keys of a row for each query, from hidden states and the queries' latent."""
        config, rotate = self.config, self.operators.rotate
        x_BSD, latent_BSC = x_BSD.detach(), latent_BSC.detach()
        q_BSHN = rotate(
            self.query(latent_BSC).unflatten(-1, (config.index_n_heads, -1)), context.cos_BSP, context.sin_BSP
        )
        k_BSN = rotate(self.key_norm(self.key(x_BSD))[:, :, None], context.cos_BSP, context.sin_BSP)[:, :, 0]
        scale = (config.index_n_heads * config.index_head_dim) ** -0.5
        scores_BSS = index_scores(q_BSHN, k_BSN, self.weights(x_BSD).float() * scale)
        allowed_BSS = seen_keys(context.allowed_BSS, x_BSD.shape[1], x_BSD.device)
        if config.stage == "dense":
            return Chosen(scores_BSS, allowed_BSS.expand_as(scores_BSS))
        return Chosen(scores_BSS, best_keys(scores_BSS, allowed_BSS, config.index_topk))

    def taught(
        self, o_BSHM: Tensor, chosen: Chosen, q_BSHN: Tensor, k_BSHN: Tensor, scale: float, share: float
    ) -> Tensor:
        """The output of attention unchanged, with the indexer's loss attached; `share` of the micro-batch."""
        if not (self.training and torch.is_grad_enabled()) or not self.config.loss_coef:
            return o_BSHM
        mass_BSS = attention_mass(q_BSHN.detach(), k_BSHN.detach(), chosen.keys_BSS, scale)
        tokens = q_BSHN.shape[0] * q_BSHN.shape[1]
        loss = index_loss(chosen.scores_BSS, mass_BSS, chosen.keys_BSS)
        return attach_loss(o_BSHM, loss * (self.config.loss_coef * share / tokens))
