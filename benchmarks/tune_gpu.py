"""`penstock tune` on one GPU, case by case; a part of a case that is in the file is kept.

    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json
    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json --case gpt-oss --part tune
    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json --join deepseek.json sweep-deepseek.json

A case has two parts here: `tune` (at most 12 trials and 6 minutes), and `plain`, the run with plain torch kernels as
TorchTitan's defaults are. Each is written as soon as it is measured. The exhaustive sweep of the same space is
benchmarks/tune_sweep.py. `--join` measures nothing, and puts the cases of other files, measured on GPUs side by side,
into one.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import record

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


def main() -> None:
    """Measure the cases that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    parser.add_argument("--case", choices=[*CASES], action="append", help="only this one")
    parser.add_argument("--part", choices=["tune", "plain"], action="append", help="only this one")
    parser.add_argument("--on", default="H200", help="chip")
    parser.add_argument("--minutes", type=float, default=BUDGET_MINUTES, help="budget of a search")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="files whose cases are added")
    options = parser.parse_args()
    numbers: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        numbers = json.loads(options.output.read_text(encoding="utf-8"))["numbers"]
    for path in options.join:
        part = "sweep" if path.name.startswith("sweep") else ""
        for case, found in json.loads(path.read_text(encoding="utf-8"))["numbers"].items():
            numbers.setdefault(case, {}).update({part: found} if part else found)
    for case in () if options.join else options.case or [name for name in CASES if name != "debug"]:
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
