"""`config.json` from a model and back.

Every written config is read again at once. If the result is another model, the export fails and names the field that
the format cannot express: an exported config always means the trained model.

The format has no training settings; `TRAINING_ONLY` fields get their defaults when it is read. Ids of special tokens
belong to the tokenizer: they are written as null, because the defaults of `transformers` belong to other tokenizers.

A family that is not supported is refused with what its file has and Penstock lacks, and a near preset (`unsupported`).
Such a file is not read as a model, and its values may have any type: parts are recognized by the names of keys.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.base.errors import CheckpointError, ConfigError
from penstock.base.files import read_json
from penstock.base.numbers import count_text
from penstock.config.load import CONFIG_FILE, huggingface_config_in, load_run, with_overrides
from penstock.config.model import CompressedAttention, GroupedQueryAttention, Model
from penstock.config.presets.registry import PRESETS
from penstock.config.run import LearningRateSchedule, Optimizer, Run, Training
from penstock.config.schema import as_toml, find, leaves
from penstock.config.size import size_of
from penstock.models.huggingface.config_parts import KEYS_OF_PARTS, Keys, Values, agreed, refused
from penstock.models.huggingface.families import FAMILIES, LACKING, family_of
from penstock.models.huggingface.family import Family

TRAINING_ONLY = (
    *("moe.balance.", "moe.router.expert_bias_rate"),
    *("attention.indexer.stage", "attention.indexer.loss_coef"),
)
"""Prefixes of the paths below `model` that `config.json` does not have."""

_TAGS = ("gqa", "mla", "compressed")  # of the union of attentions
_POSITIONS = 4096  # if the longest row of training is unknown
_STEPS = 1000
_LEARNING_RATE = 2e-5  # small, because trained weights are easily lost


def huggingface_config(config: Model, positions: int | None = None) -> dict[str, Any]:
    """The `config.json` from which `transformers` builds the same model.

    `positions` is the longest row of training, if known; a scaled rotary embedding sets the length itself. Raises a
    ConfigError if the family has no Hugging Face form, or if its form cannot express something of the model.
    """
    family = family_of(config)
    values = leaves(config)
    fields: Values = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, path in family.values.items():
        if path not in values:
            raise ConfigError(f"model.{path} is missing: every model of the family {config.family} has it")
        fields[key] = values[path]
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    for part in family.parts:
        fields |= part.write(config)
    fields |= family.fixed
    scaling = config.attention.rope.yarn or config.attention.rope.llama3
    fields["max_position_embeddings"] = (
        round(scaling.original_max_position_embeddings * scaling.factor) if scaling else positions or _POSITIONS
    )
    _check_round_trip(config, model_of_config(fields))
    return fields


def model_of_config(fields: Mapping[str, Any]) -> Model:
    """The model that a `config.json` describes, published ones included.

    An absent key has the default of the family's class in `transformers`. Keys that do not describe the model, such as
    token ids, are ignored. Raises a ConfigError if the family is unknown, or if a key is missing, contradicts another
    one, or has an unsupported value.
    """
    text = fields.get("text_config", fields)  # a multimodal model has a text part
    if not isinstance(text, Mapping):
        raise refused("text_config", text, "a table of keys")
    name, family = _family_named(text.get("model_type", fields.get("model_type")), text)
    key = "tie_word_embeddings"  # which is outside in some files, and counts there
    is_tied = agreed({key: fields.get(key), f"text_config.{key}": text.get(key)})
    if is_tied is not None:
        text = {**text, key: is_tied}
    keys, defaults = _keys_of(family, text)
    for key, only in family.fixed.items():
        if (value := keys.get(key, None if key in defaults else only)) != only:
            raise refused(key, value, as_toml(only))
    said: Values = {"family": name, **family.always}
    for key, path in family.values.items():
        said[path] = _whole(keys.need(key) if key in defaults else keys.get(key, family.absent.get(key)), path)
    for part in family.parts:
        said |= part.read(keys)
    for key in defaults.keys() - keys.seen:
        if keys.values[key] != defaults[key]:
            raise refused(key, keys.values[key], as_toml(defaults[key]))
    names = {**KEYS_OF_PARTS, **{path: key for key, path in family.values.items()}}
    model = _built(said, names)
    if model.moe is not None:
        router = model.moe.router
        if router.topk_group > router.n_group:
            raise refused("topk_group", router.topk_group, f"1 to {router.n_group} (n_group)")
        choices = model.moe.experts // router.n_group * router.topk_group
        of = f"of {names['moe.experts']}" + (", in topk_group of n_group groups" if router.n_group > 1 else "")
        if model.moe.top_k > choices:
            raise refused(names["moe.top_k"], model.moe.top_k, f"1 to {choices} ({of})")
    return model


def model_in(source: Path) -> Model:
    """The model of a `config.json`, or of the one in a folder.

    Raises a CheckpointError if the file is missing or no JSON, and a ConfigError if the family is unknown or an option
    unsupported.
    """
    path = source / CONFIG_FILE if source.is_dir() or source.suffix != ".json" else source
    try:
        fields = read_json(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}", got=error.strerror, fix="give a folder with config.json, or name the preset"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON", got=error, fix="fetch it again") from error
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{path} is no table of keys", got=type(fields).__name__)
    return model_of_config(fields)


def run_of(source: Path, name: str) -> Run:
    """A run that trains the model of a `config.json`, with required fields only; raises as `model_in` does."""
    return Run(
        name=name,
        model=model_in(source),
        training=Training(steps=_STEPS, sequence_length=2048),
        optimizer=Optimizer(learning_rate=_LEARNING_RATE),
        schedule=LearningRateSchedule(warmup_steps=_STEPS // 20),
    )


def load_run_or_model(target: str, overrides: Sequence[str] = (), *, is_whole: bool = True) -> Run:
    """`load_run` of a target, or `run_of` the `config.json` that it names, with overrides; raises as both do."""
    path = huggingface_config_in(target)
    if path is None:
        return load_run(target, overrides, is_whole=is_whole)
    name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    return with_overrides(run_of(path, name), overrides, is_whole=is_whole)


@cache
def class_defaults() -> Mapping[str, Any]:
    """By model type: defaults of absent keys, other spellings of keys, rotary settings of a file without any."""
    return dict(json.loads(Path(__file__).with_name("config_defaults.json").read_text(encoding="utf-8")))


def _keys_of(family: Family, text: Mapping[str, Any]) -> tuple[Keys, Values]:
    """The keys of a file under the names that the family has for them, and the defaults of its class."""
    table = class_defaults()[family.model_type]
    renamed = {**table["renamed"], **family.renamed}
    spelled: dict[str, Values] = {renamed.get(key, key): {} for key in text}
    for key in sorted(text, key=lambda key: key in renamed):
        spelled[renamed.get(key, key)][key] = text[key]
    given = {name: agreed(values) for name, values in spelled.items()}
    defaults = table["defaults"]
    for key, value in given.items():
        if value is None and key in defaults and key not in table["nullable"]:
            raise refused(key, value, f"a value, such as {as_toml(defaults[key])}")
    return Keys({**family.absent, **defaults, **given}, given, table["rope"]), defaults


def _family_named(model_type: object, text: Mapping[str, Any]) -> tuple[str, Family]:
    for name, family in FAMILIES.items():
        if model_type in (family.model_type, family.model_type.removesuffix("_text"), *family.also):
            return name, family
    if not isinstance(model_type, str):
        allowed = ", ".join(family.model_type for family in FAMILIES.values())
        raise ConfigError("config.json: model_type says no family", got=model_type, allowed=allowed)
    known = {
        key
        for family in FAMILIES.values()
        for keys in (class_defaults()[family.model_type]["defaults"], family.values, family.fixed)
        for key in keys
    }
    raise unsupported(model_type, text, known)


def _whole(value: Any, path: str) -> Any:
    # Files have 8192.0 for some whole numbers.
    is_whole = find(Model, path)[0].type_text == "whole number"
    return int(value) if is_whole and isinstance(value, float) and value.is_integer() else value


def _built(said: Values, keys: Mapping[str, str]) -> Model:
    """Build the model from values by path; a validation error names the key of `config.json`."""
    tree: dict[str, Any] = {}
    for path, value in said.items():
        *parents, last = path.split(".")
        table = tree
        for name in parents:
            table = table.setdefault(name, {})
        table[last] = value
    try:
        return Model.model_validate(tree)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        path = ".".join(str(name) for name in fault["loc"] if name not in _TAGS)
        allowed = next((field.allowed_text for field in find(Model, path)), fault["msg"])
        key = keys.get(path, path.rpartition(".")[2])
        raise refused(key, fault["input"], allowed) from error


def _check_round_trip(config: Model, returned: Model) -> None:
    ours, theirs = facts_of(config), facts_of(returned)
    for path in {**ours, **theirs}:
        if ours.get(path) != theirs.get(path):
            raise ConfigError(
                f"model.{path} cannot be stated in the config.json of {config.family}",
                got=as_toml(ours.get(path)),
                allowed=as_toml(theirs.get(path)),
                fix="change it, or choose the family that has it",
            )


def facts_of(config: Model) -> dict[str, Any]:
    """The fields that define a model's computation, by path: without training settings and fields without effect."""
    facts = {path: value for path, value in leaves(config).items() if not path.startswith(TRAINING_ONLY)}
    dense = [config.is_dense(layer) for layer in range(config.layers)]
    # Two descriptions of the same layers count as equal, as 0 dense layers and experts in every layer.
    facts |= {"dense_layers": dense, "moe.moe_layer_freq": dense if config.moe is not None else None}
    unused = [] if any(dense) else ["intermediate_size"]
    if config.moe is not None and config.moe.router.n_group == 1:
        unused.append("moe.router.group_score")
    attention = config.attention
    if isinstance(attention, CompressedAttention):
        facts["attention.first_layers"] = [attention.kind_of(layer) for layer in range(config.layers)]
        unused.append("attention.other_layers")
    elif not attention.query_temperature:
        unused.append("attention.temperature_floor")
    if isinstance(attention, GroupedQueryAttention):
        facts["attention.nope_every"] = [attention.rotates(layer) for layer in range(config.layers)]
    if isinstance(attention, GroupedQueryAttention) and attention.local is not None:
        is_global = [attention.is_global(layer) for layer in range(config.layers)]
        facts["attention.local.global_every"] = is_global
        unused.append("attention.local.global_layers")
        if not any(is_global):
            unused += [f"attention.local.{name}" for name in ("global_rope", "global_temperature")]
        if not any(is_global) or not attention.local.global_temperature:
            unused.append("attention.local.temperature_floor")
    return {path: value for path, value in facts.items() if path not in unused}


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
    parts = dict.fromkeys(part for part, types in LACKING.items() if model_type in types)
    parts |= dict.fromkeys(part for key, value in text.items() if value for part in _parts(key, value))
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
    if isinstance(model.attention, CompressedAttention):
        return "compressed"
    return "latent" if model.attention.indexer is None else "sparse latent"
