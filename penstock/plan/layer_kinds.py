"""Kinds of decoder layers, each in a word or two: layers of one kind hold the same and do the same.

What lets layers of one model differ is experts or none (`model.dense_layers`, `model.moe.moe_layer_freq`) and whether
attention sees the whole row (`model.attention.local`). What `recompute.layers` adds, `penstock.plan.activations` sees.
"""

from collections.abc import Iterable

from penstock.config.model import GroupedQueryAttention, Model

MOE = "moe"
"""End of the words of layers with experts."""


def layer_kind(model: Model, layer: int) -> str:
    """`dense`, `moe`, `local dense` or `local moe`.

    Args:
        model: whose.
        layer: its number, from 0.
    """
    ffn = "dense" if model.is_dense(layer) else MOE
    attention = model.attention
    is_local = isinstance(attention, GroupedQueryAttention) and not attention.is_global(layer)
    return f"local {ffn}" if is_local else ffn


def has_experts(kind: str) -> bool:
    """Whether layers of a kind have experts."""
    return kind.endswith(MOE)


def layers_in_order(model: Model, kinds: Iterable[str]) -> tuple[int, ...]:
    """One layer of each of some kinds, ascending, where a stage has them in this order."""
    found: list[int] = []
    for kind in kinds:
        behind = range(found[-1] + 1 if found else 0, model.layers)
        found.append(next(layer for layer in behind if layer_kind(model, layer) == kind))
    return tuple(found)


def first_of_kinds(model: Model, layers: Iterable[int]) -> dict[str, int]:
    """The kinds of some layers in the order in which they come first, and the first layer of each."""
    found: dict[str, int] = {}
    for layer in layers:
        found.setdefault(layer_kind(model, layer), layer)
    return found
