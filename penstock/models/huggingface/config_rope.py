"""Rotary settings of `config.json`, in the spellings of all versions of `transformers`."""

from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.model import Model
from penstock.config.schema import as_toml
from penstock.models.huggingface.config_parts import Keys, Part, Values, agreed, grouped, refused


def rotary(*, scales_scores: bool = False, partial: bool = False) -> Part:
    """Rotary embedding in today's form (`rope_parameters`) and in the older one (`rope_theta`, `rope_scaling`).

    `transformers` reads `rope_scaling` instead of `rope_parameters`, and `rope_theta` where the section has none. With
    `scales_scores` the family's YaRN scales attention scores as well (`mscale_all_dim`). `partial`: heads of the family
    may be rotated in part; MiniMax's `rotary_dim` is in features.
    """

    def read(keys: Keys) -> Values:
        keys.skip("max_position_embeddings")
        sections = {name: keys.section(name) for name in ("rope_scaling", "rope_parameters")}
        readings = {
            name: _read_section(keys, section, scales_scores, partial)
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
        section = Keys({key: usual[key] for key in usual.keys() - {"rope_theta", "partial_rotary_factor"}})
        return _read_section(keys, section, scales_scores, partial)

    def write(model: Model) -> Values:
        rope = model.attention.rope
        fields: Values = {"rope_type": "default", "rope_theta": rope.theta}
        if partial:
            fields["partial_rotary_factor"] = grouped(model).partial_rotary_factor
        if rope.yarn is not None:
            fields |= {"rope_type": "yarn", **rope.yarn.model_dump()}
            if not rope.yarn.mscale_all_dim:  # transformers derives both scales from the factor
                del fields["mscale"], fields["mscale_all_dim"]
        if rope.llama3 is not None:
            fields |= {"rope_type": "llama3", **rope.llama3.model_dump()}
        return {"rope_parameters": fields}

    return Part(read, write)


def _read_section(keys: Keys, section: Keys, scales_scores: bool, partial: bool) -> Values:
    kind = agreed({name: section.get(name, None) for name in ("rope_type", "type")}) or "default"
    if kind not in ("default", "yarn", "llama3"):
        raise refused("rope_type", kind, "default, yarn, llama3")
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
    if kind != "default":
        positions = {"original_max_position_embeddings": keys.get("max_position_embeddings", None)}
        section = Keys({**positions, **section.values})
    if kind == "yarn":
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
    if scale_all and not (scales_scores and scale):
        raise refused("mscale_all_dim", scale_all, "none, or beside mscale in a DeepSeek model")
    if (given := scaling.get("attention_factor", None)) is not None:
        raise refused("attention_factor", given, "none: it follows from the factor")
    return {
        "factor": scaling.number("factor"),
        "original_max_position_embeddings": scaling.whole("original_max_position_embeddings"),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": scale if scale and scale_all else 1.0,
        "mscale_all_dim": scale_all,
        "truncate": bool(scaling.values.get("truncate", True)),
    }
