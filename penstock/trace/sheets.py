"""Tables of traces as CSV files for spreadsheets, one a table, in a folder.

A row has the rank first. Times are microseconds; times and counts of a table of sums are means of a recorded step, as
`penstock trace` prints them. Rows of `collectives`, `gaps` and `critical_path` are single events or one step.
"""

import csv
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from penstock.base.errors import TraceError
from penstock.base.numbers import printable
from penstock.trace.analysis import TraceAnalysis, analysis_json
from penstock.trace.operators import hierarchy

Row = dict[str, Any]

SUMS = frozenset({"count", "events", "times_last"})
"""Columns that are counts over the recorded steps, like all that end in `_us`."""

SINGLE = frozenset({"steps", "counters", "gaps", "memory", "collectives", "bandwidth", "critical_path"})
"""Sheets whose rows are single events or one step; rows of the others are sums over steps."""


def _of_rank(tree: Row) -> dict[str, Iterable[Row]]:
    return {
        "timeline": [{"of": "steps"} | tree["timeline"]["steps"]],
        "steps": [{"name": step["name"], "number": step["number"]} | step["timeline"] for step in tree["steps"]],
        **{name: tree[name] for name in ("phases", "unknown", "streams", "annotations", "counters", "roofline")},
        "own_time": tree["operators"],
        "waits": tree["launches"]["waits"],
        "gaps": tree["launches"]["gaps"]["longest"],
        "memory": [row for memory in tree["memory"] for row in memory["phases"]],
    }


def sheets(answer: TraceAnalysis) -> dict[str, list[Row]]:
    """Rows by sheet; sheets without rows are left out."""
    tree, tables = analysis_json(answer), {"operators": _operators(answer)}
    for rank, of_rank in (tree.get("ranks") or {f"{answer.ranks[0].rank}": tree}).items():
        for name, rows in _of_rank(of_rank).items():
            tables.setdefault(name, []).extend({"rank": int(rank)} | row for row in rows)
    tables |= {name: tree[name] for name in ("collectives", "bandwidth", "stragglers")}
    tables["critical_path"] = tree["critical_path"]["rows"]
    for name in tables.keys() - SINGLE - {"operators"}:
        tables[name] = [_scaled(row, answer.per_step) for row in tables[name]]
    return {name: rows for name, rows in tables.items() if rows}


def _operators(answer: TraceAnalysis) -> list[Row]:
    """Kernels of each operator and shape, by layer, phase and pass, added up over steps."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for rank in answer.ranks:
        for leaf in hierarchy(rank.trace, rank.phases):
            key = (rank.rank, leaf.layer, leaf.phase, leaf.pass_, leaf.operator, leaf.shapes, leaf.kernel)
            row = sums.setdefault(key, [0.0, 0.0, 0.0])
            for index, value in enumerate((leaf.events, leaf.kernel_us, leaf.exposed_us)):
                row[index] += value * answer.per_step
    names = ("rank", "layer", "phase", "pass", "operator", "shapes", "kernel", "events", "kernel_us", "exposed_us")
    rows = [dict(zip(names, (*key, *values), strict=True)) for key, values in sums.items()]
    return sorted(rows, key=lambda row: (row["rank"], -row["kernel_us"]))


def _scaled(row: Row, per: float) -> Row:
    is_sum = {name: (name.endswith("_us") and name != "max_us") or name in SUMS for name in row}
    return {name: value * per if is_sum[name] and value is not None else value for name, value in row.items()}


def write_sheets(answer: TraceAnalysis, folder: Path) -> list[Path]:
    """Write the sheets into a new or empty folder. Raises a TraceError if it has files or cannot be written."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise TraceError(f"--csv: {folder} is not empty", fix="name a new folder")
        for name, rows in sheets(answer).items():
            path = folder / f"{name}.csv"
            path.write_text(_text(rows), encoding="utf-8", newline="")
            written.append(path)
    except OSError as error:
        raise TraceError(f"--csv: cannot write {folder}: {error.strerror}", fix="name another folder") from error
    return written


def _text(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str | float | int:
    """A value as a spreadsheet shows it; text that would be a formula gets a quote."""
    if value is None:
        return ""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, list | tuple):
        text = ", ".join("x".join(map(str, item)) if isinstance(item, list | tuple) else f"{item}" for item in value)
    else:
        text = printable(str(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
