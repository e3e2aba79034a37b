"""Configuration to model: the one page that puts parts together and gives each rank its own.

The model is made on the meta device (shapes only), given its dtypes, then memory, then initial weights. The same meta
model is what counting and planning walk. A rank of a pipeline builds one decoder for each of its stages, with only the
parts that the stage holds; ranks that share matrices or experts build modules of their share (`Kit.axes`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.config.model import LatentAttention, Model
from penstock.config.parallel import Recompute
from penstock.config.run import Run
from penstock.kernels.operators import Operators
from penstock.layout.stages import Stage
from penstock.models.attention import GroupedQueryLayer
from penstock.models.block import Block
from penstock.models.decoder import Decoder
from penstock.models.ffn import FeedForward
from penstock.models.init import initialize
from penstock.models.kernels import choose_operators
from penstock.models.linear import Embedding, Linear
from penstock.models.mla import LatentLayer
from penstock.models.mtp import MultiTokenPrediction
from penstock.models.norm import RMSNorm
from penstock.moe.dispatch.choose import make_dispatcher
from penstock.moe.experts import Experts, expert_rule
from penstock.moe.layer import MoE
from penstock.moe.router import Router
from penstock.parallel.activations import offload
from penstock.parallel.activations.recompute import RecomputeRule, rule_for
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.flight import Transfers
from penstock.parallel.kit import Kit
from penstock.parallel.shard import shard_fully


def whole_model(config: Model) -> Stage:
    """The stage that holds everything."""
    return Stage(
        embed=True, layers=tuple(range(config.layers)), mtp=tuple(range(config.mtp_layers)), norm_and_head=True
    )


def needs_embedding(config: Model, stage: Stage) -> bool:
    """Prediction layers read the embedding of the tokens ahead, and a tied output projection is the embedding."""
    return stage.embed or bool(stage.mtp) or (stage.norm_and_head and config.tied_embeddings)


def meta_model(
    config: Model,
    kit: Kit | None = None,
    stage: Stage | None = None,
    recompute: Callable[[int], RecomputeRule] | None = None,
) -> Decoder:
    """The model on the meta device: shapes and float32 dtypes, no memory.

    Args:
        config: the whole model.
        kit: kernels and ranks; None for the reference kernels and one rank.
        stage: what this decoder holds; None for everything.
        recompute: what a layer computes again; None for nothing.
    """
    kit, stage = kit or Kit(), stage or whole_model(config)
    hidden, epsilon = config.hidden_size, config.norm_epsilon

    def kit_of(layer: int) -> Kit:
        return kit if recompute is None else replace(kit, recompute=recompute(layer))

    has_head = stage.norm_and_head and not config.tied_embeddings
    with torch.device("meta"):
        return Decoder(
            config,
            embed=Embedding(config.vocabulary, hidden, kit) if needs_embedding(config, stage) else None,
            blocks={layer: _block(config, layer, kit_of(layer)) for layer in stage.layers},
            norm=RMSNorm(hidden, epsilon, kit.operators) if stage.norm_and_head else None,
            head=Linear(hidden, config.vocabulary, replace(kit, later=None), split="outputs") if has_head else None,
            mtp={depth: _mtp(config, config.layers + depth, kit_of(config.layers + depth)) for depth in stage.mtp},
            kit=kit,
            is_first=stage.embed,
        )


def build_model(run: Run, device: torch.device, operators: Operators | None = None) -> Decoder:
    """The whole model of a run with its initial weights, on a device.

    Args:
        run: the run; its seed decides the weights, its precision their dtype. Router weights stay float32.
        device: where to put it.
        operators: kernels to run on; None chooses them for the run and the device.

    Raises:
        KernelError: the run asks for kernels that the device cannot run.
    """
    kit = Kit(
        operators=operators or choose_operators(run, device),
        dispatch=run.dispatch,
        transfers=transfers_of(run, device),
        offload=offload.rule_for(run.offload, device),
    )
    decoders = meta_stages(run, kit, {0: whole_model(run.model)})
    set_dtypes(run, decoders.values(), ALONE, device)
    materialize(run, device, decoders.values())
    return decoders[0]


def transfers_of(run: Run, device: torch.device) -> Transfers | None:
    """Where the tokens of a run travel beside what it computes; None if it computes nothing meanwhile."""
    return None if run.dispatch.overlap == "none" else Transfers(device)


def meta_stages(run: Run, kit: Kit, stages: Mapping[int, Stage]) -> dict[int, Decoder]:
    """The decoders of one rank on the meta device, in float32.

    Args:
        run: the run.
        kit: kernels and ranks.
        stages: what each stage of this rank holds, by number of the stage.
    """
    decoders = {
        number: meta_model(run.model, kit, stage, partial(_recompute_of, run.recompute, number))
        for number, stage in stages.items()
    }
    with_embedding = [decoder for decoder in decoders.values() if decoder.embed is not None]
    for decoder in with_embedding[1:]:  # One rank, one embedding, even if two of its stages use it.
        decoder.embed = with_embedding[0].embed
    return decoders


def _recompute_of(config: Recompute, stage: int, layer: int) -> RecomputeRule:
    return rule_for(config, layer, stage)


def set_dtypes(run: Run, decoders: Collection[Decoder], axes: Axes, device: torch.device) -> None:
    """Give meta decoders their compute dtype, and divide their weights among data-parallel ranks if the run asks.

    Weights that are divided stay float32, because they are their own masters; they are gathered in the compute dtype.

    Args:
        run: reads precision and `parallel`.
        decoders: of one rank.
        axes: its groups.
        device: where they will run.
    """
    dtype = torch.bfloat16 if run.training.precision == "bf16" else torch.float32
    if run.parallel.shard == "full":
        # FSDP2 gathers a parameter for one root; what two stages of a rank share stays whole.
        counts = Counter(parameter for decoder in decoders for parameter in decoder.parameters())
        shared = {parameter for parameter, count in counts.items() if count > 1}
        for decoder in decoders:
            modules = list(decoder.modules())
            shard_fully(
                units=[*decoder.blocks.values(), *decoder.mtp.values()],
                root=decoder,
                axis=axes.dense_data,
                settings=run.parallel,
                device=device,
                compute_dtype=dtype,
                ignored={one for module in modules if isinstance(module, Router) for one in module.parameters()}
                | shared,
                inner={module: axes.expert_data for module in modules if isinstance(module, Experts)},
            )
    for decoder in decoders:
        to_dtype(decoder, dtype)


def materialize(run: Run, device: torch.device, decoders: Collection[Decoder]) -> None:
    """Give meta decoders memory and their initial weights."""
    for decoder in decoders:
        decoder.to_empty(device=device)
    for decoder in decoders:  # A second look, because a shared embedding gets its memory more than once.
        initialize(decoder, run.seed, run.model.initial_std)


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters their compute dtype, unless FSDP2 gathers them in it.

    A router decides in float32, and its buffers count in it.
    """
    for module in model.modules():
        if not isinstance(module, Router):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != dtype and not isinstance(parameter, DTensor):
                    module.register_parameter(name, nn.Parameter(parameter.to(dtype)))


def _block(config: Model, layer: int, kit: Kit) -> Block:
    return Block(
        RMSNorm(config.hidden_size, config.norm_epsilon, kit.operators),
        _attention(config, layer, kit),
        RMSNorm(config.hidden_size, config.norm_epsilon, kit.operators),
        _ffn(config, layer, kit),
        kit,
    )


def _attention(config: Model, layer: int, kit: Kit) -> GroupedQueryLayer | LatentLayer:
    if isinstance(config.attention, LatentAttention):
        return LatentLayer(config.attention, config.hidden_size, kit)
    return GroupedQueryLayer(config.attention, config.hidden_size, kit, layer=layer, epsilon=config.norm_epsilon)


def _ffn(config: Model, layer: int, kit: Kit) -> FeedForward | MoE:
    moe = config.moe
    if moe is None or config.is_dense(layer):
        return FeedForward(config.hidden_size, config.dense_ffn_size, kit)
    dispatcher, room = make_dispatcher(moe, kit)
    return MoE(
        Router(moe, config.hidden_size, layer, kit.operators, kit.axes),
        dispatcher,
        Experts(moe.experts, config.hidden_size, moe.ffn_size, kit, rule=expert_rule(moe), bias=moe.bias),
        FeedForward(config.hidden_size, moe.shared_ffn_size, kit) if moe.shared_ffn_size else None,
        kit,
        room,
    )


def _mtp(config: Model, layer: int, kit: Kit) -> MultiTokenPrediction:
    return MultiTokenPrediction(config.hidden_size, config.norm_epsilon, _block(config, layer, kit), kit)
