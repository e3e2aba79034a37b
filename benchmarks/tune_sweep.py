"""An exhaustive sweep of the space of `penstock tune` on one GPU, of which a case needs some minutes.

    python -m benchmarks.tune_sweep --case short-rows --folder sweep                     every configuration
    python -m benchmarks.tune_sweep --case short-rows --folder sweep --part 2 --parts 4  each fourth, from the third on
    python -m benchmarks.tune_sweep --case short-rows --folder sweep --confirm           the best of all parts in turn

The space has every combination of micro-batch, recomputation, graphs, host waits and overlap that is legal and fits the
memory by projection. All configurations run in one process, with the training loop of `penstock train`: a start costs
seconds, not the imports. Steps are as short as those of the search. A configuration is ended as soon as a whole step
surely takes `BEHIND` times the best one; the best by projection come first, so that most are ended after few steps.

The folder keeps a line for each configuration. A call that goes on with it measures what is missing; a configuration
that took the process down is a failure. `--minutes` ends a call in time.
"""

import argparse
import gc
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.tune_gpu import BUDGET_MINUTES, CASES, FREE, MOST_TRIALS, STEPS
from penstock.base.errors import PenstockError
from penstock.base.files import write_whole
from penstock.config.load import dump_toml, load_run, with_overrides
from penstock.parallel.launch.environment import facts_of_machine, prepare_environment, read_environment
from penstock.parallel.launch.local import facts_of_run
from penstock.parallel.launch.process import bind_near, choose_device
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.train.loop import Progress, open_store, train_run
from penstock.train.observer import Observer, StepReport
from penstock.train.run_folder import create_run_folder
from penstock.train.setup import prepare
from penstock.train.stop import StopRequest
from penstock.tune.belief import TrialCandidate
from penstock.tune.trial import first_steps
from penstock.tune.tune_candidates import CandidateSource

SPACE = (
    tuple(f"training.micro_batch={1 << power}" for power in range(4)),
    tuple(
        f"recompute.modules={modules}"
        for modules in ("[]", '["norm"]', '["expert-activation"]', '["norm","expert-activation"]', '["layer"]')
    ),
    (
        'graphs.capture="none" dispatch.sync_free=0',
        'graphs.capture="none" dispatch.sync_free=2',
        'graphs.capture="partial" dispatch.sync_free=0',
        'graphs.capture="full" dispatch.sync_free=2',
    ),
    ('dispatch.overlap="none"', 'dispatch.overlap="halves"'),
)
"""Choices of a configuration, one of each line."""

BEHIND, FAR_BEHIND = 1.06, 1.5
"""A configuration is ended after two timed steps, or in its warm-up, that are all so many times the best step."""

WARM_UP, TIMED = 3, 6
"""First steps, which compile and capture, and those that are timed."""

CONFIRMED, ROUNDS = 3, 2
"""Best configurations that are measured once more, in turn, and how often."""

MOST_HELD = 2e9
"""Bytes on the device after a configuration has ended, with which the process starts anew."""


class _Watch(Observer):
    """Keeps the step times, and asks for the end when they are enough; `best` seconds are those to beat."""

    def __init__(self, stop: StopRequest, best: float, most: int) -> None:
        self._stop, self._best, self._most = stop, best, most
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        self.is_behind = False

    def stepped(self, report: StepReport) -> None:
        """Called after each step."""
        self.seconds.append(report.step_seconds)
        self.losses.append(report.loss)
        self.peak = max(self.peak, report.peak_memory_bytes)
        timed = self.seconds[WARM_UP:]
        far = len(self.seconds) > 2 and min(self.seconds[1:]) > FAR_BEHIND * self._best
        self.is_behind = far or (len(timed) > 1 and min(timed) > BEHIND * self._best)
        if self.is_behind or len(timed) >= self._most:
            self._stop.signal = signal.SIGTERM  # as if it had come


def source_of(case: str, chip: str) -> CandidateSource:
    """What `penstock tune` takes its candidates from, with steps as short as those of its search."""
    words = CASES[case]
    source = CandidateSource(
        run=load_run(words[0], words[1:]), cluster=cluster_of(1, load_hardware(chip)), fixed={}, free=FREE.get(case, ())
    )
    source.fit()
    source.shorten(STEPS, BUDGET_MINUTES * 60.0, MOST_TRIALS)
    return source


def candidates_of(source: CandidateSource) -> list[TrialCandidate]:
    """All legal combinations that fit the memory, the best by projection first; the run as it is comes first."""
    first = source.reference()
    found = {first.key: first}
    for choices in itertools.product(*SPACE):
        for one in source.changed(source.run, " ".join(choices), "sweep"):
            found.setdefault(one.key, one)
    fits = [one for one in found.values() if one.memory_bytes < source.cluster.hardware.usable_bytes]
    return [first, *sorted((one for one in fits if one is not first), key=lambda one: one.projected)]


def measured(source: CandidateSource, one: TrialCandidate, folder: Path, best: float, most: int) -> dict[str, Any]:
    """Train a configuration in this process until its step time is known, or is surely no `best` seconds."""
    words = [*first_steps(source.run, WARM_UP + TIMED), *one.overrides]
    words += [] if one.short is None else [f"training.global_batch={one.short.rows}"]
    run = load_run(f"{folder / 'reference.toml'}", [*words, f"record.folder={folder / 'runs'}"])
    begin = time.perf_counter()
    row: dict[str, Any] = {"change": one.key, "projected": one.projected, "stretch": one.stretch}
    try:
        session = prepare(run, read_environment())
        named, there = create_run_folder(run, number_if_taken=True)
        stop = StopRequest()
        watch = _Watch(stop, best / one.stretch, most)
        train_run(session, there, open_store(named, there), Progress(), [watch], stop)
    except torch.OutOfMemoryError as error:
        return {**row, "failed": f"out of memory: {error}".partition(". ")[0]}
    except PenstockError as error:
        return {**row, "failed": f"{error}"}
    shutil.rmtree(there.path)
    timed = watch.seconds[WARM_UP:] or watch.seconds[1:]
    return {
        **row,
        "step_seconds": watch.seconds,
        "losses": watch.losses,
        "peak_memory_bytes": watch.peak,
        "is_behind": watch.is_behind,
        "measured_seconds": statistics.median(timed),
        "whole_seconds": one.stretch * statistics.median(timed),
        "seconds": time.perf_counter() - begin,
    }


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of all parts by configuration."""
    rows = (json.loads(line) for path in sorted(folder.glob("rows-*.jsonl")) for line in _lines(path))
    return {row["change"]: row for row in rows if "begun" not in row}


def _lines(path: Path) -> Iterator[str]:
    """Whole lines of a file, which another process may be writing."""
    yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))


def _best(rows: dict[str, dict[str, Any]]) -> float:
    return min((row["whole_seconds"] for row in rows.values() if "whole_seconds" in row), default=math.inf)


def sweep(source: CandidateSource, candidates: list[TrialCandidate], options: argparse.Namespace) -> None:
    """Measure the configurations of a part that the folder lacks, until the time is over."""
    path = options.folder / f"rows-{options.part}-of-{options.parts}.jsonl"
    path.touch()
    begun = [row["begun"] for row in map(json.loads, _lines(path)) if "begun" in row]
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for key in set(begun) - set(rows_in(options.folder)):
            file.write(json.dumps({"change": key, "failed": "the process ended with it"}) + "\n")
        for one in candidates[options.part :: options.parts]:
            rows = rows_in(options.folder)
            if one.key in rows:
                continue
            if time.time() > options.until:
                return
            file.write(json.dumps({"begun": one.key}) + "\n")
            row = measured(source, one, options.folder, _best(rows), TIMED)
            gc.collect()
            held = 0
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                held = torch.cuda.memory_allocated()
            file.write(json.dumps({**row, "held_bytes": held}) + "\n")
            told = row.get("failed") or f"{row['whole_seconds']:.4g} s{', behind' if row['is_behind'] else ''}"
            print(f"{len(rows) + 1}/{len(candidates)} {one.key or 'the run as it is'}: {told}", flush=True)
            if held > MOST_HELD:  # a fresh process has all of the memory
                os.execv(sys.executable, [sys.executable, "-m", "benchmarks.tune_sweep", *sys.argv[1:]])


def confirm(
    source: CandidateSource, candidates: list[TrialCandidate], folder: Path, tuned: str
) -> list[dict[str, Any]]:
    """Measure the best configurations, that of the search and the run as it is once more, in turn, to their end."""
    rows = rows_in(folder)
    best = sorted((row for row in rows.values() if "whole_seconds" in row), key=lambda row: float(row["whole_seconds"]))
    keys = list(dict.fromkeys([tuned, *(row["change"] for row in best[:CONFIRMED]), ""]))
    chosen = {one.key: one for one in candidates if one.key in keys}
    found = []
    for number in range(ROUNDS):
        for key in keys:
            row = measured(source, chosen[key], folder, math.inf, TIMED)
            gc.collect()
            found.append({**row, "round": number})
            print(f"again: {key or 'the run as it is'}: {row.get('whole_seconds')}", flush=True)
    return found


def summary(rows: list[dict[str, Any]], again: list[dict[str, Any]], tuned: str) -> dict[str, Any]:
    """The configuration of the search beside the best of the sweep, as measured in turn where that was done."""
    seconds: dict[str, list[float]] = {}
    for row in again or rows:
        if "whole_seconds" in row:
            seconds.setdefault(row["change"], []).append(row["whole_seconds"])
    mean = {key: statistics.fmean(ones) for key, ones in seconds.items()}
    best = min(mean, key=lambda key: mean[key], default="")
    return {
        "configurations": len(rows),
        "failed": sum("failed" in row for row in rows),
        "ended_early": sum(row.get("is_behind", False) for row in rows),
        "best": best,
        "best_seconds": mean.get(best),
        "tuned": tuned,
        "tuned_seconds": mean.get(tuned),
        "tuned_over_best": mean[tuned] / mean[best] if tuned in mean else None,
        "as_it_is_over_best": mean[""] / mean[best] if "" in mean else None,
    }


def main() -> None:
    """Measure a part, and write what all parts have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    parser.add_argument("--case", choices=[*CASES], required=True)
    parser.add_argument("--folder", type=Path, required=True, help="rows of all parts, and runs")
    parser.add_argument("--on", default="H200", help="chip")
    parser.add_argument("--most", type=int, default=64, help="configurations, the best by projection")
    parser.add_argument("--part", type=int, default=0, help="number of this part, from 0")
    parser.add_argument("--parts", type=int, default=1, help="into how many the configurations are divided")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970 after which none is begun")
    parser.add_argument("--tuned", type=Path, help="file of tune_gpu, whose best joins the configurations")
    parser.add_argument("--confirm", action="store_true", help="measure only the best ones, once more and in turn")
    options = parser.parse_args()
    source = source_of(options.case, options.on)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_whole(options.folder / "reference.toml", dump_toml(source.run))
    candidates = candidates_of(source)[: options.most]
    tuned = ""
    if options.tuned is not None:
        leader = json.loads(options.tuned.read_text(encoding="utf-8"))["numbers"][options.case]["tune"]["leader"]
        one = source.candidate(with_overrides(source.run, leader), "tuned")
        tuned = one.key
        candidates[1:1] = [] if tuned in {other.key for other in candidates} else [one]
    environment = read_environment()
    device = choose_device(source.run.device, environment)
    prepare_environment(facts_of_run(source.run, facts_of_machine(environment)))
    if source.run.host.numa:
        bind_near(device, environment)
    again = confirm(source, candidates, options.folder, tuned) if options.confirm else []
    if not options.confirm:
        sweep(source, candidates, options)
    rows = [*rows_in(options.folder).values()]
    numbers = {"summary": summary(rows, again, tuned), "space": len(candidates), "rows": rows, "again": again}
    print(numbers["summary"], flush=True)
    record.write(options, {options.case: numbers}, chip=options.on)


if __name__ == "__main__":
    main()
