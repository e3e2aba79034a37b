"""Measured against projected: adds what the plan says of each case to what `benchmarks.projection` has measured.

    python -m benchmarks.projection_compare benchmarks/results/projection-h200.json

Needs no GPU. The file is written anew with projections and errors beside the measurements, which stay as they are; the
commit that projected is written beside the one that measured. An error is projected over measured, minus 1. A step that
was measured long ago is that of another program: `--only` projects those that were measured with today's.

What a plan cannot know, how unevenly an untrained router chooses, it is told as the run has recorded it: for the time
the mean over layers of the fullest rank's share, for the memory the share of the rank that was fullest over all layers.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.projection_cases import FROZEN, MADE, Case
from benchmarks.record import current_overrides
from penstock.base.files import write_whole
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.tune.result_file import commit_of_code

ALLOWED = {"step": 0.10, "memory": 0.05}
"""Errors that no run may exceed."""

Row = dict[str, Any]


def main() -> None:
    """Project every case of a file, write it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="written by benchmarks.projection; is written anew")
    parser.add_argument("--hardware", default="H200", help="chip or hardware file")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="names; the others stay as they are")
    parser.add_argument("--terms", action="store_true", help="print what step time and memory are made of, too")
    parser.add_argument("--commit", default="", help="of these files, where there is no repository")
    options = parser.parse_args()
    result = json.loads(options.file.read_text(encoding="utf-8"))
    numbers = result["numbers"]
    for row in numbers["cases"]:
        if row["figures"] is not None and (not options.only or row["name"] in options.only):
            row |= compared(row, options.hardware, result["environment"]["steps"])
            print_row(row, with_terms=options.terms)
    commits = dict.fromkeys([options.commit or commit_of_code()])
    if options.only:
        commits = dict.fromkeys(numbers["projected_by"]["commit"].split(", ")) | commits
    numbers["projected_by"] = {"commit": ", ".join(commits), "hardware": options.hardware}
    numbers["errors"] = summary(numbers["cases"])
    for name, found in numbers["errors"].items():
        print(f"{name}: {found['runs']} runs, {_in_words(found)}")
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
        overrides=current_overrides(row["overrides"]),
        processes=row["processes"],
        chosen=row["chosen"],
    )
    figures = row["figures"]
    assumptions = Assumptions(
        imbalance=figures["expert_rank_load_max_over_mean"] or 1.0,
        kept_imbalance=figures["expert_rank_load_fullest"] or 1.0,
    )
    found = project(case.run(steps), parse_cluster(f"{case.processes}x{hardware}"), assumptions)
    fullest = max(found.memories, key=lambda memory: memory.allocated)
    slowest = max(found.time.ranks, key=lambda rank: rank.passes + rank.waiting + rank.update)
    memory = {name: value for name, value in asdict(fullest).items() if isinstance(value, int | str)}
    projected = {
        "step_seconds": found.time.step_seconds,
        "peak_memory_bytes": fullest.allocated,
        "model_flops_utilization": found.time.model_flops_utilization,
        "bubble": found.time.bubble,
        "exposed_communication_seconds": found.time.exposed_communication_seconds,
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
    return {name: _sizes(found) for name, found in groups.items() if found}


def _sizes(rows: Sequence[Row]) -> Row:
    sizes: Row = {"runs": len(rows)}
    for name, allowed in ALLOWED.items():
        found = [abs(row["errors"][name]) for row in rows]
        sizes |= {
            f"{name}_median": statistics.median(found),
            f"{name}_largest": max(found),
            f"{name}_beyond": sum(error > allowed for error in found),
        }
    return sizes


def _in_words(sizes: Row) -> str:
    return "; ".join(
        f"{name} median {sizes[f'{name}_median']:.1%}, largest {sizes[f'{name}_largest']:.1%}, "
        f"{sizes[f'{name}_beyond']} beyond {allowed:.0%}"
        for name, allowed in ALLOWED.items()
    )


def print_row(row: Row, *, with_terms: bool) -> None:
    figures, projected, errors = row["figures"], row["projected"], row["errors"]
    marks = {name: "!" if abs(errors[name]) > allowed else " " for name, allowed in ALLOWED.items()}
    print(
        f"{row['name']:<44}{figures['step_seconds_median'] * 1e3:>7.1f} ms {projected['step_seconds'] * 1e3:>7.1f} "
        f"{errors['step']:>+7.1%}{marks['step']}  {figures['peak_memory_bytes'] / 1e9:>6.1f} GB "
        f"{projected['peak_memory_bytes'] / 1e9:>6.1f} {errors['memory']:>+6.1%}{marks['memory']}",
        flush=True,
    )
    if with_terms:
        times = {**projected["time"], **projected["terms"]}
        print("    " + "  ".join(f"{name} {value * 1e3:.1f}" for name, value in times.items() if name != "rank"))
        sizes = {name: size for name, size in projected["memory"].items() if isinstance(size, int) and name != "rank"}
        print("    " + "  ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items() if size))


if __name__ == "__main__":
    main()
