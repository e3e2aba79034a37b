"""The table of how long a search takes. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def search_cost(result: Result) -> str:
    """Seconds and memory of each search, as a process."""
    others = max(row["others"] for row in result["numbers"]["searches"])
    lines = [
        f"Whole processes on {result['environment']['cpus']} cores, start of Python and torch in it, commit "
        f"`{result['commit']}`; other programs used {others:.1f} cores at most.",
        "",
        "| model | devices | seconds | memory | layouts | candidates | fastest |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in result["numbers"]["searches"]:
        lines.append(
            f"| {row['model']} | {row['on']} | {row['seconds']:.1f} | {row['peak_bytes'] / 1e9:.2f} GB | "
            f"{row['considered']:,} | {row['candidates']} | {row['best'] or 'nothing fits'} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {"search-cost": search_cost}
