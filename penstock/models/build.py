"""Configuration to model: the one page that puts parts together and gives each rank its own.

The model is made on the meta device (shapes only), given its dtypes, then memory, then initial weights. The same meta
model is what counting and planning walk. A rank of a pipeline builds one decoder for each of its stages, with only the
parts that the stage holds; ranks that share matrices or experts build modules of their share (`LayerContext.axes`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config.model import LatentAttention, Model
from penstock.config.run import Run
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.operators import Operators
from penstock.layout.stages import Stage
from penstock.models.attention import GroupedQueryLayer
from penstock.models.block import Block
from penstock.models.decoder import Decoder
from penstock.models.ffn import FeedForward
from penstock.models.init import initialize
from penstock.models.kernels import choose_float8, choose_operators
from penstock.models.linear import Embedding, Linear
from penstock.models.mla import LatentLayer
from penstock.models.mtp import MultiTokenPrediction
from penstock.models.norm import PreNorm, RMSNorm
from penstock.moe.dispatch.build import make_dispatcher, shares_arena
from penstock.moe.dispatch.row_capacity import ActivationArena
from penstock.moe.experts import GroupedExperts, expert_rule
from penstock.moe.layer import MoE
from penstock.moe.router import TopKRouter
from penstock.parallel import offload
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.float8_gather import Float8Shard
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import rule_for
from penstock.parallel.shard import shard_fully


def whole_model(config: Model) -> Stage:
    """The stage that holds everything."""
    return Stage(
        embed=True, layers=tuple(range(config.layers)), mtp=tuple(range(config.mtp_layers)), norm_and_head=True
    )


def needs_embedding(config: Model, stage: Stage) -> bool:
    """Prediction layers read the embedding of the tokens ahead, and a tied output projection is the embedding."""
    return stage.embed or bool(stage.mtp) or (stage.norm_and_head and config.tie_word_embeddings)


def meta_model(
    config: Model,
    layer_context: LayerContext | None = None,
    stage: Stage | None = None,
    layer_context_of: Callable[[int], LayerContext] | None = None,
) -> Decoder:
    """The model on the meta device: shapes and float32 dtypes, no memory.

    Args:
        config: the whole model.
        layer_context: kernels and ranks; None for the reference kernels and one rank.
        stage: what this decoder holds; None for everything.
        layer_context_of: that of each layer; None gives all of them the same one.
    """
    layer_context, stage = layer_context or LayerContext(), stage or whole_model(config)
    # Embedding, final norm and output projection are never in 8 bits.
    plain, hidden, epsilon = (
        replace(layer_context, weight_grads=None, float8=NO_FLOAT8),
        config.hidden_size,
        config.rms_norm_eps,
    )
    layer_context_of = layer_context_of or (lambda layer: layer_context)
    arena = _arena(config, layer_context)
    has_head = stage.norm_and_head and not config.tie_word_embeddings
    with torch.device("meta"):
        return Decoder(
            config,
            embed=Embedding(config.vocab_size, hidden, plain) if needs_embedding(config, stage) else None,
            blocks={layer: _block(config, layer, layer_context_of(layer), arena) for layer in stage.layers},
            norm=RMSNorm(hidden, epsilon, plain.operators) if stage.norm_and_head else None,
            head=Linear(hidden, config.vocab_size, plain, split="outputs") if has_head else None,
            mtp={
                depth: _mtp(config, config.layers + depth, layer_context_of(config.layers + depth), arena)
                for depth in stage.mtp
            },
            layer_context=layer_context,
            is_first=stage.embed,
            arena=arena,
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
    layer_context = LayerContext(
        operators=operators or choose_operators(run, device),
        dispatch=run.dispatch,
        transfers=transfers_of(run, device),
        float8=choose_float8(run, device),
        offload=offload.rule_for(run.offload, device),
    )
    decoders = meta_stages(run, layer_context, {0: whole_model(run.model)})
    set_dtypes(run, decoders.values(), ALONE, device)
    materialize(run, device, decoders.values())
    return decoders[0]


def transfers_of(run: Run, device: torch.device) -> TransferStream | None:
    """Where the tokens of a run travel beside what it computes; None if it computes nothing meanwhile."""
    return None if run.dispatch.overlap == "none" else TransferStream(device)


def meta_stages(run: Run, layer_context: LayerContext, stages: Mapping[int, Stage]) -> dict[int, Decoder]:
    """The decoders of one rank on the meta device, in float32.

    Args:
        run: the run.
        layer_context: kernels and ranks.
        stages: what each stage of this rank holds, by number of the stage.
    """
    decoders = {
        number: meta_model(run.model, layer_context, stage, partial(_kit_of, run, layer_context, number))
        for number, stage in stages.items()
    }
    with_embedding = [decoder for decoder in decoders.values() if decoder.embed is not None]
    for decoder in with_embedding[1:]:  # One rank, one embedding, even if two of its stages use it.
        decoder.embed = with_embedding[0].embed
    return decoders


def _kit_of(run: Run, layer_context: LayerContext, stage: int, layer: int) -> LayerContext:
    """The layer_context of one layer, whose activations and numbers may be treated in their own way."""
    return replace(
        layer_context,
        recompute=rule_for(run.recompute, layer, stage),
        float8=_float8_of(run, layer_context.float8, layer),
    )


def _float8_of(run: Run, rule: Float8Rule, layer: int) -> Float8Rule:
    """What a layer does in 8 bits. Multi-token prediction comes behind the last layer, and stays if that stays."""
    first, last = run.float8.first_layers, run.float8.last_layers
    end = run.model.layers - last if last else run.model.layers + run.model.mtp_layers
    return rule if first <= layer < end else NO_FLOAT8


def set_dtypes(run: Run, decoders: Collection[Decoder], axes: Axes, device: torch.device) -> None:
    """Give meta decoders their compute dtype, and divide their weights among data-parallel ranks if the run asks.

    Weights that are divided stay float32, because they are their own masters; they are gathered in the compute dtype.

    Args:
        run: reads precision and `parallel`.
        decoders: of one rank.
        axes: its groups.
        device: where they will run.
    """
    dtype = _compute_dtype(run)
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
                ignored={one for module in modules if isinstance(module, TopKRouter) for one in module.parameters()}
                | shared,
                inner={module: axes.expert_data for module in modules if isinstance(module, GroupedExperts)},
            )
    for decoder in decoders:
        to_dtype(decoder, dtype)


def materialize(run: Run, device: torch.device, decoders: Collection[Decoder]) -> None:
    """Give meta decoders memory and their initial weights."""
    for decoder in decoders:
        decoder.to_empty(device=device)
    for decoder in decoders:  # A second look, because a shared embedding gets its memory more than once.
        initialize(decoder, run.seed, run.model.initializer_range)


def gather_in_float8(run: Run, decoders: Iterable[Decoder], axes: Axes) -> None:
    """Have FSDP2 gather in 8 bits what all products read so: matrices of blocks, and the experts' (`float8.gather`).

    Call it when there is memory and before the first pass, and `penstock.models.parameters.refresh_float8` after it.

    Args:
        run: reads `float8.gather` and precision.
        decoders: of one rank.
        axes: its groups.

    Raises:
        KernelError: a recipe's weights cannot be gathered in 8 bits.
    """
    if not run.float8.gather:
        return
    for decoder in decoders:
        for module in decoder.modules():
            matrices: tuple[Tensor, ...]
            if isinstance(module, Linear) and module.float8 is not None:
                rule, recipe, axis, matrices = module.float8, module.float8.dense, axes.dense_data, (module.weight,)
            elif isinstance(module, GroupedExperts):
                rule, recipe, axis = module.float8, module.float8.experts, axes.expert_data
                matrices = (module.gate_up_eFD, module.down_eDF)
            else:
                continue
            if recipe is not None and all(isinstance(one, DTensor) for one in matrices):
                dtype = _compute_dtype(run)
                module.gathered = tuple(Float8Shard(one, axis, recipe, rule, dtype) for one in matrices)


def _compute_dtype(run: Run) -> torch.dtype:
    return torch.bfloat16 if run.training.precision == "bf16" else torch.float32


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters their compute dtype, unless FSDP2 gathers them in it.

    A router decides in float32, and its buffers count in it.
    """
    for module in model.modules():
        if not isinstance(module, TopKRouter):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != dtype and not isinstance(parameter, DTensor):
                    module.register_parameter(name, nn.Parameter(parameter.to(dtype)))


_READ_TWICE = frozenset({"dense", "moe", "shared-expert"})
"""Parts that keep what they read to run again. They keep it once, in 16 bits, and quantize it by themselves."""


def _arena(config: Model, layer_context: LayerContext) -> ActivationArena | None:
    """The buffer in which the experts of a stage save their pre-activations together; None if none of them may."""
    # Some layers may compute in 16 bits even if the others do not.
    contexts = (layer_context, replace(layer_context, float8=NO_FLOAT8))
    if config.moe is None or not any(shares_arena(config.moe, one) for one in contexts):
        return None
    return ActivationArena(layer_context.dispatch.row_capacity_factor)


def _block(config: Model, layer: int, layer_context: LayerContext, arena: ActivationArena | None = None) -> Block:
    attention, ffn = _attention(config, layer, layer_context), _ffn(config, layer, layer_context, arena)
    reader = ffn.shared if isinstance(ffn, MoE) else ffn
    is_ready = (
        isinstance(reader, FeedForward) and reader.reads_ready and not layer_context.recompute.kinds & _READ_TWICE
    )

    def norm(*, ready: bool, keep_plain: bool) -> PreNorm:
        float8 = layer_context.float8 if ready else None
        return PreNorm(config.hidden_size, config.rms_norm_eps, layer_context.operators, float8, keep_plain=keep_plain)

    attention_norm = norm(ready=attention.reads_ready, keep_plain=attention.reads_plain)
    # Routers and dispatchers read 16 bits.
    return Block(attention_norm, attention, norm(ready=is_ready, keep_plain=isinstance(ffn, MoE)), ffn, layer_context)


def _attention(config: Model, layer: int, layer_context: LayerContext) -> GroupedQueryLayer | LatentLayer:
    if isinstance(config.attention, LatentAttention):
        return LatentLayer(config.attention, config.hidden_size, layer_context)
    return GroupedQueryLayer(
        config.attention, config.hidden_size, layer_context, layer=layer, epsilon=config.rms_norm_eps
    )


def _ffn(config: Model, layer: int, layer_context: LayerContext, arena: ActivationArena | None) -> FeedForward | MoE:
    moe = config.moe
    if moe is None or config.is_dense(layer):
        return FeedForward(config.hidden_size, config.intermediate_size, layer_context)
    dispatcher, row_capacity = make_dispatcher(moe, layer_context, in_arena=shares_arena(moe, layer_context))
    # What is computed again is kept by nobody, and lives no longer than the layer.
    keeps = shares_arena(moe, layer_context) and not layer_context.recompute.kinds & {
        "expert-activation",
        "moe",
        "layer",
    }
    return MoE(
        TopKRouter(moe, config.hidden_size, layer, layer_context.operators, layer_context.axes),
        dispatcher,
        GroupedExperts(
            moe.experts,
            config.hidden_size,
            moe.moe_intermediate_size,
            layer_context,
            rule=expert_rule(moe),
            bias=moe.bias,
        ),
        FeedForward(config.hidden_size, moe.shared_expert_intermediate_size, layer_context)
        if moe.shared_expert_intermediate_size
        else None,
        layer_context,
        row_capacity,
        arena if keeps else None,
    )


def _mtp(config: Model, layer: int, layer_context: LayerContext, arena: ActivationArena | None) -> MultiTokenPrediction:
    return MultiTokenPrediction(
        config.hidden_size, config.rms_norm_eps, _block(config, layer, layer_context, arena), layer_context
    )
