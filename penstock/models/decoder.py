"""The decoder: embedding, blocks, final norm, output projection, and multi-token prediction layers.

A pipeline stage is the same class with parts missing. Without an embedding it starts from the hidden states of the
previous stage; without a norm it returns those for the next stage. Blocks and prediction layers keep their number in
the whole model, so a parameter has the same name on every stage.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.spans import LAYER, Span
from penstock.config.model import CompressedAttention, GroupedQueryAttention, LatentAttention, LocalAttention, Model
from penstock.kernels.bounded_attention import first_keys
from penstock.kernels.float8.operators import Float8Rule
from penstock.models.attention import GroupedQueryLayer, SoftmaxAttention, query_scale, reach_of
from penstock.models.block import Block, MultiTokenPrediction
from penstock.models.compressed import windows_of
from penstock.models.linear import Embedding, Linear
from penstock.models.mla import gathers_keys, reads_all_keys
from penstock.models.model_inputs import ForwardContext, ModelInputs, angles, shifted_tokens
from penstock.models.norm import RMSNorm
from penstock.models.residual import StreamMixer
from penstock.moe.balance import Scope
from penstock.moe.dispatch.row_capacity import ActivationArena
from penstock.parallel.context import held_positions, nears_of
from penstock.parallel.layer_context import LayerContext, Steps, drain, within
from penstock.parallel.offload import EMBEDDING
from penstock.parallel.spans import span


class Hidden(NamedTuple):
    """Inputs of the output projection."""

    main_BSD: Tensor  # they predict the next token, after the final norm; before the last stage, its output
    mtp: tuple[Tensor, ...]  # of each prediction depth, after its norm; depth k predicts k tokens further on


class Decoder(nn.Module):
    """A decoder-only language model without the output projection's product.

    The loss computes the product with `head_VD`: it never materializes all logits at once.
    """

    def __init__(  # noqa: PLR0913 (the parts of a stage, each of which may be missing)
        self,
        config: Model,
        *,
        embed: Embedding | None,
        blocks: dict[int, Block],  # by number in the model
        norm: RMSNorm | None,  # the final one; None before the last stage
        head: Linear | None,  # None if tied to the embedding, or on another stage
        mtp: dict[int, MultiTokenPrediction],  # by depth, from 0
        layer_context: LayerContext,
        streams: StreamMixer | None = None,  # make one of several residual streams before the norm
        is_first: bool = True,  # starts from tokens; False where the embedding serves prediction layers only
        arena: ActivationArena | None = None,  # of the experts' saved rows; None if each layer saves its own
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_context = layer_context
        self.is_first = is_first
        self.arena = arena
        self.pauses = layer_context.dispatch.overlap == "passes"  # between the steps of a layer another pass runs
        self.embed = embed
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.streams = streams
        self.norm = norm
        self.head = head
        self.mtp = nn.ModuleDict({str(depth): layer for depth, layer in mtp.items()})
        attentions = [block.attention for block in (*blocks.values(), *(layer.block for layer in mtp.values()))]
        grouped = [attention for attention in attentions if isinstance(attention, GroupedQueryLayer)]
        self.reached: Callable[[int], None] | None = None  # called when backward reaches a layer's output
        self.has_reach = any(layer.reach is not None for layer in grouped)  # a window or chunks
        self.scales_queries = any(layer.scales_queries for layer in grouped)
        self.with_logits = tuple(attention for attention in attentions if isinstance(attention, SoftmaxAttention))
        self.has_bounds = layer_context.operators.bounded_attention is not None
        self.rotary_dim = config.attention.rotary_dim
        self.reads_tokens = any(config.is_hashed(layer) for layer in blocks)  # to choose experts

    @property
    def head_VD(self) -> Tensor:
        """Weights of the output projection, or this rank's rows of them."""
        owner = self.embed if self.head is None else self.head
        assert owner is not None, "this stage has no output projection"
        return owner.weight

    @property
    def head_main_grad(self) -> Tensor | None:
        """Buffer for the gradient of the output projection; None leaves it to autograd."""
        owner = self.embed if self.head is None else self.head
        return None if owner is None else owner.main_grad

    @property
    def head_float8(self) -> Float8Rule | None:
        """The rule of the output projection's products, or None where they are in 16 bits."""
        rule = self.layer_context.float8
        return None if rule.head is None else rule

    def forward(self, inputs: ModelInputs, x_BSD: Tensor | None = None) -> Hidden:
        """Hidden states of this rank's positions; `x_BSD` is the output of the previous stage, None on the first."""
        return drain(self.steps(inputs, x_BSD))

    def call_in_steps(self, inputs: ModelInputs, x_BSD: Tensor | None = None) -> Steps[Hidden]:
        """Call the module with its hooks; with overlap "passes", run `steps`, between which another pass runs."""
        if self.pauses:
            return (yield from self.steps(inputs, x_BSD))
        hidden: Hidden = self(inputs, x_BSD)
        return hidden

    def steps(self, inputs: ModelInputs, x_BSD: Tensor | None = None) -> Steps[Hidden]:
        """`forward` as a generator; with overlap "passes" it yields while a transfer of a layer runs."""
        if self.arena is not None:
            self.arena.begin()
        context = self.forward_context(inputs)
        if self.is_first:
            x_BSD = self._embed(inputs.tokens_BS)
            if self.config.hyper_connections is not None:
                x_BSD = x_BSD.repeat(1, 1, self.config.hyper_connections.streams)
            self._mark(x_BSD, EMBEDDING)
        assert x_BSD is not None, "a stage without embedding needs the hidden states of the stage before"
        for number, block in self.blocks.items():
            assert isinstance(block, Block), "nothing else is a decoder layer"
            if self.pauses:
                x_BSD = yield from within(partial(span, LAYER, number), block.steps(x_BSD, context))
                continue
            with span(LAYER, number):
                x_BSD = block(x_BSD, context)  # called as a module, so that its hooks (FSDP2) run
            self._mark(x_BSD, int(number))
        if self.streams is not None:
            x_BSD = self.streams(x_BSD)[0]
        main_BSD = x_BSD if self.norm is None else self.norm(x_BSD)
        previous_BSD, depths = main_BSD, []
        # Every stage gets `ahead`; only the last one has prediction layers.
        for (depth, layer), ahead_BS in zip(self.mtp.items(), inputs.ahead, strict=False):
            ahead_BSD = self._embed(ahead_BS)
            with span(LAYER, self.config.layers + int(depth)), span(Span.MTP):
                previous_BSD = layer(previous_BSD, ahead_BSD, context)  # depth k reads depth k - 1
            depths.append(previous_BSD)
        if (
            self.norm is not None and self.config.logits_scaling != 1
        ):  # the product with the output projection is linear
            main_BSD, *depths = (hidden_BSD / self.config.logits_scaling for hidden_BSD in (main_BSD, *depths))
        return Hidden(main_BSD, tuple(depths))

    def _mark(self, x_BSD: Tensor, layer: int) -> None:
        """Tell `reached` when backward has the gradient of a layer's output."""
        if self.reached is not None and x_BSD.requires_grad:
            x_BSD.register_hook(lambda _, reached=self.reached: reached(layer))

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed is not None, "this stage has no embedding"
        with span(Span.EMBED):
            x_BSD: Tensor = self.embed(tokens_BS)
            return x_BSD if self.config.embedding_scale == 1 else x_BSD * self.config.embedding_scale

    def forward_context(self, inputs: ModelInputs) -> ForwardContext:
        """Rotary angles, masks and share of a micro-batch, computed once for all layers."""
        attention, positions_BS = self.config.attention, inputs.positions_BS
        scope = Scope(sequences=positions_BS.shape[0], share=inputs.share)
        if self.reads_tokens:  # those of this rank's part of the positions
            tensor = self.layer_context.axes.tensor
            scope = replace(scope, tokens_T=inputs.tokens_BS.chunk(tensor.size, dim=1)[tensor.rank].flatten())
        if isinstance(attention, LatentAttention) and not attention.rotary:
            positions_BS = torch.zeros_like(positions_BS)  # angles of zero
        with span(Span.EMBED):
            cos_BSP, sin_BSP = angles(attention.rope, self.rotary_dim, positions_BS)  # P / 2 wide
            context = ForwardContext(cos_BSP, sin_BSP, None, scope, inputs.parts)
            if not isinstance(attention, CompressedAttention):
                context = self._with_masks(context, inputs)
                if attention.query_temperature:  # by position in the document
                    scale_BS = 1 + attention.query_temperature * (positions_BS // attention.temperature_floor).log1p()
                    context = replace(context, temperature_BS=scale_BS)
            if self.config.linear_attention is not None:
                context = replace(context, documents_BS=inputs.documents_BS)
            if isinstance(attention, CompressedAttention):
                context = self._with_windows(context, attention, inputs)
            if isinstance(attention, GroupedQueryAttention) and attention.local is not None:
                context = self._with_local(context, attention.local, inputs)
            return context.in_static_memory()  # last: captured graphs read these addresses

    def _with_masks(self, context: ForwardContext, inputs: ModelInputs) -> ForwardContext:
        """The same with what layers that see the whole row may read: masks, bounds, begins of documents."""
        attention, positions_BS = self.config.attention, inputs.positions_BS
        indexer = attention.indexer if isinstance(attention, LatentAttention) else None
        chooses = indexer is not None and not reads_all_keys(indexer, positions_BS.shape[1])
        has_bounds = self.has_bounds and not chooses
        # Beside attention between bounds, QK-clip alone reads the mask.
        reads_mask = not has_bounds or any(logits.logits is not None for logits in self.with_logits)
        gathers = chooses and indexer is not None and gathers_keys(indexer, self.layer_context)
        if reads_mask and not gathers:
            context = replace(context, allowed_BSS=inputs.allowed_BSS())
        if has_bounds:
            held, device = positions_BS.shape[1], positions_BS.device
            context = replace(context, bounds=nears_of(self.layer_context, None, held, inputs.documents_BS, device))
        return context if indexer is None else replace(context, first_BS=_firsts(inputs))

    def _with_windows(
        self, context: ForwardContext, attention: CompressedAttention, inputs: ModelInputs
    ) -> ForwardContext:
        """The same with what compressed attention reads: begins of documents, windows, angles of window layers."""
        first_BS, width = _firsts(inputs), attention.rotary_dim
        kinds = {attention.kind_of(int(layer)) for layer in self.blocks}
        rates = {"csa": attention.csa_rate, "hca": attention.hca_rate}
        csa, hca = (
            tuple(windows_of(first_BS, rate, attention.rope, width, overlap=kind == "csa")) if kind in kinds else ()
            for kind, rate in rates.items()
        )
        local = angles(attention.window_rope, width, inputs.positions_BS) if "window" in kinds else ()
        return replace(context, first_BS=first_BS, csa_windows=csa, hca_windows=hca, local_angles=local)

    def _with_local(self, context: ForwardContext, local: LocalAttention, inputs: ModelInputs) -> ForwardContext:
        held, device = inputs.positions_BS.shape[1], inputs.positions_BS.device
        if self.has_reach:
            nears = nears_of(self.layer_context, reach_of(local), held, inputs.documents_BS, device)
            context = replace(context, nears=nears)
        if local.rope is not None:
            context = replace(context, local_angles=angles(local.rope, self.rotary_dim, inputs.positions_BS))
        if self.scales_queries:  # by position in the row, not in the document as rotary angles are
            scale_S = query_scale(local, held_positions(self.layer_context, held, device))
            context = replace(context, query_scale_S=scale_S)
        return context

    def logits(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """All logits of the main prediction, B x S x V, in the compute dtype. For tests, not for training."""
        ahead = shifted_tokens(tokens_BS, len(self.mtp))
        inputs = ModelInputs(tokens_BS=tokens_BS, positions_BS=positions_BS, ahead=ahead)
        return F.linear(self(inputs).main_BSD, self.head_VD)


def _firsts(inputs: ModelInputs) -> Tensor:
    """The first position of each position's document, int32 B x S."""
    documents_BS = inputs.documents_BS
    if documents_BS is None:
        documents_BS = torch.zeros_like(inputs.positions_BS)
    return first_keys(documents_BS, None, documents_BS.shape[1], documents_BS.device)
