"""The Hugging Face form of a family as data: names and layouts of its weights, and the keys of its `config.json`.

Names of weights are those of the published files. Within a layer, one of our tensors is filled by one tensor of the
file, or by several stacked along dim 0; `{expert}` marks names that exist once per expert. `forms` rearrange numbers.

A field of our configuration comes from a key of `config.json` (`values`), from a part (`parts`), or is the same in all
models of the family (`always`). Training settings (`model.moe.balance`, `model.moe.router.expert_bias_rate`) are not in
the file and have their defaults after reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.model import CompressedAttention, LatentAttention, Model, Rope
from penstock.config.schema import as_toml
from penstock.models.huggingface.config_parts import Keys, Part, Values, agreed, grouped, refused
from penstock.models.huggingface.weight_names import MODEL, DivisionOf, Names, RearrangementOf


def rotary(
    *, scales_scores: bool = False, partial: bool = False, stretched: bool = False, has_base: bool = False
) -> Part:
    """Rotary embedding in today's form (`rope_parameters`) and in the older one (`rope_theta`, `rope_scaling`).

    `transformers` reads `rope_scaling` instead of `rope_parameters`, and `rope_theta` where the section has none. With
    `scales_scores` the family's YaRN scales attention scores as well (`mscale_all_dim`). `partial`: heads of the family
    may be rotated in part; MiniMax's `rotary_dim` is in features. `stretched`: a fixed `alpha` of kind `dynamic` may
    multiply the base (Hunyuan), which is written as the larger base. `has_base`: a file without a section has the
    base of the class, and one beside it is not read.
    """
    left_out = {"partial_rotary_factor"} if has_base else {"rope_theta", "partial_rotary_factor"}

    def read(keys: Keys) -> Values:
        keys.skip("max_position_embeddings")
        sections = {name: keys.section(name) for name in ("rope_scaling", "rope_parameters")}
        readings = {
            name: read_section(keys, section, scales_scores, partial, stretched)
            for name, section in sections.items()
            if section.values
        }
        if len(readings) == 2 and readings["rope_scaling"] != readings["rope_parameters"]:
            raise ConfigError(
                "config.json: rope_scaling and rope_parameters contradict each other",
                got=" and ".join(as_toml(dict(section.values)) for section in sections.values()),
                fix="keep one of them, with rope_theta in it",
            )
        if readings:
            return next(iter(readings.values()))
        usual = keys.rope if keys.get("rope_parameters", None) is None else {}
        section = Keys({key: usual[key] for key in usual.keys() - left_out})
        return read_section(keys, section, scales_scores, partial)

    def write(model: Model) -> Values:
        fields = section_of(model.attention.rope)
        if partial:
            fields["partial_rotary_factor"] = grouped(model).partial_rotary_factor
        return {"rope_parameters": fields}

    return Part(read, write)


def rotary_by_kind(window: Part, local_theta: str | None = None) -> Part:
    """The window of local layers, and rotary embeddings of global and of local layers.

    Files of today have a section for each kind in `rope_parameters`. Older ones have `rope_theta` and `rope_scaling`
    of global layers, and the base of local ones in the key `local_theta`, or none.
    """

    def read(keys: Keys) -> Values:
        keys.skip("max_position_embeddings")
        given = keys.get("rope_parameters", {})
        if not isinstance(given, Mapping) or given.keys() - set(_KINDS):
            raise refused("rope_parameters", given, f"a table for each of {', '.join(_KINDS)}")
        sections = {kind: dict(Keys(given).section(kind).values) or {"rope_type": "default"} for kind in _KINDS}
        sections["full_attention"] |= keys.section("rope_scaling").values
        ropes = []
        for kind, theta in zip(_KINDS, ("rope_theta", local_theta), strict=True):
            bases = {"rope_theta": keys.get(theta, None) if theta else None}
            positions = {"max_position_embeddings": keys.get("max_position_embeddings", None)}
            whole = Keys({**bases, **positions}, rope=keys.rope[kind])
            ropes.append(read_section(whole, Keys(sections[kind]), False, False)["attention.rope"])
        values = {**window.read(keys), "attention.rope": ropes[0]}
        return values | ({"attention.local.rope": ropes[1]} if "attention.local" in values else {})

    def write(model: Model) -> Values:
        attention = grouped(model)
        of_local = attention.local.rope if attention.local else None
        ropes = zip(_KINDS, (attention.rope, of_local or attention.rope), strict=True)
        return {**window.write(model), "rope_parameters": {kind: section_of(rope) for kind, rope in ropes}}

    return Part(read, write)


def with_temperature(rope: Part, *, of_latents: bool = False) -> Part:
    """Rotary embedding whose section also has the temperature of queries; `of_latents` name their part of a head."""

    def read(keys: Keys) -> Values:
        name = "rope_scaling" if keys.section("rope_scaling").values else "rope_parameters"
        is_usual = name == "rope_parameters" and keys.get(name, None) is None
        section = Keys(keys.rope) if is_usual else keys.section(name)
        if section.get("llama_4_scaling_beta", None) is None:
            raise refused(name, dict(section.values), "a section with llama_4_scaling_beta")
        if of_latents:
            widths = [keys.whole(f"qk_{part}_head_dim", low=1) for part in ("rope", "nope")]
            share, usual = widths[0] / sum(widths), section.get("partial_rotary_factor", None)
            if usual not in (None, share) and not is_usual:
                raise refused("partial_rotary_factor", usual, f"{share:g}, as qk_rope_head_dim says")
            rest = {key: value for key, value in section.values.items() if key != "partial_rotary_factor"}
            values = keys.values if is_usual else {**keys.values, name: rest}
            keys = replace(keys, values=values, rope={**keys.rope, "partial_rotary_factor": 1.0})
        return {
            **rope.read(keys),
            "attention.query_temperature": section.number("llama_4_scaling_beta"),
            "attention.temperature_floor": section.whole("original_max_position_embeddings", low=1),
        }

    def write(model: Model) -> Values:
        attention = model.attention
        assert not isinstance(attention, CompressedAttention), "the family has a temperature"
        section = rope.write(model)["rope_parameters"] | {
            "llama_4_scaling_beta": attention.query_temperature,
            "original_max_position_embeddings": attention.temperature_floor,
        }
        if isinstance(attention, LatentAttention):
            section["partial_rotary_factor"] = attention.qk_rope_head_dim / attention.head_dim
        return {"rope_parameters": section}

    return Part(read, write)


_KINDS = ("full_attention", "sliding_attention")


def section_of(rope: Rope) -> Values:
    """The rotary embedding as a section of `rope_parameters`."""
    fields: Values = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.linear != 1:
        fields |= {"rope_type": "linear", "factor": rope.linear}
    if rope.yarn is not None:
        fields |= {"rope_type": "yarn", **rope.yarn.model_dump()}
        if not rope.yarn.mscale_all_dim:  # transformers derives both scales from the factor
            del fields["mscale"], fields["mscale_all_dim"]
        if not rope.yarn.mscale:
            fields["attention_factor"] = 1.0
    if rope.llama3 is not None:
        fields |= {"rope_type": "llama3", **rope.llama3.model_dump()}
    return fields


def read_section(keys: Keys, section: Keys, scales_scores: bool, partial: bool, stretched: bool = False) -> Values:
    """Our fields of a section of `rope_parameters`; `keys` are those around it, with defaults in `rope`."""
    kind = agreed({name: section.get(name, None) for name in ("rope_type", "type")}) or "default"
    alpha = section.number("alpha", 0.0) if stretched and kind == "dynamic" else 0.0
    if alpha:
        kind = "default"
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise refused("rope_type", kind, "default, linear, yarn, llama3")
    shares = {
        "rope_parameters.partial_rotary_factor": section.get("partial_rotary_factor", None),
        "partial_rotary_factor": keys.get("partial_rotary_factor", None),
    }
    if keys.get("rotary_dim", None):
        shares["rotary_dim"] = keys.whole("rotary_dim") / keys.whole("head_dim", low=1)
    share = _number("partial_rotary_factor", agreed(shares), keys.rope.get("partial_rotary_factor", 1.0))
    if not partial and share != 1.0:
        raise refused("partial_rotary_factor", share, "1.0")
    theta = agreed(
        {"rope_parameters.rope_theta": section.get("rope_theta", None), "rope_theta": keys.get("rope_theta", None)}
    )
    extension: Values = {"theta": _number("rope_theta", theta, keys.rope["rope_theta"])}
    if alpha:
        width = keys.whole("head_dim", keys.whole("hidden_size") // keys.whole("num_attention_heads", low=1), low=3)
        extension["theta"] *= alpha ** (width / (width - 2))
    if kind != "default":
        positions = {"original_max_position_embeddings": keys.get("max_position_embeddings", None)}
        section = Keys({**positions, **section.values})
    if kind == "linear":
        extension["linear"] = section.number("factor")
    elif kind == "yarn":
        extension["yarn"] = _read_yarn(section, scales_scores)
    elif kind == "llama3":
        extension["llama3"] = {
            **{key: section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")},
            "original_max_position_embeddings": section.whole("original_max_position_embeddings"),
        }
    return {"attention.rope": extension, **({"attention.partial_rotary_factor": share} if partial else {})}


def _number(key: str, value: Any, default: float) -> float:
    return Keys({key: value}).number(key, default)


def _read_yarn(scaling: Keys, scales_scores: bool) -> Values:
    scale, scale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if (given := scaling.get("attention_factor", None)) not in (None, 1.0):
        raise refused("attention_factor", given, "1.0, or none: it follows from the factor")
    is_one = given is not None or (scale != 0 and scale == scale_all)  # the factor on cosine and sine
    if scale_all and not (is_one or (scales_scores and scale)):
        raise refused("mscale_all_dim", scale_all, "none, or equal to mscale, or beside mscale in a DeepSeek model")
    return {
        "factor": scaling.number("factor"),
        "original_max_position_embeddings": scaling.whole("original_max_position_embeddings"),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": (scale_all if scales_scores else 0.0) if is_one else scale if scale and scale_all else 1.0,
        "mscale_all_dim": scale_all if scales_scores else 0.0,
        "truncate": bool(scaling.values.get("truncate", True)),
    }


# ----------------------------------------------------------------------------------------------------------- family


@dataclass(frozen=True, kw_only=True)
class Family:
    """Hugging Face form of the models of one family."""

    model_type: str
    also: tuple[str, ...] = ()  # other model types of the same form, which import reads
    architecture: str
    model: Names = field(default_factory=lambda: MODEL)  # the same of weights outside of layers
    names: Names  # our name of each layer weight to its names in the file
    forms: Mapping[str, tuple[RearrangementOf, ...]] = field(default_factory=dict)  # in the order of reading
    instead: Names = field(default_factory=dict)  # other names that files may have, for the same of ours
    linear: Names = field(default_factory=dict)  # in place of the attention's, in layers with linear attention
    # Tensors of the file that several of ours fill, by their name in a layer, and ours in the file's order.
    divided: Mapping[str, tuple[DivisionOf, tuple[str, ...]]] = field(default_factory=dict)
    prediction: Names = field(default_factory=dict)  # multi-token prediction weights outside its decoder layer
    # Beginnings of these names, and of those of its decoder layer.
    prediction_prefixes: tuple[str, str] = ("model.layers.{layer}.", "model.layers.{layer}.")
    values: Mapping[str, str]  # key of `config.json` to the path of our field
    renamed: Mapping[str, str] = field(default_factory=dict)  # other spellings that the class of `transformers` lacks
    absent: Values = field(default_factory=dict)  # defaults of keys that the class of `transformers` lacks
    always: Values = field(default_factory=dict)  # path of our field to its value in every model of the family
    fixed: Values = field(default_factory=dict)  # keys with their only supported value
    parts: tuple[Part, ...]  # readers and writers of other keys
    mxfp4: Values = field(default_factory=dict)  # quantization_config of files with packed experts, if there are any
    prefix: str = ""  # part of all names in files of multimodal models
    spellings: Mapping[str, str] = field(default_factory=dict)  # patterns of other names of whole tensors, and ours
    left_out: str = r".*\.rotary_emb\.inv_freq"  # matches names of tensors that are not weights of the text model

    def text_name(self, name: str) -> str | None:
        """The name of a file's tensor without prefix; None if it is not a weight of the text model."""
        if re.fullmatch(self.left_out, name):
            return None
        for other, usual in self.spellings.items():
            name = re.sub(rf"^{other}$", usual, name)
        return name.replace(self.prefix, "", 1)

    def depth_of(self, name: str, layers: int) -> int | None:
        """The depth of multi-token prediction, from 0, to which a `text_name` belongs; None for other weights."""
        if self.prediction and (match := _IN_LAYER.match(name)):
            behind = int(match["layer"]) - (0 if match["mtp"] else layers)
            return behind if behind >= 0 else None
        # Files with a prefix of its own have one depth.
        return 0 if self.prediction and name.startswith("mtp.") else None


_IN_LAYER = re.compile(r"(?:model|(?P<mtp>mtp))\.layers\.(?P<layer>\d+)\.")

# ---------------------------------------------------------------------------------------------- keys of config.json

MODEL_VALUES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
MODEL_FIXED: Values = {"hidden_act": "silu", "attention_dropout": 0.0}

BIAS = {"attention_bias": "attention.bias"}
DENSE_VALUES = {**MODEL_VALUES, **BIAS, "intermediate_size": "intermediate_size"}
GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.softmax_scale",
    "logits_scaling": "logits_scaling",
}
