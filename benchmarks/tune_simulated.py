"""The search of `penstock tune` on random machines: its leader beside the true best, and the number of trials.

    python -m benchmarks.tune_simulated --output benchmarks/results/tune-simulated.json

Each machine is the planner's projection with hidden wrong coefficients and noise (benchmarks/simulated_machine.py).
"""

import argparse
import random
import statistics
from typing import Any

from benchmarks import record
from benchmarks.simulated_machine import SimulatedMachine, random_candidates
from penstock.tune.search_loop import Search, SearchSettings, median_error

CAPACITY = 80e9


def measure(seed: int) -> dict[str, Any]:
    """One machine."""
    rng = random.Random(seed)
    there = SimulatedMachine(random_candidates(rng), rng, capacity_bytes=CAPACITY)
    search = Search(list(there.candidates), there, SearchSettings(budget_seconds=1e9, capacity_bytes=CAPACITY))
    search.run()
    leader, first = search.leader, search.reference
    assert leader is not None, "a candidate fits"
    assert first is not None, "a candidate fits"
    over = [there.seconds(one.candidate.key) / there.best for one in search.records]
    return {
        "seed": seed,
        "over_best": there.seconds(leader.candidate.key) / there.best,
        "reference_over_best": there.seconds(first.candidate.key) / there.best,
        "trials": len(search.records),
        "trials_to_2_percent": next((place for place, one in enumerate(over, 1) if one <= 1.02), None),
        "error": median_error(search.records, corrected=False),
        "error_corrected": median_error(search.records, corrected=True),
    }


def main() -> None:
    """Measure all machines, and print a summary."""
    parser = argparse.ArgumentParser(description="The search of penstock tune on random machines.")
    record.add_arguments(parser)
    parser.add_argument("--machines", type=int, default=200, help="number of machines")
    options = parser.parse_args()
    rows = [measure(seed) for seed in range(options.machines)]
    reached = [row["trials_to_2_percent"] for row in rows if row["trials_to_2_percent"] is not None]
    summary = {
        "machines": len(rows),
        "candidates": len(random_candidates(random.Random(0))),
        "within_3_percent": statistics.fmean(row["over_best"] <= 1.03 for row in rows),
        "worst_over_best": max(row["over_best"] for row in rows),
        "median_trials": statistics.median(row["trials"] for row in rows),
        "most_trials": max(row["trials"] for row in rows),
        "reached_2_percent": len(reached) / len(rows),
        "median_trials_to_2_percent": statistics.median(reached),
        "median_error": statistics.median(row["error"] for row in rows if row["error"] is not None),
        "median_error_corrected": statistics.median(
            row["error_corrected"] for row in rows if row["error_corrected"] is not None
        ),
    }
    for name, value in summary.items():
        print(f"{name:<28}{value:.4g}")
    record.write(options, {"summary": summary, "machines": rows})


if __name__ == "__main__":
    main()
