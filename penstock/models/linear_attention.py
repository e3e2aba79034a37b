"""Linear attention by a gated delta rule: Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692).

    project -> short convolution, SiLU -> unit length of queries and keys -> delta rule -> norm of each head -> gate

Each tensor-parallel rank holds some heads. Context-parallel ranks exchange positions for heads, whatever
`parallel.context_method` says: each has the states of a part of the heads over the whole row, so no rank waits for the
state of another one. A state and the convolution end with their document.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.config.model import LinearAttention
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.layout.sharding import local_shape
from penstock.models.linear import Linear, cut_over
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import RMSNorm
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import heads_for_positions, positions_for_heads
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span


class DeltaMixing(nn.Module):
    """Parameters that are no matrix of a product: weights of the short convolutions, and rate and bias of the decay.

    A feature's row of the convolution has the weight of the newest position last.
    """

    def __init__(self, config: LinearAttention, layer_context: LayerContext) -> None:
        super().__init__()
        keys, values = config.key_heads * config.key_head_dim, config.value_heads * config.value_head_dim
        of_tensor = cut_over(layer_context.axes.tensor, dim=0)
        decays = config.value_heads * (config.key_head_dim if config.kind == "kda" else 1)
        shapes = {
            "query_conv_DJ": (keys, config.conv_size),
            "key_conv_DJ": (keys, config.conv_size),
            "value_conv_DJ": (values, config.conv_size),
            "decay_rate_H": (config.value_heads,),
            "decay_bias": (decays,),  # for each head, or for each key feature
        }
        self.cuts = dict.fromkeys(shapes, of_tensor)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(local_shape(shape, of_tensor))))

    def part(self, name: str, rank: int, ranks: int) -> Tensor:
        """A context-parallel rank's part of a parameter."""
        return self.get_parameter(name).chunk(ranks)[rank]


class LowRank(nn.Module):
    """A product with a matrix of low rank; tensor-parallel ranks divide the outputs."""

    def __init__(self, inputs: int, rank: int, outputs: int, layer_context: LayerContext) -> None:
        super().__init__()
        self.down = Linear(inputs, rank, layer_context)
        self.up = Linear(rank, outputs, layer_context, split="outputs")

    def forward(self, x_D: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        y: Tensor = self.up(self.down(x_D, x_float8))
        return y


class DeltaLayer(nn.Module):
    """Linear attention of one layer."""

    def __init__(
        self, config: LinearAttention, hidden_size: int, layer_context: LayerContext, *, epsilon: float
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_context = layer_context
        keys, values = config.key_heads * config.key_head_dim, config.value_heads * config.value_head_dim
        by_outputs = partial(Linear, hidden_size, layer_context=layer_context, split="outputs")
        self.query, self.key, self.value = by_outputs(keys), by_outputs(keys), by_outputs(values)
        self.beta = by_outputs(config.value_heads)
        self.decay: nn.Module
        self.gate: nn.Module
        if config.kind == "kda":
            decays = config.value_heads * config.key_head_dim
            self.decay = LowRank(hidden_size, config.key_head_dim, decays, layer_context)
            self.gate = LowRank(hidden_size, config.value_head_dim, values, layer_context)
        else:
            self.decay, self.gate = by_outputs(config.value_heads), by_outputs(values)
        self.mixing = DeltaMixing(config, layer_context)
        self.norm = RMSNorm(config.value_head_dim, epsilon, layer_context.operators)
        self.out = Linear(values, hidden_size, layer_context, split="inputs")

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input; gathered positions are quantized after the collective instead."""
        return self.query.float8 is not None and self.layer_context.axes.tensor.size == 1

    @property
    def reads_high_precision(self) -> bool:
        """Whether any product or collective reads the input in high precision: those of narrow outputs always do."""
        return True

    def forward(self, x_BSD: Tensor, context: ForwardContext, x_float8: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D of this rank's positions; `x_float8` is a quantized copy of x, if there is one."""
        tensor, run = self.layer_context.axes.tensor, self.layer_context.run
        if tensor.size > 1:
            x_BSD = all_gather(x_BSD, tensor, dim=1)  # S / tensor -> S positions
            x_float8 = self.query.quantize_input(x_BSD)  # once, for all products
        projected = (linear(x_BSD, x_float8) for linear in (self.query, self.key, self.value, self.decay, self.beta))
        o_BSHM = run("attention", partial(self._attended, context.documents_BS), *projected)
        gate_BSHM = self.gate(x_BSD, x_float8).unflatten(-1, (-1, self.config.value_head_dim))
        o_BSHM = run("norm", self._gated, o_BSHM, gate_BSHM)
        return reduce_scatter(self.out(o_BSHM.flatten(-2)), tensor, dim=1)  # sum over heads; S -> S / tensor

    def _attended(
        self, documents_BS: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """From projections of this rank's positions and heads to o_BSHM."""
        config, axis, operators = self.config, self.layer_context.axes.context, self.layer_context.operators
        # Each has its heads side by side, B x S x (H N).
        q, k, v, decay, beta = heads_for_positions((q, k, v, decay, beta), self.layer_context)

        # Read parameters when this runs: FSDP2 gathers them to another address before recomputation.
        def of(name: str) -> Tensor:
            return self.mixing.part(name, axis.rank, axis.size)

        convolved = (
            operators.short_convolution(tensor, of(f"{name}_conv_DJ"), documents_BS)
            for tensor, name in ((q, "query"), (k, "key"), (v, "value"))
        )
        widths = (config.key_head_dim, config.key_head_dim, config.value_head_dim)
        q_BSGN, k_BSGN, v_BSHM = (
            tensor.unflatten(-1, (-1, width)) for tensor, width in zip(convolved, widths, strict=True)
        )
        g = F.softplus(decay.float() + of("decay_bias").float())
        rate_H = of("decay_rate_H").float().exp()
        if config.kind == "kda":
            g, rate_H = g.unflatten(-1, (-1, config.key_head_dim)), rate_H[:, None]
        o_BSHM = operators.delta_rule(
            operators.unit_length(q_BSGN, config.key_head_dim**-0.5),
            operators.unit_length(k_BSGN),
            v_BSHM,
            -rate_H * g,
            beta.float().sigmoid(),
            documents_BS,
        )
        return positions_for_heads(o_BSHM, self.layer_context)

    def _gated(self, o_BSHM: Tensor, gate_BSHM: Tensor) -> Tensor:
        """The norm of each head times its gate, in float32."""
        norm, is_silu = self.norm, self.config.kind == "gdn"
        with span(Span.NORM):
            gated_norm = self.layer_context.operators.gated_norm
            return gated_norm(o_BSHM, gate_BSHM, norm.weight_D, norm.epsilon, is_silu=is_silu)
