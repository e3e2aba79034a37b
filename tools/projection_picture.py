"""Scatter plots of docs/projection.md: step time and peak memory, projected over measured.

    python -m tools.projection_picture

Reads benchmarks/results/projection-h200.json after `benchmarks.projection_compare`. Needs Chromium and the extra that
brings Plotly (penstock/report/page.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import Any

from penstock.base.numbers import rounded
from penstock.report.figure import LIMIT, SERIES, Figure
from penstock.report.page import write_images

RESULT = Path("benchmarks/results/projection-h200.json")
FOLDER = Path("docs/pictures")
BANDS = (0.05, 0.10)
"""Errors that are drawn around zero error."""


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


@dataclass(frozen=True, kw_only=True)
class ProjectionCheck:
    """A run that was projected and measured, in any unit; the runs of one group have one colour."""

    name: str
    group: str
    measured: float
    projected: float

    @property
    def error(self) -> float:
        """Relative error of the projection; positive if it is too large."""
        return self.projected / self.measured - 1


def checks_figure(name: str, title: str, unit: str, checks: Sequence[ProjectionCheck]) -> Figure:
    """Projected over measured, and the error below, with bands of 5 % and 10 %. All values are positive."""
    values = [value for check in checks for value in (check.measured, check.projected)]
    low, high = min(values) / 1.15, max(values) * 1.15
    groups = list(dict.fromkeys(check.group for check in checks))
    data = [shape for band in reversed(BANDS) for shape in _band(low, high, band)] + _lines_of_no_error(low, high)
    for place, group in enumerate(groups):
        data += _points([check for check in checks if check.group == group], unit, SERIES[place % len(SERIES)])
    errors = [abs(check.error) for check in checks]
    within = ", ".join(f"{sum(error <= band for error in errors)} within {band:.0%}" for band in BANDS)
    most = max(1.3 * BANDS[-1], 1.1 * max(errors))
    axis = {"type": "log", "range": [log10(low), log10(high)], **_ticks(low, high)}
    return Figure(
        name=name,
        title=title,
        caption=f"{len(checks)} runs: {within}; median error {median(errors):.1%}, largest {max(errors):.1%}.",
        data=data,
        layout={
            "xaxis": {"title": {"text": f"measured ({unit})"}, **axis, "anchor": "y2"},
            "yaxis": {"title": {"text": f"projected ({unit})"}, **axis, "domain": [0.4, 1]},
            "yaxis2": {"title": {"text": "error"}, "tickformat": "+.0%", "range": [-most, most], "domain": [0, 0.32]},
            "hovermode": "closest",
        },
        height=580,
    )


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each power of ten."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _band(low: float, high: float, share: float) -> list[dict[str, Any]]:
    """The area with an error below a share, in both panels."""
    xs = [low, high, high, low]
    shape: dict[str, Any] = {"type": "scatter", "mode": "lines", "fill": "toself", "x": xs, "hoverinfo": "skip"}
    shape |= {"fillcolor": "rgba(128,128,128,0.2)", "line": {"width": 0}, "name": f"\u00b1 {share:.0%}"}
    above = [low * (1 - share), high * (1 - share), high * (1 + share), low * (1 + share)]
    below = [-share, -share, share, share]
    return [shape | {"y": above}, shape | {"y": below, "yaxis": "y2", "showlegend": False}]


def _lines_of_no_error(low: float, high: float) -> list[dict[str, Any]]:
    """Zero error, in both panels."""
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high],
        "showlegend": False,
        "hoverinfo": "skip",
    }
    line |= {"line": {"color": LIMIT, "width": 1, "dash": "dash"}}
    return [line | {"y": [low, high]}, line | {"y": [0, 0], "yaxis": "y2"}]


def _points(checks: Sequence[ProjectionCheck], unit: str, colour: str) -> list[dict[str, Any]]:
    """Runs of one group, in both panels."""
    hover = (
        "<b>%{customdata[0]}</b><br>projected %{customdata[2]:.4~g} "
        f"{unit}, measured %{{x:.4~g}} {unit}: %{{customdata[1]}}<extra></extra>"
    )
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": checks[0].group,
        "x": [rounded(check.measured) for check in checks],
        "customdata": [[check.name, f"{check.error:+.1%}", rounded(check.projected)] for check in checks],
        "marker": {"color": colour, "size": 9, "line": {"width": 1, "color": "rgba(255,255,255,0.8)"}},
        "hovertemplate": hover,
    }
    above = points | {"y": [rounded(check.projected) for check in checks]}
    below = points | {"y": [rounded(check.error) for check in checks], "yaxis": "y2", "showlegend": False}
    return [above, below]


if __name__ == "__main__":
    main()
