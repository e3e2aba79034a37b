"""Parts of `config.json` that differ between families: attention heads and local layers (experts: `expert_parts`).

A part works in both directions: it reads keys into values of our fields by path, and writes keys from a model. A value
without an equivalent in our configuration raises an error that names the key. `Keys` has the defaults of
`transformers` for absent keys; a null stays, and the part says what it means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.base.errors import ConfigError
from penstock.config.model import GroupedQueryAttention, LatentAttention, Model
from penstock.config.schema import as_toml

Values: TypeAlias = dict[str, Any]  # values by key of `config.json`, or by path of our field

_MOST_LAYERS = 10_000

KEYS_OF_PARTS = {
    "attention.rope.theta": "rope_theta",
    "attention.local.size": "sliding_window",
    "attention.local.global_temperature": "attn_scale",
    "attention.heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
    "moe.shared_expert_intermediate_size": "n_shared_experts",
    "dense_layers": "num_hidden_layers",
    "moe.top_k": "moe_topk",
}
"""Keys of the fields that parts read, where they differ from the last name of the path; for errors about a range."""


@dataclass(frozen=True)
class Keys:
    """The keys of a `config.json`, with the defaults of its family's class for absent ones."""

    values: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)  # those of the file
    rope: Mapping[str, Any] = field(default_factory=dict)  # rotary settings of a file without any
    seen: set[str] = field(default_factory=set)  # keys that were read

    def get(self, key: str, default: Any) -> Any:
        """The value of a key; the default if it is null, or absent and without a default of the class."""
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def skip(self, *keys: str) -> None:
        """Keys without effect on this model."""
        self.seen.update(keys)

    def need(self, key: str) -> Any:
        """The value of a key. Raises ConfigError if it is missing."""
        value = self.get(key, None)
        if value is None:
            raise ConfigError(f"config.json lacks {key}")
        return value

    def whole(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """A whole number, `8.0` included; required without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise refused(key, value, f"whole number >= {low}")
        return value

    @property
    def layers(self) -> int:
        """The number of decoder layers, bounded because other keys are checked layer by layer."""
        layers = self.whole("num_hidden_layers", low=1)
        if layers > _MOST_LAYERS:
            raise refused("num_hidden_layers", layers, f"1 to {_MOST_LAYERS}")
        return layers

    def number(self, key: str, default: float | None = None) -> float:
        """A number; required without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refused(key, value, "number")
        return float(value)

    def numbers_of_layers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None if missing."""
        value = self.get(key, None)
        if value is not None and not (isinstance(value, list) and all(type(number) is int for number in value)):
            raise refused(key, value, "a list of whole numbers")
        return None if value is None else list(value)

    def section(self, key: str) -> "Keys":
        """The keys below a key; none if it is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise refused(key, value, "a table of keys")
        if nested := next((name for name, inner in value.items() if isinstance(inner, Mapping)), None):
            raise refused(f"{key}.{nested}", value[nested], "a value for all layers")
        return Keys(value)

    def of_layers(self, key: str, layers: int) -> list[Any] | None:
        """A list with a value for each layer; None if missing or empty."""
        value = self.get(key, None) or None
        if value is not None and not (isinstance(value, list) and len(value) == layers):
            raise refused(key, value, f"a list of {layers} (num_hidden_layers)")
        return None if value is None else list(value)


@dataclass(frozen=True)
class Part:
    """One part in both directions."""

    read: Callable[[Keys], Values]  # values of our fields, by path
    write: Callable[[Model], Values]  # keys of `config.json`


def agreed(values: Mapping[str, Any]) -> Any:
    """The value of keys that mean the same; None if all are null. Refuses two values, and names both keys."""
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            raise ConfigError(
                f"config.json: {first} and {key} contradict each other",
                got=f"{as_toml(given[first])} and {as_toml(value)}",
                fix="remove one of them",
            )
    return next(iter(given.values()), None)


def refused(key: str, got: object, allowed: str) -> ConfigError:
    """The error for a key with an unsupported value."""
    text = as_toml(got)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return ConfigError(f"config.json: {key} cannot be used", got=shown, allowed=allowed)


# ------------------------------------------------------------------------------------------------------------- heads


def _read_heads(keys: Keys) -> Values:
    heads = keys.whole("num_attention_heads", low=1)
    kv_heads = keys.whole("num_key_value_heads", heads, low=1)
    if heads % kv_heads:
        raise refused("num_key_value_heads", kv_heads, f"a divisor of {heads} (num_attention_heads)")
    return {
        "attention.kind": "gqa",
        "attention.heads": heads,
        "attention.kv_heads": kv_heads,
        "attention.head_dim": keys.whole("head_dim", keys.whole("hidden_size") // heads),
    }


def _write_heads(model: Model) -> Values:
    attention = grouped(model)
    heads = {"num_attention_heads": attention.heads, "num_key_value_heads": attention.kv_heads}
    return {**heads, "head_dim": attention.head_dim}


def grouped(model: Model) -> GroupedQueryAttention:
    """The attention of a model. Raises ConfigError if it is latent attention."""
    if not isinstance(model.attention, GroupedQueryAttention):
        raise ConfigError(f"{model.family} has no latent attention", got="model.attention.kind mla", allowed="gqa")
    return model.attention


HEADS = Part(_read_heads, _write_heads)
EQUAL_HEADS = Part(
    _read_heads, lambda model: {key: value for key, value in _write_heads(model).items() if key != "head_dim"}
)
"""All heads together are as wide as the hidden states."""


def _read_biases(keys: Keys) -> Values:
    of_inputs, of_output = bool(keys.get("attention_bias", False)), bool(keys.get("attention_out_bias", False))
    if of_output and not of_inputs:
        raise refused("attention_out_bias", of_output, "false, or attention_bias beside it")
    return {"attention.bias": of_output, "attention.qkv_bias": of_inputs and not of_output}


def _write_biases(model: Model) -> Values:
    attention = grouped(model)
    return {"attention_bias": attention.bias or attention.qkv_bias, "attention_out_bias": attention.bias}


def _skipped(*names: str) -> Part:
    def skip(keys: Keys) -> Values:
        keys.skip(*names)
        return {}

    return Part(skip, lambda model: {})


CONTEXT_OF_PHI3 = _skipped("original_max_position_embeddings")
"""Only a kind of rotary scaling that is refused reads the length of pretraining."""
SUM_OF_HY = _skipped("enable_moe_fp32_combine")  # how the sum with the shared expert is rounded
BEGIN_OF_CWM = Part(_skipped("bos_token_id").read, lambda model: {"bos_token_id": min(128_000, model.vocab_size - 1)})
"""The class of `transformers` takes no null there; this is its default."""
BIASES = Part(_read_biases, _write_biases)
DROPOUT = Part(
    _skipped("attention_dropout", "residual_dropout").read,
    lambda model: {"attention_dropout": 0.0, "residual_dropout": 0.0},
)
"""Of training as its authors did it, which no run here has; a trained model is the same without."""


def _read_gemma_scales(keys: Keys) -> Values:
    width = keys.whole("query_pre_attn_scalar", low=1)
    scale = 0.0 if width == keys.whole("head_dim") else width**-0.5
    return {"attention.softmax_scale": scale, "embedding_scale": keys.whole("hidden_size") ** 0.5}


def _write_gemma_scales(model: Model) -> Values:
    attention = grouped(model)
    scale = attention.softmax_scale
    return {"query_pre_attn_scalar": round(scale**-2) if scale else attention.head_dim}


GEMMA_SCALES = Part(_read_gemma_scales, _write_gemma_scales)


# ----------------------------------------------------------------------------------- layers that see a part of the row


def global_every(is_global: Sequence[bool], key: str) -> int:
    """The n of "every n-th layer is global", the n-th first; 0 without global layers. Refuses any other order."""
    every = is_global.index(True) + 1 if True in is_global else 0
    expected = [every > 0 and (layer + 1) % every == 0 for layer in range(len(is_global))]
    if list(is_global) != expected:
        raise refused(key, list(is_global), "layers that see the whole row at every n-th place")
    return every


def _global_layers(is_global: Sequence[bool]) -> Values:
    """Which layers see the whole row: every n-th if that says it, or a list."""
    every = is_global.index(True) + 1 if True in is_global else 0
    if list(is_global) == [every > 0 and (layer + 1) % every == 0 for layer in range(len(is_global))]:
        return {"global_every": every}
    return {"global_layers": tuple(layer for layer, sees_all in enumerate(is_global) if sees_all)}


def _read_window(keys: Keys) -> Values:
    size = keys.get("sliding_window", None)
    return {} if size is None else {"attention.local": {"size": keys.whole("sliding_window", low=1)}}


def _read_switched_window(keys: Keys) -> Values:
    keys.skip("sliding_window")
    return _read_window(keys) if keys.get("use_sliding_window", False) else {}


def _write_window(model: Model) -> Values:
    local = grouped(model).local
    return {"sliding_window": None if local is None else local.size}


def _read_global(keys: Keys, usual: Sequence[bool], other: str) -> list[bool]:
    """Which layers see the whole row, from `layer_types`; the `other` ones are of one kind."""
    types = keys.of_layers("layer_types", len(usual))
    if types is None:
        return list(usual)
    if unknown := [kind for kind in types if kind not in ("full_attention", other)]:
        raise refused("layer_types", unknown[0], f"full_attention, {other}")
    return [kind == "full_attention" for kind in types]


def _read_window_types(keys: Keys, usual: Sequence[bool]) -> Values:
    is_global = _read_global(keys, usual, "sliding_attention")
    if all(is_global):
        keys.skip("sliding_window")
        return {}
    return {"attention.local": {"size": keys.whole("sliding_window", low=1), **_global_layers(is_global)}}


def _read_qwen3_window(keys: Keys) -> Values:
    layers, first = keys.layers, keys.whole("max_window_layers", 28)
    if keys.get("use_sliding_window", False) and keys.get("sliding_window", None) is not None:
        return _read_window_types(keys, [layer < first for layer in range(layers)])
    keys.skip("sliding_window")
    types = keys.of_layers("layer_types", layers) or []
    if any(kind != "full_attention" for kind in types):
        raise refused("layer_types", types, "full_attention, or use_sliding_window and sliding_window too")
    return {}


def _write_window_types(model: Model) -> Values:
    return {"layer_types": layer_types(model, "sliding_attention"), **_write_window(model)}


def _write_set_window(model: Model) -> Values:
    # Without such layers the class's own window stays, which some of its code reads.
    return {key: value for key, value in _write_window_types(model).items() if value is not None}


def _read_window_behind(keys: Keys) -> Values:
    layers, first = keys.layers, keys.whole("max_window_layers", 62)
    has_window = keys.get("sliding_window", None) is not None
    return _read_window_types(keys, [not has_window or layer < first for layer in range(layers)])


def _read_hybrid(keys: Keys) -> Values:
    keys.skip("sliding_window_pattern")  # beside `layer_types` some files have a text
    if keys.get("sliding_window", None) is None:
        return _read_window_types(keys, [True] * keys.layers)
    every = 1 if keys.get("layer_types", None) else keys.whole("sliding_window_pattern", 4, low=1)
    usual = [(layer + 1) % every == 0 for layer in range(keys.layers)]
    return _read_unrotated(keys, usual)


def _read_unrotated(keys: Keys, usual: Sequence[bool]) -> Values:
    places = _global_layers(_read_global(keys, usual, "sliding_attention"))
    return {"attention.local": {"size": keys.whole("sliding_window", low=1), **places, "global_rope": False}}


def _read_flint_window(keys: Keys) -> Values:
    last = keys.layers - 1
    return _read_unrotated(keys, [layer < 2 or layer % 4 == 1 or layer == last for layer in range(last + 1)])


def _read_gemma3_window(keys: Keys) -> Values:
    every = keys.whole("sliding_window_pattern", 6, low=1)
    return _read_window_types(keys, [(layer + 1) % every == 0 for layer in range(keys.layers)])


def _read_afmoe(keys: Keys) -> Values:
    every = keys.whole("global_attn_every_n_layers", 4, low=1)
    scale = keys.whole("hidden_size", low=1) ** 0.5 if keys.get("mup_enabled", False) else 1.0
    usual = [(layer + 1) % every == 0 for layer in range(keys.layers)]
    return {"embedding_scale": scale, **_read_unrotated(keys, usual)}


def _write_afmoe(model: Model) -> Values:
    return {"mup_enabled": model.embedding_scale != 1, **_write_window_types(model)}


def _read_nope(keys: Keys) -> Values:
    layers, interval = keys.layers, keys.whole("no_rope_layer_interval", 4, low=1)
    keys.skip("sliding_window")
    if not all(_read_global(keys, [True] * layers, "sliding_attention")):
        raise refused("layer_types", keys.get("layer_types", None), "full_attention")
    rotates = keys.of_layers("no_rope_layers", layers) or [(layer + 1) % interval != 0 for layer in range(layers)]
    return {"attention.nope_every": global_every([not rotate for rotate in rotates], "no_rope_layers")}


def _write_nope(model: Model) -> Values:
    return {"no_rope_layers": [int(grouped(model).rotates(layer)) for layer in range(model.layers)]}


def layer_types(model: Model, local: str) -> list[str]:
    """The name of each layer's attention in `layer_types`; `local` is the name for local layers."""
    attention = grouped(model)
    return ["full_attention" if attention.is_global(layer) else local for layer in range(model.layers)]


def _read_chunks(keys: Keys) -> Values:
    layers = keys.layers
    interval = keys.whole("no_rope_layer_interval", 4, low=1)
    keys.skip("attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale")  # without such layers
    rotates = keys.of_layers("no_rope_layers", layers) or [(layer + 1) % interval != 0 for layer in range(layers)]
    is_global = _read_global(keys, [not rotate for rotate in rotates], "chunked_attention")
    if all(rotates) and all(is_global):  # plain attention in every layer
        return {}
    if not all(rotates) and [not rotate for rotate in rotates] != is_global:
        raise refused("no_rope_layers", rotates, "0 for the layers that see the whole row, 1 for the others; or all 1")
    is_tuned = bool(keys.get("attn_temperature_tuning", False)) and not all(rotates)
    local = {
        "kind": "chunk",
        "size": keys.whole("attention_chunk_size", 8192, low=1),
        "global_every": global_every(is_global, "layer_types"),
        "global_rope": all(rotates),
        "global_temperature": keys.number("attn_scale", 0.1) if is_tuned else 0.0,
        "temperature_floor": keys.whole("floor_scale", 8192, low=1),
    }
    return {"attention.local": local}


def _write_chunks(model: Model) -> Values:
    attention = grouped(model)
    local = attention.local
    fields: Values = {
        "attention_chunk_size": None if local is None else local.size,
        "layer_types": layer_types(model, "chunked_attention"),
        "no_rope_layers": [int(attention.rotates(layer)) for layer in range(model.layers)],
        "attn_temperature_tuning": local is not None and local.global_temperature > 0,
    }
    if local is None or not local.global_temperature:
        return fields
    return fields | {"attn_scale": local.global_temperature, "floor_scale": local.temperature_floor}


def _read_linear(keys: Keys) -> Values:
    layers, interval = keys.layers, keys.whole("full_attention_interval", 4, low=1)
    usual = [(layer + 1) % interval == 0 for layer in range(layers)]
    # Without full attention the places of a published model would say something of no layer.
    return {"linear_attention.full_every": global_every(_read_global(keys, usual, "linear_attention"), "layer_types")}


def _write_linear(model: Model) -> Values:
    kinds = ("full_attention", "linear_attention")
    return {"layer_types": [kinds[model.is_linear(layer)] for layer in range(model.layers)]}


def _read_kda(keys: Keys) -> Values:
    section, layers = keys.section("linear_attn_config"), keys.layers
    types = keys.of_layers("layer_types", layers)
    listed = section.numbers_of_layers("full_attn_layers")
    if types is None and listed is None:
        keys.need("linear_attn_config")
    full = agreed(
        {
            "layer_types": types and [layer for layer, kind in enumerate(types, 1) if kind == "full_attention"],
            "linear_attn_config.full_attn_layers": listed and sorted(listed),
        }
    )
    is_full = [layer in full for layer in range(1, layers + 1)]  # layers count from 1
    every = is_full.index(True) + 1 if any(is_full) else 0
    usual = [every > 0 and layer % every == 0 for layer in range(1, layers + 1)]
    is_last = is_full[-1] and not usual[-1]
    if is_full[:-1] != usual[:-1] or (usual[-1] and not is_full[-1]):
        raise refused("full_attn_layers", full, "every n-th layer from the n-th on, and maybe the last one")
    width = section.whole("head_dim", keys.whole("linear_head_dim", 128), low=1)
    heads = section.whole("num_heads", keys.whole("linear_num_heads", 32), low=1)
    return {
        "linear_attention.full_every": every,
        "linear_attention.full_last": is_last,
        **{f"linear_attention.{name}_heads": heads for name in ("key", "value")},
        **{f"linear_attention.{name}_head_dim": width for name in ("key", "value")},
        "linear_attention.conv_size": section.whole("short_conv_kernel_size", keys.whole("linear_conv_kernel_dim", 4)),
    }


def _write_kda(model: Model) -> Values:
    linear = model.linear_attention
    assert linear is not None, "the family has linear attention"
    layers = [model.is_linear(layer) for layer in range(model.layers)]
    return {
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, is_linear in enumerate(layers, 1) if not is_linear],
            "kda_layers": [layer for layer, is_linear in enumerate(layers, 1) if is_linear],
            "num_heads": linear.key_heads,
            "head_dim": linear.key_head_dim,
            "short_conv_kernel_size": linear.conv_size,
        }
    }


def _refuse_shared_indexers(keys: Keys) -> Values:
    types = keys.of_layers("layer_types", keys.layers) or []
    if any(kind != "indexed_attention" for kind in types):
        raise refused("layer_types", types, "indexed_attention in each layer")
    types = keys.of_layers("indexer_types", keys.layers) or []
    if any(kind != "full" for kind in types) or keys.get("index_topk_pattern", None) is not None:
        raise refused("indexer_types", types, "full in each layer: no layer takes the keys of another one")
    return {}


LINEAR = Part(_read_linear, _write_linear)  # every n-th layer has attention, the others linear attention
KDA = Part(_read_kda, _write_kda)
INDEXERS = Part(_refuse_shared_indexers, lambda model: {})
WINDOW = Part(_read_window, _write_window)
SWITCHED_WINDOW = Part(
    _read_switched_window,
    lambda model: {"use_sliding_window": grouped(model).local is not None, **_write_window(model)},
)
WINDOW_OF_QWEN3 = Part(
    _read_qwen3_window,
    lambda model: {"use_sliding_window": grouped(model).local is not None, **_write_window_types(model)},
)
WINDOW_BEHIND = Part(_read_window_behind, _write_window_types)  # from `max_window_layers` on, or as listed
WINDOW_OF_GPT_OSS = Part(
    lambda keys: _read_window_types(keys, [layer % 2 == 1 for layer in range(keys.layers)]),
    _write_window_types,
)
CHUNKS = Part(_read_chunks, _write_chunks)
WINDOW_OF_OLMO3 = Part(
    lambda keys: _read_window_types(keys, [(layer + 1) % 4 == 0 for layer in range(keys.layers)]), _write_set_window
)
WINDOW_OF_CWM = Part(
    lambda keys: _read_window_types(keys, [layer % 4 == 0 for layer in range(keys.layers)]), _write_set_window
)
WINDOW_OF_FLINT = Part(_read_flint_window, _write_window_types)
WINDOW_OF_AFMOE = Part(_read_afmoe, _write_afmoe)  # and the scale of embeddings
WINDOW_OF_GEMMA3 = Part(_read_gemma3_window, _write_set_window)
WINDOW_OF_MELLUM = Part(lambda keys: _read_window_types(keys, [True] * keys.layers), _write_set_window)
NOPE = Part(_read_nope, _write_nope)  # every n-th layer does not rotate, or as listed
WINDOW_OF_EXAONE = Part(_read_hybrid, _write_window_types)
"""Windows between layers that see the whole row and do not rotate; without a window all layers rotate."""


def _qk_norm(kind: str) -> Part:
    return Part(
        lambda keys: {"attention.qk_norm": kind if keys.get("use_qk_norm", False) else "none"},
        lambda model: {"use_qk_norm": grouped(model).qk_norm == kind},
    )


QK_NORM_OF_GLM, QK_NORM_OF_LLAMA4 = _qk_norm("head"), _qk_norm("rotated-head")


# ----------------------------------------------------------------------------------------------------------- DeepSeek


def _write_latents(model: Model) -> Values:
    attention = model.attention
    assert isinstance(attention, LatentAttention), "other attention lacks fields that the family needs"
    return {"num_key_value_heads": attention.heads, "q_lora_rank": attention.q_lora_rank or None}


def _read_latents(keys: Keys) -> Values:
    keys.skip("head_dim", "num_key_value_heads")  # latents have the same for all heads
    has_latent = keys.get("q_lora_rank", None) is not None
    return {"attention.kind": "mla", "attention.q_lora_rank": keys.whole("q_lora_rank", low=1) if has_latent else 0}


LATENTS = Part(_read_latents, _write_latents)
