"""The families of DeepSeek, and those with its latent attention."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.models.huggingface import config_parts as keys
from penstock.models.huggingface import expert_parts as experts
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.config_parts import Values
from penstock.models.huggingface.deepseek_v4 import DEEPSEEK_V4
from penstock.models.huggingface.family import MODEL_FIXED, MODEL_VALUES, Family, rotary, with_temperature

TOP_K = {"num_experts_per_tok": "moe.top_k"}
DEEPSEEK_VALUES = {
    **MODEL_VALUES,
    **TOP_K,
    "intermediate_size": "intermediate_size",
    "first_k_dense_replace": "dense_layers",
    "num_attention_heads": "attention.heads",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.qk_nope_head_dim",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
    "n_routed_experts": "moe.experts",
    "moe_intermediate_size": "moe.moe_intermediate_size",
    "routed_scaling_factor": "moe.router.routed_scaling_factor",
}
DEEPSEEK_FIXED: Values = {**MODEL_FIXED, "attention_bias": False, "moe_layer_freq": 1}

GROUPS = {
    "n_group": "moe.router.n_group",
    "topk_group": "moe.router.topk_group",
    "norm_topk_prob": "moe.router.norm_topk_prob",
}
SIGMOID_WITH_BIAS: Values = {
    "moe.router.scoring_func": "sigmoid",
    "moe.router.expert_bias": True,
    "moe.router.group_score": "top2",
}
REPEATED = r".*\.rotary_emb\.inv_freq|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""Names that files with multi-token prediction have twice: embedding and output projection are the main model's."""

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    also=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    names=tensors.DEEPSEEK,
    prediction=tensors.PREDICTION,
    values={
        **DEEPSEEK_VALUES,
        **GROUPS,
        "num_nextn_predict_layers": "mtp_layers",
    },
    always=SIGMOID_WITH_BIAS,
    fixed={**DEEPSEEK_FIXED, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    parts=(keys.LATENTS, rotary(scales_scores=True), experts.SHARED),
    left_out=REPEATED,
)

_DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    also=(),
    architecture="DeepseekV32ForCausalLM",
    names={**tensors.DEEPSEEK, **tensors.INDEXER},
    renamed={"num_experts": "n_routed_experts"},
    absent={"num_nextn_predict_layers": 0},
    forms=dict.fromkeys([*tensors.INDEXER][:-1], (tensors.rotary_halves_of_indexer,)),
    values={
        **DEEPSEEK_V3.values,
        "index_n_heads": "attention.indexer.index_n_heads",
        "index_head_dim": "attention.indexer.index_head_dim",
        "index_topk": "attention.indexer.index_topk",
    },
    fixed={**DEEPSEEK_V3.fixed, "mlp_bias": False},
    parts=(*DEEPSEEK_V3.parts, experts.FIRST_DENSE, keys.INDEXERS),
)

DEEPSEEK: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek-v2": Family(
            model_type="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            names=tensors.DEEPSEEK,
            values=DEEPSEEK_VALUES,
            fixed={**DEEPSEEK_FIXED, "norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False},
            parts=(keys.LATENTS, rotary(scales_scores=True), experts.SHARED, experts.GROUPS_OF_V2),
        ),
        "deepseek-v3": DEEPSEEK_V3,
        "deepseek-v3.2": _DEEPSEEK_V32,
        "deepseek-v4": DEEPSEEK_V4,
        "glm5-moe": replace(
            _DEEPSEEK_V32,
            model_type="glm_moe_dsa",
            architecture="GlmMoeDsaForCausalLM",
            forms={},  # the indexer's features are rotated in pairs, as ours are
            fixed={**_DEEPSEEK_V32.fixed, "indexer_rope_interleave": True, "index_topk_freq": 1},
        ),
        "mistral4": replace(
            DEEPSEEK_V3,
            model_type="mistral4",
            also=(),
            architecture="Mistral4ForCausalLM",
            names={
                **DEEPSEEK_V3.names,
                "ffn.experts.gate_up_eFD": ("mlp.experts.gate_up_proj",),
                "ffn.experts.down_eDF": ("mlp.experts.down_proj",),
            },
            prediction={},
            values={key: path for key, path in DEEPSEEK_V3.values.items() if path != "mtp_layers"},
            always={"moe.router.group_score": "top2"},
            fixed={**MODEL_FIXED, "attention_bias": False, "rope_interleave": True},
            parts=(
                keys.LATENTS,
                with_temperature(rotary(scales_scores=True, has_base=True), of_latents=True),
                experts.SHARED,
            ),
        ),
    }
)
