"""One decoder layer: attention and a feed-forward network, each behind a norm and around a residual sum.

Up to where tokens leave for their experts, shapes and addresses are the same in every pass: attention, both norms, the
router, and the order of the slots. That part may be a captured graph (`ForwardContext.parts`).

A norm that gives its rows in 8 bits besides gives them as a value of its own (`ready`), beside the rows.
"""

from functools import partial

from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.attention import GroupedQueryLayer
from penstock.models.ffn import FeedForward
from penstock.models.mla import LatentLayer
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import PreNorm
from penstock.moe.layer import MoE, Terms
from penstock.moe.routing import Routing
from penstock.parallel.async_transfer import Steps, within
from penstock.parallel.graphs import PartialGraphs
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span


class Block(nn.Module):
    """A pre-norm decoder layer.

    Args:
        attention_norm: norm before attention.
        attention: grouped-query or latent attention.
        ffn_norm: norm before the feed-forward network.
        ffn: dense network or mixture of experts.
        layer_context: what becomes of activations.
    """

    def __init__(
        self,
        attention_norm: PreNorm,
        attention: GroupedQueryLayer | LatentLayer,
        ffn_norm: PreNorm,
        ffn: FeedForward | MoE,
        layer_context: LayerContext,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.layer_context = layer_context

    def forward(self, x_BSD: Tensor, frame: ForwardContext) -> Tensor:
        """Returns the residual stream after the layer, B x S x D."""
        with self.layer_context.recompute.discarding():
            return self.layer_context.run("layer", self._forward, x_BSD, frame)

    def steps(self, x_BSD: Tensor, frame: ForwardContext) -> Steps[Tensor]:
        """`forward` that stops where a transfer is under way; a layer that is no region and not on the host."""
        with self.layer_context.recompute.discarding_in_pieces() as piece:
            with piece():
                x_BSD, x_TD, ready = self._attend(x_BSD, frame)
            terms = yield from within(piece, self._mix(x_TD, ready, frame))
            return self._add(x_BSD, terms)

    def _mix(self, x_TD: Tensor, ready: RowColQuantized | None, frame: ForwardContext) -> Steps[Terms]:
        if isinstance(self.ffn, MoE):
            return (yield from self.ffn.steps(x_TD, frame.scope, ready))
        return self._dense(x_TD, ready)

    def _dense(self, x_TD: Tensor, ready: RowColQuantized | None) -> Terms:
        with span(Span.DENSE):
            return (self.layer_context.run("dense", self.ffn, x_TD, ready),)

    def _forward(self, x_BSD: Tensor, frame: ForwardContext) -> Tensor:
        if frame.parts is not None:
            return self._behind_part(x_BSD, frame, frame.parts)
        x_BSD, x_TD, ready = self._attend(x_BSD, frame)
        if isinstance(self.ffn, MoE):
            terms = self.layer_context.run("moe", self.ffn, x_TD, frame.scope, ready)
        else:
            terms = self._dense(x_TD, ready)
        return self._add(x_BSD, terms)

    def _behind_part(self, x_BSD: Tensor, frame: ForwardContext, parts: PartialGraphs) -> Tensor:
        """`_forward` whose first part is replayed. What a part gives stays for good, so it gives nothing twice.

        Who reads its tokens reads them from an output of his own, though of one memory: their gradients come to the
        part one by one and are added there all at once, as in a layer that is no graph.
        """
        if not isinstance(self.ffn, MoE):
            x_BSD, x_TD = parts.run(self, lambda x_BSD: self._attend(x_BSD, frame, ready=False)[:2], x_BSD)
            return self._add(x_BSD, self._dense(x_TD, None))
        mixture = self.ffn

        def until_dispatch(x_BSD: Tensor) -> tuple[Tensor, ...]:
            x_BSD, x_TD, _ = self._attend(x_BSD, frame, ready=False)
            routed_TD, x_TD, shared_TD = self.layer_context.operators.fan_out(x_TD)
            return x_BSD, x_TD, shared_TD, *mixture.route(routed_TD, frame.scope).tensors()

        x_BSD, x_TD, shared_TD, *routing = parts.run(self, until_dispatch, x_BSD)
        return self._add(x_BSD, mixture.mix(x_TD, shared_TD, Routing.of(*routing)))

    def _attend(
        self, x_BSD: Tensor, frame: ForwardContext, *, ready: bool = True
    ) -> tuple[Tensor, Tensor, RowColQuantized | None]:
        """The residual stream after attention, and what the feed-forward network reads, T x D; also in 8 bits."""
        run, is_again = self.layer_context.run, self.layer_context.recompute.recomputes("norm")
        if is_again:
            normed_BSD, both = run("norm", self.attention_norm, x_BSD)
        else:
            normed_BSD, x_BSD, both = self.attention_norm.beside(x_BSD)
        with span(Span.ATTENTION):
            attended_BSD = self.attention(normed_BSD, frame, both)
        if is_again:
            # Made again from the sum alone; the fused form would keep both of its terms.
            x_BSD = self._add(x_BSD, (attended_BSD,))
            normed_BSD, both = run("norm", partial(self.ffn_norm, ready=ready), x_BSD)
        else:
            normed_BSD, x_BSD, both = self.ffn_norm.add(attended_BSD, x_BSD, ready=ready)
        return x_BSD, normed_BSD.flatten(0, 1), both

    def _add(self, x_BSD: Tensor, terms: Terms) -> Tensor:
        """The residual stream with one term more, or two."""
        with span(Span.RESIDUAL):
            if len(terms) == 1:
                return x_BSD + terms[0].view_as(x_BSD)
            routed_BSD, shared_BSD = (term.view_as(x_BSD) for term in terms)
            return self.layer_context.operators.add_three(routed_BSD, shared_BSD, x_BSD)
