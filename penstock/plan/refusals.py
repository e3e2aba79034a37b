"""Refusals of a search, put together so that tens of thousands stay readable: one line for one reason."""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.plan.candidates import GRID
from penstock.plan.memory import Memory
from penstock.plan.projection import Layout, Refusal
from penstock.plan.rules.rule import Rule
from penstock.plan.rules.sizes import Sizes

MEMORY = "memory"
"""Name of what refuses a layout that does not fit."""

SLOWER = "slower"
"""Name of what refuses a layout that fits, or may fit, and is not among the fastest."""

_NAMES = tuple(field.name for field in fields(Layout))

COMPONENTS = (
    "parameters",
    "gradients",
    "master",
    "moments",
    "buffers",
    "libraries",
    "reserve",
    "gathered",
    "logits",
    "activations",
    "graph_pool",
    "communication",
)
"""In which order memory is filled when it is asked what overflows: first what stays, then what passes."""


def layout_of_sizes(sizes: Sizes, settled: tuple[str, ...]) -> dict[str, Any]:
    """A layout by the names of the JSON contract; None for what is not settled."""
    follows = ("dp", "edp") if {"tp", "cp", "pp", "ep", "etp"} <= set(settled) else ()
    values = {name: size_of(sizes, name) for name in (*settled, *follows)}
    return {name: values.get(name) for name in _NAMES}


def size_of(sizes: Sizes, name: str) -> Any:
    """A part of a layout by its name in the JSON contract."""
    match name:
        case "recompute":
            return "+".join(sizes.recompute) or "none"
        case "sync_free_stage":
            return sizes.sync_free
    return getattr(sizes, name)


@dataclass(frozen=True)
class _Group:
    refusal: Refusal
    weight: float


class Refusals:
    """Collects them."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self.count = 0

    def by_rule(self, sizes: Sizes, refusal: tuple[Rule, str], count: int) -> None:
        """A rule has something against layouts.

        Args:
            sizes: one of them.
            refusal: the rule and its reason.
            count: of layouts.
        """
        rule, reason = refusal
        self.refuse(sizes, (*GRID, "schedule", "vpp", "micro_batch"), (rule.name, reason), count)

    def refuse(
        self, sizes: Sizes, settled: tuple[str, ...], why: tuple[str, str], count: int, weight: float = 0.0
    ) -> None:
        """Layouts are not among the candidates.

        Args:
            sizes: one of them.
            settled: parts that all of them have in common.
            why: rule and reason.
            count: of layouts.
            weight: the reason with the least is told of those that are told together.
        """
        rule, reason = why
        layout = layout_of_sizes(sizes, settled)
        # Layouts that do not fit, or are slow, are told by grid; those that a rule refuses by rule.
        grid = tuple(layout[name] for name in GRID) if rule in (MEMORY, SLOWER) else ()
        self.add(Refusal(layout=layout, rule=rule, reason=reason, count=count), (rule, grid), weight)

    def add(self, refusal: Refusal, key: Hashable, weight: float = 0.0) -> None:
        """One more.

        Args:
            refusal: with its count.
            key: refusals of one key become one; of their layouts stays what they agree on.
            weight: the reason with the least is told.
        """
        self.count += refusal.count
        held = self._groups.get(key)
        if held is None:
            self._groups[key] = _Group(refusal, weight)
            return
        told = refusal if weight < held.weight else held.refusal
        common = {name: value if refusal.layout[name] == value else None for name, value in held.refusal.layout.items()}
        both = replace(told, layout=common, count=refusal.count + held.refusal.count)
        self._groups[key] = _Group(both, min(weight, held.weight))

    def all(self) -> tuple[Refusal, ...]:
        """One for each key, those that stand for most first."""
        return tuple(sorted((one.refusal for one in self._groups.values()), key=lambda one: -one.count))


def overflow(memory: Memory, capacity: int) -> str:
    """Which component does not fit any more, and how much is missing."""
    filled = 0
    for name in COMPONENTS:
        filled += vars(memory)[name]
        if filled > capacity:
            break
    over, size = memory.total - capacity, vars(memory)[name]
    return (
        f"{name} ({size / 1e9:.1f} GB, {memory.moment}, rank {memory.rank}) overflow by {over / 1e9:.1f} GB: "
        f"{memory.total / 1e9:.1f} of {capacity / 1e9:.1f} GB"
    )
