"""The search of `penstock tune` on random machines: its leader beside the true best, and the number of trials.

    python -m benchmarks.tune_simulated --output benchmarks/results/tune-simulated.json

Each machine is the planner's projection with hidden wrong coefficients and noise (benchmarks/simulated_machine.py).
"""

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
    assert leader is not None and first is not None, "a candidate fits"
    over = [there.seconds(trial.candidate.key) / there.best for trial in search.records]
    return {
        "seed": seed,
        "over_best": there.seconds(leader.candidate.key) / there.best,
        "reference_over_best": there.seconds(first.candidate.key) / there.best,
        "trials": len(search.records),
        "trials_to_2_percent": next((number for number, ratio in enumerate(over, 1) if ratio <= 1.02), None),
        "error": median_error(search.records, corrected=False),
        "error_corrected": median_error(search.records, corrected=True),
    }


def main() -> None:
    options = record.parser(__doc__, machines=(200, "number of machines")).parse_args()
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
        **{
            f"median_{name}": statistics.median(row[name] for row in rows if row[name] is not None)
            for name in ("error", "error_corrected")
        },
    }
    record.show(summary)
    record.write(options, {"summary": summary, "machines": rows})


if __name__ == "__main__":
    main()
