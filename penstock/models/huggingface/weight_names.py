"""Names of weights: ours within a layer, and those of the published files, in parts that families combine.

One of our tensors is filled by one tensor of the file, or by several stacked along dim 0; `{expert}` marks names that
exist once per expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.config.model import GroupedQueryAttention, LatentAttention, LinearAttention, Model

Change: TypeAlias = Callable[[Tensor], Tensor]


# Orders of numbers in files that differ from ours, as pairs of inverse functions.
#
# A family names a rearrangement by the function that makes it for a model's sizes (`RearrangementOf`).


@dataclass(frozen=True)
class Rearrangement:
    """A permutation of the numbers of a tensor."""

    read: Change  # from the order of the file to ours
    write: Change  # its inverse
    dtype: torch.dtype | None = None  # in the file, where it is not ours


RearrangementOf: TypeAlias = Callable[[Model], Rearrangement]  # a rearrangement with the sizes of a model


def grid_transposed(dim: int, rows: int, columns: int) -> Rearrangement:
    """A dim made of equal blocks, each a grid of rows x columns that is row-major in the file and column-major here.

    A head of 6 rows, for example, is stored as a0 a1 a2 b0 b1 b2 (2 rows, 3 columns) and read as a0 b0 a1 b1 a2 b2.
    """

    def transpose(tensor: Tensor, rows: int, columns: int) -> Tensor:
        return tensor.unflatten(dim, (-1, rows, columns)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)

    return Rearrangement(lambda stored: transpose(stored, rows, columns), lambda ours: transpose(ours, columns, rows))


def _of_first_rows(block: int, rows: int, form: Rearrangement) -> Rearrangement:
    """Dim 0 made of equal blocks, of which a rearrangement concerns the first rows of all together."""

    def apply(tensor: Tensor, change: Change) -> Tensor:
        blocks = tensor.unflatten(0, (-1, block))
        first = change(blocks[:, :rows].flatten(0, 1)).unflatten(0, (-1, rows))
        return torch.cat((first, blocks[:, rows:]), dim=1).flatten(0, 1)

    return Rearrangement(lambda stored: apply(stored, form.read), lambda ours: apply(ours, form.write))


def rotary_halves(config: Model) -> Rearrangement:
    """Dim 0: heads, stored as the first members of all rotary pairs, then the second members.

    Here the members of a pair are neighbours. Permuting the rows of query and key weights alike does not change scores,
    so one rotation kernel serves all families. With partial rotary embedding the rest of a head keeps its order.
    """
    return _halves(config, config.attention.head_dim)


def rotary_halves_of_queries(config: Model) -> Rearrangement:
    """The same where each head has its gate behind its query."""
    return _halves(config, 2 * config.attention.head_dim)


def rotary_halves_of_indexer(config: Model) -> Rearrangement:
    """The same for queries and the key of the indexer, whose first features are rotated."""
    attention = config.attention
    assert isinstance(attention, LatentAttention), "the family has an indexer"
    assert attention.indexer is not None, "the family has an indexer"
    return _halves(config, attention.indexer.index_head_dim)


def _halves(config: Model, block: int) -> Rearrangement:
    rotary = config.attention.rotary_dim
    if rotary < 2 or rotary % 2 or rotary > block:
        raise ConfigError(
            "head_dim, partial_rotary_factor, qk_rope_head_dim and index_head_dim leave no pairs of rotated features",
            got=f"{rotary} of {block}",
            allowed="an even number, at least 2",
        )
    halves = grid_transposed(0, 2, rotary // 2)
    return halves if rotary == block else _of_first_rows(block, rotary, halves)


def nested(config: Model) -> Rearrangement:
    """The file has one more dim of size 1, the first."""
    return _nested(0)


def nested_last(config: Model) -> Rearrangement:
    """The file has one more dim of size 1, the last."""
    return _nested(-1)


def channels(config: Model) -> Rearrangement:
    """Weights of a convolution of single channels, which the file has with one input channel each."""
    return _nested(1)


def _nested(dim: int) -> Rearrangement:
    return Rearrangement(lambda stored: stored.squeeze(dim), lambda ours: ours.unsqueeze(dim))


def transposed(config: Model) -> Rearrangement:
    """A stack of matrices that the file has as inputs x outputs."""
    return Rearrangement(lambda stored: stored.mT, lambda ours: ours.mT)


def whole_numbers(config: Model) -> Rearrangement:
    """Whole numbers, which are floats here as all that checkpoints hold."""
    return Rearrangement(lambda stored: stored.float(), lambda ours: ours.long(), torch.int64)


def interleaved(config: Model) -> Rearrangement:
    """Dim 1: rows of gate and up projection alternate in the file."""
    assert config.moe is not None, "only experts are interleaved"
    return grid_transposed(1, config.moe.moe_intermediate_size, 2)


@dataclass(frozen=True)
class Division:
    """A tensor of a file that several of ours fill: dim 0 is equal blocks, and each block has rows for each of them.

    Of 2 blocks with widths (2, 1), for example, the first of ours has rows 0 1 3 4 and the second has rows 2 5.
    """

    blocks: int
    widths: tuple[int, ...]  # rows of a block by tensor, in the order of the file

    def take(self, stored: Tensor, index: int) -> Tensor:
        """The rows of one of ours."""
        begin = sum(self.widths[:index])
        return stored.unflatten(0, (self.blocks, -1))[:, begin : begin + self.widths[index]].flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of the file, from the rows of all of ours."""
        return torch.cat([part.unflatten(0, (self.blocks, -1)) for part in parts], dim=1).flatten(0, 1)

    @property
    def rows(self) -> int:
        """Rows of the file's tensor."""
        return self.blocks * sum(self.widths)


DivisionOf: TypeAlias = Callable[[Model], Division]  # a division with the sizes of a model


def _linear(config: Model) -> LinearAttention:
    assert config.linear_attention is not None, "the family has linear attention"
    return config.linear_attention


def by_key_head(config: Model) -> Division:
    """Qwen3-Next: for each key head its query, its key, and the values and gates of its value heads."""
    linear = _linear(config)
    of_values = linear.value_heads // linear.key_heads * linear.value_head_dim
    return Division(linear.key_heads, (linear.key_head_dim, linear.key_head_dim, of_values, of_values))


def two_by_key_head(config: Model) -> Division:
    """Qwen3-Next: for each key head a number and another one of its value heads."""
    linear = _linear(config)
    return Division(linear.key_heads, (linear.value_heads // linear.key_heads,) * 2)


def all_at_once(config: Model) -> Division:
    """Queries of all heads, then keys, then values."""
    linear = _linear(config)
    keys, values = linear.key_heads * linear.key_head_dim, linear.value_heads * linear.value_head_dim
    return Division(1, (keys, keys, values))


def heads_at_once(config: Model) -> Division:
    """Queries of all heads, then keys, then values, of softmax attention."""
    attention = config.attention
    assert isinstance(attention, GroupedQueryAttention), "the family has no latent attention"
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return Division(1, (queries, keys, keys))


Names = Mapping[str, tuple[str, ...]]

STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}  # of hyper-connections

MODEL: Names = {
    "embed.weight": ("model.embed_tokens.weight",),
    "norm.weight_D": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}

NORMS: Names = {
    "attention_norm.weight_D": ("input_layernorm.weight",),
    "ffn_norm.weight_D": ("post_attention_layernorm.weight",),
}

ATTENTION: Names = {
    **NORMS,
    **{
        f"attention.{ours}.{kind}": (f"self_attn.{theirs}.{kind}",)
        for ours, theirs in {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}.items()
        for kind in ("weight", "bias")
    },
    "attention.query_norm.weight_D": ("self_attn.q_norm.weight",),
    "attention.key_norm.weight_D": ("self_attn.k_norm.weight",),
    "attention.sinks_H": ("self_attn.sinks",),
}

ROTARY_HALVES: Mapping[str, tuple[RearrangementOf, ...]] = {
    f"attention.{ours}": (rotary_halves,)
    for ours in ("query.weight", "query.bias", "key.weight", "key.bias", "query_norm.weight_D", "key_norm.weight_D")
}

CONVOLUTIONS = tuple(f"attention.mixing.{part}_conv_DJ" for part in ("query", "key", "value"))
DELTA = "linear_attn"
DELTA_NAMES: Names = {
    **NORMS,
    **dict.fromkeys(CONVOLUTIONS, (f"{DELTA}.conv1d.weight",)),
    "attention.mixing.decay_rate_H": (f"{DELTA}.A_log",),
    "attention.mixing.decay_bias": (f"{DELTA}.dt_bias",),
    "attention.norm.weight_D": (f"{DELTA}.norm.weight",),
    "attention.out.weight": (f"{DELTA}.out_proj.weight",),
}
KDA_NAMES: Names = {
    **NORMS,
    **{
        f"attention.{ours}.weight": (f"self_attn.{theirs}.weight",)
        for ours, theirs in (
            *(("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("beta", "b_proj"), ("out", "o_proj")),
            *(("decay.down", "f_a_proj"), ("decay.up", "f_b_proj")),
            *(("gate.down", "g_a_proj"), ("gate.up", "g_b_proj")),
        )
    },
    **{f"attention.mixing.{key}_conv_DJ": (f"self_attn.{key[0]}_conv1d.weight",) for key in ("query", "key", "value")},
    "attention.mixing.decay_rate_H": ("self_attn.A_log",),
    "attention.mixing.decay_bias": ("self_attn.dt_bias",),
    "attention.norm.weight_D": ("self_attn.o_norm.weight",),
}
PROJECTIONS = tuple(f"attention.{part}.weight" for part in ("query", "key", "value", "gate"))

LATENT_ATTENTION: Names = {
    **NORMS,
    "attention.query.weight": ("self_attn.q_proj.weight",),
    "attention.query.down.weight": ("self_attn.q_a_proj.weight",),
    "attention.query.norm.weight_D": ("self_attn.q_a_layernorm.weight",),
    "attention.query.up.weight": ("self_attn.q_b_proj.weight",),
    "attention.kv_down.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.kv_norm.weight_D": ("self_attn.kv_a_layernorm.weight",),
    "attention.kv_up.weight": ("self_attn.kv_b_proj.weight",),
    "attention.out.weight": ("self_attn.o_proj.weight",),
}


def dense_network(ours: str, theirs: str) -> Names:
    """A feed-forward network with gate, up and down projection."""
    return {
        f"{ours}.gate_up.weight": (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
        f"{ours}.down.weight": (f"{theirs}.down_proj.weight",),
    }


NORMS_OF_HUNYUAN: Names = {
    f"attention.{part}_norm.weight_D": (f"self_attn.{part}_layernorm.weight",) for part in ("query", "key")
}

POST_NORMS: Names = {
    "attention_post_norm.weight_D": ("post_attention_layernorm.weight",),
    "ffn_post_norm.weight_D": ("post_feedforward_layernorm.weight",),
}

NORMS_AROUND: Names = {**POST_NORMS, "ffn_norm.weight_D": ("pre_feedforward_layernorm.weight",)}

FUSED_NETWORK: Names = {
    "ffn.gate_up.weight": ("mlp.gate_up_proj.weight",),
    "ffn.down.weight": ("mlp.down_proj.weight",),
}


def experts_one_by_one(theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Names:
    """The router, and experts with three tensors each."""
    stem = f"{theirs}.experts.{{expert}}"
    return {
        "ffn.router.weight_ED": (f"{theirs}.gate.weight",),
        "ffn.experts.gate_up_eFD": (f"{stem}.{gate}.weight", f"{stem}.{up}.weight"),
        "ffn.experts.down_eDF": (f"{stem}.{down}.weight",),
    }


def experts_stacked(theirs: str) -> Names:
    """The router, and stacks of all experts, with biases."""
    return {
        "ffn.router.weight_ED": (f"{theirs}.router.weight",),
        "ffn.router.logit_bias_E": (f"{theirs}.router.bias",),
        "ffn.experts.gate_up_eFD": (f"{theirs}.experts.gate_up_proj",),
        "ffn.experts.gate_up_bias_eF": (f"{theirs}.experts.gate_up_proj_bias",),
        "ffn.experts.down_eDF": (f"{theirs}.experts.down_proj",),
        "ffn.experts.down_bias_eD": (f"{theirs}.experts.down_proj_bias",),
    }


EXPERT_BIAS: Names = {"ffn.router.expert_bias_E": ("mlp.gate.e_score_correction_bias",)}

EXPERTS_BESIDE_SHARED: Names = {
    **dense_network("ffn", "mlp"),
    **dense_network("ffn.shared", "mlp.shared_experts"),
    **experts_one_by_one("mlp"),
}

DEEPSEEK: Names = {**LATENT_ATTENTION, **EXPERTS_BESIDE_SHARED, **EXPERT_BIAS}

INDEXER: Names = {
    "attention.indexer.query.weight": ("self_attn.indexer.wq_b.weight",),
    "attention.indexer.key.weight": ("self_attn.indexer.wk.weight",),
    "attention.indexer.key_norm.weight_D": ("self_attn.indexer.k_norm.weight",),
    "attention.indexer.key_norm.bias_D": ("self_attn.indexer.k_norm.bias",),
    "attention.indexer.weights.weight": ("self_attn.indexer.weights_proj.weight",),
}

PREDICTION: Names = {
    "embed_norm.weight_D": ("enorm.weight",),
    "hidden_norm.weight_D": ("hnorm.weight",),
    "join.weight": ("eh_proj.weight",),
    "norm.weight_D": ("shared_head.norm.weight",),
}

PREDICTION_OF_QWEN: Names = {
    "embed_norm.weight_D": ("pre_fc_norm_embedding.weight",),
    "hidden_norm.weight_D": ("pre_fc_norm_hidden.weight",),
    "join.weight": ("fc.weight",),
    "norm.weight_D": ("norm.weight",),
}
