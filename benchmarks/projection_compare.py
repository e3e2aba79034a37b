"""Measured against projected: adds what the plan says of each case to what `benchmarks.projection` has measured.

    python -m benchmarks.projection_compare benchmarks/results/projection-h200.json

Needs no GPU. The file is written anew with projections and errors beside the measurements, which stay as they are; the
commit that projected is written beside the one that measured. An error is projected over measured, minus 1. A step that
was measured long ago is that of another program: `--only` projects those that were measured with today's.

What a plan cannot know, how unevenly an untrained router chooses, it is told as the run has recorded it: for the time
the mean over layers of the fullest rank's share, for the memory the share of the rank that was fullest over all layers.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.projection_cases import FROZEN, MADE, Case
from penstock.base.files import write_whole
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.tune.kernels import commit_of_code

ALLOWED = {"step": 0.10, "memory": 0.05}
"""Errors that no run may exceed."""

Row = dict[str, Any]


def main() -> None:
    """Project every case of a file, and write it."""
    parser = record.parser(
        __doc__,
        hardware=("H200", "chip or hardware file"),
        only=([str], "names of cases; the others stay as they are"),
    )
    parser.add_argument("file", type=Path, help="written by benchmarks.projection; is written anew")
    options = parser.parse_args()
    result = json.loads(options.file.read_text(encoding="utf-8"))
    numbers = result["numbers"]
    for row in numbers["cases"]:
        if row["figures"] is not None and (not options.only or row["name"] in options.only):
            row |= compared(row, options.hardware, result["environment"]["steps"])
            figures = {name: row["figures"][name] for name in ("step_seconds_median", "peak_memory_bytes")}
            record.show({"case": row["name"], **figures, **row["projected"], "errors": row["errors"]})
    commits = dict.fromkeys([options.commit or commit_of_code()])
    if options.only:
        commits = dict.fromkeys(numbers["projected_by"]["commit"].split(", ")) | commits
    numbers["projected_by"] = {"commit": ", ".join(commits), "hardware": options.hardware}
    numbers["errors"] = summary(numbers["cases"])
    for name, sizes in numbers["errors"].items():
        record.show({"runs of": name, **sizes})
    write_whole(options.file, json.dumps(result, indent=1, allow_nan=False) + "\n")


def compared(row: Row, hardware: str, steps: int) -> Row:
    """Projection and errors of a case that was measured.

    Args:
        row: of the file.
        hardware: chip that it ran on.
        steps: that were made; a run of so many is projected.
    """
    case = Case(
        name=row["name"],
        target=row["target"],
        overrides=record.current_overrides(row["overrides"]),
        processes=row["processes"],
        chosen=row["chosen"],
    )
    figures = row["figures"]
    assumptions = Assumptions(
        imbalance=figures["expert_rank_load_max_over_mean"] or 1.0,
        kept_imbalance=figures["expert_rank_load_fullest"] or 1.0,
    )
    plan = project(case.run(steps), parse_cluster(f"{case.processes}x{hardware}"), assumptions)
    fullest = max(plan.memories, key=lambda memory: memory.allocated)
    slowest = max(plan.time.ranks, key=lambda rank: rank.passes + rank.waiting + rank.update)
    memory = {name: value for name, value in asdict(fullest).items() if isinstance(value, int | str)}
    projected = {
        "step_seconds": plan.time.step_seconds,
        "peak_memory_bytes": fullest.allocated,
        "model_flops_utilization": plan.time.model_flops_utilization,
        "bubble": plan.time.bubble,
        "exposed_communication_seconds": plan.time.exposed_communication_seconds,
        "time": {name: value for name, value in asdict(slowest).items() if isinstance(value, int | float)},
        "terms": dict(slowest.terms),
        "memory": memory,
    }
    errors = {
        "step": projected["step_seconds"] / figures["step_seconds_median"] - 1,
        "memory": projected["peak_memory_bytes"] / figures["peak_memory_bytes"] - 1,
    }
    return {"projected": projected, "errors": errors}


def summary(rows: Iterable[Row]) -> dict[str, Row]:
    """Sizes of the errors: of all runs, of those while the model was made, and of those after it was frozen."""
    compared_rows = [row for row in rows if row.get("errors")]
    groups = {
        "all": compared_rows,
        "made": [row for row in compared_rows if row["chosen"] == MADE],
        "frozen": [row for row in compared_rows if row["chosen"] == FROZEN],
    }
    return {name: _sizes(group) for name, group in groups.items() if group}


def _sizes(rows: Sequence[Row]) -> Row:
    sizes: Row = {"runs": len(rows)}
    for name, allowed in ALLOWED.items():
        errors = [abs(row["errors"][name]) for row in rows]
        sizes |= {
            f"{name}_median": statistics.median(errors),
            f"{name}_largest": max(errors),
            f"{name}_beyond": sum(error > allowed for error in errors),
        }
    return sizes


if __name__ == "__main__":
    main()
