"""The families without experts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.models.huggingface import config_parts as keys
from penstock.models.huggingface import expert_parts as experts
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.family import (
    DENSE_VALUES,
    GRANITE_SCALES,
    MODEL_FIXED,
    MODEL_VALUES,
    Family,
    rotary,
    rotary_by_kind,
    with_temperature,
)

_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**tensors.ATTENTION, **tensors.dense_network("ffn", "mlp")},
    forms=tensors.ROTARY_HALVES,
    values=DENSE_VALUES,
    fixed={**MODEL_FIXED, "mlp_bias": False},
    parts=(keys.HEADS, rotary(), experts.DENSE),
)
_QKV = tuple(f"attention.{part}.weight" for part in ("query", "key", "value"))
_WITHOUT_BIAS = {**MODEL_VALUES, "intermediate_size": "intermediate_size"}
_ONLY_QKV_BIAS = {**_WITHOUT_BIAS, "attention_bias": "attention.qkv_bias"}

_GLM = replace(
    _LLAMA,
    model_type="glm",
    architecture="GlmForCausalLM",
    names={**tensors.ATTENTION, **tensors.FUSED_NETWORK},
    forms={},  # members of a pair are neighbours, as ours are
    values=_ONLY_QKV_BIAS,
    fixed=MODEL_FIXED,
    parts=(keys.HEADS, rotary(partial=True), experts.DENSE),
)
_OLMO2 = replace(
    _LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names={**_LLAMA.names, **tensors.POST_NORMS},
    always={"attention.qk_norm": "projection", "norm_position": "post"},
    fixed=MODEL_FIXED,
)

DENSE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen3": replace(
            _LLAMA,
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            always={"attention.qk_norm": "head"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, experts.DENSE),
        ),
        "qwen2": replace(
            _LLAMA,
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            values=_WITHOUT_BIAS,
            always={"attention.qkv_bias": True},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, experts.DENSE),
        ),
        "mistral": replace(
            _LLAMA,
            model_type="mistral",
            architecture="MistralForCausalLM",
            values=_WITHOUT_BIAS,
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW, experts.DENSE),
        ),
        "seed-oss": replace(
            _LLAMA,
            model_type="seed_oss",
            architecture="SeedOssForCausalLM",
            values=_WITHOUT_BIAS,
            fixed={"hidden_act": "silu", "mlp_bias": False},
            parts=(keys.HEADS, rotary(), keys.BIASES, keys.DROPOUT, experts.DENSE),
        ),
        "phi3": replace(
            _LLAMA,
            model_type="phi3",
            architecture="Phi3ForCausalLM",
            names={
                **{name: theirs for name, theirs in tensors.ATTENTION.items() if not name.endswith(".bias")},
                **dict.fromkeys(_QKV, ("self_attn.qkv_proj.weight",)),
                **tensors.FUSED_NETWORK,
            },
            divided={"self_attn.qkv_proj.weight": (tensors.heads_at_once, _QKV)},
            values=_WITHOUT_BIAS,
            fixed={**MODEL_FIXED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            parts=(keys.HEADS, rotary(partial=True), keys.WINDOW, keys.CONTEXT_OF_PHI3, experts.DENSE),
        ),
        "arcee": replace(
            _LLAMA,
            model_type="arcee",
            architecture="ArceeForCausalLM",
            names={
                **tensors.ATTENTION,
                "ffn.gate_up.weight": ("mlp.up_proj.weight",),
                "ffn.down.weight": ("mlp.down_proj.weight",),
            },
            always={"hidden_act": "relu2"},
            fixed={**_LLAMA.fixed, "hidden_act": "relu2"},
        ),
        "ernie4.5": replace(
            _LLAMA,
            model_type="ernie4_5",
            architecture="Ernie4_5ForCausalLM",
            forms={},
            values=_WITHOUT_BIAS,
            fixed={"hidden_act": "silu", "use_bias": False},
        ),
        "glm": _GLM,
        "glm4": replace(
            _GLM,
            model_type="glm4",
            architecture="Glm4ForCausalLM",
            names={
                **_GLM.names,
                "attention_post_norm.weight_D": ("post_self_attn_layernorm.weight",),
                "ffn_post_norm.weight_D": ("post_mlp_layernorm.weight",),
            },
            always={"norm_position": "sandwich"},
        ),
        "olmo2": _OLMO2,
        "exaone4": replace(
            _OLMO2,
            model_type="exaone4",
            architecture="Exaone4ForCausalLM",
            values=_WITHOUT_BIAS,
            always={"attention.qk_norm": "head", "norm_position": "post"},
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_EXAONE, experts.DENSE),
        ),
        "olmo3": replace(
            _OLMO2,
            model_type="olmo3",
            architecture="Olmo3ForCausalLM",
            parts=(keys.HEADS, rotary_by_kind(keys.WINDOW_OF_OLMO3), experts.DENSE),
        ),
        "gemma3": replace(
            _LLAMA,
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            names={**_LLAMA.names, **tensors.NORMS_AROUND},
            always={
                "attention.qk_norm": "head",
                "norm_position": "sandwich",
                "zero_centred_norms": True,
                "hidden_act": "gelu",
            },
            fixed={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_dropout": 0.0,
                "final_logit_softcapping": None,
                "attn_logit_softcapping": None,
                "use_bidirectional_attention": False,
            },
            parts=(
                keys.HEADS,
                rotary_by_kind(keys.WINDOW_OF_GEMMA3, "rope_local_base_freq"),
                keys.GEMMA_SCALES,
                experts.DENSE,
            ),
            prefix="language_model.",
            left_out=r".*\.rotary_emb\..*inv_freq|(vision_tower|multi_modal_projector|model\.vision_tower|"
            r"model\.multi_modal_projector)\..*",
        ),
        "granite": replace(
            _LLAMA,
            model_type="granite",
            architecture="GraniteForCausalLM",
            values={**DENSE_VALUES, **GRANITE_SCALES},
        ),
        "smollm3": replace(
            _LLAMA,
            model_type="smollm3",
            architecture="SmolLM3ForCausalLM",
            fixed={**_LLAMA.fixed, "use_sliding_window": False},
            parts=(*_LLAMA.parts, keys.NOPE),
        ),
        "hunyuan": replace(
            _LLAMA,
            model_type="hunyuan_v1_dense",
            architecture="HunYuanDenseV1ForCausalLM",
            names={**_LLAMA.names, **tensors.NORMS_OF_HUNYUAN},
            always={"attention.qk_norm": "weighted-rotated-head"},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(stretched=True), experts.DENSE),
        ),
        "cwm": replace(
            _LLAMA,
            model_type="cwm",
            architecture="CwmForCausalLM",
            values=_WITHOUT_BIAS,
            parts=(keys.HEADS, rotary(has_base=True), keys.WINDOW_OF_CWM, keys.BEGIN_OF_CWM, experts.DENSE),
        ),
        "ministral3": replace(
            _LLAMA,
            model_type="ministral3",
            architecture="Ministral3ForCausalLM",
            values=_WITHOUT_BIAS,
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, with_temperature(rotary(has_base=True)), keys.WINDOW, experts.DENSE),
        ),
    }
)
