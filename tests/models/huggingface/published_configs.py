"""What the `config.json` of published models says of the model, as their authors wrote it: facts, by preset.

Keys that say nothing of the model (token ids, dtypes, versions) are left out, but for a few that a reader must pass by.
"""

from typing import Any

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rms_norm_eps", "rope_theta"),
)


def _model(model_type: str, sizes: tuple[float, ...], **keys: Any) -> dict[str, Any]:
    """A file: what all of them have, `_SIZES`, and its own keys."""
    common = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
    return {**common, "model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), **keys}


_LLAMA3_SCALING: dict[str, Any] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA4_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "head_dim": 128,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "router_jitter_noise": 0.0,
}
_LLAMA4_SIZES = (5120, 8192, 48, 40, 8, 202048, 1e-05, 500000.0)
_LLAMA4_VISION = {"model_type": "llama4_vision_model", "hidden_size": 1408}

_GPT_OSS: dict[str, Any] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}

_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
_DEEPSEEK_YARN: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

_QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}

_GLM: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
_ERNIE: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_layer_interval": 1,
    "moe_num_experts": 64,
    "moe_use_aux_free": True,
    "use_bias": False,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _model(
        "deepseek_v2",
        (2048, 10944, 27, 16, 16, 102400, 1e-06, 10000),
        **_DEEPSEEK,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_experts_per_tok=6,
        q_lora_rank=None,
        rope_scaling={**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_group=1,
        topk_method="greedy",
    ),
    "deepseek-v3": _model(
        "deepseek_v3",
        (7168, 18432, 61, 128, 128, 129280, 1e-06, 10000),
        **_DEEPSEEK,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        quantization_config={"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        rope_scaling={**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_group=4,
        topk_method="noaux_tc",
    ),
    "moonlight-16b-a3b": _model(
        "deepseek_v3",
        (2048, 11264, 27, 16, 16, 163840, 1e-05, 50000.0),
        **_DEEPSEEK,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=True,
        num_experts_per_tok=6,
        num_nextn_predict_layers=0,
        q_lora_rank=None,
        rope_scaling=None,
        routed_scaling_factor=2.446,
        scoring_func="sigmoid",
        topk_group=1,
        topk_method="noaux_tc",
    ),
    "kimi-k2": _model(
        "kimi_k2",
        (7168, 18432, 61, 64, 64, 163840, 1e-06, 50000.0),
        **_DEEPSEEK,
        first_k_dense_replace=1,
        moe_intermediate_size=2048,
        n_group=1,
        n_routed_experts=384,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=0,
        q_lora_rank=1536,
        rope_scaling={
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        routed_scaling_factor=2.827,
        scoring_func="sigmoid",
        topk_group=1,
        topk_method="noaux_tc",
    ),
    "glm-4.5": _model(
        "glm4_moe",
        (5120, 12288, 92, 96, 8, 151552, 1e-05, 1000000),
        **_GLM,
        first_k_dense_replace=3,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm-4.5-air": _model(
        "glm4_moe",
        (4096, 10944, 46, 96, 8, 151552, 1e-05, 1000000),
        **_GLM,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "ernie-4.5-21b-a3b": _model(
        "ernie4_5_moe",
        (2560, 12288, 28, 20, 4, 103424, 1e-05, 500000),
        **_ERNIE,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_layer_end_index=27,
        moe_layer_start_index=1,
        moe_num_shared_experts=2,
        tie_word_embeddings=True,
    ),
    "minimax-m2": _model(
        "minimax_m2",
        (3072, 1536, 62, 48, 8, 200064, 1e-06, 5000000),
        attn_type_list=[1] * 62,
        head_dim=128,
        max_position_embeddings=196608,
        num_experts_per_tok=8,
        num_local_experts=256,
        rotary_dim=64,
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        tie_word_embeddings=False,
        use_qk_norm=True,
        use_routing_bias=True,
    ),
    "mixtral-8x7b": _model(
        "mixtral",
        (4096, 14336, 32, 32, 8, 32000, 1e-05, 1000000.0),
        max_position_embeddings=32768,
        num_experts_per_tok=2,
        num_local_experts=8,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": _model(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936, 1e-06, 1000000.0),
        **_QWEN3,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": _model(
        "qwen3", (1024, 3072, 28, 16, 8, 151936, 1e-06, 1000000.0), **_QWEN3, tie_word_embeddings=True
    ),
    "olmoe-1b-7b": _model(
        "olmoe",
        (2048, 1024, 16, 16, 16, 50304, 1e-05, 10000.0),
        attention_bias=False,
        clip_qkv=None,
        max_position_embeddings=4096,
        norm_topk_prob=False,
        num_experts=64,
        num_experts_per_tok=8,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "llama4-scout": {
        "model_type": "llama4",
        "text_config": _model(
            "llama4_text",
            _LLAMA4_SIZES,
            **_LLAMA4_TEXT,
            interleave_moe_layer_step=1,
            moe_layers=list(range(48)),
            no_rope_layers=[1, 1, 1, 0] * 12,
            num_local_experts=16,
            rope_scaling=_LLAMA3_SCALING,
            use_qk_norm=True,
        ),
        "tie_word_embeddings": False,
        "vision_config": _LLAMA4_VISION,
    },
    "llama4-maverick": {
        "model_type": "llama4",
        "text_config": _model(
            "llama4_text",
            _LLAMA4_SIZES,
            **_LLAMA4_TEXT,
            interleave_moe_layer_step=2,
            moe_layers=list(range(1, 48, 2)),
            no_rope_layers=[],
            num_local_experts=128,
            rope_scaling=None,
            use_qk_norm=False,
        ),
        "vision_config": _LLAMA4_VISION,
    },
    **{
        name: _model(
            "gpt_oss",
            (2880, 2880, layers, 64, 8, 201088, 1e-05, 150000),
            **_GPT_OSS,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            num_local_experts=experts,
        )
        for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128))
    },
    "llama3.1-8b": _model(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 1e-05, 500000.0),
        attention_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        rope_scaling=_LLAMA3_SCALING,
        tie_word_embeddings=False,
    ),
}
