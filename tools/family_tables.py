"""The tables about model families: how far they are from `transformers`. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

KINDS = ("plain", "packed")
FIGURES = ("logits", "gradient")


def parity(result: Result) -> str:
    """Every model's largest difference, in plain and in packed rows."""
    allowed = result["numbers"]["tolerances"]
    rows = [
        "| model | logits | worst gradient | of the weight | packed: logits | worst gradient | of the weight |",
        "|---|---:|---:|---|---:|---:|---|",
        f"| **allowed** | {allowed['logits']:.0e} | {allowed['gradient']:.0e} | "
        f"| {allowed['logits']:.0e} | {allowed['gradient']:.0e} | |",
    ]
    for model in result["numbers"]["models"]:
        cells = " | ".join(
            f"{model[kind]['logits']:.1e} | {model[kind]['gradient']:.1e} | `{_within_layer(model[kind]['weight'])}`"
            for kind in KINDS
        )
        rows.append(f"| {model['model']} | {cells} |")
    return "\n".join(rows)


def parity_verdict(result: Result) -> str:
    """How many models pass, and the worst of each figure."""
    allowed, models = result["numbers"]["tolerances"], result["numbers"]["models"]
    found = [model[kind] for model in models for kind in KINDS]
    passed = sum(all(model[kind][name] <= allowed[name] for kind in KINDS for name in allowed) for model in models)
    worst = ", ".join(f"{name} {max(one[name] for one in found):.1e}" for name in allowed)
    families = len({model["family"] for model in models})
    return (
        f"{passed} of {len(models)} models of {families} families pass, beside transformers "
        f"{result['environment']['transformers']}. The largest differences: {worst}."
    )


def _within_layer(weight: str) -> str:
    """A parameter's name without `blocks` and the number of its layer."""
    return weight.removeprefix("blocks.").lstrip("0123456789").removeprefix(".")


TABLES: dict[str, Callable[[Result], str]] = {"parity": parity, "parity-verdict": parity_verdict}
