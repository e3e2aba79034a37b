"""The search of `penstock tune PRESET` for presets with few layers, on a made-up GPU: what it finds in six minutes.

    python -m benchmarks.tune_presets --output benchmarks/results/tune-presets.json
    python -m benchmarks.tune_presets --preset gpt-oss-20b --layers 4

The machine is the planner's projection with hidden wrong coefficients and noise (benchmarks/simulated_machine.py), and
its trials take as long as their steps and a start would. A preset that does not fit one GPU, or whose shortest step is
too long, is refused before a trial, with the reason.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.simulated_machine import SimulatedMachine
from penstock.base.errors import ConfigError
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.projection import Projection
from penstock.tune.search_loop import Search, SearchSettings
from penstock.tune.short_step import START_SECONDS
from penstock.tune.tune_candidates import CandidateSource

STEPS, TRIALS = 14, 12

LAYERS = (2, 3, 4, 8)


class _Source(CandidateSource):
    """Candidates without plans of other machines, which take most of the time."""

    def _next_wins(self, first: Projection) -> Iterator[str]:
        return iter(())


def measure(name: str, chip: str, budget: float, seed: int) -> dict[str, Any]:
    """One preset: as `penstock tune` does it, with made-up trials."""
    run, hardware = load_run(name), load_hardware(chip)
    source, begin = _Source(run=run, cluster=cluster_of(1, hardware), fixed={}), time.monotonic()
    found: dict[str, Any] = {"preset": name, "rows": run.training.global_batch}
    try:
        source.fit()
        source.shorten(STEPS, budget, TRIALS)
    except ConfigError as error:
        return {**found, "refused": f"{error}"}
    candidates = source.planned()
    capacity = float(hardware.memory.capacity_bytes)
    there = SimulatedMachine(candidates, random.Random(seed), capacity, steps=STEPS, start_seconds=START_SECONDS)
    search = Search(list(candidates), there, SearchSettings(budget_seconds=budget, capacity_bytes=capacity))
    search.run()
    leader, first = search.leader, search.reference
    return {
        **found,
        "fitted": source.was_fitted,
        "trial_rows": source.rows or run.training.global_batch,
        "candidates": len(candidates),
        "left_out": source.left_out,
        "trials": len(search.records),
        "seconds": search.spent,
        "planning_seconds": time.monotonic() - begin,
        "whole_step_measured": search.whole is not None,
        "leader": None if leader is None else leader.candidate.key,
        "gain": None if leader is None or first is None else first.even_step / leader.even_step,
        "over_best": None if leader is None else there.seconds(leader.candidate.key) / there.best,
    }


def main() -> None:
    """Measure all presets, and print a line for each."""
    parser = argparse.ArgumentParser(description="The search of penstock tune for presets, on a made-up GPU.")
    record.add_arguments(parser)
    parser.add_argument("--preset", action="append", choices=sorted(PRESETS), help="only this one")
    parser.add_argument("--layers", type=int, action="append", help="only this number of layers")
    parser.add_argument("--on", default="H200", help="chip")
    parser.add_argument("--minutes", type=float, default=6.0, help="budget of a search")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers in options.layers or LAYERS:
        for preset in options.preset or PRESETS:
            if preset.startswith("debug"):
                continue
            row = measure(f"{preset}-{layers}l", options.on, 60 * options.minutes, seed=len(rows))
            rows.append(row)
            print(row, flush=True)
            tuned = [one for one in rows if "refused" not in one]
            summary = {
                "presets": len(rows),
                "refused": len(rows) - len(tuned),
                "with_leader": sum(one["leader"] is not None for one in tuned),
                "most_seconds": max((one["seconds"] for one in tuned), default=0.0),
                "within_3_percent": statistics.fmean(one["over_best"] <= 1.03 for one in tuned) if tuned else None,
            }
            record.write(options, {"summary": summary, "presets": rows}, chip=options.on)


if __name__ == "__main__":
    main()
