"""The table of recorded conditions and what the doctor says of them. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

TELLS = 0.05
"""Share of a step that the others wait for a rank, from which the table names it."""

CAUSES = {"host": "host", "experts": "experts", "compute": "computing", "unknown": "unknown"}


def doctor_recorded(result: Result) -> str:
    """A row for each condition: its cause, the wall, the late ranks, and the change that would gain most."""
    lines = [
        f"Commit `{result['commit']}`. Percentages are shares of the step. *Late* are ranks for which the others wait "
        f"{TELLS:.0%} of the step or more, with the cause.",
        "",
        "| condition | run | GPUs | wall | host | communication | late | first remedy |",
        "|---|---|---|---|---:|---:|---|---|",
    ]
    for row in result["numbers"]["conditions"]:
        late = [
            f"{one['rank']}: {CAUSES[one['cause']]}, {one['share']:.0%}" for one in row["late"] if one["share"] >= TELLS
        ]
        first = row["remedies"][0]
        cells = (
            row["condition"],
            row["done"],
            f"{row['ranks']} x {row['device'].removeprefix('NVIDIA ')}",
            row["wall"],
            f"{row['shares']['host']:.0%}",
            f"{row['shares']['communication']:.0%}",
            "; ".join(late) or "none",
            f"`{first['rule']}`, {first['share']:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {"doctor-recorded": doctor_recorded}
