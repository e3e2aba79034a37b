"""Configuration to model: the one page that puts parts together.

The model is made on the meta device (shapes only), given its dtypes, then memory, then initial weights. The same meta
model is what counting and planning walk.
"""

import torch
from torch import nn

from penstock.config.model import LatentAttention, Model, Moe
from penstock.config.run import Run
from penstock.kernels.operators import REFERENCE, Operators
from penstock.models.attention import GroupedQueryLayer
from penstock.models.block import Block
from penstock.models.decoder import Decoder
from penstock.models.ffn import FeedForward
from penstock.models.init import initialize
from penstock.models.kernels import choose_operators
from penstock.models.mla import LatentLayer
from penstock.models.mtp import MultiTokenPrediction
from penstock.models.norm import RMSNorm
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.local import LocalDispatcher, PaddedDispatcher
from penstock.moe.experts import Experts
from penstock.moe.layer import MoE
from penstock.moe.router import Router


def meta_model(config: Model, operators: Operators = REFERENCE) -> Decoder:
    """The model on the meta device: shapes and float32 dtypes, no memory."""
    with torch.device("meta"):
        return Decoder(
            config,
            embed=nn.Embedding(config.vocabulary, config.hidden_size),
            blocks=[_block(config, layer, operators) for layer in range(config.layers)],
            norm=RMSNorm(config.hidden_size, config.norm_epsilon, operators),
            head=None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocabulary, bias=False),
            mtp=[_mtp(config, config.layers + depth, operators) for depth in range(config.mtp_layers)],
        )


def build_model(run: Run, device: torch.device, operators: Operators | None = None) -> Decoder:
    """The model of a run with its initial weights, on a device.

    Args:
        run: the run; its seed decides the weights, its precision their dtype. Router weights stay float32.
        device: where to put it.
        operators: kernels to run on; None chooses them for the run and the device.

    Raises:
        KernelError: the run asks for kernels that the device cannot run.
    """
    operators = operators or choose_operators(run, device)
    model = meta_model(run.model, operators)
    if run.training.precision == "bf16":
        _to_bf16(model)
    model.to_empty(device=device)
    initialize(model, run.seed, run.model.initial_std)
    return model


def _to_bf16(model: nn.Module) -> None:
    """Give parameters their compute dtype; a router decides in float32, and its buffers count in it."""
    for module in model.modules():
        if not isinstance(module, Router):
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(parameter.to(torch.bfloat16)))


def _block(config: Model, layer: int, operators: Operators) -> Block:
    return Block(
        RMSNorm(config.hidden_size, config.norm_epsilon, operators),
        _attention(config, operators),
        RMSNorm(config.hidden_size, config.norm_epsilon, operators),
        _ffn(config, layer, operators),
    )


def _attention(config: Model, operators: Operators) -> GroupedQueryLayer | LatentLayer:
    if isinstance(config.attention, LatentAttention):
        return LatentLayer(config.attention, config.hidden_size, operators)
    return GroupedQueryLayer(config.attention, config.hidden_size, operators)


def _ffn(config: Model, layer: int, operators: Operators) -> FeedForward | MoE:
    moe = config.moe
    if moe is None or layer < config.dense_layers:
        return FeedForward(config.hidden_size, config.dense_ffn_size, operators)
    return MoE(
        Router(moe, config.hidden_size, layer, operators),
        _dispatcher(moe, operators),
        Experts(moe.experts, config.hidden_size, moe.ffn_size, operators),
        FeedForward(config.hidden_size, moe.shared_ffn_size, operators) if moe.shared_ffn_size else None,
    )


def _dispatcher(moe: Moe, operators: Operators) -> Dispatcher:
    if moe.balance.pad_to_capacity:
        return PaddedDispatcher(moe.experts, moe.balance.capacity_factor, operators)
    return LocalDispatcher(moe.experts, operators)


def _mtp(config: Model, layer: int, operators: Operators) -> MultiTokenPrediction:
    return MultiTokenPrediction(config.hidden_size, config.norm_epsilon, _block(config, layer, operators), operators)
