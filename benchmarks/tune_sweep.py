"""An exhaustive sweep of the space of `penstock tune` on one GPU, of which a case needs some minutes.

    python -m benchmarks.tune_sweep --case short-rows --folder sweep              every configuration
    python -m benchmarks.tune_sweep --case short-rows --folder sweep --worker 1   beside it, on a second GPU
    python -m benchmarks.tune_sweep --case short-rows --folder sweep --confirm    the best in turn, and the run as it is

The space has every combination of micro-batch, recomputation, graphs, host waits and overlap that is legal and fits the
memory by projection. All configurations run in one process, with the training loop of `penstock train`: a
start costs seconds, not the imports. A configuration is ended, and noted so, as soon as all its steps after the first
take `BEHIND` times the best one's; the best by projection come first, so that most are ended after few steps.

The folder keeps a line for each configuration, and a lock while it is measured, so that several workers share a case.
A call that goes on with the folder measures what is missing; a configuration that took the process down, or hung, is a
failure. `--known` takes what a result has of another machine of the same kind. `--until` ends a call in time. `--rows`
shortens the steps further, where those of the search are short ones.
"""

import argparse
import faulthandler
import fcntl
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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.tune_gpu import BUDGET_MINUTES, CASES, FREE, MOST_TRIALS, PLAIN, STEPS
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
from penstock.train.step import StopRequest
from penstock.tune.belief import ShortStep, TrialCandidate
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
        'graphs.capture="partial" dispatch.sync_free=2',
        'graphs.capture="full" dispatch.sync_free=2',
    ),
    ('dispatch.overlap="none"', 'dispatch.overlap="shared"'),
)
"""Choices of a configuration, one of each line."""

BEHIND = 1.03
"""A configuration is ended after three steps if those after the first all take so many times the best one's."""

WARM_UP, TIMED = 2, 3
"""First steps, which compile and capture, and those that are timed."""

UNFINISHED = 3
"""Exit code of a sweep in which other workers measure the rest, or whose time was over."""

CONFIRMED, ROUNDS = 3, 2
"""Best configurations that are measured once more, in turn, and how often."""

PLAIN_MICRO_BATCH = ("training.micro_batch=4",)
"""Of the second run with torch's kernels; the first has that of the preset."""

MOST_HELD = 8e9
"""Bytes on the device after a configuration has ended, with which the process starts anew."""

MOST_SECONDS, MOST_FIRST = 60.0, 150.0
"""Time in which a configuration ends, or the process does: of the others, and of the first one, which compiles."""


class _Watch(Observer):
    """Keeps the step times, and asks for the end when they are enough; `best` seconds are those to beat."""

    def __init__(self, stop: StopRequest, best: float) -> None:
        self._stop, self._best = stop, best
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        self.is_behind = False

    def stepped(self, report: StepReport) -> None:
        """Called after each step."""
        self.seconds.append(report.step_seconds)
        self.losses.append(report.loss)
        self.peak = max(self.peak, report.peak_memory_bytes)
        self.is_behind = len(self.seconds) > WARM_UP and min(self.seconds[1:]) > BEHIND * self._best
        if self.is_behind:
            self._stop.signal = signal.SIGTERM  # as if it had come


def source_of(case: str, chip: str, rows: int = 0) -> CandidateSource:
    """What `penstock tune` takes its candidates from, with steps as short as those of its search, or of `rows`."""
    words = CASES[case]
    source = CandidateSource(
        run=load_run(words[0], words[1:]), cluster=cluster_of(1, load_hardware(chip)), fixed={}, free=FREE.get(case, ())
    )
    source.fit()
    source.shorten(STEPS, BUDGET_MINUTES * 60.0, MOST_TRIALS)
    source.rows = min(rows, source.rows) or source.rows
    return source


def candidates_of(source: CandidateSource, folder: Path) -> list[TrialCandidate]:
    """All legal combinations that fit the memory, the best by projection first; from the folder if it has them."""
    path = folder / f"candidates-{source.rows}.json"
    if path.exists():
        return [_candidate(one) for one in json.loads(path.read_text(encoding="utf-8"))]
    first = source.reference()
    found = {first.key: first}
    for choices in itertools.product(*SPACE):
        for one in source.changed(source.run, " ".join(choices), "sweep"):
            found.setdefault(one.key, one)
    fits = [one for one in found.values() if one.memory_bytes < source.cluster.hardware.usable_bytes]
    fits.sort(key=lambda one: one.projected)
    write_whole(path, json.dumps([asdict(one) for one in fits]) + "\n")
    return fits


def _candidate(table: dict[str, Any]) -> TrialCandidate:
    """From `asdict`."""
    short = None if table["short"] is None else ShortStep(**table["short"])
    return TrialCandidate(**{**table, "overrides": tuple(table["overrides"]), "short": short})


def chosen_of(candidates: list[TrialCandidate], most: int, tuned: TrialCandidate) -> list[TrialCandidate]:
    """The best by projection, with the run as it is; and that of the search."""
    kept = candidates[:most]
    kept += [one for one in candidates[most:] if not one.key]
    return kept if tuned.key in {one.key for one in kept} else [tuned, *kept]


def measured(source: CandidateSource, one: TrialCandidate, folder: Path, best: float) -> dict[str, Any]:
    """Train a configuration in this process until its step time is known, or is surely no `best` seconds."""
    words = [*first_steps(source.run, WARM_UP + TIMED), *one.overrides]
    words += [] if one.short is None else [f"training.global_batch={one.short.rows}"]
    run = load_run(f"{folder / 'reference.toml'}", [*words, f"record.folder={folder / 'runs'}"])
    begin = time.perf_counter()
    row: dict[str, Any] = {
        "change": one.key,
        "overrides": one.overrides,
        "projected": one.projected,
        "rows": run.training.global_batch,
        "stretch": one.stretch,
    }
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        session = prepare(run, read_environment())
        named, there = create_run_folder(run, number_if_taken=True)
        stop = StopRequest()
        watch = _Watch(stop, best / one.stretch)
        row["start_seconds"] = time.perf_counter() - begin
        train_run(session, there, open_store(named, there), Progress(), [watch], stop)
    except torch.OutOfMemoryError as error:
        return {**row, "failed": f"out of memory: {error}".partition(". ")[0]}
    except PenstockError as error:
        return {**row, "failed": f"{error}"}
    shutil.rmtree(there.path)
    step = min(watch.seconds[1:]) if watch.is_behind else statistics.median(watch.seconds[WARM_UP:])
    return {
        **row,
        "step_seconds": watch.seconds,
        "losses": watch.losses,
        "peak_memory_bytes": watch.peak,
        "is_behind": watch.is_behind,
        "measured_seconds": step,
        "whole_seconds": one.stretch * step,
        "seconds": time.perf_counter() - begin,
    }


def _freed(source: CandidateSource, one: TrialCandidate, folder: Path, best: float, most: float) -> dict[str, Any]:
    """Measure a configuration and free what it held; the process ends if that takes more than `most` seconds."""
    faulthandler.dump_traceback_later(most, exit=True)
    row = measured(source, one, folder, best)
    gc.collect()
    held = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
    faulthandler.cancel_dump_traceback_later()
    return {**row, "held_bytes": held}


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of all parts by configuration."""
    rows = (json.loads(line) for path in sorted(folder.glob("rows-*.jsonl")) for line in _lines(path))
    return {row["change"]: row for row in rows if "begun" not in row}


def _lines(path: Path) -> Iterator[str]:
    """Whole lines of a file, which another process may be writing."""
    yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))


def _best(rows: dict[str, dict[str, Any]]) -> float:
    """Of this machine, because another one of its kind may be faster by more than `BEHIND` forgives."""
    here = (row for row in rows.values() if "whole_seconds" in row and not row.get("is_known"))
    return min((row["whole_seconds"] for row in here), default=math.inf)


@contextmanager
def claimed(folder: Path, key: str) -> Iterator[bool]:
    """Whether this worker may measure a configuration, which no other one is measuring or has measured."""
    with (folder / f"lock-{zlib.crc32(key.encode()):08x}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed, or the process has ended
        except BlockingIOError:
            yield False
        else:
            yield key not in rows_in(folder)


def sweep(source: CandidateSource, candidates: list[TrialCandidate], options: argparse.Namespace) -> None:
    """Measure the configurations that the folder lacks and no other worker has begun, until the time is over."""
    path = options.folder / f"rows-{options.worker}.jsonl"
    path.touch()
    begun = [row["begun"] for row in map(json.loads, _lines(path)) if "begun" in row]
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for key in set(begun) - set(rows_in(options.folder)):
            file.write(json.dumps({"change": key, "failed": "the process ended with it"}) + "\n")
        most = MOST_FIRST
        for one in candidates:
            if time.time() > options.until:
                return
            with claimed(options.folder, one.key) as is_ours:
                if is_ours:
                    file.write(json.dumps({"begun": one.key}) + "\n")
                    row = _freed(source, one, options.folder, _best(rows_in(options.folder)), most)
                    most = MOST_SECONDS
                    file.write(json.dumps(row) + "\n")
            if is_ours:
                told = row.get("failed") or f"{row['whole_seconds']:.4g} s{', behind' if row['is_behind'] else ''}"
                print(f"{one.key or 'the run as it is'}: {told}", flush=True)
                if row["held_bytes"] > MOST_HELD:  # a fresh process has all of the memory
                    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.tune_sweep", *sys.argv[1:]])


def _plain(source: CandidateSource) -> list[TrialCandidate]:
    """The run with torch's kernels; nothing where they cannot run."""
    try:
        return [
            source.candidate(with_overrides(source.run, (*PLAIN, *more)), "plain") for more in ((), PLAIN_MICRO_BATCH)
        ]
    except PenstockError:
        return []


def confirm(
    source: CandidateSource, candidates: list[TrialCandidate], options: argparse.Namespace, tuned: TrialCandidate
) -> Iterator[dict[str, Any]]:
    """Measure that of the search, the best and the run as it is again, in turn, and once the run with torch's kernels.

    All of them make all of their steps.
    """
    overrides = {one.key: one.overrides for one in candidates}
    ran = [row for key, row in rows_in(options.folder).items() if "whole_seconds" in row and key in overrides]
    best = sorted(ran, key=lambda row: float(row["whole_seconds"]))[:CONFIRMED]
    words = [tuned.overrides, *(overrides[row["change"]] for row in best), ()]
    turn = {one.key: one for one in (source.candidate(with_overrides(source.run, each), "again") for each in words)}
    plain = _plain(source)
    longest = 0.0
    for number, one in enumerate([*turn.values(), *plain, *(ROUNDS - 1) * [*turn.values()]]):
        begin = time.time()
        if begin + longest > options.until:
            return
        row = _freed(source, one, options.folder, math.inf, MOST_FIRST)
        longest = max(longest, time.time() - begin) if number else 0.0  # the first one compiles
        print(f"again: {one.key or 'the run as it is'}: {row.get('failed') or row['whole_seconds']}", flush=True)
        yield {**row, "is_plain": one in plain}


def summary(rows: list[dict[str, Any]], again: list[dict[str, Any]], tuned: str) -> dict[str, Any]:
    """The configuration of the search beside the best of the sweep, as measured in turn where that was done."""
    seconds: dict[str, list[float]] = {}
    for row in again or rows:
        if "whole_seconds" in row and not row.get("is_plain"):
            seconds.setdefault(row["change"], []).append(row["whole_seconds"])
    mean = {key: statistics.fmean(ones) for key, ones in seconds.items()}
    best = min(mean, key=lambda key: mean[key], default="")
    plain = [row["whole_seconds"] for row in again if row.get("is_plain") and "whole_seconds" in row]
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
        "plain_over_tuned": min(plain) / mean[tuned] if plain and tuned in mean else None,
    }


def main() -> None:
    """Measure a part, and write what all parts have."""
    options = record.parser(
        __doc__,
        case=("deepseek", f"of {', '.join(CASES)}"),
        folder=(Path("sweep"), "rows of all parts, and runs"),
        on=("H200", "chip"),
        most=(64, "configurations, the best by projection"),
        rows=(0, "of a step, where those of the search are short ones"),
        known=(Path, "result whose configurations of this case are not measured again"),
        worker=(0, "number of this process among those that share the case"),
        until=(math.inf, "seconds since 1970 after which none is begun"),
        tuned=(Path, "file of tune_gpu, whose best joins the configurations"),
        confirm=(False, "measure only the best ones, once more and in turn"),
    ).parse_args()
    source = source_of(options.case, options.on, options.rows)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_whole(options.folder / "reference.toml", dump_toml(source.run))
    if options.known is not None:
        known = record.numbers_in(options.known).get(options.case, {"rows": []})["rows"]
        lines = (json.dumps({**row, "is_known": True}) for row in known)
        write_whole(options.folder / "rows-known.jsonl", "".join(f"{line}\n" for line in lines))
    leader = None
    if options.tuned is not None:
        leader = record.numbers_in(options.tuned)[options.case]["tune"].get("leader")
    tuned = source.candidate(with_overrides(source.run, leader or ()), "tuned")
    candidates = candidates_of(source, options.folder)
    chosen = chosen_of(candidates, options.most, tuned)
    environment = read_environment()
    device = choose_device(source.run.device, environment)
    prepare_environment(facts_of_run(source.run, facts_of_machine(environment)))
    if source.run.host.numa:
        bind_near(device, environment)

    def write(again: list[dict[str, Any]]) -> None:
        rows = [*rows_in(options.folder).values()]
        found = summary(rows, again, tuned.key)
        numbers = {"summary": found, "legal": len(candidates), "asked": len(chosen), "rows": rows, "again": again}
        record.write(options, {options.case: numbers}, chip=options.on)

    if options.confirm:
        again = list[dict[str, Any]]()
        for row in confirm(source, [tuned, *candidates], options, tuned):
            again.append(row)
            write(again)
    else:
        sweep(source, chosen, options)
        write([])
    done = rows_in(options.folder).keys() >= {one.key for one in chosen}
    print(f"{options.case}: {'all' if done else 'a part'} of {len(chosen)} configurations", flush=True)
    sys.exit(0 if done else UNFINISHED)


if __name__ == "__main__":
    main()
