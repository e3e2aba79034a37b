"""Configuration to model: assembles the modules and gives each rank its own parts.

The model is built on the meta device (shapes only), then gets its dtypes, memory, and initial weights. Counting and
planning walk the same meta model. A pipeline rank builds one decoder for each of its stages, with only the modules of
that stage; ranks that shard matrices or experts build modules of their shard's size (`LayerContext.axes`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from penstock.config.model import CompressedAttention, LatentAttention, Model, warms_indexer_up
from penstock.config.run import Run
from penstock.config.sync_free import capacity_factor
from penstock.kernels.float8.operators import NO_FLOAT8
from penstock.kernels.operators import Operators
from penstock.layout.stages import Stage
from penstock.models.attention import DeltaLayer, GroupedQueryLayer
from penstock.models.block import AnyAttention, Block, BlockNorms, FeedForward, MultiTokenPrediction
from penstock.models.compressed import CompressedLayer
from penstock.models.decoder import Decoder
from penstock.models.kernels import choose_float8, choose_operators
from penstock.models.linear import Embedding, Linear
from penstock.models.mla import LatentLayer, LightningIndexer
from penstock.models.norm import PreNorm, RMSNorm
from penstock.models.parameters import initialize
from penstock.models.residual import StreamMixer
from penstock.moe.dispatch.build import make_dispatcher, shares_arena
from penstock.moe.dispatch.row_capacity import ActivationArena
from penstock.moe.experts import ACTIVATIONS, GroupedExperts, expert_rule, shared_rule
from penstock.moe.layer import MoE
from penstock.moe.router import TopKRouter
from penstock.parallel import offload
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import recomputed_kinds
from penstock.parallel.shard import Float8Shard, is_dtensor, shard_fully


def whole_model(config: Model) -> Stage:
    return Stage(
        embed=True, layers=tuple(range(config.layers)), mtp=tuple(range(config.mtp_layers)), norm_and_head=True
    )


def needs_embedding(config: Model, stage: Stage) -> bool:
    """Whether a stage needs the embedding: for its input, for prediction layers, or as a tied output projection."""
    return stage.embed or bool(stage.mtp) or (stage.norm_and_head and config.tie_word_embeddings)


def meta_model(
    config: Model,
    layer_context: LayerContext | None = None,
    stage: Stage | None = None,
    layer_context_of: Callable[[int], LayerContext] | None = None,
) -> Decoder:
    """The model on the meta device: shapes and float32 dtypes, no memory.

    Without a `layer_context` it has the reference kernels and one rank, without a `stage` all parts; without
    `layer_context_of` all layers have the same context.
    """
    layer_context, stage = layer_context or LayerContext(), stage or whole_model(config)
    # Embedding, final norm and the module of the output projection stay in high precision (the loss quantizes its
    # weight: `Decoder.head_float8`), and their weight gradients are not deferred.
    plain = replace(layer_context, weight_grads=None, float8=NO_FLOAT8)
    hidden, epsilon = config.hidden_size, config.rms_norm_eps
    layer_context_of = layer_context_of or (lambda layer: layer_context)
    arena = _arena(config, layer_context)

    def block(layer: int) -> Block:
        return _block(config, layer, layer_context_of(layer), arena)

    def norm() -> RMSNorm:
        return RMSNorm(hidden, epsilon, plain.operators, is_zero_centred=config.zero_centred_norms)

    def mtp_layer(layer: int) -> MultiTokenPrediction:
        return MultiTokenPrediction(hidden, block(layer), layer_context_of(layer), norm)

    has_head = stage.norm_and_head and not config.tie_word_embeddings
    with torch.device("meta"):
        return Decoder(
            config,
            embed=Embedding(config.vocab_size, hidden, plain) if needs_embedding(config, stage) else None,
            blocks={layer: block(layer) for layer in stage.layers},
            norm=norm() if stage.norm_and_head else None,
            streams=StreamMixer(config.hyper_connections, hidden, rms_epsilon=epsilon, only_reads=True)
            if stage.norm_and_head and config.hyper_connections is not None
            else None,
            head=Linear(hidden, config.vocab_size, plain, split="outputs") if has_head else None,
            mtp={depth: mtp_layer(config.layers + depth) for depth in stage.mtp},
            layer_context=layer_context,
            is_first=stage.embed,
            arena=arena,
        )


def build_model(run: Run, device: torch.device, operators: Operators | None = None) -> Decoder:
    """The whole model of a run with its initial weights, on a device; without `operators` they are chosen for both.

    Raises a KernelError if the run asks for kernels that the device cannot run.
    """
    layer_context = LayerContext(
        operators=operators or choose_operators(run, device),
        dispatch=run.dispatch,
        transfers=transfers_of(run, device),
        float8=choose_float8(run, device),
        experts_in_mxfp4=run.qat.experts == "mxfp4",
        offload=offload.rule_for(run.offload, device),
    )
    decoders = meta_stages(run, layer_context, {0: whole_model(run.model)})
    set_dtypes(run, decoders.values(), ALONE, device)
    materialize(run, device, decoders.values())
    return decoders[0]


def transfers_of(run: Run, device: torch.device) -> TransferStream | None:
    """The streams for token transfers that overlap with computation; None without overlap."""
    return None if run.dispatch.overlap == "none" else TransferStream(device)


def meta_stages(run: Run, layer_context: LayerContext, stages: Mapping[int, Stage]) -> dict[int, Decoder]:
    """The decoders of one rank on the meta device, in float32, by number of the stage."""
    decoders = {
        number: meta_model(run.model, layer_context, stage, partial(_layer_context_of, run, layer_context, number))
        for number, stage in stages.items()
    }
    if warms_indexer_up(run.model):
        for decoder in decoders.values():
            _freeze_all_but_the_indexer(decoder)
    with_embedding = [decoder for decoder in decoders.values() if decoder.embed is not None]
    for decoder in with_embedding[1:]:
        decoder.embed = with_embedding[0].embed  # stages of one rank share one embedding, so it has one gradient
    return decoders


def _freeze_all_but_the_indexer(decoder: Decoder) -> None:
    decoder.requires_grad_(False)
    for module in decoder.modules():
        if isinstance(module, LightningIndexer):
            module.requires_grad_(True)


def _layer_context_of(run: Run, layer_context: LayerContext, stage: int, layer: int) -> LayerContext:
    return replace(
        layer_context,
        recompute=recomputed_kinds(run.recompute, layer, stage),
        float8=layer_context.float8 if is_in_8_bits(run, layer) else NO_FLOAT8,
    )


def is_in_8_bits(run: Run, layer: int) -> bool:
    """Whether a layer uses the run's recipes in 8 bits; `float8.last_layers` count prediction layers as the last."""
    first, last, model = run.float8.first_layers, run.float8.last_layers, run.model
    return first <= layer < (model.layers - last if last else model.layers + model.mtp_layers)


_EXACT = (TopKRouter, StreamMixer)
"""Modules whose parameters are float32 on every rank."""


def set_dtypes(run: Run, decoders: Collection[Decoder], axes: Axes, device: torch.device) -> None:
    """Give meta decoders their compute dtype, and shard their weights with FSDP2 if the run asks for it.

    Sharded weights stay float32, because they are their own masters; FSDP2 gathers them in the compute dtype.
    """
    dtype = compute_dtype(run)
    if run.parallel.shard == "full":
        # FSDP2 manages a parameter under one root, so a parameter that two stages share is not sharded.
        counts = Counter(parameter for decoder in decoders for parameter in decoder.parameters())
        shared = {parameter for parameter, count in counts.items() if count > 1}
        for decoder in decoders:
            modules = list(decoder.modules())
            exact = {parameter for module in modules if isinstance(module, _EXACT) for parameter in module.parameters()}
            shard_fully(
                units=[*decoder.blocks.values(), *decoder.mtp.values()],  # in the order of forward: FSDP2 prefetches
                root=decoder,
                axis=axes.dense_data,
                settings=run.parallel,
                device=device,
                compute_dtype=dtype,
                ignored=exact | shared,
                # Experts are divided by the ranks that hold the same ones, not by all data-parallel ranks.
                inner={module: axes.expert_data for module in modules if isinstance(module, GroupedExperts)},
            )
    for decoder in decoders:
        to_dtype(decoder, dtype)


def materialize(run: Run, device: torch.device, decoders: Collection[Decoder]) -> None:
    """Give meta decoders memory and their initial weights."""

    def empty(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            return torch.empty_like(tensor, device=device)
        # The like of a meta tensor would import sympy, a good part of the start of a process.
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    for decoder in decoders:
        decoder._apply(empty)  # what `to_empty` does
    for decoder in decoders:  # After all of them have memory: this replaces a shared embedding's memory again.
        initialize(decoder, run.seed, run.model.initializer_range)


def gather_in_float8(run: Run, decoders: Iterable[Decoder], axes: Axes) -> None:
    """Have FSDP2 gather float8 matrices (dense ones and experts) in float8 (`float8.gather`).

    Call it after `materialize` and before the first pass; `penstock.models.parameters.refresh_float8` must follow it.
    Raises a KernelError if a recipe's weights cannot be gathered in float8.
    """
    if not run.float8.gather:
        return
    for decoder in decoders:
        for module in decoder.modules():
            matrices: tuple[Tensor, ...]
            if isinstance(module, Linear) and module.float8 is not None:
                rule, recipe, axis, matrices = module.float8, module.float8.dense, axes.dense_data, (module.weight,)
                count = None
            elif isinstance(module, GroupedExperts):
                rule, recipe, axis = module.float8, module.float8.experts, axes.expert_data
                matrices, count = (module.gate_up_eFD, module.down_eDF), module.shapes["down_eDF"][0]
            else:
                continue
            if recipe is not None and all(is_dtensor(matrix) for matrix in matrices):
                dtype = compute_dtype(run)
                module.gathered = tuple(Float8Shard(matrix, axis, recipe, rule, dtype, count) for matrix in matrices)


def compute_dtype(run: Run) -> torch.dtype:
    """Dtype of activations and of the weights that products read."""
    return torch.bfloat16 if run.training.precision == "bf16" else torch.float32


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters to their compute dtype, except those that stay float32 and those that FSDP2 casts."""
    for module in model.modules():
        if not isinstance(module, _EXACT):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != dtype and not is_dtensor(parameter):
                    cast = nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
                    module.register_parameter(name, cast)


_SAVES_INPUT = frozenset({"dense", "moe", "shared-expert"})
"""Recomputed parts that save their input: once, in high precision. They quantize it again when they recompute."""


def _arena(config: Model, layer_context: LayerContext) -> ActivationArena | None:
    """The buffer in which the experts of a stage save their rows together; None if none of them may."""
    # Some layers may run in high precision while the others run in float8.
    contexts = (layer_context, replace(layer_context, float8=NO_FLOAT8))
    if config.moe is None or not any(shares_arena(config.moe, context) for context in contexts):
        return None
    return ActivationArena(capacity_factor(layer_context.dispatch))


def _block(config: Model, layer: int, layer_context: LayerContext, arena: ActivationArena | None) -> Block:
    hidden, epsilon = config.hidden_size, config.rms_norm_eps
    attention = _attention(config, layer, layer_context)
    ffn = _ffn(config, layer, layer_context, arena)
    dense = ffn.shared if isinstance(ffn, MoE) else ffn
    saves_input = bool(layer_context.recompute & _SAVES_INPUT)

    def norm(*, float8: bool, keep_plain: bool) -> PreNorm | None:
        if config.norm_position == "post":
            return None
        rule = layer_context.float8 if float8 else None
        is_centred = config.zero_centred_norms
        operators = layer_context.operators
        return PreNorm(hidden, epsilon, operators, rule, keep_plain=keep_plain, is_zero_centred=is_centred)

    def post_norm() -> RMSNorm | None:
        if config.norm_position == "pre":
            return None
        return RMSNorm(hidden, epsilon, layer_context.operators, is_zero_centred=config.zero_centred_norms)

    norms = BlockNorms(
        attention=norm(float8=attention.reads_float8, keep_plain=attention.reads_high_precision),
        ffn=norm(
            float8=isinstance(dense, FeedForward) and dense.reads_float8 and not saves_input,
            keep_plain=isinstance(ffn, MoE),  # routers and dispatchers read high precision
        ),
        attention_post=post_norm(),
        ffn_post=post_norm(),
    )
    streams = None
    if config.hyper_connections is not None:
        make = partial(StreamMixer, config.hyper_connections, hidden, rms_epsilon=epsilon)
        streams = make(), make()
    return Block(attention, ffn, norms, layer_context, config.residual_scale, streams)


def _attention(config: Model, layer: int, layer_context: LayerContext) -> AnyAttention:
    hidden, epsilon = config.hidden_size, config.rms_norm_eps
    if config.linear_attention is not None and config.is_linear(layer):
        return DeltaLayer(config.linear_attention, hidden, layer_context, epsilon=epsilon)
    if isinstance(config.attention, LatentAttention):
        return LatentLayer(config.attention, hidden, layer_context)
    if isinstance(config.attention, CompressedAttention):
        return CompressedLayer(config.attention, hidden, layer_context, layer=layer, epsilon=epsilon)
    return GroupedQueryLayer(
        config.attention,
        hidden,
        layer_context,
        layer=layer,
        epsilon=epsilon,
        zero_centred_norms=config.zero_centred_norms,
    )


def _ffn(config: Model, layer: int, layer_context: LayerContext, arena: ActivationArena | None) -> FeedForward | MoE:
    moe, activation = config.moe, ACTIVATIONS[config.hidden_act]
    if moe is None or config.is_dense(layer):
        return FeedForward(config.hidden_size, config.intermediate_size, layer_context, activation)
    uses_arena = shares_arena(moe, layer_context)
    dispatcher, row_capacity = make_dispatcher(moe, layer_context, in_arena=uses_arena)
    # Recomputed rows are not saved: they live only during the layer's own backward.
    saves_rows = uses_arena and not layer_context.recompute & {"expert-activation", "moe", "layer"}
    hidden, shared_width = config.hidden_size, moe.shared_expert_intermediate_size
    rule, shared = expert_rule(moe, activation), None
    if shared_width:
        of_shared = shared_rule(moe, activation)
        shared = FeedForward(hidden, shared_width, layer_context, of_shared, has_gate=moe.shared_expert_gate)
    hashed_ids = config.vocab_size if config.is_hashed(layer) else 0
    return MoE(
        TopKRouter(moe, hidden, layer, layer_context, hashed_ids),
        dispatcher,
        GroupedExperts(moe.experts, hidden, moe.moe_intermediate_size, layer_context, rule=rule, bias=moe.bias),
        shared,
        layer_context,
        row_capacity,
        arena if saves_rows else None,
    )
