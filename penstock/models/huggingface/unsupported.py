"""The refusal of a family that is not supported: what its `config.json` has and Penstock lacks, and a near preset.

Such a file is not read as a model, and its values may have any type: parts are recognized by the names of keys.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from math import log
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.numbers import count_text
from penstock.config.model import GroupedQueryAttention, Model
from penstock.config.presets.registry import PRESETS
from penstock.config.size import size_of

_PARTS: Mapping[str, str] = {
    r"mamba.*|ssm_.*|state_size|time_step.*|rwkv.*": "state-space layers",
    r"lightning.*|recurrent.*|lru_.*|retention.*|block_types|.*layers_block_type|hybrid_.*": "other layers by turns",
    r"conv_.*|full_attn_idxs": "convolutions in place of attention",
    r".*soft_?cap.*": "logits with a soft cap",
    r"alibi|.*relative_attention.*|position_embedding_type|n_positions|type_vocab_.*": "learned or relative positions",
    r"(layer_?)?norm_eps(ilon)?|layer_norm_.*": "LayerNorm",
    r".*_multiplier|.*logits?_scal.*|scale_.*|query_pre_attn_scalar": "scaled embeddings, scores or residuals",
    r"parallel_attn|.*parallel_residual|new_decoder_architecture": "attention beside the FFN",
    r"clip_qkv": "clipped queries, keys and values",
    r"(mlp|lm_head)_bias|use_bias|add_bias_linear": "biases of FFN or output",
    r"is_encoder_decoder|.*cross_attention.*": "an encoder",
    r".*per_layer_input.*|altup.*|laurel.*": "embeddings of each layer",
    r"use_cla|num_kv_shared_layers": "keys that layers share",
    r"zero_expert.*": "experts without weights",
}
"""Patterns of keys, and the part that they stand for, which no family here has as those files mean it."""

_ACTIVATION = re.compile(r".*hidden_act(ivation)?|activation_function")
_NO_PART = re.compile(
    r"_.*|(torch_)?dtype|architectures|auto_map|attn_implementation|attribute_map|bos|eos|.*_config|.*_version|.*dropout.*"
    r"|.*init.*|.*jitter.*|.*label.*|.*loss.*|.*max.*(position|length).*|model_type|.*name.*|.*pdrop|output_.*|pad.*"
    r"|pretraining_tp|problem_type|return_.*|rope.*|rotary.*|.*token.*|tie_.*|use_cache|use_return_dict"
    r"|d_(ff|kv|model)|n_(embd|head|inner|layer)s?|num_(kv_)?(heads|layers)|.*(expert|moe).*|sliding_window_pattern"
)
"""Keys that name no part by themselves, or one that some family has."""

_SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "width": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size"),
}
_SHOWN = 4
_MOST = 10**7


def unsupported(model_type: str, text: Mapping[str, Any], known: Collection[str]) -> ConfigError:
    """The error for a file of another family, one line; `known` are the keys of all families."""
    parts = dict.fromkeys(part for key, value in text.items() if value for part in _parts(key, value))
    parts |= dict.fromkeys(key[:30] for key, value in text.items() if value and _is_other(key, known))
    shown = ", ".join([*parts][:_SHOWN]) + (f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")
    return ConfigError(
        f"config.json: model_type {model_type[:40]!a} is not supported",
        got=f"parts that are missing here: {shown}" if parts else "layers that no key tells apart from those here",
        fix=_nearest(text),
    )


def _parts(key: str, value: object) -> Iterator[str]:
    """The parts that a key with a value stands for and that are missing; for most keys there is none."""
    if _ACTIVATION.fullmatch(key) and value not in ("silu", "swish"):
        yield f"activation {value}"[:30]
    if value is True or value != 1.0:  # a scale of 1 changes nothing
        yield from (part for pattern, part in _PARTS.items() if re.fullmatch(pattern, key))


def _is_other(key: str, known: Collection[str]) -> bool:
    """Whether a key may stand for a part that neither a family nor a pattern here has."""
    patterns = (*_PARTS, _ACTIVATION.pattern, _NO_PART.pattern)
    return key not in known and not any(re.fullmatch(pattern, key) for pattern in patterns)


def _nearest(text: Mapping[str, Any]) -> str | None:
    """The preset that is nearest by kind of attention, then by experts or none, then by size; None for no sizes."""
    hidden, layers, heads, kv_heads, width, vocabulary, experts, expert_width = (
        next((text[key] for key in keys if type(text.get(key)) is int and 0 < text[key] < _MOST), 0)
        for keys in _SIZES.values()
    )
    of_layers = text.get("layers_block_type")
    layers = layers or (len(of_layers) if isinstance(of_layers, list) else 0)
    if not hidden or not layers:
        return None
    inner = max(experts, 1) * (expert_width or width or 4 * hidden)
    share = min(kv_heads / heads, 1.0) if kv_heads and heads else 1.0  # of keys and values
    parameters = layers * hidden * (2 * (1 + share) * hidden + 3 * inner) + 2 * vocabulary * hidden
    is_linear = any(re.fullmatch(r"mamba.*|ssm_.*|lightning.*|linear_.*|.*layers_block_type", key) for key in text)
    latent = "sparse latent" if text.get("index_topk") else "latent"
    kind = "linear" if is_linear else latent if text.get("kv_lora_rank") else "grouped-query"
    models = {name: make().model for name, make in PRESETS.items()}
    totals = {name: size_of(model, 1).parameters for name, model in models.items()}

    def distance(name: str) -> tuple[bool, bool, float]:
        differs = (models[name].moe is None) != (experts == 0)
        return kind_of(models[name]) != kind, differs, abs(log(totals[name] / parameters))

    name = min(PRESETS, key=distance)
    moe = models[name].moe
    has = "no experts" if moe is None else f"{moe.experts} experts"
    size = count_text(totals[name])
    return f"start from the nearest preset, {name} ({kind_of(models[name])} attention, {has}, {size} parameters)"


def kind_of(model: Model) -> str:
    if model.linear_attention is not None:
        return "linear"
    if isinstance(model.attention, GroupedQueryAttention):
        return "grouped-query"
    return "latent" if model.attention.indexer is None else "sparse latent"
