"""DeepSeek-V4's files: names as `transformers` writes them, and as they were published; kinds of layers, two ropes.

Layers of multi-token prediction are left out, as `transformers` does.
"""

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.model import CompressedAttention, Model
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.config_parts import Keys, Part, Values, agreed, refused
from penstock.models.huggingface.expert_parts import shared
from penstock.models.huggingface.family import MODEL_FIXED, MODEL_VALUES, Family, read_section, section_of

_KINDS = {"window": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
_RATIOS = {0: "window", 4: "csa", 128: "hca"}  # of older files
_ROPES = {"main": "attention.window_rope", "compress": "attention.rope"}
_THETAS = {"main": "rope_theta", "compress": "compress_rope_theta"}
_SHARE = 64 / 512  # of a head, rotated, where a file does not say
_HASH_LAYERS = 3


def compressed(model: Model) -> CompressedAttention:
    """The attention of a model. Raises ConfigError if it is of another kind."""
    if not isinstance(model.attention, CompressedAttention):
        raise ConfigError(f"{model.family} has compressed attention", got=model.attention.kind, allowed="compressed")
    return model.attention


def _read_kinds(keys: Keys) -> Values:
    layers = keys.layers
    keys.skip("num_nextn_predict_layers")
    named = {theirs: ours for ours, theirs in _KINDS.items()}
    types, ratios = keys.of_layers("layer_types", layers), keys.numbers_of_layers("compress_ratios")
    if types is not None:
        kinds = [named.get(kind, "") for kind in types]
    elif ratios is not None:  # with one of each prediction layer, too
        kinds = [_RATIOS.get(ratio, "") for ratio in ratios[:layers]]
    else:
        kinds = ["hca"] * min(layers, 2) + ["csa" if layer % 2 else "hca" for layer in range(layers - 2)]
    if "" in kinds or len(kinds) < layers:
        raise refused("layer_types", types or ratios, f"{', '.join(named)} for each layer")
    rates = keys.get("compress_rates", None) or {}
    if not isinstance(rates, Mapping) or rates.keys() - set(_KINDS.values()):
        raise refused("compress_rates", rates, f"a table of {_KINDS['csa']} and {_KINDS['hca']}")
    of_kind = Keys({_KINDS["csa"]: 4, _KINDS["hca"]: 128, **rates})
    first, turns = _by_turns(kinds)
    return {
        "attention.first_layers": first,
        "attention.other_layers": turns,
        **{f"attention.{kind}_rate": of_kind.whole(_KINDS[kind], low=1) for kind in ("csa", "hca")},
    }


def _by_turns(kinds: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As few first layers as can be, and one kind or two that take turns behind them."""
    for first in range(len(kinds)):
        rest = kinds[first:]
        for turns in (1, 2):
            if all(kind == rest[layer % turns] for layer, kind in enumerate(rest)):
                return tuple(kinds[:first]), tuple(rest[:turns])
    raise AssertionError("the last layer alone takes turns")


def _write_kinds(model: Model) -> Values:
    attention = compressed(model)
    return {
        "layer_types": [_KINDS[attention.kind_of(layer)] for layer in range(model.layers)],
        "compress_rates": {_KINDS["csa"]: attention.csa_rate, _KINDS["hca"]: attention.hca_rate},
    }


def _read_hashed(keys: Keys) -> Values:
    types, number = keys.of_layers("mlp_layer_types", keys.layers), keys.values.get("num_hash_layers")
    first = min(keys.layers, _HASH_LAYERS if number is None else keys.whole("num_hash_layers"))
    if types is not None:
        first = types.count("hash_moe")
        if types != ["hash_moe"] * first + ["moe"] * (keys.layers - first):
            raise refused("mlp_layer_types", types, "hash_moe in the first layers, then moe")
    return {"moe.router.num_hash_layers": first}


def _write_hashed(model: Model) -> Values:
    return {"mlp_layer_types": ["hash_moe" if model.is_hashed(layer) else "moe" for layer in range(model.layers)]}


def _read_ropes(keys: Keys) -> Values:
    keys.skip("max_position_embeddings")
    width, share = (keys.get(key, None) for key in ("qk_rope_head_dim", "partial_rotary_factor"))
    head_dim = keys.whole("head_dim", low=1)
    if share is None:
        share = _SHARE if width is None else keys.whole("qk_rope_head_dim") / head_dim
    share = Keys({"share": share}).number("share")
    given: Any = agreed({key: keys.get(key, None) for key in ("rope_parameters", "rope_scaling")}) or {}
    if not isinstance(given, Mapping):
        raise refused("rope_parameters", given, "a table of keys")
    if is_nested := all(isinstance(given.get(name), Mapping) for name in _ROPES):
        sections = {name: dict(given[name]) for name in _ROPES}
    else:  # what such a file scales are the angles of compressed layers; its factor on them is 1
        sections = {"main": {}, "compress": {"attention_factor": 1.0, **given}}
    read: Values = {}
    for name, path in _ROPES.items():
        theta = keys.number(_THETAS[name])
        usual = {"rope_theta": theta, "partial_rotary_factor": share}
        section = sections[name] if is_nested else {**sections[name], "rope_theta": theta}
        values = read_section(Keys({}, rope=usual), Keys(section), scales_scores=False, partial=True)
        read[path] = values["attention.rope"]
        if (other := values["attention.partial_rotary_factor"]) != share:
            raise refused(f"rope_parameters.{name}.partial_rotary_factor", other, f"{share:g}, as for all layers")
    return read | {"attention.qk_rope_head_dim": int(head_dim * share)}


def _write_ropes(model: Model) -> Values:
    attention, sections = compressed(model), dict[str, Values]()
    share = attention.qk_rope_head_dim / attention.head_dim
    for name, rope in (("main", attention.window_rope), ("compress", attention.rope)):
        sections[name] = {**section_of(rope), "partial_rotary_factor": share}
    return {"rope_parameters": sections, "partial_rotary_factor": share}


_STEMS = {"compressor": "attn.compressor", "indexer.compressor": "attn.indexer.compressor"}
_STREAMS = {"attention_streams": "hc_attn", "ffn_streams": "hc_ffn"}

DEEPSEEK_V4 = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    model={
        **tensors.MODEL,
        "head.weight": ("head.weight",),
        **{f"streams.{kind}": (f"model.hc_head.hc_{name}",) for kind, name in tensors.STREAMS.items()},
    },
    names={
        "attention_norm.weight_D": ("attn_norm.weight",),
        "ffn_norm.weight_D": ("ffn_norm.weight",),
        **{
            f"{ours}.{kind}": (f"{theirs}_{name}",)
            for ours, theirs in _STREAMS.items()
            for kind, name in tensors.STREAMS.items()
        },
        **{
            f"attention.{ours}": (f"attn.{theirs}",)
            for ours, theirs in (
                *(("query.down.weight", "wq_a.weight"), ("query.norm.weight_D", "q_norm.weight")),
                *(("query.up.weight", "wq_b.weight"), ("kv.weight", "wkv.weight"), ("kv_norm.weight_D", "norm.weight")),
                *(("out_down.weight", "wo_a.weight"), ("out.weight", "wo_b.weight"), ("sinks_H", "attn_sink")),
                ("indexer.query.weight", "indexer.wq_b.weight"),
                ("indexer.weights.weight", "indexer.weights_proj.weight"),
            )
        },
        **{
            f"attention.{ours}.{part}": (f"{stem}.{theirs}",)
            for ours, stem in _STEMS.items()
            for part, theirs in (
                *(("kv.weight", "wkv.weight"), ("gate.weight", "wgate.weight")),
                *(("position_bias_JN", "ape"), ("norm.weight_D", "norm.weight")),
            )
        },
        **tensors.experts_one_by_one("ffn", "w1", "w3", "w2"),
        "ffn.shared.gate_up.weight": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
        "ffn.shared.down.weight": ("ffn.shared_experts.w2.weight",),
        "ffn.router.expert_bias_E": ("ffn.gate.bias",),
        "ffn.router.table_VK": ("ffn.gate.tid2eid",),
    },
    forms={"ffn.router.table_VK": (tensors.whole_numbers,)},
    spellings={
        r"(layers\..*|norm\.weight)": r"model.\1",
        r"embed\.weight": "model.embed_tokens.weight",
        r"hc_head_(fn|base|scale)": r"model.hc_head.hc_\1",
        r"(.*\.attn)\.kv_norm\.weight": r"\1.norm.weight",
    },
    values={
        **{key: path for key, path in MODEL_VALUES.items() if key != "tie_word_embeddings"},
        **{
            key: f"attention.{path}"
            for key, path in (
                *(("num_attention_heads", "heads"), ("head_dim", "head_dim"), ("q_lora_rank", "q_lora_rank")),
                *(("o_groups", "o_groups"), ("o_lora_rank", "o_lora_rank"), ("sliding_window", "sliding_window")),
                *((name, f"indexer.{name}") for name in ("index_n_heads", "index_head_dim", "index_topk")),
            )
        },
        "n_routed_experts": "moe.experts",
        "num_experts_per_tok": "moe.top_k",
        "moe_intermediate_size": "moe.moe_intermediate_size",
        "routed_scaling_factor": "moe.router.routed_scaling_factor",
        "swiglu_limit": "moe.clamped.limit",
        "hc_mult": "hyper_connections.streams",
        "hc_sinkhorn_iters": "hyper_connections.sinkhorn_iters",
        "hc_eps": "hyper_connections.epsilon",
    },
    always={
        "attention.kind": "compressed",
        "moe.router.scoring_func": "sqrt-softplus",
        "moe.router.expert_bias": True,
        "moe.router.norm_topk_prob": True,
        "moe.clamped.alpha": 1.0,
        "moe.clamped.up_offset": 0.0,
        "moe.clamp_shared": True,
    },
    fixed={
        **MODEL_FIXED,
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "attention_bias": False,
        "mlp_bias": False,
        "router_jitter_noise": 0.0,
    },
    parts=(
        Part(_read_kinds, _write_kinds),
        Part(_read_hashed, _write_hashed),
        Part(_read_ropes, _write_ropes),
        shared("n_shared_experts"),
    ),
    left_out=r".*\.rotary_emb\.inv_freq|(.*\.)?mtp\..*",
)
