"""Parameters and FLOPs of a model, from the meta model that a run is built from.

FLOPs are those of the matrix products for one trained token: forward once, backward twice, M x K times K x N counted as
2 M K N. Causal attention counts as half of the full square, local layers as the visible part of it, linear attention as
its definition position by position. Elementwise work, short convolutions and embedding look-ups are not counted. Of the
routed experts only the top-k share is active.

penstock/config/size.py computes the same from the configuration alone, without importing PyTorch. Tests compare them.
"""

from functools import lru_cache

from torch import nn

from penstock.config.model import Model
from penstock.config.size import Count, keys_seen
from penstock.layout.stages import StageCosts
from penstock.models.attention import GroupedQueryLayer
from penstock.models.build import meta_model
from penstock.models.linear_attention import DeltaLayer
from penstock.models.mla import LatentLayer
from penstock.moe.layer import MoE


@lru_cache(maxsize=16)
def count(config: Model, sequence_length: int) -> Count:
    """Count a model at a sequence length of S positions."""
    model = meta_model(config)
    parts = [part for part in (model.embed, model.blocks, model.norm, model.head) if part is not None]
    head = 2 * model.head_VD.numel()
    products = _product_flops(model.blocks) + head
    attention = _attention_flops(model.blocks, sequence_length)
    for depth in model.mtp.values():
        products += _product_flops(depth) + head
        attention += _attention_flops(depth, sequence_length)
    return Count(
        parameters=sum(_parameters(part) for part in parts),
        active_parameters=sum(_parameters(part) - _idle_parameters(part) for part in parts),
        mtp_parameters=_parameters(model.mtp),
        flops_per_token=3 * (products + attention),
    )


@lru_cache(maxsize=16)
def stage_costs(config: Model, sequence_length: int) -> StageCosts:
    """Forward FLOPs of one token through each part that a pipeline stage may hold."""
    model = meta_model(config)
    head = 2 * model.head_VD.numel()

    def cost(part: nn.Module) -> float:
        return _product_flops(part) + _attention_flops(part, sequence_length)

    return StageCosts(
        embed=0.0,  # a look-up has no product
        layers=tuple(map(cost, model.blocks.values())),
        mtp=tuple(cost(depth) + head for depth in model.mtp.values()),
        head=head,
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_parameters(module: nn.Module) -> int:
    """Weights of routed experts that one token does not pass."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    return sum(round(_parameters(layer.experts) * (1 - layer.active_share)) for layer in layers)


def _product_flops(module: nn.Module) -> float:
    """Forward FLOPs of one token through the weights of a module."""
    flops = 0.0
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            flops += 2 * layer.weight.numel()
        elif isinstance(layer, MoE):
            matrix_values = layer.experts.gate_up_eFD.numel() + layer.experts.down_eDF.numel()
            flops += 2 * layer.router.weight_ED.numel() + 2 * matrix_values * layer.active_share
    return flops


def _attention_flops(module: nn.Module, sequence_length: int) -> float:
    """Forward FLOPs of one token for attention scores and weighted values, without masked positions."""
    flops = 0.0
    for layer in module.modules():
        if isinstance(layer, LatentLayer):
            widths, indexer = layer.config.head_dim + layer.config.v_head_dim, layer.config.indexer
            flops += layer.config.heads * widths * 2 * keys_seen(indexer, sequence_length)
            if indexer is not None:  # it scores all keys
                flops += indexer.index_n_heads * indexer.index_head_dim * sequence_length
        elif isinstance(layer, GroupedQueryLayer):
            # Keys per query: half of the row under a causal mask, fewer with a window or chunks.
            seen = sequence_length / 2 if layer.reach is None else layer.reach.pairs(sequence_length) / sequence_length
            flops += layer.config.heads * 2 * 2 * layer.config.head_dim * seen
        elif isinstance(layer, DeltaLayer):
            # The state of a head is read for the key, written, and read for the query.
            state = layer.config.key_head_dim * layer.config.value_head_dim
            flops += layer.config.value_heads * 3 * 2 * state
    return flops
