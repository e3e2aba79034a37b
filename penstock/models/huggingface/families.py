"""The families with experts; those without are in `dense_families`."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.base.errors import ConfigError
from penstock.config.model import Model
from penstock.models.huggingface import config_parts as keys
from penstock.models.huggingface import expert_parts as experts
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.deepseek_families import (
    DEEPSEEK,
    DEEPSEEK_FIXED,
    DEEPSEEK_V3,
    DEEPSEEK_VALUES,
    GROUPS,
    REPEATED,
    SIGMOID_WITH_BIAS,
    TOP_K,
)
from penstock.models.huggingface.dense_families import DENSE
from penstock.models.huggingface.family import (
    BIAS,
    DENSE_VALUES,
    GRANITE_SCALES,
    MODEL_FIXED,
    MODEL_VALUES,
    Family,
    rotary,
    rotary_by_kind,
)

_EXPERTS = {
    **TOP_K,
    "num_experts": "moe.experts",
    "moe_intermediate_size": "moe.moe_intermediate_size",
    "norm_topk_prob": "moe.router.norm_topk_prob",
}
_LOCAL_EXPERTS = {
    **MODEL_VALUES,
    **TOP_K,
    "num_local_experts": "moe.experts",
    "intermediate_size": "moe.moe_intermediate_size",
}

_NOT_IN_QWEN35 = ("intermediate_size", "norm_topk_prob")
_QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names={
        **tensors.ATTENTION,
        **tensors.dense_network("ffn", "mlp"),
        **tensors.dense_network("ffn.shared", "mlp.shared_expert"),
        "ffn.shared.gate.weight": ("mlp.shared_expert_gate.weight",),
        **tensors.experts_one_by_one("mlp"),
    },
    linear={
        **tensors.DELTA_NAMES,
        **dict.fromkeys(tensors.PROJECTIONS, (f"{tensors.DELTA}.in_proj_qkvz.weight",)),
        **dict.fromkeys(("attention.beta.weight", "attention.decay.weight"), (f"{tensors.DELTA}.in_proj_ba.weight",)),
    },
    divided={
        f"{tensors.DELTA}.in_proj_qkvz.weight": (tensors.by_key_head, tensors.PROJECTIONS),
        f"{tensors.DELTA}.in_proj_ba.weight": (
            tensors.two_by_key_head,
            ("attention.beta.weight", "attention.decay.weight"),
        ),
        f"{tensors.DELTA}.conv1d.weight": (tensors.all_at_once, tensors.CONVOLUTIONS),
    },
    forms={
        **tensors.ROTARY_HALVES,
        "attention.query.weight": (tensors.rotary_halves_of_queries,),
        "attention.query.bias": (tensors.rotary_halves_of_queries,),
        **dict.fromkeys(tensors.CONVOLUTIONS, (tensors.channels,)),
    },
    values={
        **DENSE_VALUES,
        **_EXPERTS,
        "shared_expert_intermediate_size": "moe.shared_expert_intermediate_size",
        "linear_num_key_heads": "linear_attention.key_heads",
        "linear_num_value_heads": "linear_attention.value_heads",
        "linear_key_head_dim": "linear_attention.key_head_dim",
        "linear_value_head_dim": "linear_attention.value_head_dim",
        "linear_conv_kernel_dim": "linear_attention.conv_size",
        "num_nextn_predict_layers": "mtp_layers",
    },
    renamed={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
    absent={"num_nextn_predict_layers": 0},
    always={
        "attention.qk_norm": "head",
        "attention.output_gate": True,
        "linear_attention.kind": "gdn",
        "moe.shared_expert_gate": True,
        "zero_centred_norms": True,
    },
    fixed=MODEL_FIXED,
    parts=(keys.HEADS, rotary(partial=True), keys.LINEAR, experts.EXCEPTIONS),
    prediction=tensors.PREDICTION_OF_QWEN,
    prediction_prefixes=("mtp.", "mtp.layers.{depth}."),
)

_QWEN35 = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names={
        **_QWEN3_NEXT.names,
        "ffn.experts.gate_up_eFD": ("mlp.experts.gate_up_proj",),
        "ffn.experts.down_eDF": ("mlp.experts.down_proj",),
    },
    linear={
        **tensors.DELTA_NAMES,
        **dict.fromkeys(tensors.PROJECTIONS[:3], (f"{tensors.DELTA}.in_proj_qkv.weight",)),
        "attention.gate.weight": (f"{tensors.DELTA}.in_proj_z.weight",),
        "attention.beta.weight": (f"{tensors.DELTA}.in_proj_b.weight",),
        "attention.decay.weight": (f"{tensors.DELTA}.in_proj_a.weight",),
    },
    divided={
        f"{tensors.DELTA}.in_proj_qkv.weight": (tensors.all_at_once, tensors.PROJECTIONS[:3]),
        f"{tensors.DELTA}.conv1d.weight": (tensors.all_at_once, tensors.CONVOLUTIONS),
    },
    instead=tensors.experts_one_by_one("mlp"),
    values={key: path for key, path in _QWEN3_NEXT.values.items() if key not in _NOT_IN_QWEN35},
    always={**_QWEN3_NEXT.always, "moe.router.norm_topk_prob": True},
    parts=(keys.HEADS, rotary(partial=True), keys.LINEAR),
    prefix="language_model.",
    left_out=r".*\.rotary_emb\.inv_freq|model\.visual\..*",
)

_DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    names={**tensors.ATTENTION, **tensors.EXPERTS_BESIDE_SHARED, **tensors.EXPERT_BIAS},
    forms=tensors.ROTARY_HALVES,
    values={
        **DENSE_VALUES,
        **TOP_K,
        **GROUPS,
        "first_k_dense_replace": "dense_layers",
        "n_routed_experts": "moe.experts",
        "moe_intermediate_size": "moe.moe_intermediate_size",
        "routed_scaling_factor": "moe.router.routed_scaling_factor",
    },
    always={**SIGMOID_WITH_BIAS, "attention.qk_norm": "head"},
    fixed=MODEL_FIXED,
    parts=(keys.HEADS, rotary(), keys.WINDOW_BEHIND, experts.SHARED),
)

_OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names={**tensors.ATTENTION, **tensors.experts_one_by_one("mlp")},
    forms=tensors.ROTARY_HALVES,
    values={
        **MODEL_VALUES,
        **BIAS,
        **TOP_K,
        "num_experts": "moe.experts",
        "intermediate_size": "moe.moe_intermediate_size",
        "norm_topk_prob": "moe.router.norm_topk_prob",
    },
    always={"attention.qk_norm": "projection"},
    fixed={**MODEL_FIXED, "clip_qkv": None},
    parts=(keys.EQUAL_HEADS, rotary()),
)

_KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    names={
        **tensors.LATENT_ATTENTION,
        **tensors.dense_network("ffn", "mlp"),
        **tensors.dense_network("ffn.shared", "block_sparse_moe.shared_experts"),
        **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
        "ffn.router.expert_bias_E": ("block_sparse_moe.gate.e_score_correction_bias",),
    },
    instead=tensors.dense_network("ffn", "block_sparse_moe"),  # transformers writes dense layers so, too
    linear=tensors.KDA_NAMES,
    forms={
        **dict.fromkeys(tensors.CONVOLUTIONS, (tensors.channels,)),
        "attention.mixing.decay_rate_H": (tensors.nested, tensors.nested, tensors.nested_last),
    },
    values={
        **MODEL_VALUES,
        **{key: path for key, path in DEEPSEEK_VALUES.items() if key not in (*TOP_K, "n_routed_experts")},
        "num_experts": "moe.experts",
        "num_experts_per_token": "moe.top_k",
        "num_expert_group": "moe.router.n_group",
        "topk_group": "moe.router.topk_group",
        "moe_renormalize": "moe.router.norm_topk_prob",
    },
    absent={"first_k_dense_replace": 1},
    always={**SIGMOID_WITH_BIAS, "attention.rotary": False, "linear_attention.kind": "kda"},
    fixed={
        **DEEPSEEK_FIXED,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    parts=(keys.LATENTS, experts.FIRST_DENSE, keys.KDA, experts.shared("num_shared_experts")),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **DEEPSEEK,
        "mixtral": Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2")},
            forms=tensors.ROTARY_HALVES,
            values=_LOCAL_EXPERTS,
            always={"moe.router.softmax_after_top_k": True},
            fixed={**MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(), keys.WINDOW),
        ),
        "qwen3-moe": Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            names={**tensors.ATTENTION, **tensors.dense_network("ffn", "mlp"), **tensors.experts_one_by_one("mlp")},
            forms=tensors.ROTARY_HALVES,
            values={
                **DENSE_VALUES,
                **_EXPERTS,
            },
            always={"attention.qk_norm": "head"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.SWITCHED_WINDOW, experts.EXCEPTIONS),
        ),
        "olmoe": _OLMOE,
        "llama4": Family(
            model_type="llama4_text",
            architecture="Llama4ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.dense_network("ffn", "feed_forward"),
                **tensors.dense_network("ffn.shared", "feed_forward.shared_expert"),
                **tensors.experts_stacked("feed_forward"),
            },
            forms={"ffn.experts.gate_up_eFD": (tensors.transposed,), "ffn.experts.down_eDF": (tensors.transposed,)},
            values={
                **_LOCAL_EXPERTS,
                **BIAS,
                "intermediate_size_mlp": "intermediate_size",
            },
            always={"moe.router.scoring_func": "sigmoid", "moe.router.apply_probs_on_input": True},
            fixed={**MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(), keys.CHUNKS, keys.QK_NORM_OF_LLAMA4, experts.LIST, experts.ONE_SHARED),
            prefix="language_model.",
            left_out=r".*\.rotary_emb\.inv_freq|(vision_model|multi_modal_projector)\..*",
        ),
        "gpt-oss": Family(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_stacked("mlp")},
            forms={
                **tensors.ROTARY_HALVES,
                "ffn.experts.gate_up_eFD": (tensors.transposed, tensors.interleaved),
                "ffn.experts.gate_up_bias_eF": (tensors.interleaved,),
                "ffn.experts.down_eDF": (tensors.transposed,),
            },
            values={
                **_LOCAL_EXPERTS,
                **BIAS,
                "swiglu_alpha": "moe.clamped.alpha",
                "swiglu_limit": "moe.clamped.limit",
            },
            always={
                "attention.sinks": True,
                "moe.bias": True,
                "moe.router.logit_bias": True,
                "moe.router.softmax_after_top_k": True,
            },
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_GPT_OSS),
            mxfp4={
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
                ],
            },
        ),
        "glm4-moe": Family(
            model_type="glm4_moe",
            architecture="Glm4MoeForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.EXPERTS_BESIDE_SHARED,
                **tensors.EXPERT_BIAS,
            },
            forms=tensors.ROTARY_HALVES,
            prediction=tensors.PREDICTION,
            values={
                **MODEL_VALUES,
                **TOP_K,
                **GROUPS,
                "attention_bias": "attention.qkv_bias",
                "intermediate_size": "intermediate_size",
                "first_k_dense_replace": "dense_layers",
                "n_routed_experts": "moe.experts",
                "moe_intermediate_size": "moe.moe_intermediate_size",
                "routed_scaling_factor": "moe.router.routed_scaling_factor",
                "num_nextn_predict_layers": "mtp_layers",
            },
            always=SIGMOID_WITH_BIAS,
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(partial=True), keys.QK_NORM_OF_GLM, experts.SHARED),
            left_out=REPEATED,
        ),
        "ernie4.5-moe": Family(
            model_type="ernie4_5_moe",
            architecture="Ernie4_5_MoeForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.EXPERTS_BESIDE_SHARED,
                "ffn.router.expert_bias_E": ("mlp.moe_statics.e_score_correction_bias",),
            },
            forms={"ffn.router.expert_bias_E": (tensors.nested,)},
            values={
                **MODEL_VALUES,
                "intermediate_size": "intermediate_size",
                "moe_num_experts": "moe.experts",
                "moe_k": "moe.top_k",
                "moe_intermediate_size": "moe.moe_intermediate_size",
            },
            always={
                "moe.router.scoring_func": "softmax",
                "moe.router.expert_bias": True,
                "moe.router.norm_topk_prob": True,
            },
            fixed={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
            parts=(keys.HEADS, rotary(), experts.RANGE, experts.shared("moe_num_shared_experts")),
        ),
        "minimax-m2": Family(
            model_type="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
                "ffn.router.expert_bias_E": ("block_sparse_moe.e_score_correction_bias",),
            },
            forms=tensors.ROTARY_HALVES,
            values=_LOCAL_EXPERTS,
            always={
                "attention.qk_norm": "projection",
                "moe.router.scoring_func": "sigmoid",
                "moe.router.expert_bias": True,
                "moe.router.norm_topk_prob": True,
            },
            fixed={**MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(partial=True)),
        ),
        "qwen3-next": _QWEN3_NEXT,
        "qwen3.5-moe": _QWEN35,
        "kimi-linear": _KIMI_LINEAR,
        "qwen2-moe": Family(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            names=_QWEN3_NEXT.names,
            forms=tensors.ROTARY_HALVES,
            values={
                **MODEL_VALUES,
                **_EXPERTS,
                "intermediate_size": "intermediate_size",
                "qkv_bias": "attention.qkv_bias",
                "shared_expert_intermediate_size": "moe.shared_expert_intermediate_size",
            },
            always={"moe.shared_expert_gate": True},
            fixed={**MODEL_FIXED, "use_sliding_window": False},
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, experts.EXCEPTIONS),
        ),
        "dots1": _DOTS1,
        "solar-open": replace(
            _DOTS1,
            model_type="solar_open",
            architecture="SolarOpenForCausalLM",
            values={
                **{
                    key: path
                    for key, path in _DOTS1.values.items()
                    if path not in ("intermediate_size", "dense_layers")
                },
                "attention_bias": "attention.qkv_bias",
            },
            always=SIGMOID_WITH_BIAS,
            parts=(keys.HEADS, rotary(), experts.SHARED),
        ),
        "exaone-moe": replace(
            _DOTS1,
            model_type="exaone_moe",
            architecture="ExaoneMoeForCausalLM",
            names={**_DOTS1.names, "ffn.router.expert_bias_E": ("mlp.e_score_correction_bias",)},
            instead=tensors.EXPERT_BIAS,
            values={
                **{key: path for key, path in _DOTS1.values.items() if key not in ("n_routed_experts", *BIAS)},
                "num_experts": "moe.experts",
            },
            parts=(
                keys.HEADS,
                rotary(),
                keys.WINDOW_OF_EXAONE,
                experts.FIRST_DENSE,
                experts.shared("num_shared_experts"),
            ),
            left_out=r".*\.rotary_emb\.inv_freq|mtp\..*",
        ),
        "hy-v3": replace(
            _DOTS1,
            model_type="hy_v3",
            architecture="HYV3ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.dense_network("ffn", "mlp"),
                **tensors.dense_network("ffn.shared", "mlp.shared_mlp"),
                **tensors.experts_one_by_one("mlp"),
                "ffn.router.weight_ED": ("mlp.router.gate.weight",),
                "ffn.router.expert_bias_E": ("mlp.expert_bias",),
            },
            values={
                **DENSE_VALUES,
                **TOP_K,
                "num_experts": "moe.experts",
                "moe_intermediate_size": "moe.moe_intermediate_size",
                "router_scaling_factor": "moe.router.routed_scaling_factor",
            },
            always={**_DOTS1.always, "moe.router.norm_topk_prob": True},
            fixed={**MODEL_FIXED, "mlp_bias": False},
            parts=(keys.HEADS, rotary(), experts.LISTED_DENSE, experts.shared("num_shared_experts"), keys.SUM_OF_HY),
        ),
        "hunyuan-moe": Family(
            model_type="hunyuan_v1_moe",
            architecture="HunYuanMoEV1ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.NORMS_OF_HUNYUAN,
                **tensors.dense_network("ffn.shared", "mlp.shared_mlp"),
                **tensors.experts_one_by_one("mlp"),
                "ffn.router.weight_ED": ("mlp.gate.wg.weight",),
            },
            forms=tensors.ROTARY_HALVES,
            values={
                **MODEL_VALUES,
                **BIAS,
                "num_experts": "moe.experts",
                "intermediate_size": "moe.moe_intermediate_size",
            },
            always={"attention.qk_norm": "weighted-rotated-head", "moe.router.norm_topk_prob": True},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(stretched=True), experts.CHOICES_OF_HUNYUAN, experts.ONE_SHARED),
        ),
        "afmoe": Family(
            model_type="afmoe",
            architecture="AfmoeForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.EXPERTS_BESIDE_SHARED,
                "attention.gate.weight": ("self_attn.gate_proj.weight",),
                "attention_post_norm.weight_D": ("post_attention_layernorm.weight",),
                "ffn_norm.weight_D": ("pre_mlp_layernorm.weight",),
                "ffn_post_norm.weight_D": ("post_mlp_layernorm.weight",),
                "ffn.router.weight_ED": ("mlp.router.gate.weight",),
                "ffn.router.expert_bias_E": ("mlp.expert_bias",),
            },
            forms=tensors.ROTARY_HALVES,
            values={
                **DENSE_VALUES,
                **TOP_K,
                "num_experts": "moe.experts",
                "moe_intermediate_size": "moe.moe_intermediate_size",
                "num_dense_layers": "dense_layers",
                "route_scale": "moe.router.routed_scaling_factor",
            },
            always={
                **SIGMOID_WITH_BIAS,
                "moe.router.norm_topk_prob": True,
                "attention.qk_norm": "head",
                "attention.gate_proj": True,
                "norm_position": "sandwich",
            },
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_AFMOE, experts.shared("num_shared_experts")),
        ),
        "flint": Family(
            model_type="flint",
            architecture="FlintForCausalLM",
            names={
                **_QWEN3_NEXT.names,
                "attention.sinks_H": ("self_attn.softmax_offset",),
            },
            forms=tensors.ROTARY_HALVES,
            values={
                **DENSE_VALUES,
                **_EXPERTS,
                "shared_expert_intermediate_size": "moe.shared_expert_intermediate_size",
            },
            always={"attention.qk_norm": "head", "attention.sinks": True, "moe.router.scoring_func": "sigmoid"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_FLINT, experts.EXCEPTIONS_OF_FLINT),
        ),
        "glm4-moe-lite": replace(
            DEEPSEEK_V3,
            model_type="glm4_moe_lite",
            architecture="Glm4MoeLiteForCausalLM",
            also=(),
            values={key: path for key, path in DEEPSEEK_V3.values.items() if key != "first_k_dense_replace"},
            absent={"num_nextn_predict_layers": 0},
            parts=(*DEEPSEEK_V3.parts, experts.LISTED_DENSE),
        ),
        "mellum": Family(
            model_type="mellum",
            architecture="MellumForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_one_by_one("mlp")},
            forms=tensors.ROTARY_HALVES,
            values={**DENSE_VALUES, **_EXPERTS},
            always={"attention.qk_norm": "head"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary_by_kind(keys.WINDOW_OF_MELLUM), experts.KINDS_OF_MELLUM),
            left_out=r".*\.rotary_emb\..*inv_freq|mtp\..*",
        ),
        "flex-olmo": replace(
            _OLMOE,
            model_type="flex_olmo",
            architecture="FlexOlmoForCausalLM",
            names={**_OLMOE.names, **tensors.POST_NORMS},
            always={**_OLMOE.always, "norm_position": "post"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary()),
        ),
        "granite-moe": Family(
            model_type="granitemoeshared",
            also=("granitemoe",),
            architecture="GraniteMoeSharedForCausalLM",
            names={
                **tensors.ATTENTION,
                "ffn.router.weight_ED": ("block_sparse_moe.router.layer.weight",),
                "ffn.experts.gate_up_eFD": ("block_sparse_moe.input_linear.weight",),
                "ffn.experts.down_eDF": ("block_sparse_moe.output_linear.weight",),
                "ffn.shared.gate_up.weight": ("shared_mlp.input_linear.weight",),
                "ffn.shared.down.weight": ("shared_mlp.output_linear.weight",),
            },
            forms=tensors.ROTARY_HALVES,
            values={
                **_LOCAL_EXPERTS,
                **BIAS,
                **GRANITE_SCALES,
                "shared_intermediate_size": "moe.shared_expert_intermediate_size",
            },
            always={"moe.router.softmax_after_top_k": True},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary()),
        ),
        **DENSE,
        "qwen3.5": replace(
            _QWEN35,
            model_type="qwen3_5_text",
            architecture="Qwen3_5ForCausalLM",
            values={key: path for key, path in _QWEN35.values.items() if not path.startswith("moe.")}
            | {"intermediate_size": "intermediate_size"},
            always={path: value for path, value in _QWEN35.always.items() if not path.startswith("moe.")},
            parts=(*_QWEN35.parts, experts.DENSE),
        ),
    }
)


LACKING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "soft caps of scores or logits": ("beam", "gemma2", "nanochat", "vaultgemma"),
        "LayerNorm": ("cohere", "cohere2", "cohere2_moe", "dbrx", "nemotron", "phimoe", "stablelm", "starcoder2"),
        "values of another width than keys in grouped queries": ("mimo_v2_flash",),
        "other numbers of heads in some layers": ("laguna", "mimo_v2_flash", "step3p7_text"),
        "gates of attention for whole heads": ("laguna", "step3p7_text"),
        "a norm behind the experts alone": ("axk1",),
        "a choice of experts by logits and bias": ("kolibri1",),
        "a bound of linear attention's decay": ("bailing_hybrid",),
        "linear attention without a delta rule": ("minimax",),
        "experts without weights": ("longcat_flash",),
        "experts in attention": ("jetmoe",),
        "hyper-connections beside other parts": ("glm5_next_text", "hy_v4", "qwen4_exp_text"),
        "state-space layers": ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
        "convolutions in place of attention": ("lfm2", "lfm2_moe"),
        "embeddings of each layer": ("gemma3n", "gemma4"),
    }
)
"""Parts that no model here has, and the model types of `transformers` 5.23 that need them."""


def family_of(config: Model) -> Family:
    """The family of a model. Raises ConfigError if it has no Hugging Face form."""
    if config.family not in FAMILIES:
        got, allowed = f"model.family={config.family}", ", ".join(FAMILIES)
        raise ConfigError("this model has no Hugging Face form", got=got, allowed=allowed)
    return FAMILIES[config.family]
