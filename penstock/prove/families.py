"""A small model of every family: what a preset says, with the sizes of other draws."""

from functools import reduce
from operator import getitem
from typing import Any

from penstock.config.load import load_run
from penstock.config.model import Model
from penstock.config.schema import differences, leaves

FAMILIES = (
    *("deepseek-v2", "deepseek-v3", "deepseek-v3.2", "kimi-linear-48b-a3b", "glm-4.5", "glm-4.5-air", "glm-5"),
    *("ernie-4.5-21b-a3b", "minimax-m2", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b"),
    *("olmoe-1b-7b", "llama4-scout", "llama4-maverick", "gpt-oss-20b", "llama3.1-8b", "qwen3-8b"),
)
"""Presets, one or two of a family."""

_WIDTHS = """
vocab_size 64, hidden_size 32, intermediate_size 48, attention.head_dim 8, attention.q_lora_rank 16,
attention.kv_lora_rank 16, attention.qk_nope_head_dim 8, attention.qk_rope_head_dim 8, attention.v_head_dim 8,
attention.indexer.index_head_dim 8, attention.indexer.index_topk 6, attention.local.size 6,
attention.local.temperature_floor 5, attention.rope.yarn.original_max_position_embeddings 8,
attention.rope.llama3.original_max_position_embeddings 8, linear_attention.key_head_dim 8,
linear_attention.value_head_dim 8, moe.moe_intermediate_size 16, moe.shared_expert_intermediate_size 16
"""
"""Of a CPU; a value of 0 in the preset stays."""

_COUNTS = """
layers 4, dense_layers 1, mtp_layers 1, attention.heads 4, attention.kv_heads 2, attention.indexer.index_n_heads 2,
linear_attention.key_heads 4, linear_attention.value_heads 4, moe.experts 8, moe.top_k 2, moe.router.n_group 4,
moe.router.topk_group 2
"""
"""Most of them: a preset's smaller values stay."""


def _table(text: str) -> dict[str, int]:
    return {path: int(value) for path, value in (entry.split() for entry in text.split(","))}


def family_overrides(preset: str, base: Model, scale: int, initializer_range: float) -> tuple[str, ...]:
    """What makes the small model of a preset from `base`."""
    model = load_run(preset).model
    widths, counts = _table(_WIDTHS), _table(_COUNTS)
    values: dict[str, Any] = {"initializer_range": initializer_range}
    for path, value in leaves(model).items():
        if path in widths and value:
            values[path] = widths[path] * scale
        elif path in counts:
            values[path] = min(value, counts[path])
    if model.moe is None:
        values["dense_layers"] = values["layers"]
    tree = model.model_dump()
    for path, value in values.items():
        *sections, last = path.split(".")
        reduce(getitem, sections, tree)[last] = value
    small = Model.model_validate(tree)
    return tuple(
        f"model.{difference.field}={difference.right}"
        for difference in differences(base, small)
        if difference.right is not None
    )
