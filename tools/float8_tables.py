"""Tables of docs/float8.md, from results of `benchmarks.float8_curves`. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def curves(result: Result) -> str:
    """The last losses of every case, beside those of the first."""
    numbers = result["numbers"]
    first = numbers["cases"][0]
    sizes = f"{numbers['steps']:,} steps, {first['tokens'] / 1e6:.1f} M tokens"
    lines = [
        f"`{result['command']}`, commit `{result['commit']}`: {sizes}.",
        "",
        "| recipe of dense products and experts | loss of the last steps | beside none | held-out loss | beside none |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in numbers["cases"]:
        held_out = case["held_out_loss"]
        name = "none in 8 bits" if case["case"] == "none" else f"`{case['case']}`"
        lines.append(
            f"| {name} | {case['last_loss']:.4f} | {case['difference']:+.2%} | {held_out:.4f} "
            f"| {held_out / first['held_out_loss'] - 1:+.2%} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {"float8-curves": curves}
"""By the name that a document calls them."""
