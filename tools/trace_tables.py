"""The table of what reading traces costs. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def trace_speed(result: Result) -> str:
    """CPU seconds and peak memory of every file, HTA's beside ours where it was measured."""
    numbers = result["numbers"]
    others = "; ".join(f"{name} {said}" for name, said in numbers["others"].items())
    lines = [
        f"CPU seconds and peak memory on {result['environment']['cpus']} cores, commit `{result['commit']}`. {others}.",
        "",
        "| trace | files | size | events | CPU seconds | memory | HTA | memory | HTA failed in |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in numbers["cases"]:
        hta = row.get("hta")
        beside = ("", "", "") if hta is None else (*_cost(hta), "all of it" if hta["crashed"] else hta["failed"] or "")
        sizes = (f"{row['files']}", f"{row['bytes'] / 1e6:,.0f} MB", f"{row['events']:,}")
        lines.append(f"| {' | '.join((row['case'], *sizes, *_cost(row['trace']), *beside))} |")
    diff = numbers["diff"]
    sizes = ("2", f"{sum(diff['bytes']) / 1e6:,.0f} MB", f"2 x {diff['events']:,}")
    lines.append(f"| {' | '.join(('diff', *sizes, *_cost(diff), '', '', ''))} |")
    return "\n".join(lines)


def _cost(cost: dict[str, float]) -> tuple[str, str]:
    return f"{cost['cpu_seconds']:.2f}", f"{cost['peak_bytes'] / 1e6:,.0f} MB"


TABLES: dict[str, Callable[[Result], str]] = {"trace-speed": trace_speed}
