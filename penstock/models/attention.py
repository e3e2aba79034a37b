"""Grouped-query attention with the options of all families, linear attention, and QK-clip.

    project, add biases -> norm per head or per projection -> rotate -> norm of rotated heads -> temperature
    -> attend -> multiply by a gate

The layer's configuration and number decide which of these run; layers of one model may differ in their window and in
whether they rotate. Masks and temperatures are computed once per pass, in `ForwardContext`.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.config.model import GroupedQueryAttention, LinearAttention, LocalAttention
from penstock.kernels.attention import largest_logits
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.layout.sharding import local_shape
from penstock.models.linear import Linear, cut_over
from penstock.models.model_inputs import ForwardContext, softmax_scale
from penstock.models.norm import RMSNorm, TensorParallelNorm, norm_together
from penstock.moe.balance import StepMeter
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.context import attend, heads_for_positions, positions_for_heads
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span

# QK-clip (Kimi-K2, arXiv 2507.20534 section 2.1): after an update, weights of heads with large logits shrink.
#
# A head whose largest logit of the step is m > t has its queries and keys multiplied by factors whose product is t / m:
#
#     latent attention    plain parts: the root of t / m each; rotary queries: t / m, because all heads share the key
#     grouped queries     the root of t / m each, with the largest m of the heads that share a key
#
# The logits cost one more product of queries and keys in each pass, because attention kernels do not return them.


class LogitMeter(StepMeter):
    """The largest logits of this rank's heads."""

    largest_H: Tensor  # float32, the same tensor for the whole run

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("largest_H", torch.full((heads,), -torch.inf, device=device), persistent=False)

    def reset(self) -> None:
        self.largest_H.fill_(-torch.inf)

    @torch.no_grad()
    def see(self, q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> None:
        """Take queries and keys of a pass. Seeing them twice, as recomputation does, changes nothing."""
        largest_H = largest_logits(q_BSHN, k_BSGN, scale, allowed_BSS)
        self.largest_H.copy_(torch.maximum(self.largest_H, largest_H))


class SoftmaxAttention(nn.Module):
    """Attention by a softmax over keys; each tensor-parallel rank holds some heads."""

    def __init__(self, layer_context: LayerContext, heads: int, scale: float, *, sinks: bool) -> None:
        super().__init__()
        axis = layer_context.axes.tensor
        self.layer_context = layer_context
        self.heads = heads // axis.size  # of this rank
        self.scale = scale  # of scores
        self.logits: LogitMeter | None = None  # of QK-clip
        self.cuts = {"sinks_H": cut_over(axis, dim=0)}
        self.sinks_H = nn.Parameter(torch.empty(self.heads)) if sinks else None  # one softmax logit for each head

    def clip_factors(self, factor_H: Tensor) -> dict[str, Tensor]:
        """Factors of rows of weights and biases, by parameter, so that the logits of heads are multiplied."""
        raise NotImplementedError


def _layers(decoders: Iterable[nn.Module]) -> Iterator[tuple[str, SoftmaxAttention]]:
    for decoder in decoders:
        for path, module in decoder.named_modules():
            if isinstance(module, SoftmaxAttention):
                yield path, module


def measure_logits(decoders: Iterable[nn.Module], device: torch.device) -> None:
    """Let all layers with softmax attention measure their logits."""
    for _, layer in _layers(decoders):
        layer.logits = LogitMeter(layer.heads, device)


@torch.no_grad()
def clip_factors(decoders: Iterable[nn.Module], limit: float, data: Axis) -> dict[str, Tensor]:
    """Factors of the rows of weights and biases on this rank, by parameter, after the passes of a step.

    `data` are ranks that train on other tokens with the same heads; they call it together.
    """
    factors: dict[str, Tensor] = {}
    for path, layer in _layers(decoders):
        if layer.logits is None:
            continue
        largest_H = layer.logits.largest_H.clone()
        if data.group is not None:
            dist.all_reduce(largest_H, dist.ReduceOp.MAX, group=data.group)
        factor_H = (limit / largest_H.clamp(min=limit)).float()  # 1 below the limit
        factors |= {f"{path}.{name}": rows for name, rows in layer.clip_factors(factor_H).items()}
    return factors


def factors_of_rows(*parts: tuple[Tensor, int]) -> Tensor:
    """Factors of rows: in each head, so many rows for each of its parts."""
    return torch.cat([factor_H[:, None].expand(-1, width) for factor_H, width in parts], dim=1).flatten()


class GroupedQueryLayer(SoftmaxAttention):
    """Attention whose query heads share keys; tensor-parallel ranks see all positions of their context rank."""

    def __init__(
        self,
        config: GroupedQueryAttention,
        hidden_size: int,
        layer_context: LayerContext,
        *,
        layer: int,  # number in the model, from 0; layers of multi-token prediction count on
        epsilon: float,
        zero_centred_norms: bool = False,
    ) -> None:
        scale = config.softmax_scale or softmax_scale(config.rope_of(layer), config.head_dim)
        super().__init__(layer_context, config.heads, scale, sinks=config.sinks)
        local, is_global = config.local, config.is_global(layer)
        self.config = config
        self.epsilon = epsilon
        self.zero_centred_norms = zero_centred_norms
        self.reach = None if local is None or is_global else reach_of(local)  # None sees the whole row
        self.is_rotated = config.rotates(layer)
        # Attention temperature tuning is for layers that see the whole row.
        self.scales_queries = local is not None and is_global and local.global_temperature > 0
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        has_bias = config.bias or config.qkv_bias
        # With a gate each head has its query, then its gate, unless gates have a matrix of their own.
        self.has_gate_rows = config.output_gate and not config.gate_proj
        in_queries = 2 * queries if self.has_gate_rows else queries
        self.query = Linear(hidden_size, in_queries, layer_context, split="outputs", bias=has_bias)
        self.key = Linear(hidden_size, keys, layer_context, split="outputs", bias=has_bias)
        self.value = Linear(hidden_size, keys, layer_context, split="outputs", bias=has_bias)
        self.gate = Linear(hidden_size, queries, layer_context, split="outputs") if config.gate_proj else None
        self.out = Linear(queries, hidden_size, layer_context, split="inputs", bias=config.bias)
        self.query_norm, self.key_norm = (self._norm(width) for width in (queries, keys))

    def _norm(self, width: int) -> RMSNorm | None:
        match self.config.qk_norm:
            case "head" | "weighted-rotated-head":
                operators, is_centred = self.layer_context.operators, self.zero_centred_norms
                return RMSNorm(self.config.head_dim, self.epsilon, operators, is_zero_centred=is_centred)
            case "projection":
                is_centred = self.zero_centred_norms
                return TensorParallelNorm(width, self.epsilon, self.layer_context, is_zero_centred=is_centred)
        return None

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input; gathered positions are quantized after the collective instead."""
        return self.query.float8 is not None and self.layer_context.axes.tensor.size == 1

    @property
    def reads_high_precision(self) -> bool:
        """Whether any product or collective reads the input in high precision."""
        return not self.reads_float8 or any(
            linear.float8 is None for linear in (self.key, self.value, self.gate or self.key)
        )

    def forward(self, x_BSD: Tensor, context: ForwardContext, x_float8: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D of this rank's positions; `x_float8` is a quantized copy of x, if there is one."""
        tensor = self.layer_context.axes.tensor
        if tensor.size > 1:
            x_BSD = all_gather(x_BSD, tensor, dim=1)  # S / tensor -> S positions
            x_float8 = self.query.quantize_input(x_BSD)  # once, for queries, keys and values
        q, gate_BSHN = self._queries(x_BSD, x_float8)
        q_BSHN, k_BSGN = self._positioned(*self._normed(q, self.key(x_BSD, x_float8)), context)
        if self.logits is not None and self.training:
            self.logits.see(q_BSHN, k_BSGN, self.scale, context.allowed_BSS)
        v_BSGN = self.value(x_BSD, x_float8).unflatten(-1, (-1, self.config.head_dim))  # (G N) -> G x N
        o_BSHN = self.layer_context.run("attention", partial(self._attended, context=context), q_BSHN, k_BSGN, v_BSGN)
        if gate_BSHN is not None:
            o_BSHN = o_BSHN * torch.sigmoid(gate_BSHN)
        # The products of the ranks' heads are partial sums: S -> S / tensor positions, then the bias once.
        return self.out.shifted(reduce_scatter(self.out(o_BSHN.flatten(-2)), tensor, dim=1))

    def _queries(self, x_BSD: Tensor, x_float8: RowColQuantized | None) -> tuple[Tensor, Tensor | None]:
        """Queries of all heads side by side, and gates by head, if there are any."""
        q: Tensor = self.query(x_BSD, x_float8)
        if self.gate is not None:
            return q, self.gate(x_BSD, x_float8).unflatten(-1, (-1, self.config.head_dim))
        if not self.has_gate_rows:
            return q, None
        q_BSHN, gate_BSHN = q.unflatten(-1, (-1, 2 * self.config.head_dim)).chunk(2, dim=-1)
        return q_BSHN.flatten(-2), gate_BSHN

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys by head, after the weighted norms."""
        split = (-1, self.config.head_dim)
        query_norm, key_norm = self.query_norm, self.key_norm
        if isinstance(query_norm, TensorParallelNorm) and isinstance(key_norm, TensorParallelNorm):
            # Norms over all heads need sums of squares from every tensor rank: one exchange for both.
            q, k = norm_together(((query_norm, q), (key_norm, k)), self.layer_context.axes.tensor)
        q_BSHN, k_BSGN = q.unflatten(-1, split), k.unflatten(-1, split)  # H N -> H x N, this rank's heads
        if self.config.qk_norm == "head":
            return self._normed_heads(q_BSHN, k_BSGN)
        return q_BSHN, k_BSGN

    def _normed_heads(self, q_BSHN: Tensor, k_BSGN: Tensor) -> tuple[Tensor, Tensor]:
        assert self.query_norm is not None and self.key_norm is not None, "norms of heads have weights"
        return self.query_norm(q_BSHN), self.key_norm(k_BSGN)  # over N

    def _positioned(self, q_BSHN: Tensor, k_BSGN: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries and keys after rotation, the norms behind it, and attention temperature."""
        if self.is_rotated:
            rotate, of_all = self.layer_context.operators.rotate, (context.cos_BSP, context.sin_BSP)
            cos_BSP, sin_BSP = of_all if self.reach is None else context.local_angles or of_all
            q_BSHN, k_BSGN = (rotate(x, cos_BSP, sin_BSP) for x in (q_BSHN, k_BSGN))
            if self.config.qk_norm == "rotated-head":  # Llama 4: layers that do not rotate have no norm either
                norm = self.layer_context.operators.rms_norm
                q_BSHN, k_BSGN = (norm(x, x.new_ones(x.shape[-1]), self.epsilon) for x in (q_BSHN, k_BSGN))
        if self.config.qk_norm == "weighted-rotated-head":
            q_BSHN, k_BSGN = self._normed_heads(q_BSHN, k_BSGN)
        if self.scales_queries:
            assert context.query_scale_S is not None, "the context has the attention temperature"
            q_BSHN = (q_BSHN * context.query_scale_S[:, None, None]).to(q_BSHN.dtype)  # float32 product
        return context.scaled(q_BSHN), k_BSGN

    def _attended(self, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGN: Tensor, context: ForwardContext) -> Tensor:
        # Read the parameter when this runs: FSDP2 gathers it to another address before recomputation.
        return attend(
            q_BSHN,
            k_BSGN,
            v_BSGN,
            self.layer_context,
            scale=self.scale,
            allowed_BSS=context.allowed_BSS,
            nears=(() if self.reach is None else context.nears) or context.bounds,
            sinks_H=self.sinks_H,
        )

    def clip_factors(self, factor_H: Tensor) -> dict[str, Tensor]:
        config, group = self.config, self.config.heads // self.config.kv_heads
        factor_G = factor_H.view(-1, group).amin(1).sqrt()
        factor_H = factor_G.repeat_interleave(group)
        gates = ((torch.ones_like(factor_H), config.head_dim),) if self.has_gate_rows else ()
        queries = factors_of_rows((factor_H, config.head_dim), *gates)
        factors = {"query": queries, "key": factors_of_rows((factor_G, config.head_dim))}
        kinds = ("weight", "bias") if self.query.bias is not None else ("weight",)
        return {f"{name}.{kind}": rows for name, rows in factors.items() for kind in kinds}


def reach_of(local: LocalAttention) -> AttentionWindow:
    return AttentionWindow(kind=local.kind, size=local.size)


def query_scale(local: LocalAttention, positions_S: Tensor) -> Tensor:
    """Attention temperature of queries in global layers (arXiv 2501.19399), float32, by position in the row."""
    steps_S = ((positions_S.float() + 1) / local.temperature_floor).floor()  # + 1: the formula counts from 1
    return steps_S.log1p() * local.global_temperature + 1


# Linear attention by a gated delta rule: Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692).
#
#     project -> short convolution, SiLU -> unit length of queries and keys -> delta rule -> norm of each head -> gate
#
# Each tensor-parallel rank holds some heads. Context-parallel ranks exchange positions for heads, whatever
# `parallel.context_method` says: each has the states of a part of the heads over the whole row, so no rank waits for
# the state of another one. A state and the convolution end with their document.


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
