"""Runs that the plan is held against: those of `benchmarks.projection_cases`, trained on GPUs and written down.

    python -m benchmarks.projection --output benchmarks/results/projection-h200.json --chosen "after it was frozen"

Each case is trained by the product (`penstock.tune.trial`). Step time is the median after the warm-up, memory the most
that a rank's allocator had handed out. Cases of one rank run side by side, one on each GPU; those of several follow.
The file is added to: a case that it has already and that is not measured again stays as it is, with the commit that it
was measured at. `--join` adds the cases of other files. `benchmarks.projection_compare` then adds what the plan says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks import record
from benchmarks.projection_cases import Case, Chosen, named
from penstock.base.errors import PenstockError
from penstock.train.run_folder import RunFolder
from penstock.tune.result_file import commit_of_code
from penstock.tune.trial import Failure, Trial, run_trial

VISIBLE = "CUDA_VISIBLE_DEVICES"

Row = dict[str, Any]


def main() -> None:
    """Measure cases, and write all so far after each of them."""
    options = parse_arguments()
    if options.join:
        join(options)
        return
    cases = [case for case in named(options.only, options.chosen) if case.processes <= max(1, options.gpus)]
    alone, together = [case for case in cases if case.processes == 1], [case for case in cases if case.processes > 1]
    rows = known_rows(options.output)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if len(alone) > 1 and options.gpus > 1:
            rows |= side_by_side(options, alone, folder)
            alone = []
            write(options, rows)
        for case in [*alone, *together]:
            rows[case.name] = measured(options, case, folder)
            print_measured(rows[case.name])
            write(options, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="names of cases; none takes all")
    parser.add_argument("--chosen", choices=["", *get_args(Chosen)], default="", help="those that were chosen then")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="cases that need more are left out")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that are not counted")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds after which a case is ended; 0 never")
    parser.add_argument("--folder", type=Path, help="keeps the runs, instead of a temporary folder")
    parser.add_argument("--join", nargs="+", type=Path, default=[], metavar="FILE", help="measure nothing, add these")
    record.add_arguments(parser)
    return parser.parse_args()


def join(options: argparse.Namespace) -> None:
    """Add the cases of other files that were measured to the output."""
    whole, parts = json.loads(options.output.read_text(encoding="utf-8")), record.parts_of(options)
    rows = known_rows(options.output)
    rows |= {row["name"]: row for part in parts for row in part["numbers"]["cases"] if row["figures"] is not None}
    record.write_joined(options, [whole, *parts], whole["numbers"] | {"cases": in_order(rows)})


def known_rows(path: Path | None) -> dict[str, Row]:
    """Cases that a file has, by name."""
    if path is None or not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["numbers"]["cases"]}


def write(options: argparse.Namespace, rows: dict[str, Row]) -> None:
    """All cases so far."""
    record.write(options, {"cases": in_order(rows)}, steps=options.steps, warm_up_steps=options.warm_up)


def in_order(rows: dict[str, Row]) -> list[Row]:
    """The cases in the order of the list, and by what it says of when they were chosen."""
    return [rows[case.name] | {"chosen": case.chosen} for case in named([], "") if case.name in rows]


def side_by_side(options: argparse.Namespace, cases: Sequence[Case], folder: Path) -> dict[str, Row]:
    """Cases of one rank, on all GPUs at once: each GPU has a process that measures its part of them in turn."""
    devices = os.environ.get(VISIBLE, ",".join(map(str, range(options.gpus)))).split(",")[: options.gpus]
    lanes = [cases[number :: len(devices)] for number in range(len(devices))]
    running, outputs = [], []
    for device, lane in zip(devices, lanes, strict=True):
        if not lane:
            continue
        outputs.append(folder / f"gpu-{device}.json")
        words = ["--only", *(case.name for case in lane), "--gpus", "1", "--output", str(outputs[-1])]
        words += ["--steps", str(options.steps), "--warm-up", str(options.warm_up), "--timeout", str(options.timeout)]
        words += ["--folder", str(folder), "--commit", options.commit]
        command = [sys.executable, "-m", "benchmarks.projection", *words]
        running.append(subprocess.Popen(command, env={**os.environ, VISIBLE: device}))
    for process in running:
        process.wait()
    found: dict[str, Row] = {}
    for output in outputs:
        found |= known_rows(output)
    return found


def measured(options: argparse.Namespace, case: Case, folder: Path) -> Row:
    """What a case is, and its figures; where it did not run, None and the reason."""
    facts = record.describe()
    row: Row = {
        **asdict(case),
        "overrides": list(case.overrides),
        "commit": options.commit or commit_of_code(),
        "device": facts["device"],
        "torch": facts["torch"],
        "reason": "",
        "figures": None,
    }
    try:
        every = case.every_override(options.steps)
    except PenstockError as error:
        return row | {"reason": str(error)}
    trial = Trial(
        name=case.name,
        target=case.target,
        overrides=every,
        processes=case.processes,
        warm_up=options.warm_up,
        folder=folder,
        most_seconds=options.timeout,
    )
    found = run_trial(trial)
    if isinstance(found, Failure):
        return row | {"reason": found.reason}
    text = RunFolder(folder / case.name).metrics.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return row | {"figures": asdict(found) | rank_loads(lines, options.warm_up)}


def rank_loads(lines: Sequence[dict[str, Any]], warm_up: int) -> dict[str, float | None]:
    """How uneven expert ranks were: the median step's for the time, and the fullest step's for the memory."""
    timed = [line["expert_rank_load_max_over_mean"] for line in lines[warm_up:]]
    held = [line["expert_rank_load_fullest"] for line in lines]
    return {
        "expert_rank_load_max_over_mean": None if None in timed else statistics.median(timed),
        "expert_rank_load_fullest": None if None in held else max(held),
    }


def print_measured(row: Row) -> None:
    figures = row["figures"]
    if figures is None:
        print(f"{row['name']:<44}{row['reason']}", flush=True)
        return
    loads = [figures[f"expert_rank_load_{name}"] for name in ("max_over_mean", "fullest")]
    times = figures["step_seconds"]
    print(
        f"{row['name']:<44}{figures['step_seconds_median'] * 1e3:>8.1f} ms ({min(times) * 1e3:.1f}.."
        f"{max(times) * 1e3:.1f})  {figures['peak_memory_bytes'] / 1e9:>6.1f} GB  "
        f"{figures['tokens_per_second_per_device']:>7,.0f} tokens/s/GPU  rank loads "
        f"{' '.join('-' if load is None else f'{load:.3f}' for load in loads)}  in {figures['seconds']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
