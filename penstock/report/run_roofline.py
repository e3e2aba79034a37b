"""How near operators come to what the device could do: FLOP/s over FLOPs for each byte, under the device's roofs."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

from penstock.base.devices import Chip
from penstock.report.colours import KERNELS, LIMIT, kernel_group
from penstock.report.figure import Figure, counted, rounded
from penstock.report.run_evidence import RunEvidence
from penstock.trace.answer import RankAnswer
from penstock.trace.kernel_names import general, telling
from penstock.trace.roofline import Row

POINTS = 400
"""Calls that are drawn at most, the longest."""

LEAST = 1e-5
"""Of the peak. Calls that reach less (a fill of a few numbers) would stretch the axes and are only counted."""

UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))

SHAPE_LETTERS = 110


def roofline_figure(evidence: RunEvidence) -> Figure | None:
    """Every different call of the first recorded rank whose work is known.

    Returns:
        The picture, or None if no call's work is known.
    """
    one = next((each for each in evidence.ranks if _known(each)), None)
    if one is None:
        return None
    known, chip = _known(one), one.roofline.chip
    rows = _drawn(known, chip)
    size, unit = _unit(rows, chip)
    data = _points(rows, size, unit)
    reach = [row.flops / row.bytes for row in rows if row.flops and row.bytes]
    if chip is not None:
        data = [*_roofs(chip, size, (min(reach), max(reach))), *data]
    roofs = f"Lines: what {chip.name} could do ({chip.source})." if chip is not None else _NO_ROOFS
    left = ""
    if len(rows) < len(known):
        rest = 1 - sum(row.kernel_us for row in rows) / sum(row.kernel_us for row in known)
        count = len(known) - len(rows)
        verb = "reaches almost nothing and is" if count == 1 else "reach almost nothing and are"
        left = f" {counted(count, 'call')}, {rest:.1%} of their time, {verb} left out."
    where = f"rank {one.rank}" if len(evidence.ranks) > 1 else "the trace"
    return Figure(
        name="roofline",
        title="Roofline",
        caption=f"Each different call of {where}, larger where it takes longer; work is known of "
        f"{one.roofline.modelled_share:.0%} of the time. {roofs}{left}",
        data=data,
        layout={
            "xaxis": {"title": {"text": "FLOPs for each byte"}, "type": "log", "dtick": 1},
            "yaxis": {"title": {"text": unit}, "type": "log", "dtick": 1, "exponentformat": "none"},
            "hovermode": "closest",
            "legend": {"itemsizing": "constant"},
        },
        height=520,
        is_wide=True,
    )


_NO_ROOFS = "The peaks of this device are not known, so no roofs are drawn."


def _known(one: RankAnswer) -> list[Row]:
    """Calls whose work and speed are known, the longest first."""
    return [row for row in one.roofline.rows if row.flops and row.bytes and row.flops_per_second]


def _drawn(rows: Sequence[Row], chip: Chip | None) -> Sequence[Row]:
    """The longest of those that reach something."""
    peak = chip.bf16 if chip is not None else max(row.flops_per_second or 0.0 for row in rows)
    return [row for row in rows if (row.flops_per_second or 0.0) >= LEAST * peak][:POINTS]


def _unit(rows: Sequence[Row], chip: Chip | None) -> tuple[float, str]:
    """FLOP/s of the unit, and its name."""
    most = chip.bf16 if chip is not None else max(row.flops_per_second or 0.0 for row in rows)
    return next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])


def _points(rows: Sequence[Row], size: float, unit: str) -> list[dict[str, Any]]:
    """One trace for each group of operators."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group(row.operator), []).append(row)
    longest = max(row.kernel_us for row in rows)
    traces = []
    for name in (name for name in KERNELS if name in groups):
        members = groups[name]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [rounded((row.flops or 0.0) / (row.bytes or 1.0), 4) for row in members],
                "y": [rounded((row.flops_per_second or 0.0) / size, 4) for row in members],
                "customdata": [_facts(row) for row in members],
                "marker": {
                    "color": KERNELS[name],
                    "opacity": 0.8,
                    "size": [round(5 + 25 * sqrt(row.kernel_us / longest), 1) for row in members],
                    "line": {"width": 0.7, "color": "rgba(255,255,255,0.7)"},
                },
                "hovertemplate": f"<b>%{{customdata[0]}}</b><br>%{{y:.3~g}} {unit} at %{{x:.3~g}} FLOPs/byte"
                "<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
            }
        )
    return traces


def _group(operator: str) -> str:
    """Of an operator, by its name."""
    part = telling(operator) or general(operator)
    return "other" if part is None else kernel_group(part.value)


def _facts(row: Row) -> list[str]:
    """Name, time and shapes."""
    time = f"{row.count:,} calls, {row.kernel_us / 1e3:,.3f} ms, {row.share:.1%} of the computing"
    if row.reached is not None and row.bound is not None:
        time += f"; {row.reached:.0%} of its roof ({row.bound})"
    shapes = ", ".join("x".join(map(str, shape)) for shape in row.shapes if shape)
    return [
        row.operator,
        time,
        shapes if len(shapes) <= SHAPE_LETTERS else f"{shapes[:SHAPE_LETTERS].rpartition(', ')[0]} ...",
    ]


def _roofs(chip: Chip, size: float, reach: tuple[float, float]) -> list[dict[str, Any]]:
    """The memory's slope up to the highest peak, and each peak from there on."""
    peaks = {name: peak for name, peak in (("fp8", chip.fp8), ("bf16", chip.bf16), ("fp32", chip.fp32)) if peak}
    ridge = max(peaks.values()) / chip.memory
    left, right = min(reach[0] / 2, ridge / 100), max(reach[1] * 3, ridge * 5)
    slope = _roof([left, ridge], [left * chip.memory / size, ridge * chip.memory / size], "solid")
    label = {"text": [f"  {chip.memory / 1e12:.3g} TB/s", ""], "textposition": "bottom right"}
    flat = [
        _roof([peak / chip.memory, right], [peak / size] * 2, "solid" if name == "bf16" else "dot")
        | {"text": ["", f"{name} {peak / size:,.0f} "], "textposition": "top left" if name == "fp8" else "bottom left"}
        for name, peak in peaks.items()
    ]
    return [slope | label, *flat]


def _roof(xs: Sequence[float], ys: Sequence[float], dash: str) -> dict[str, Any]:
    """One line of the roof."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": [rounded(x) for x in xs],
        "y": [rounded(y) for y in ys],
        "textfont": {"size": 11, "color": LIMIT},
        "line": {"color": LIMIT, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
        "showlegend": False,
    }
