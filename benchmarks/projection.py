"""Runs that the plan is held against: those of `benchmarks.projection_cases`, trained on GPUs and written down.

    python -m benchmarks.projection --output benchmarks/results/projection-h200.json --chosen "after it was frozen"

Each case is trained by the product (`penstock.tune.trial`). Step time is the median after the warm-up, memory the peak
of the fullest rank's allocator. Cases of one rank run side by side, one on each GPU; those of several follow.
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
from typing import Any

import torch

from benchmarks import record, runs
from benchmarks.projection_cases import FROZEN, MADE, Case, named
from penstock.base.errors import PenstockError
from penstock.tune.kernels import commit_of_code
from penstock.tune.trial import Failure, Trial, run_trial

VISIBLE = "CUDA_VISIBLE_DEVICES"

Row = dict[str, Any]


def main() -> None:
    """Measure cases, and write all so far after each of them."""
    options = record.parser(
        __doc__,
        only=([str], "names of cases; none takes all"),
        chosen=("", f"those that were chosen then: {MADE!r} or {FROZEN!r}"),
        gpus=(torch.cuda.device_count(), "cases that need more are left out"),
        steps=9,
        warm_up=(3, "first steps that are not counted"),
        timeout=(0.0, "seconds after which a case is ended; 0 never"),
        folder=(Path, "keeps the runs, instead of a temporary folder"),
        join=([Path], "measure nothing, add the cases of these files"),
    ).parse_args()
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
            record.show(rows[case.name])
            write(options, rows)


def join(options: argparse.Namespace) -> None:
    """Add the cases of other files that were measured to the output."""
    whole, parts = json.loads(options.output.read_text(encoding="utf-8")), record.parts_of(options)
    rows = known_rows(options.output)
    rows |= {row["name"]: row for part in parts for row in part["numbers"]["cases"] if row["figures"] is not None}
    record.write_joined(options, [whole, *parts], whole["numbers"] | {"cases": in_order(rows)})


def known_rows(path: Path | None) -> dict[str, Row]:
    """Cases that a file has, by name."""
    return {row["name"]: row for row in record.numbers_in(path).get("cases", [])}


def write(options: argparse.Namespace, rows: dict[str, Row]) -> None:
    """All cases so far."""
    record.write(options, {"cases": in_order(rows)}, steps=options.steps, warm_up_steps=options.warm_up)


def in_order(rows: dict[str, Row]) -> list[Row]:
    """The cases in the order of the list, and by what it says of when they were chosen."""
    return [rows[case.name] | {"chosen": case.chosen} for case in named([], "") if case.name in rows]


def side_by_side(options: argparse.Namespace, cases: Sequence[Case], folder: Path) -> dict[str, Row]:
    """Cases of one rank, on all GPUs at once: each GPU has a process that measures its part of them in turn."""
    devices = os.environ.get(VISIBLE, ",".join(map(str, range(options.gpus)))).split(",")[: options.gpus]
    running = {}
    for number, device in enumerate(devices[: len(cases)]):
        output = folder / f"gpu-{device}.json"
        words = ["--only", *(case.name for case in cases[number :: len(devices)]), "--gpus", "1", "--output", output]
        words += ["--steps", options.steps, "--warm-up", options.warm_up, "--timeout", options.timeout]
        words += ["--folder", folder, "--commit", options.commit]
        command = [sys.executable, "-m", "benchmarks.projection", *map(str, words)]
        running[output] = subprocess.Popen(command, env={**os.environ, VISIBLE: device})
    rows: dict[str, Row] = {}
    for output, process in running.items():
        process.wait()
        rows |= known_rows(output)
    return rows


def measured(options: argparse.Namespace, case: Case, folder: Path) -> Row:
    """What a case is, and its figures; where it did not run, None and the reason."""
    row: Row = {
        **asdict(case),
        "overrides": list(case.overrides),
        "commit": options.commit or commit_of_code(),
        **{name: record.describe()[name] for name in ("device", "torch")},
        "reason": "",
        "figures": None,
    }
    try:
        overrides = case.every_override(options.steps)
    except PenstockError as error:
        return row | {"reason": str(error)}
    result = run_trial(
        Trial(
            name=case.name,
            target=case.target,
            overrides=overrides,
            processes=case.processes,
            warm_up=options.warm_up,
            folder=folder,
            most_seconds=options.timeout,
        )
    )
    if isinstance(result, Failure):
        return row | {"reason": result.reason}
    return row | {"figures": asdict(result) | rank_loads(runs.lines_of(folder / case.name), options.warm_up)}


def rank_loads(lines: Sequence[dict[str, Any]], warm_up: int) -> dict[str, float | None]:
    """How uneven expert ranks were: the median step's for the time, and the fullest step's for the memory."""
    timed = [line["expert_rank_load_max_over_mean"] for line in lines[warm_up:]]
    fullest = [line["expert_rank_load_fullest"] for line in lines]
    return {
        "expert_rank_load_max_over_mean": None if None in timed else statistics.median(timed),
        "expert_rank_load_fullest": None if None in fullest else max(fullest),
    }


if __name__ == "__main__":
    main()
