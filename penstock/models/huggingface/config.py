"""`config.json` from a model and back.

Every written config is read again at once. If the result is another model, the export fails and names the field that
the format cannot express: an exported config always means the trained model.

The format has no training settings; `TRAINING_ONLY` fields get their defaults when it is read. Ids of special tokens
belong to the tokenizer: they are written as null, because the defaults of `transformers` belong to other tokenizers.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.base.errors import CheckpointError, ConfigError
from penstock.base.files import read_json
from penstock.config.load import CONFIG_FILE, huggingface_config_in, load_run, with_overrides
from penstock.config.model import GroupedQueryAttention, Model
from penstock.config.run import Run
from penstock.config.schema import as_toml, find, leaves
from penstock.config.training import LearningRateSchedule, Optimizer, Training
from penstock.models.huggingface.config_parts import KEYS_OF_PARTS, Keys, Values, agreed, refused
from penstock.models.huggingface.families import FAMILIES, Family, family_of
from penstock.models.huggingface.unsupported import unsupported

TRAINING_ONLY = (
    *("moe.balance.", "moe.router.expert_bias_rate"),
    *("attention.indexer.stage", "attention.indexer.loss_coef"),
)
"""Prefixes of the paths below `model` that `config.json` does not have."""

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
    for part in family.parts:
        fields |= part.write(config)
    fields |= family.fixed
    scaling = config.attention.rope.yarn or config.attention.rope.llama3
    fields["max_position_embeddings"] = (
        round(scaling.original_max_position_embeddings * scaling.factor) if scaling else positions or _POSITIONS
    )
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
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
    names = {path: key for key, path in family.values.items()}
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
        path = ".".join(str(name) for name in fault["loc"] if name not in ("gqa", "mla"))  # tags of a union
        allowed = next((field.allowed_text for field in find(Model, path)), fault["msg"])
        key = keys.get(path, KEYS_OF_PARTS.get(path, path.rpartition(".")[2]))
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
    if isinstance(attention, GroupedQueryAttention) and attention.local is not None:
        is_global = [attention.is_global(layer) for layer in range(config.layers)]
        facts["attention.local.global_every"] = is_global
        if not any(is_global):
            unused += [f"attention.local.{name}" for name in ("global_rope", "global_temperature")]
        if not any(is_global) or not attention.local.global_temperature:
            unused.append("attention.local.temperature_floor")
    return {path: value for path, value in facts.items() if path not in unused}
