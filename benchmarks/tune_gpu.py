"""`penstock tune` on one GPU beside an exhaustive sweep of the same space, by case; a case that is in the file is kept.

    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json
    python -m benchmarks.tune_gpu --output benchmarks/results/tune-h200.json --case gpt-oss --no-sweep

A case has three parts, each written as soon as it is measured: `tune` (at most 12 trials and 6 minutes), `sweep`
(trials of all candidates of the search, at least 60 where there are as many, one resumable trial after another), and
`plain`, the run with plain torch kernels as TorchTitan's defaults are.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.base.files import write_whole
from penstock.config.load import dump_toml, load_run
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.tune.real_trials import RealTrials
from penstock.tune.search_loop import TrialLimits, TrialResult
from penstock.tune.trial import Trial, first_steps
from penstock.tune.tune_candidates import CandidateSource

CASES = {
    "deepseek": ("deepseek-v2-lite-8l",),
    "qwen3": ("qwen3-30b-a3b-8l",),
    "mixtral": ("mixtral-8x7b-2l",),
    "gpt-oss": ("gpt-oss-20b-4l",),
    "short-rows": ("deepseek-v2-lite-8l", "training.sequence_length=512", "training.global_batch=16"),
}

PLAIN = (
    "kernels.norm=torch",
    "kernels.swiglu=reference",
    "kernels.rope=reference",
    "graphs.capture=none",
    "dispatch.sync_free=0",
)
"""Plain torch kernels where the run has ours."""

STEPS, WARM_UP, BUDGET_MINUTES = 14, 4, 6


def tuned(words: tuple[str, ...], chip: str) -> dict[str, Any]:
    """The JSON of `penstock tune`, with its wall time."""
    command = [sys.executable, "-m", "penstock", "tune", *words, "--on", chip, "--json"]
    begin = time.perf_counter()
    command += ["--budget", f"{BUDGET_MINUTES}m", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip()[-500:]}
    return {**json.loads(done.stdout), "wall_seconds": time.perf_counter() - begin}


def sweep(words: tuple[str, ...], chip: str, folder: Path, most: int) -> list[dict[str, Any]]:
    """A trial of each candidate, those with the best projections first; results are kept in the folder."""
    run = load_run(words[0], words[1:])
    source = CandidateSource(run=run, cluster=cluster_of(1, load_hardware(chip)), fixed={})
    source.fit()
    source.shorten(STEPS, BUDGET_MINUTES * 60.0, 12)  # steps as short as those of the search
    candidates = sorted(source.planned(), key=lambda one: one.projected)[:most]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "reference.toml", dump_toml(source.run))
    base = Trial(
        name="",
        target=f"{folder / 'reference.toml'}",
        overrides=first_steps(source.run, STEPS),
        processes=1,
        warm_up=WARM_UP,
        folder=folder / "trials",
    )
    trials, rows = RealTrials(base), []
    for place, candidate in enumerate(candidates):
        saved = folder / f"{place}.json"
        if saved.exists():
            rows.append(json.loads(saved.read_text(encoding="utf-8")))
            continue
        trials.count = place
        expected = candidate.projected * candidate.batches / candidate.stretch
        result: TrialResult = trials.run(candidate, TrialLimits(expected_seconds=expected, left_seconds=math.inf))
        row = {"change": candidate.key, "projected": candidate.projected, **asdict(result)}
        row["short_rows"] = None if candidate.short is None else candidate.short.rows
        row["measured_seconds"] = result.step if result.step_seconds else None
        row["whole_seconds"] = result.step * candidate.stretch if result.step_seconds else None
        write_whole(saved, json.dumps(row))
        rows.append(row)
        print(f"  {place + 1}/{len(candidates)} {candidate.key or 'reference'}: {row['whole_seconds']}", flush=True)
    return rows


def main() -> None:
    """Measure the cases that are not in the file."""
    parser = argparse.ArgumentParser(description="penstock tune beside an exhaustive sweep.")
    record.add_arguments(parser)
    parser.add_argument("--case", choices=[*CASES], action="append", help="only this one")
    parser.add_argument("--on", default="H200", help="chip")
    parser.add_argument("--most", type=int, default=80, help="configurations of a sweep")
    parser.add_argument("--no-sweep", action="store_true", help="only tune")
    options = parser.parse_args()
    numbers: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        numbers = json.loads(options.output.read_text(encoding="utf-8"))["numbers"]
    for case in options.case or CASES:
        found = numbers.setdefault(case, {})
        parts = {
            "tune": lambda case=case: tuned(CASES[case], options.on),
            "plain": lambda case=case: tuned((*CASES[case], *PLAIN, "--trials", "1"), options.on),
            "sweep": lambda case=case: sweep(CASES[case], options.on, Path("runs", f"sweep-{case}"), options.most),
        }
        for part, make in parts.items():
            if part not in found and not (part == "sweep" and options.no_sweep):
                print(f"{case}: {part}", flush=True)
                found[part] = make()
                record.write(options, numbers, chip=options.on)


if __name__ == "__main__":
    main()
