"""The families without experts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.models.huggingface import config_parts as keys
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.family import DENSE_VALUES, MODEL_FIXED, MODEL_VALUES, Family, rotary

_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**tensors.ATTENTION, **tensors.dense_network("ffn", "mlp")},
    forms=tensors.ROTARY_HALVES,
    values=DENSE_VALUES,
    fixed={**MODEL_FIXED, "mlp_bias": False},
    parts=(keys.HEADS, rotary(), keys.DENSE),
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
    parts=(keys.HEADS, rotary(partial=True), keys.DENSE),
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
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, keys.DENSE),
        ),
        "qwen2": replace(
            _LLAMA,
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            values=_WITHOUT_BIAS,
            always={"attention.qkv_bias": True},
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, keys.DENSE),
        ),
        "mistral": replace(
            _LLAMA,
            model_type="mistral",
            architecture="MistralForCausalLM",
            values=_WITHOUT_BIAS,
            fixed=MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW, keys.DENSE),
        ),
        "seed-oss": replace(
            _LLAMA,
            model_type="seed_oss",
            architecture="SeedOssForCausalLM",
            values=_WITHOUT_BIAS,
            fixed={"hidden_act": "silu", "mlp_bias": False},
            parts=(keys.HEADS, rotary(), keys.BIASES, keys.DROPOUT, keys.DENSE),
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
            parts=(keys.HEADS, rotary(partial=True), keys.WINDOW, keys.CONTEXT_OF_PHI3, keys.DENSE),
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
    }
)
