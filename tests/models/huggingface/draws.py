"""Random edits of `config.json` and tensors: each gives the model of `transformers`, or a refusal that names the edit.

The tensors of a draw are those that `transformers` saves from the edited configuration. If a default makes them large,
configurations are compared: ours of the edited file, and ours of the complete file that `transformers` writes for it.
"""

import copy
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from penstock.base.errors import PenstockError
from penstock.models.huggingface.config import class_defaults, facts_of, huggingface_config, model_of_config
from penstock.models.huggingface.families import family_of
from penstock.models.huggingface.family import Family
from penstock.models.huggingface.weight_folder import WeightFolder
from penstock.models.huggingface.weights import WEIGHTS_FILE, from_huggingface, with_prediction
from tests.closeness import relative_error
from tests.float64 import EXACT, in_float64
from tests.models.families import tiny_decoder
from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.parity import both_logits, save, their_gradients, worst_gradient

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROTARY: tuple[dict[str, Any], ...] = (
    {"rope_parameters": None},
    {"rope_parameters": {}},
    {"rope_parameters": None, "rope_theta": 5000.0},
    {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": None},
    {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": YARN},
    {"rope_parameters": None, "rope_scaling": {**YARN, "type": "yarn", "rope_type": None}},
    {"rope_parameters": None, "rope_scaling": {**YARN, "original_max_position_embeddings": None}},
    {"rope_parameters": None, "rope_scaling": {**YARN, "mscale": 0.7}},
    {"rope_parameters": None, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    {"rope_parameters": None, "rope_scaling": {**YARN, "beta_fast": 8.0, "truncate": False}},
    {"rope_parameters": None, "rope_scaling": LLAMA3},
    {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": YARN},
    {"rope_theta": 5000.0},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {**YARN, "rope_theta": 7000.0}},
    {"rope_parameters": {**YARN, "rope_theta": 7000.0}, "rope_scaling": YARN},
    {"rope_parameters": {**YARN, "rope_theta": 7000.0, "attention_factor": 1.5}},
    {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 7000.0}}},
)
"""Rotary settings in both spellings; a None in a section leaves that key out."""

_MAIN = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}
ROTARY_LATER: tuple[dict[str, Any], ...] = (
    *ROTARY,
    {"rope_parameters": None, "compress_rope_theta": 500.0, "partial_rotary_factor": None, "qk_rope_head_dim": 4},
    {"rope_parameters": None, "rope_scaling": {**YARN, "attention_factor": 1.0}},
    {"rope_parameters": {"main": _MAIN, "compress": {**_MAIN, **YARN}}},
    {"rope_parameters": {"main": _MAIN, "compress": {**_MAIN, **YARN, "attention_factor": 1.0}}},
    {"rope_parameters": {"main": {**_MAIN, **YARN}, "compress": {**_MAIN, "partial_rotary_factor": 0.25}}},
)

OTHER: dict[str, tuple[Any, ...]] = {
    "compress_rates": (
        None,
        {"compressed_sparse_attention": 3},
        {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
        {"full_attention": 2},
    ),
    "compress_ratios": ([0, 4, 128], [128, 4, 0, 0], [4, 4, 4, 8], [0]),
    "num_hash_layers": (0, 1, 2, 5),
    "hidden_size": (32, 48, 64),
    "hidden_act": ("gelu", "relu", None),
    "num_attention_heads": (2, 4, 8),
    "num_key_value_heads": (1, 2, 4, 3, None),
    "head_dim": (4, 8, 16, None),
    "q_lora_rank": (None, 12, 0),
    "sliding_window": (3, 5, None),
    "max_window_layers": (0, 1, 2, 5),
    "attention_chunk_size": (3, 7, None),
    "num_hidden_layers": (1, 2, 4),
    "layer_types": (
        None,
        ["full_attention"] * 5,
        ["sliding_attention", "full_attention"] * 3,
        ["linear_attention"] * 5,
    ),
    "mlp_layer_types": (
        None,
        ["dense", "dense", "sparse", "sparse"],
        ["sparse", "dense", "sparse", "dense"],
        ["x"] * 5,
    ),
    "mlp_only_layers": (None, [], [0], [1]),
    "moe_layers": (None, [1, 3], [0, 2], []),
    "no_rope_layers": (None, [], [1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 1, 0, 1]),
    "indexer_types": (None, ["full"] * 5, ["full", "shared", "full", "shared"]),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "clip_qkv": (None, 0.5),
    "moe_norm_min": (1e-12, 0.5),
    "moe_layer_end_index": (-1, 1, 2),
    "moe_layer_interval": (1, 2),
    "rms_norm_eps": (1e-6, 1e-3),
    "routed_scaling_factor": (1.0, 2.5),
    "n_shared_experts": (0, 1, 2, None),
    "moe_num_shared_experts": (0, 1, 2, None),
    "num_shared_experts": (0, 1, 2, None),
    "num_nextn_predict_layers": (0, 1, 2, None),
}
DRAWS, LATER = 300, "deepseek-v4"
"""Seeds from there on draw the family that came later, so that the others stay."""
NEWEST, ADDED = 400, ("hunyuan", "afmoe", "cwm", "flint", "ministral3", "mistral4")
"""And these from there on, by the beginning of their names."""
CHOSEN = (
    *(0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 13, 14, 15, 16, 17, 18, 19, 20, 21, 25, 26, 27, 28, 31, 33, 34, 35, 38, 41, 42),
    *(44, 45, 46, 50, 51, 54, 55, 58, 60, 61, 66, 71, 72, 74, 76, 77, 79, 81, 82, 83, 85, 89, 93, 95, 96, 97, 99),
    *(100, 101, 103, 108, 121, 126, 129, 132, 133, 134, 135, 136, 139, 142, 145, 148, 149, 150, 152, 153, 155, 158),
    *(160, 162, 163, 164, 168, 169, 170, 174, 181, 186, 188, 197, 198, 201, 203, 205, 211, 212, 214, 215, 217, 220),
    *(229, 230, 237, 245, 246, 248, 251, 252, 253, 256, 257, 263, 264, 268, 270, 273, 278, 280, 282, 296, 298),
)
"""Draws with the same families, edited keys and rotary sections, and outcomes of each of them, as all draws have."""

_UNEDITED = {"max_position_embeddings", "attention_dropout", "initializer_range", "router_jitter_noise", "vocab_size"}
_LARGEST = {"hidden_size": 128, "vocab_size": 256, "num_hidden_layers": 8}
_LARGEST_OTHER = 300
EXPLAINED = ("equal", "equal configuration", "refused", "no model there")
_BY_LAYER = ("layer_types", "full_attn_layers", "indexer_types", "moe_layers", "no_rope_layers", "mlp_only_layers")
_FAILURES = (
    *(ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, NameError, ZeroDivisionError),
    StrictDataclassError,
)
"""Of `transformers` with files that have no meaning for it: heads that do not divide, more choices than experts."""


@dataclass(frozen=True)
class Draw:
    """An edited `config.json`."""

    family: Family
    fields: dict[str, Any]
    keys: tuple[str, ...]  # that were edited
    damage: str = ""  # of a tensor: "nan", "missing" or "head"


def drawn(seed: int) -> Draw:
    """A variant of a family, with one to three edits."""
    draw = random.Random(seed)
    is_later = seed >= DRAWS
    groups = [1 if name.startswith(LATER) else 2 if name.startswith(ADDED) else 0 for name in VARIANTS]
    group = 2 if seed >= NEWEST else int(is_later)
    config = VARIANTS[draw.choice(sorted(name for name, one in zip(VARIANTS, groups, strict=True) if one == group))]
    family = family_of(config)
    fields = huggingface_config(config, 64)
    table = class_defaults()[family.model_type]
    spellings = {**table["renamed"], **family.renamed}
    keys = sorted(table["defaults"].keys() - _UNEDITED)
    keys += ["compress_ratios", "num_hash_layers", "qk_rope_head_dim"] if is_later else []
    edited: list[str] = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(("absent", "absent", "other", "other", "rotary", "spelling"))
        key = draw.choice(keys)
        if kind == "rotary" and table["rope"]:
            edit = copy.deepcopy(draw.choice(ROTARY_LATER if is_later else ROTARY))
            for name, value in edit.items():
                if isinstance(value, dict):
                    edit[name] = {key: inner for key, inner in value.items() if inner is not None}
            fields |= edit
            if edit.get("rope_parameters", 0) is None and draw.random() < 0.8:
                del fields["rope_parameters"]
            edited += [*edit, *(name for value in edit.values() if isinstance(value, dict) for name in value)]
        elif kind == "spelling" and spellings:
            alias = draw.choice(sorted(spellings))
            value = fields.get(spellings[alias], table["defaults"].get(spellings[alias]))
            fields[alias] = value if draw.random() < 0.8 else (value or 0) + 1
            if draw.random() < 0.6:
                fields.pop(spellings[alias], None)
            edited += [alias, spellings[alias]]
        elif kind == "absent":
            fields.pop(key, None)
            edited.append(key)
        else:
            fields[key] = _other(draw, key, fields.get(key, table["defaults"].get(key)))
            if key in ("compress_ratios", "num_hash_layers"):  # older spellings, beside which newer ones count
                fields.pop("layer_types" if key == "compress_ratios" else "mlp_layer_types", None)
            edited.append(key)
    return Draw(family, fields, tuple(edited), draw.choice(("", "", "", "", "", "nan", "missing", "head")))


def _other(draw: random.Random, key: str, value: Any) -> Any:
    if key == "qk_rope_head_dim" and value is None:  # of files that do not say it by `partial_rotary_factor`
        return draw.choice((4, 6, 16))
    if key in OTHER:
        return draw.choice(OTHER[key])
    if isinstance(value, bool) or value is None:
        return draw.choice((True, False, None))
    return draw.choice((value, value * 2, 1, 2, 4)) if isinstance(value, int) else value * 2


def _is_small(config: PreTrainedConfig) -> bool:
    values = {key: value for key, value in config.to_dict().items() if type(value) is int and "token" not in key}
    least = {
        "max_position_embeddings",
        "original_max_position_embeddings",
        "model_max_length",
        "floor_scale",
        "attention_chunk_size",
        "index_topk",
    }
    return all(value <= _LARGEST.get(key, _LARGEST_OTHER) for key, value in values.items() if key not in least)


def outcome(draw: Draw) -> str:
    """`equal`, `refused`, `no model there` if `transformers` fails, or what is wrong."""
    torch.manual_seed(0)
    try:
        ours = model_of_config(draw.fields)
    except PenstockError as error:
        return _refused(draw.keys, error)
    kind = CONFIG_MAPPING[draw.family.model_type]
    try:
        config = kind.from_dict(copy.deepcopy(draw.fields))
        is_small = _is_small(config)
        theirs = _model(config, draw.family) if is_small else None
    except _FAILURES:
        return "no model there"
    if theirs is None:
        again = facts_of(model_of_config(config.to_dict()))
        mine = facts_of(ours)
        apart = {key: (mine.get(key), again.get(key)) for key in {**mine, **again} if mine.get(key) != again.get(key)}
        return f"another model: {apart}" if apart else "equal configuration"
    return _compared(draw, theirs)


@in_float64()
def _model(config: PreTrainedConfig, family: Family) -> PreTrainedModel:
    kind = getattr(transformers, family.architecture)
    model: PreTrainedModel = kind._from_config(config, attn_implementation="eager", dtype=torch.float64)
    model.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    model(tokens, use_cache=False)
    return model.eval()


def _refused(edits: tuple[str, ...], error: PenstockError) -> str:
    # Lists by layer do not fit another number of layers.
    text = str(error) + (" num_hidden_layers" if any(name in str(error) for name in _BY_LAYER) else "")
    return "refused" if any(edit in text for edit in edits) else f"a refusal that names none of {edits}: {error}"


def _damaged(draw: Draw, file: Path) -> tuple[str, ...]:
    """Edits tensors of a file; returns the names of those with which it must be refused."""
    weights = load_file(file)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    names = sorted(name for name in weights if name.startswith("model.") and weights[name].numel())
    name = random.Random(len(names)).choice(names)
    if draw.damage == "nan":
        weights[name].view(-1)[-1] = float("nan")
    elif draw.damage == "missing":
        del weights[name]
    elif draw.damage == "head" and head not in weights:
        name, weights[head] = head, weights[embed].flip(0)
    else:
        return ()
    save_file(weights, file)
    return (name,)


@in_float64()
def _compared(draw: Draw, theirs: PreTrainedModel) -> str:
    with tempfile.TemporaryDirectory() as name:
        save(theirs, name)
        broken = _damaged(draw, Path(name) / WEIGHTS_FILE)
        try:
            weights = WeightFolder(Path(name))
            config = with_prediction(model_of_config(draw.fields), weights)
            ours = tiny_decoder(config).train()
            from_huggingface(ours, weights)
        except PenstockError as error:
            return _refused((*broken, *draw.keys), error)
        if broken:
            return f"{broken} was read, {draw.damage}"
        tokens_BS = torch.randint(config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(5))
        logits_BSV, expected_BSV = both_logits(ours, theirs, tokens_BS, packed=False)
        if (apart := relative_error(logits_BSV, expected_BSV)) > EXACT:
            return f"logits {apart:.1e} apart"
        for logits in (logits_BSV, expected_BSV):
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
        gradient, weight = worst_gradient(ours, their_gradients(config, theirs, Path(name) / "gradients"))
    return f"gradient of {weight} {gradient:.1e} apart" if gradient > EXACT else "equal"
