"""Parameters and FLOPs of a model by arithmetic, without importing PyTorch.

FLOPs are those of the matrix products for one trained token: forward once, backward twice, M x K times K x N counted as
2 M K N. Causal attention counts as half of the full square, local layers as the visible part of it, linear attention as
its definition position by position. Elementwise work, short convolutions and embedding look-ups are not counted. Of the
routed experts only the top-k share is active.

Tests compare this with the weights of the model that is built, on every preset and on models that differ in one field.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from penstock.config.model import (
    CompressedAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Model,
    Moe,
)
from penstock.kernels.attention_window import AttentionWindow
from penstock.layout.stages import StageCosts


@dataclass(frozen=True)
class Count:
    """Size of a model."""

    parameters: int  # without multi-token prediction, as in published totals
    active_parameters: int  # that one token meets, embedding and output projection included
    mtp_parameters: int  # of multi-token prediction
    flops_per_token: float  # of training, multi-token prediction included


@dataclass(frozen=True)
class _Part:
    """A part of the model."""

    parameters: int
    idle: int = 0  # parameters that one token does not meet
    flops: float = 0.0  # of one token's forward pass


@lru_cache(maxsize=16)
def size_of(model: Model, sequence_length: int) -> Count:
    """Count a model at a sequence length, the positions of a row."""
    matrix = model.vocab_size * model.hidden_size  # embedding, and output projection
    head = _Part(0 if model.tie_word_embeddings else matrix, flops=2 * matrix)
    layers = [_block(model, layer, sequence_length) for layer in range(model.layers)]
    last = [_Part(model.hidden_size), _streams(model, 1)]  # final norm, and streams that become one
    whole = _sum([_Part(matrix), *layers, *last, head])
    ahead = _sum(_depths(model, sequence_length))
    return Count(
        parameters=whole.parameters,
        active_parameters=whole.parameters - whole.idle,
        mtp_parameters=ahead.parameters,
        # Backward has twice the FLOPs of forward.
        flops_per_token=3 * (whole.flops + ahead.flops + head.flops * model.mtp_layers),
    )


def stage_costs(model: Model, sequence_length: int) -> StageCosts:
    """Forward FLOPs of one token through each part that a pipeline stage may hold."""
    head = 2.0 * model.vocab_size * model.hidden_size
    return StageCosts(
        embed=0.0,  # a look-up has no product
        layers=tuple(_block(model, layer, sequence_length).flops for layer in range(model.layers)),
        mtp=tuple(depth.flops + head for depth in _depths(model, sequence_length)),
        head=head,
    )


def _depths(model: Model, sequence_length: int) -> list[_Part]:
    """The depths of multi-token prediction, without output projection."""
    # A depth joins the hidden state and the next embedding: [2H] -> [H].
    join = _sum([_matrices((2 * model.hidden_size, model.hidden_size)), _Part(3 * model.hidden_size)])  # and norms
    return [_sum([_block(model, model.layers + depth, sequence_length), join]) for depth in range(model.mtp_layers)]


def routed_parameters(model: Model) -> int:
    """Parameters of all routed experts, those of multi-token prediction too."""
    moe = model.moe
    layers = [layer for layer in range(model.layers + model.mtp_layers) if not model.is_dense(layer)]
    return 0 if moe is None else len(layers) * moe.experts * sum(_of_expert(model, moe))


def _of_expert(model: Model, moe: Moe) -> tuple[int, int]:
    """Parameters in the matrices of one expert, and in its biases."""
    return (
        (model.projections + 1) * model.hidden_size * moe.moe_intermediate_size,  # gate, up [H, F] and down [F, H]
        model.projections * moe.moe_intermediate_size + model.hidden_size if moe.bias else 0,  # of these
    )


def keys_seen(indexer: Indexer | None, sequence_length: int) -> float:
    """Keys that a query of latent attention reads on average: half of the row, or the chosen ones."""
    if indexer is None or indexer.stage == "dense" or indexer.index_topk >= sequence_length:
        return sequence_length / 2
    return indexer.index_topk - indexer.index_topk**2 / (2 * sequence_length)  # early queries have fewer


def _sum(parts: Iterable[_Part]) -> _Part:
    there = list(parts)
    flops = sum(part.flops for part in there)
    return _Part(sum(part.parameters for part in there), sum(part.idle for part in there), flops)


def _matrices(*shapes: tuple[int, int]) -> _Part:
    """Matrices that every token passes."""
    numbers = sum(rows * columns for rows, columns in shapes)
    # A multiplication and an addition for each weight.
    return _Part(numbers, flops=2 * numbers)


def _block(model: Model, layer: int, sequence_length: int) -> _Part:
    attention, hidden = model.attention, model.hidden_size
    if model.linear_attention is not None and model.is_linear(layer):
        attends = _linear(model.linear_attention, hidden)
    elif isinstance(attention, LatentAttention):
        attends = _latent(attention, hidden, sequence_length)
    elif isinstance(attention, CompressedAttention):
        attends = _compressed(attention, hidden, attention.kind_of(layer), sequence_length)
    else:
        attends = _grouped(attention, hidden, layer, sequence_length)
    feeds = _feed_forward(model, model.intermediate_size) if model.is_dense(layer) else _experts(model)
    norms = 4 if model.norm_position == "sandwich" else 2
    return _sum([attends, feeds, _Part(norms * hidden), *[_streams(model, 3)] * 2])


def _streams(model: Model, kinds: int) -> _Part:
    """Mixes of residual streams: those that are read (1 kind), and those that outputs and streams are added by."""
    if model.hyper_connections is None:
        return _Part(0)
    streams = model.hyper_connections.streams
    mixes = streams if kinds == 1 else (2 + streams) * streams
    return _sum([_matrices((mixes, model.residual_size)), _Part(mixes + kinds, flops=2 * mixes * model.hidden_size)])


def _grouped(attention: GroupedQueryAttention, hidden: int, layer: int, sequence_length: int) -> _Part:
    local, width = attention.local, attention.head_dim
    queries, keys = attention.heads * width, attention.kv_heads * width  # values are as wide as keys
    gates = queries * (attention.output_gate or attention.gate_proj)
    # Causal attention: a position sees half of the row on average.
    seen = sequence_length / 2
    if local is not None and not attention.is_global(layer):
        seen = AttentionWindow(kind=local.kind, size=local.size).pairs(sequence_length) / sequence_length
    of_norms = {"head": 2 * width, "weighted-rotated-head": 2 * width, "projection": queries + keys}
    norms = of_norms.get(attention.qk_norm, 0)  # of queries and keys
    biases = (queries + gates * (not attention.gate_proj) + 2 * keys) * (
        attention.bias or attention.qkv_bias
    ) + hidden * attention.bias  # last: of output
    rest = _Part(norms + biases + attention.heads * attention.sinks, flops=2 * 2 * queries * seen)
    return _sum([_matrices((hidden, queries + gates), (hidden, keys), (hidden, keys), (queries, hidden)), rest])


def _linear(linear: LinearAttention, hidden: int) -> _Part:
    heads = linear.value_heads
    keys, values = linear.key_heads * linear.key_head_dim, heads * linear.value_head_dim
    matrices = [(hidden, keys), (hidden, keys), (hidden, values), (hidden, heads), (values, hidden)]  # heads: beta
    decays = heads
    if linear.kind == "kda":
        decays = heads * linear.key_head_dim
        matrices += [(hidden, linear.key_head_dim), (linear.key_head_dim, decays)]
        matrices += [(hidden, linear.value_head_dim), (linear.value_head_dim, values)]  # gate
    else:
        matrices += [(hidden, decays), (hidden, values)]
    convolutions = (2 * keys + values) * linear.conv_size
    # A state is read for the key, written, and read for the query.
    flops = 3 * 2 * heads * linear.key_head_dim * linear.value_head_dim
    rest = _Part(convolutions + heads + decays + linear.value_head_dim, flops=flops)  # rates, biases, norm
    return _sum([_matrices(*matrices), rest])


def _latent(attention: LatentAttention, hidden: int, sequence_length: int) -> _Part:
    heads, kv_lora_rank, q_lora_rank = attention.heads, attention.kv_lora_rank, attention.q_lora_rank
    queries, values = heads * attention.head_dim, heads * attention.v_head_dim
    query = [(hidden, q_lora_rank), (q_lora_rank, queries)] if q_lora_rank else [(hidden, queries)]
    keys = [
        (hidden, kv_lora_rank + attention.qk_rope_head_dim),  # the latent, and the key part that all heads share
        (kv_lora_rank, heads * attention.qk_nope_head_dim + values),  # from the latent up
        (values, hidden),  # output projection
    ]
    # Norms; scores and weighted values, causal.
    flops = (queries + values) * 2 * keys_seen(attention.indexer, sequence_length)
    rest = [_Part(q_lora_rank + kv_lora_rank + heads * attention.sinks, flops=flops)]
    if (indexer := attention.indexer) is not None:
        wide = indexer.index_n_heads * indexer.index_head_dim
        rest += [_matrices((q_lora_rank, wide), (hidden, indexer.index_head_dim), (hidden, indexer.index_n_heads))]
        rest += [_Part(2 * indexer.index_head_dim, flops=wide * sequence_length)]  # norm of keys; scores of all of them
    return _sum([_matrices(*query, *keys), *rest])


def _compressed(attention: CompressedAttention, hidden: int, kind: str, sequence_length: int) -> _Part:
    width, rank, indexer = attention.head_dim, attention.q_lora_rank, attention.indexer
    queries, groups = attention.heads * width, attention.o_groups * attention.o_lora_rank
    matrices = [
        (hidden, rank),
        (rank, queries),
        (hidden, width),
        (queries // attention.o_groups, groups),
        (groups, hidden),
    ]
    rest = rank + width + attention.heads  # norms, sinks
    seen = AttentionWindow(kind="window", size=attention.sliding_window).pairs(sequence_length) / sequence_length
    flops = 0.0
    if kind == "hca":
        matrices += [(hidden, width)] * 2  # keys and weights of positions
        rest += width * (attention.hca_rate + 1)
        seen += sequence_length / attention.hca_rate / 2
    elif kind == "csa":
        entries, rate, wide = sequence_length / attention.csa_rate, attention.csa_rate, indexer.index_head_dim
        matrices += [(hidden, 2 * width)] * 2 + [(hidden, 2 * wide)] * 2
        matrices += [(rank, indexer.index_n_heads * wide), (hidden, indexer.index_n_heads)]
        rest += (width + wide) * (2 * rate + 1)
        chosen = min(indexer.index_topk, entries)
        seen += chosen - chosen**2 / (2 * entries)  # early queries have fewer
        flops = indexer.index_n_heads * wide * entries  # scores of half of them
    return _sum([_matrices(*matrices), _Part(rest, flops=flops + 2 * 2 * queries * seen)])


def _feed_forward(model: Model, width: int) -> _Part:
    hidden = model.hidden_size
    return _matrices((hidden, model.projections * width), (width, hidden))  # gate and up, down


def _experts(model: Model) -> _Part:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None, "a model without experts has dense layers only"
    expert, biases = _of_expert(model, moe)
    share = moe.top_k / moe.experts  # of the experts that a token meets
    routed = moe.experts * (expert + biases)
    return _sum(
        [
            _matrices((hidden, moe.experts)),  # router
            _Part(moe.experts * moe.router.logit_bias),
            _Part(routed, idle=round(routed * (1 - share)), flops=2 * moe.experts * expert * share),
            _feed_forward(model, moe.shared_expert_intermediate_size),  # of width 0 if there is none
            *([_matrices((hidden, 1))] if moe.shared_expert_gate and moe.shared_expert_intermediate_size else []),
        ]
    )
