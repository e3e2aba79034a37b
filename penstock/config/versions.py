"""The version of configuration files, keys that were renamed or removed, and names of other trainers for our fields.

A file says `version = 1` at its top; a file without it is of the current version. There are no aliases: a file with an
old key is refused, and the error names the new key or says what to use instead.

`make docs` writes other_names.json (Megatron-Core, TorchTitan, Primus, Hugging Face, nanochat) from the tables of
docs/coming-from.md (tools/other_names.py).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.base.errors import ConfigError

VERSION = 1  # version of the files that are written now
VERSION_KEY = "version"

_ATTENTION, _ROPE, _MOE = "model.attention", "model.attention.rope", "model.moe"

# New name of a key in the same section, by the full path that it had.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "model.vocabulary": "vocab_size",
        "model.dense_ffn_size": "intermediate_size",
        "model.norm_epsilon": "rms_norm_eps",
        "model.tied_embeddings": "tie_word_embeddings",
        "model.initial_std": "initializer_range",
        f"{_ATTENTION}.q_latent": "q_lora_rank",
        f"{_ATTENTION}.kv_latent": "kv_lora_rank",
        f"{_ATTENTION}.plain_head_dim": "qk_nope_head_dim",
        f"{_ATTENTION}.rotary_head_dim": "qk_rope_head_dim",
        f"{_ATTENTION}.value_head_dim": "v_head_dim",
        f"{_ROPE}.yarn.original_positions": "original_max_position_embeddings",
        f"{_ROPE}.yarn.scale": "mscale",
        f"{_ROPE}.yarn.scale_all_dims": "mscale_all_dim",
        f"{_ROPE}.yarn.whole_pairs": "truncate",
        f"{_ROPE}.llama3.original_positions": "original_max_position_embeddings",
        f"{_ROPE}.llama3.slow": "low_freq_factor",
        f"{_ROPE}.llama3.fast": "high_freq_factor",
        f"{_MOE}.every": "moe_layer_freq",
        f"{_MOE}.ffn_size": "moe_intermediate_size",
        f"{_MOE}.shared_ffn_size": "shared_expert_intermediate_size",
        f"{_MOE}.router.score": "scoring_func",
        f"{_MOE}.router.groups": "n_group",
        f"{_MOE}.router.groups_kept": "topk_group",
        f"{_MOE}.router.normalize": "norm_topk_prob",
        f"{_MOE}.router.scale": "routed_scaling_factor",
        f"{_MOE}.router.weigh": "apply_probs_on_input",
        f"{_MOE}.balance.auxiliary": "aux_loss",
        f"{_MOE}.balance.auxiliary_weight": "aux_loss_coef",
        f"{_MOE}.balance.z_weight": "z_loss_coef",
        f"{_MOE}.balance.force": "force_load_balance",
        "training.z_weight": "z_loss_coef",
        "dispatch.bound": "row_capacity_factor",
        "dispatch.layer_bound": "layer_capacity_factor",
        "dispatch.sms": "num_sms",
    }
)

# What to write instead of a removed key, or of a value as `path=value`; docs/decisions/0173-size.md has the reasons.
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "graphs.capture=passes": "write full, as passes is called now",
        "graphs.capture=parts": "write partial, as parts is called now",
        "dispatch.overlap=halves": "write none or shared, which are faster, or passes with a pipeline",
        "checkpoint.memory_every": "leave it out; a run goes on from the checkpoints of checkpoint.every",
        "kernels.attention=hopper": "write auto, which takes cuDNN or flash-attn-4; ours for Hopper are gone",
    }
)


def new_path(path: str) -> str | None:
    """Full path of today's key for an old one, or None if `path` was never renamed."""
    name = RENAMED.get(path)
    return name and f"{path.rpartition('.')[0]}.{name}"


def check_version(table: dict[str, Any], source: str) -> None:
    """Take the version out of a parsed file's table; any but today's is a ConfigError, which names `source`."""
    version = table.pop(VERSION_KEY, VERSION)  # so that it is no unknown key
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:  # bool is an int in Python
        raise ConfigError(f"{source}: {VERSION_KEY} is not a version", got=f"{version!r}", allowed=f"{VERSION}")
    if version != VERSION:
        is_newer = version > VERSION
        raise ConfigError(
            f"{source}: the file is of {'a newer' if is_newer else 'an older'} version than this Penstock reads",
            got=f"{VERSION_KEY} = {version}",
            allowed=f"{VERSION}",
            fix="update Penstock" if is_newer else f"write {VERSION_KEY} = {VERSION}; errors name the keys to rename",
        )


def fields_of_other_name(name: str) -> tuple[str, ...]:
    """Paths of our fields for a name such as `--seq-length`, `training.seq_len` or `lr`; empty for an unknown one."""
    known, plain = _names(), _plain(name)
    return known.get(plain) or known.get(plain.rpartition(".")[2], ())


@cache
def _names() -> Mapping[str, tuple[str, ...]]:
    text = Path(__file__).with_name("other_names.json").read_text(encoding="utf-8")
    whole = {_plain(name): tuple(fields) for name, fields in json.loads(text).items()}
    last = {name.rpartition(".")[2]: fields for name, fields in whole.items()}
    return last | whole


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
