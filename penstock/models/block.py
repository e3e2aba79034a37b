"""A decoder layer (attention and a feed-forward network, each with norms and around a residual sum), and MTP.

With several residual streams (`residual`) the networks read a mix of them, and their outputs join all of them.

From the input to the dispatch of tokens, shapes and addresses are the same in every pass: attention, both norms, the
router, and the order of the slots. That part may be a captured graph (`ForwardContext.parts`).

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) has one more decoder layer for each depth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.models.attention import DeltaLayer, GroupedQueryLayer
from penstock.models.compressed import CompressedLayer
from penstock.models.linear import Linear, float8_network
from penstock.models.mla import LatentLayer
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import PreNorm, RMSNorm
from penstock.models.residual import Connection, StreamMixer
from penstock.moe.balance import Routing
from penstock.moe.layer import MoE, Terms
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.graphs import PartialGraphs
from penstock.parallel.layer_context import LayerContext, Steps, drain, within
from penstock.parallel.spans import span


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or the activation of `rule`; gate and up in one product, and in float8 all.

    Tensor-parallel ranks divide the width F. Every token passes the whole width, so their tokens are gathered before
    the products, and the partial outputs are reduce-scattered after them.

    With a gate, a sigmoid of the token multiplies the output. It is applied before the second product, which is linear.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        layer_context: LayerContext,
        rule: ExpertRule = SWIGLU,
        *,
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.operators = layer_context.operators
        self.axis = layer_context.axes.tensor
        parts = rule.projections
        self.gate_up = Linear(hidden_size, parts * ffn_size, layer_context, split="outputs", blocks=parts)
        self.down = Linear(ffn_size, hidden_size, layer_context, split="inputs")
        self.gate = Linear(hidden_size, 1, layer_context) if has_gate else None

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input; gathered tokens are quantized after the collective instead."""
        return self.gate_up.float8 is not None and self.axis.size == 1

    def forward(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """Apply to every token. Returns y_TD; `x_float8` is a quantized copy of x, if there is one."""
        if self.gate_up.float8 is None or self.down.float8 is None or self.gate is not None:
            return self.narrow(self.widen(x_TD, x_float8))
        x_TD = all_gather(x_TD, self.axis, dim=0)  # tokens of all tensor ranks
        weights = self.gate_up.float8_weight(), self.down.float8_weight()
        y_TD = float8_network(x_TD, *weights, x_float8, self.rule)
        return reduce_scatter(y_TD, self.axis, dim=0)

    def widen(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """The first product and the activation: this rank's part of h_TF, for the tokens of all tensor ranks."""
        x_TD = all_gather(x_TD, self.axis, dim=0)  # tokens of all tensor ranks
        wide_TF = self.gate_up(x_TD, x_float8)  # T x 2F, then T x F
        if self.gate is None:
            return self.operators.swiglu(wide_TF, None, self.rule)
        return self.operators.swiglu(wide_TF, torch.sigmoid(self.gate(x_TD).float())[:, 0], self.rule)

    def narrow(self, h_TF: Tensor) -> Tensor:
        """The second product, reduced to this rank's own tokens. Returns y_TD."""
        return reduce_scatter(self.down(h_TF), self.axis, dim=0)


@dataclass(frozen=True, kw_only=True)
class BlockNorms:
    """Norms of the inputs of attention and feed-forward network, and of their outputs; None where there is none."""

    attention: PreNorm | None
    ffn: PreNorm | None
    attention_post: RMSNorm | None
    ffn_post: RMSNorm | None


AnyAttention = GroupedQueryLayer | LatentLayer | CompressedLayer | DeltaLayer

Residual = tuple[Tensor, ...]
"""The residual stream alone, B x S x D; or several ones, as a `Connection`."""


class Block(nn.Module):
    """A decoder layer; what it adds to the residual stream is multiplied by `residual_scale`.

    With several residual streams it has a mixer of them before attention and before the feed-forward network.
    """

    def __init__(
        self,
        attention: AnyAttention,
        ffn: FeedForward | MoE,
        norms: BlockNorms,
        layer_context: LayerContext,
        residual_scale: float = 1.0,
        streams: tuple[StreamMixer, StreamMixer] | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = norms.attention
        self.attention = attention
        self.attention_post_norm = norms.attention_post
        self.ffn_norm = norms.ffn
        self.ffn = ffn
        self.ffn_post_norm = norms.ffn_post
        self.layer_context = layer_context
        self.residual_scale = residual_scale
        self.attention_streams, self.ffn_streams = streams or (None, None)

    def forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        """Returns the residual stream after the layer, B x S x D; several ones side by side."""
        replicas, forward = self.layer_context.replicas, partial(self._whole, context=context)
        if replicas is None or not isinstance(self.ffn, MoE):
            return forward(x_BSD)
        return replicas.backward_of_layer(forward, x_BSD)

    def _whole(self, x_BSD: Tensor, *, context: ForwardContext) -> Tensor:
        with self.layer_context.discarding():
            return self.layer_context.run("layer", self._forward, x_BSD, context)

    def steps(self, x_BSD: Tensor, context: ForwardContext) -> Steps[Tensor]:
        """`forward` as a generator that yields while a transfer runs; not for layers recomputed or offloaded whole."""
        with self.layer_context.discarding_in_pieces() as piece:
            with piece():
                residual, x_TD, x_float8 = self._attend(x_BSD, context)
            if isinstance(self.ffn, MoE):
                # Each step enters a piece of its own: between steps another pass runs, with its own discarding.
                terms = yield from within(piece, self.ffn.steps(x_TD, context.scope, x_float8))
            else:
                with piece():
                    terms = self._dense(x_TD, x_float8)
            return self._add(residual, terms, self.ffn_post_norm)

    def _dense(self, x_TD: Tensor, x_float8: RowColQuantized | None) -> Terms:
        with span(Span.DENSE):
            return (self.layer_context.run("dense", self.ffn, x_TD, x_float8),)

    def _forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        if context.parts is not None:
            return self._with_captured_part(x_BSD, context, context.parts)
        residual, x_TD, x_float8 = self._attend(x_BSD, context)
        if isinstance(self.ffn, MoE):
            terms = self.layer_context.run("moe", self.ffn, x_TD, context.scope, x_float8)
        else:
            terms = self._dense(x_TD, x_float8)
        return self._add(residual, terms, self.ffn_post_norm)

    def _with_captured_part(self, x_BSD: Tensor, context: ForwardContext, parts: PartialGraphs) -> Tensor:
        """`_forward` that replays everything before dispatch as a graph.

        Router, dispatch and shared expert each read their own output of the graph (views of one tensor). Their
        gradients then enter the captured backward separately and are summed inside it, as in eager mode.
        """
        if not isinstance(self.ffn, MoE):

            def until_ffn(x_BSD: Tensor) -> tuple[Tensor, ...]:
                residual, x_TD, _ = self._attend(x_BSD, context, quantize=False)
                return x_TD, *residual

            x_TD, *residual = parts.run(self, until_ffn, x_BSD)
            return self._add(tuple(residual), self._dense(x_TD, None), self.ffn_post_norm)
        moe, width = self.ffn, 1 if self.ffn_streams is None else len(Connection._fields)  # of the residual

        def until_dispatch(x_BSD: Tensor) -> tuple[Tensor, ...]:
            residual, x_TD, _ = self._attend(x_BSD, context, quantize=False)
            routed_TD, x_TD, shared_TD = self.layer_context.operators.fan_out(x_TD)
            return x_TD, shared_TD, *residual, *moe.route(routed_TD, context.scope).tensors()

        x_TD, shared_TD, *rest = parts.run(self, until_dispatch, x_BSD)
        residual, routing = tuple(rest[:width]), rest[width:]
        terms = drain(moe.after_routing(x_TD, shared_TD, Routing.of(*routing)))
        return self._add(residual, terms, self.ffn_post_norm)

    def _attend(
        self, x_BSD: Tensor, context: ForwardContext, *, quantize: bool = True
    ) -> tuple[Residual, Tensor, RowColQuantized | None]:
        """Returns (residual stream after attention, input T x D of the feed-forward network, its float8 copy)."""
        if self.attention_streams is not None:
            return self._attend_in_streams(x_BSD, context, quantize=quantize)
        run, recomputes_norm = self.layer_context.run, self.layer_context.recomputes("norm")
        if self.attention_norm is None:
            normed_BSD, normed_float8 = x_BSD, None
        elif recomputes_norm:
            normed_BSD, normed_float8 = run("norm", self.attention_norm, x_BSD)
        else:
            normed_BSD, x_BSD, normed_float8 = self.attention_norm.beside(x_BSD)
        with span(Span.ATTENTION):
            attended_BSD = self.attention(normed_BSD, context, normed_float8)
        if self.ffn_norm is None or recomputes_norm:
            # Recomputation needs only the sum; the fused add and norm would save both of its terms.
            x_BSD = self._add((x_BSD,), (attended_BSD,), self.attention_post_norm)
            normed_BSD, normed_float8 = x_BSD, None
            if self.ffn_norm is not None:
                normed_BSD, normed_float8 = run("norm", partial(self.ffn_norm, quantize=quantize), x_BSD)
        else:
            attended_BSD = self._output(attended_BSD, self.attention_post_norm)
            normed_BSD, x_BSD, normed_float8 = self.ffn_norm.add(attended_BSD, x_BSD, quantize=quantize)
        return (x_BSD,), normed_BSD.flatten(0, 1), normed_float8

    def _attend_in_streams(
        self, x_BSD: Tensor, context: ForwardContext, *, quantize: bool
    ) -> tuple[Residual, Tensor, RowColQuantized | None]:
        run = self.layer_context.run
        assert self.attention_streams is not None and self.ffn_streams is not None, "a layer has both or none"
        assert self.attention_norm is not None and self.ffn_norm is not None, "a rule refuses norms of outputs"
        one_BSD, weights = self.attention_streams(x_BSD)
        normed_BSD, normed_float8 = run("norm", self.attention_norm, one_BSD)
        with span(Span.ATTENTION):
            attended_BSD = self.attention(normed_BSD, context, normed_float8)
        with span(Span.RESIDUAL):
            x_BSD = Connection(x_BSD, *weights).joined(attended_BSD)
        one_BSD, weights = self.ffn_streams(x_BSD)
        normed_BSD, normed_float8 = run("norm", partial(self.ffn_norm, quantize=quantize), one_BSD)
        return Connection(x_BSD, *weights), normed_BSD.flatten(0, 1), normed_float8

    def _output(self, y_BSD: Tensor, norm: RMSNorm | None) -> Tensor:
        """What attention or the feed-forward network adds to the residual stream."""
        if norm is not None:
            y_BSD = self.layer_context.run("norm", norm, y_BSD)
        return y_BSD if self.residual_scale == 1 else y_BSD * self.residual_scale

    def _add(self, residual: Residual, terms: Terms, norm: RMSNorm | None) -> Tensor:
        x_BSD = residual[0]
        terms = tuple(term.view(*x_BSD.shape[:-1], -1) for term in terms)
        if len(residual) > 1:
            with span(Span.RESIDUAL):
                return Connection(*residual).joined(sum(terms[1:], terms[0]))
        if norm is not None or self.residual_scale != 1:
            terms = (self._output(sum(terms[1:], terms[0]), norm),)
        with span(Span.RESIDUAL):
            if len(terms) == 1:
                return x_BSD + terms[0]
            routed_BSD, shared_BSD = terms
            return self.layer_context.operators.add_three(routed_BSD, shared_BSD, x_BSD)


class MultiTokenPrediction(nn.Module):
    """One depth k of multi-token prediction.

    It joins the hidden states of depth k - 1 (the main model's for k = 1) with the embeddings of the tokens k positions
    ahead and runs one decoder layer. Embedding and output projection are the main model's. The last k positions of a
    row have no target: their labels are ignored.
    """

    def __init__(
        self, hidden_size: int, block: Block, layer_context: LayerContext, make_norm: Callable[[], RMSNorm]
    ) -> None:
        super().__init__()
        self.embed_norm = make_norm()
        self.hidden_norm = make_norm()
        self.join = Linear(2 * hidden_size, hidden_size, layer_context)
        self.block = block
        self.norm = make_norm()

    def forward(self, previous_BSD: Tensor, ahead_BSD: Tensor, context: ForwardContext) -> Tensor:
        """Returns this depth's hidden states after its norm; `ahead_BSD` embeds the tokens k positions ahead."""
        joined_BSD = self.join(torch.cat((self.embed_norm(ahead_BSD), self.hidden_norm(previous_BSD)), dim=-1))
        out_BSD: Tensor = self.norm(self.block(joined_BSD, context))
        return out_BSD
