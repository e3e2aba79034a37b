"""`penstock tune` on one GPU, case by case; a part of a case that is in the file is kept.

    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json
    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json --case gpt-oss --part tune
    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json --join deepseek.json sweep-deepseek.json

A case has two parts here: `tune` (at most 12 trials and 6 minutes), and `plain`, the run with plain torch kernels, of
which TorchTitan's defaults are. Each is written as soon as it is measured. The exhaustive sweep of the same space is
benchmarks/tune_sweep.py. `--join` measures nothing: it puts the cases of other files, measured on GPUs side by side,
into one, with a summary of all, and the sweeps into a file beside it, `tune-sweep-h200.json`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.tune.kernels import write_result

CASES = {
    "deepseek": ("deepseek-v2-lite-8l",),
    "qwen3": ("qwen3-30b-a3b-8l",),
    "mixtral": ("mixtral-8x7b-2l",),
    "gpt-oss": ("gpt-oss-20b-4l",),
    "short-rows": ("deepseek-v2-lite-8l", "training.sequence_length=512", "training.global_batch=16"),
    "debug": ("debug-2l", "device=cpu", "training.micro_batch=1"),
}
"""Runs by case; `debug` is one to try this without a GPU."""

FREE = {"mixtral": ("micro_batch",), "gpt-oss": ("micro_batch",)}
"""What these cases may change besides: their auxiliary losses are of micro-batches."""

PLAIN = ("kernels.all=torch", "graphs.capture=none", "dispatch.sync_free=0")
"""Plain torch kernels where the run has ours."""

PLAIN_STEPS = 8
"""Of that run, in its one trial."""

NEAR_BEST = 1.02
"""Step time over that of the best, up to which a configuration is as good."""

STEPS, WARM_UP, MOST_TRIALS, BUDGET_MINUTES = 14, 4, 12, 6.0
"""Of a search, those of `penstock tune` but for the budget."""


def tuned(case: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The JSON of `penstock tune`, with its wall time; its lines are shown."""
    words = ["tune", *CASES[case], *more, "--on", options.on, "--json", "--budget", f"{60 * options.minutes:.0f}s"]
    words += ["--processes", "1", "--free", ",".join(FREE.get(case, ()))]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True, check=False)
    told, brace, found = done.stdout.partition("{\n")
    if not brace:
        return {"error": f"exit code {done.returncode}: {told[-300:]}"}
    return {**json.loads(brace + found), "wall_seconds": time.perf_counter() - begin}


def over_best(sweep: Mapping[str, Any]) -> dict[str, float]:
    """Step time of each configuration of a sweep over the best one's, as measured in turn where that was done."""
    found = dict[str, float]()
    for rows in (sweep["rows"], [row for row in sweep["again"] if not row["is_plain"]]):
        seconds: dict[str, list[float]] = {}
        for row in rows:
            if "whole_seconds" in row:
                seconds.setdefault(row["change"], []).append(row["whole_seconds"])
        mean = {key: statistics.fmean(ones) for key, ones in seconds.items()}
        found |= {key: each / min(mean.values()) for key, each in mean.items()}
    return found


def case_summary(parts: Mapping[str, Any], sweep: Mapping[str, Any] | None) -> dict[str, Any]:
    """A search beside the sweep of the same space, and the run with torch's kernels."""
    tune = parts["tune"]
    trials = [one for one in tune["trials"] if not one["is_whole"]]
    gains = {"gain": tune["gain"], "trials": len(trials), "seconds": sum(tune["spent_seconds"].values())}
    errors = [
        abs(one["whole_seconds"] / one["expected_seconds"] - 1) for one in tune["trials"][1:] if one["kind"] == "ran"
    ]
    found: dict[str, Any] = {**gains, "errors_corrected": errors, "median_error": tune["median_error"]}
    found["median_error_corrected"] = tune["median_error_corrected"]
    if (plain := parts.get("plain", {}).get("trials")) and plain[0]["kind"] == "ran":
        leader = [one["whole_seconds"] for one in trials if one["kind"] == "ran" and one["change"] == tune["leader"]]
        found["plain_over_tuned"] = plain[0]["whole_seconds"] / statistics.fmean(leader)
    if sweep is not None:
        over, told = over_best(sweep), sweep["summary"]
        keys = [" ".join(sorted(one["change"])) if one["kind"] == "ran" else None for one in trials]
        reached = (place for place, key in enumerate(keys, 1) if key in over and over[key] <= NEAR_BEST)
        found["trials_to_2_percent"] = next(reached, None)
        names = ("configurations", "failed", "ended_early", "best", "tuned_over_best", "as_it_is_over_best")
        found |= {name: told[name] for name in names}
        found["plain_again_over_tuned"] = told["plain_over_tuned"]
    return found


def projected_errors(sweep: Mapping[str, Any]) -> list[float]:
    """How far the plan was off for each configuration of a sweep that ran, as a share of its measured step."""
    ran = (row for row in sweep["rows"] if "whole_seconds" in row)
    return [abs(row["projected"] / row["whole_seconds"] - 1) for row in ran]


def summary(cases: Mapping[str, Any], sweeps: Mapping[str, Any]) -> dict[str, Any]:
    """All searches together."""
    found = {case: case_summary(parts, sweeps.get(case)) for case, parts in cases.items() if "trials" in parts["tune"]}
    errors = [error for one in found.values() for error in one["errors_corrected"]]
    reached = [one["trials_to_2_percent"] for one in found.values() if one.get("trials_to_2_percent") is not None]
    swept = [error for sweep in sweeps.values() for error in projected_errors(sweep)]
    over = [one["tuned_over_best"] for one in found.values() if one.get("tuned_over_best") is not None]
    return {
        "cases": found,
        "median_trials_to_2_percent": statistics.median(reached) if reached else None,
        "most_tuned_over_best": max(over, default=None),
        "trials_after_the_first": len(errors),
        "median_error_corrected": statistics.median(errors) if errors else None,
        "swept": len(swept),
        "median_error_swept": statistics.median(swept) if swept else None,
        "error_of_90_percent_swept": sorted(swept)[int(0.9 * len(swept))] if swept else None,
    }


def join(paths: list[Path], output: Path) -> None:
    """Write the cases of several files into one, and their sweeps into another one."""
    files = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    cases: dict[str, Any] = {}
    sweeps: dict[str, Any] = {}
    for path, file in files.items():
        for case, found in file["numbers"].items():
            if path.name.startswith("sweep"):
                rows = {name: [_without_loss(row) for row in found[name]] for name in ("rows", "again")}
                sweeps[case] = {**found, **rows}
            elif case != "summary":
                cases.setdefault(case, {}).update({"commit": file["commit"], **found})
    numbers = {"summary": summary(cases, sweeps), **cases}
    written = [(output, [path for path in paths if not path.name.startswith("sweep")], numbers)]
    name = output.with_name(output.name.replace("tune-", "tune-sweep-", 1))
    written += [(name, [path for path in paths if path.name.startswith("sweep")], sweeps)] if sweeps else []
    for there, sources, each in written:
        commands = dict.fromkeys(" ".join(_LOCAL.sub("", files[path]["command"]).split()) for path in sources)
        last = files[sources[-1]]
        write_result(
            there,
            command=" && ".join(commands),
            commit=last["commit"],
            environment=last["environment"],
            numbers=each,
        )


_LOCAL = re.compile(r" --(case|part|output|commit|folder|until|tuned|worker|confirm)( [^- ]\S*)?")
"""Options that say where and in which pieces something was measured."""


def _without_loss(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("losses", "overrides")}


def main() -> None:
    options = record.parser(
        __doc__,
        case=([str], f"only these of {', '.join(CASES)}"),
        part=([str], "only tune, or only plain"),
        on=("H200", "chip"),
        minutes=(BUDGET_MINUTES, "budget of a search"),
        join=([Path], "files whose cases are added"),
    ).parse_args()
    if options.join:
        join(options.join, options.output)
        return
    numbers = record.numbers_in(options.output)
    for case in options.case or [name for name in CASES if name != "debug"]:
        found = numbers.setdefault(case, {})
        parts = {
            "tune": lambda case=case: tuned(case, options, "--trials", f"{MOST_TRIALS}"),
            "plain": lambda case=case: tuned(case, options, *PLAIN, "--trials", "1", "--steps", f"{PLAIN_STEPS}"),
        }
        for part, make in parts.items():
            if part not in found and part in (options.part or parts):
                print(f"{case}: {part}", flush=True)
                found[part] = make()
                record.write(options, numbers, chip=options.on)
    record.write(options, numbers, chip=options.on)


if __name__ == "__main__":
    main()
