"""Parameters and FLOPs of a model, by walking the meta model that a run is built from.

FLOPs are those of the matrix products of one trained token: forward once, backward twice, a product of M x K and K x
N counted as 2 M K N. Causal attention is counted as half of the full square, and of layers that see a part of the row
only that part is. Elementwise work and embedding look-ups are not counted. A token passes top-k of the routed experts,
so only their share of the weights is active.

penstock/config/size.py counts the same by arithmetic, for answers that do not wait for PyTorch. Tests compare the two.
"""

from functools import lru_cache

from torch import nn

from penstock.config.model import Model
from penstock.config.size import Count
from penstock.layout.stages import StageCosts
from penstock.models.attention import GroupedQueryLayer
from penstock.models.build import meta_model
from penstock.models.mla import LatentLayer
from penstock.moe.layer import MoE


@lru_cache(maxsize=16)
def count(config: Model, sequence_length: int) -> Count:
    """Count a model at a sequence length.

    Args:
        config: the model.
        sequence_length: positions of a row, S.
    """
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
    """FLOPs of one token's forward pass through each part that a pipeline stage may hold."""
    model = meta_model(config)
    head = 2 * model.head_VD.numel()

    def cost(part: nn.Module) -> float:
        return _product_flops(part) + _attention_flops(part, sequence_length)

    return StageCosts(
        embed=0.0,  # A look-up: no product.
        layers=tuple(map(cost, model.blocks.values())),
        mtp=tuple(cost(depth) + head for depth in model.mtp.values()),
        head=head,
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_parameters(module: nn.Module) -> int:
    """Weights of the routed experts that a token does not meet."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    return sum(round(_parameters(layer.experts) * (1 - layer.active_share)) for layer in layers)


def _product_flops(module: nn.Module) -> float:
    """FLOPs of one token's forward pass through the weights of a module."""
    flops = 0.0
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            flops += 2 * layer.weight.numel()
        elif isinstance(layer, MoE):
            flops += 2 * layer.router.weight_ED.numel() + 2 * layer.experts.matrix_values * layer.active_share
    return flops


def _attention_flops(module: nn.Module, sequence_length: int) -> float:
    """FLOPs of one token's forward pass through scores and weighted values, of those that are needed."""
    flops = 0.0
    for layer in module.modules():
        if isinstance(layer, LatentLayer):
            widths = layer.config.head_dim + layer.config.v_head_dim
            flops += layer.config.heads * widths * sequence_length
        elif isinstance(layer, GroupedQueryLayer):
            seen = sequence_length / 2 if layer.reach is None else layer.reach.pairs(sequence_length) / sequence_length
            flops += layer.config.heads * 2 * 2 * layer.config.head_dim * seen
    return flops
