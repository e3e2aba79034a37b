"""The search of `penstock tune PRESET` for presets with few layers, on a made-up GPU: what it finds in six minutes.

    python -m benchmarks.tune_presets --output benchmarks/results/tune-presets.json
    python -m benchmarks.tune_presets --layouts --preset gpt-oss-20b --layers 8

The machine is the planner's projection with hidden wrong coefficients and noise (benchmarks/simulated_machine.py), and
its trials take as long as their steps and a start would. Candidates are single changes of the run; those of a plan,
which takes minutes for a large model, join where the run hardly fits, and everywhere with --layouts. Without it, runs
that need more than the GPU has are left out.
"""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from benchmarks import record
from benchmarks.simulated_machine import SimulatedMachine
from penstock.base.errors import ConfigError
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.projection import Plan, Projection
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest
from penstock.tune import tune_candidates
from penstock.tune.search_loop import Search, SearchSettings
from penstock.tune.tune_candidates import START_SECONDS, TOO_LARGE, CandidateSource

STEPS, TRIALS = 14, 12

LAYERS = (2, 3, 4, 8)

HARDLY = 0.95
"""Share of the memory that a run needs, from which on layouts are searched that need less."""


class _Source(CandidateSource):
    """Candidates without plans of other machines, which take most of the time."""

    def _next_wins(self, first: Projection) -> Iterator[str]:
        return iter(())


def _no_layouts(request: SearchRequest, progress: object = None) -> Plan:
    return Plan(model=request.run.name, cluster=request.cluster, candidates=(), refused=(), considered=0)


def measure(name: str, chip: str, budget: float, *, with_layouts: bool, seed: int) -> dict[str, Any]:
    """One preset: as `penstock tune` does it, with made-up trials."""
    run, hardware = load_run(name), load_hardware(chip)
    source, begin = _Source(run=run, cluster=cluster_of(1, hardware), fixed={}), time.monotonic()
    row: dict[str, Any] = {"preset": name, "rows": run.training.global_batch}
    share = source.reference().memory_bytes / hardware.memory.capacity_bytes
    if share > TOO_LARGE and not with_layouts:
        return {**row, "left_out": f"needs {share:.1f} x the memory as it is"}
    tune_candidates.search = search if with_layouts or share > HARDLY else _no_layouts
    try:
        source.fit()
        source.shorten(STEPS, budget, TRIALS)
    except ConfigError as error:
        return {**row, "refused": f"{error}"}
    candidates = source.planned()
    capacity = float(hardware.memory.capacity_bytes)
    there = SimulatedMachine(candidates, random.Random(seed), capacity, steps=STEPS, start_seconds=START_SECONDS)
    tuned = Search(list(candidates), there, SearchSettings(budget_seconds=budget, capacity_bytes=capacity))
    tuned.run()
    leader, first = tuned.leader, tuned.reference
    return {
        **row,
        "fitted": source.was_fitted,
        "trial_rows": source.rows or run.training.global_batch,
        "candidates": len(candidates),
        "cannot_have_short_steps": source.left_out,
        "trials": len(tuned.records),
        "seconds": tuned.spent,
        "planning_seconds": time.monotonic() - begin,
        "whole_step_measured": tuned.whole is not None,
        "leader": None if leader is None else leader.candidate.key,
        "gain": None if leader is None or first is None else first.even_step / leader.even_step,
        "over_best": None if leader is None else there.seconds(leader.candidate.key) / there.best,
    }


def main() -> None:
    options = record.parser(
        __doc__,
        parts=True,
        preset=([str], "only these"),
        layers=[*LAYERS],
        layouts=(False, "candidates of plans, too"),
        on=("H200", "chip"),
        minutes=(6.0, "budget of a search"),
    ).parse_args()
    if options.join:
        parts = record.parts_of(options)
        rows = [row for part in parts for row in part["numbers"]["presets"]]
        record.write_joined(options, parts, {"summary": summary(rows), "presets": rows})
        return
    presets = [preset for preset in options.preset or PRESETS if not preset.startswith("debug")]
    names = [f"{preset}-{layers}l" for layers in options.layers for preset in presets]
    rows = list[dict[str, Any]]()
    for name in record.part_of(options, names):
        budget, seed = 60 * options.minutes, crc32(name.encode())
        rows.append(measure(name, options.on, budget, with_layouts=options.layouts, seed=seed))
        record.show(rows[-1])
        record.write(options, {"summary": summary(rows), "presets": rows}, chip=options.on)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many presets there are, and what became of them."""
    tuned = [row for row in rows if "trials" in row]
    return {
        "presets": len(rows),
        "too_large": sum("left_out" in row for row in rows),
        "refused": sum("refused" in row for row in rows),
        "tuned": len(tuned),
        "with_leader": sum(row["leader"] is not None for row in tuned),
        "most_seconds": max((row["seconds"] for row in tuned), default=0.0),
        "within_3_percent": sum((row["over_best"] or 2.0) <= 1.03 for row in tuned),
    }


if __name__ == "__main__":
    main()
