"""The table of how long a search takes, and its picture. As `tools.kernel_tables`.

python -m tools.search_tables        draws docs/pictures/search-cost.svg, which needs Chromium
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.report.curves import Curve, CurveAxes, curves_figure
from penstock.report.export import write_images
from penstock.report.figure import Figure

Result = dict[str, Any]

RESULT = Path("benchmarks/results/search-cost.json")
FOLDER = Path("docs/pictures")


def search_cost(result: Result) -> str:
    """Seconds and memory of each search, as a process."""
    lines = [
        f"Whole processes on {result['environment']['cpus']} cores, start of Python and torch in it, commit "
        f"`{result['commit']}`.",
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


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Seconds over devices, and over layers of the same model on one number of devices."""
    by_devices = sorted((int(row["on"].split("x")[0]), row["seconds"]) for row in rows if row["model"] == "deepseek-v3")
    by_layers = sorted(
        (int(row["model"].split("-")[-1][:-1]), row["seconds"])
        for row in rows
        if row["model"].startswith("deepseek-v3-")
    )
    curves = [
        Curve(name="DeepSeek-V3, devices", xs=[x for x, _ in by_devices], ys=[y for _, y in by_devices]),
        Curve(name="DeepSeek-V3 on 256 devices, layers", xs=[x for x, _ in by_layers], ys=[y for _, y in by_layers]),
    ]
    axes = CurveAxes(x="devices, or layers", y="seconds of the whole process")
    return curves_figure("search-cost", "How long a search takes", "MI300X, every layout looked at", axes, curves)


def main() -> None:
    """Draw."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["numbers"]["searches"]
    for path in write_images([figure(rows)], FOLDER):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
