"""Scatter plots of docs/projection.md: step time and peak memory, projected over measured.

    python -m tools.projection_picture

Reads benchmarks/results/projection-h200.json after `benchmarks.projection_compare`. Needs Chromium and the extra that
brings Plotly (penstock/report/export.py).
"""

import json
from pathlib import Path
from typing import Any

from penstock.report.curves import ProjectionCheck, checks_figure
from penstock.report.export import write_images
from penstock.report.figure import Figure

RESULT = Path("benchmarks/results/projection-h200.json")
FOLDER = Path("docs/pictures")


def main() -> None:
    """Draw both."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["numbers"]["cases"]
    for path in write_images(figures(rows), FOLDER):
        print(f"wrote {path}")


def figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Both pictures, of the cases that were measured and projected."""
    found = [row for row in rows if row.get("errors")]

    def checks(measured: str, projected: str, unit: float) -> list[ProjectionCheck]:
        return [
            ProjectionCheck(
                name=row["name"],
                group=f"run {row['chosen']}",
                measured=row["figures"][measured] / unit,
                projected=row["projected"][projected] / unit,
            )
            for row in found
        ]

    times = checks("step_seconds_median", "step_seconds", 1e-3)
    sizes = checks("peak_memory_bytes", "peak_memory_bytes", 1e9)
    return [
        checks_figure("projection-step-time", "Step time", "ms", times),
        checks_figure("projection-memory", "Peak memory, as allocated", "GB", sizes),
    ]


if __name__ == "__main__":
    main()
