"""Names of weights: ours within a layer, and those of the published files, in parts that families combine.

One of our tensors is filled by one tensor of the file, or by several stacked along dim 0; `{expert}` marks names that
exist once per expert.
"""

from collections.abc import Mapping

from penstock.models.huggingface.rearrangements import RearrangementOf, rotary_halves

Names = Mapping[str, tuple[str, ...]]

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
