"""Steps of data-parallel ranks with `parallel.overlap` false and true, in turn on the GPUs of one node.

    python -m benchmarks.data_overlap --output benchmarks/results/data-overlap-h200x2.json
    python -m benchmarks.data_overlap --tiny --output /tmp/overlap.json      # a small model on CPU ranks: that it runs

For each model, in parts that a file keeps, so that a call that was ended goes on behind them:

    same       steps with deterministic kernels: losses and gradient norms must be the same bits
    off, on    steps in turn, `--rounds` times: medians after warm-up, of all rounds
    traced     a few recorded steps of both: milliseconds of a step in which the device does nothing but sum gradients,
               or gather weights, copies into and out of messages included, on the rank with most

A recorded stretch begins with a step's first sum and ends with that of a later step, so that it has as many gathers as
passes that they run beside.
"""

import argparse
import shutil
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, runs
from penstock.base.spans import Span
from penstock.trace.events import Trace
from penstock.trace.intervals import union
from penstock.trace.load import load_ranks
from penstock.trace.tree import SPANS, place

Row = dict[str, Any]

MODELS: Mapping[str, tuple[str, ...]] = {
    "deepseek-v2-lite-8l": ("training.micro_batch=4", "training.global_batch=16"),
    "llama3.1-8b-24l": ("training.micro_batch=2", "training.global_batch=8"),
}
SIZES = ("training.sequence_length=4096", "optimizer.learning_rate=1e-5", "schedule.warmup_steps=5")
TINY: Mapping[str, tuple[str, ...]] = {
    "debug": ("training.micro_batch=1", "training.global_batch=4", "model.layers=4", "device=cpu")
}
WAYS = ("off", "on")
RECORDED = 4  # steps, of which the first has passes without gathers beside them


def overrides(options: argparse.Namespace, model: str, way: str, *more: str) -> list[str]:
    is_on = "true" if way == "on" else "false"
    sizes = TINY[model] if options.tiny else (*MODELS[model], *SIZES)
    return [*sizes, *runs.QUIET, "record.tensorboard=false", f"parallel.overlap={is_on}", *options.also, *more]


def trained(options: argparse.Namespace, model: str, way: str, name: str, *more: str) -> list[Row]:
    run = f"{model}-{way}-{name}".replace(".", "-")
    shutil.rmtree(options.folder / run, ignore_errors=True)
    given = overrides(options, model, way, *more)
    return runs.trained(model, given, options.folder.absolute(), run, processes=options.ranks, timeout=options.limit)


def same(options: argparse.Namespace, model: str) -> Row:
    """Whether both ways give the same bits."""
    figures = {}
    for way in WAYS:
        lines = trained(options, model, way, "same", "training.steps=6", "training.deterministic=true")
        figures[way] = [(line["loss"], line["gradient_norm"]) for line in lines]
    return {"is_same": figures["off"] == figures["on"], **{f"losses_{way}": figures[way] for way in WAYS}}


def timed(options: argparse.Namespace, model: str) -> Row:
    lines: dict[str, list[Row]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            steps = trained(options, model, way, f"timed-{number}", f"training.steps={options.steps}")
            lines[way] += steps[options.warm_up :]
    return {way: figures(lines[way]) for way in WAYS} | {"on_over_off": _ratio(lines)}


def _ratio(lines: Mapping[str, list[Row]]) -> float:
    off, on = (statistics.median(line["step_seconds"] for line in lines[way]) for way in WAYS)
    return on / off


def figures(lines: list[Row]) -> Row:
    seconds = [line["step_seconds"] for line in lines]
    phases = sorted({phase for line in lines for phase in line["phase_seconds"]})
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_lowest": min(seconds),
        "step_seconds_highest": max(seconds),
        "phase_seconds": {
            phase: statistics.median(line["phase_seconds"].get(phase, 0.0) for line in lines) for phase in phases
        },
        "peak_memory_gib": max(line["peak_memory_bytes"] for line in lines) / 2**30,
        "loss": lines[-1]["loss"],
    }


def traced(options: argparse.Namespace, model: str) -> Row:
    row: Row = {}
    begin = options.warm_up + 1
    for way in WAYS:
        more = (f"profile.start={begin}", f"profile.steps={RECORDED}", "profile.memory=false")
        lines = trained(options, model, way, "traced", f"training.steps={begin + RECORDED}", *more)
        folder = options.folder / f"{model}-{way}-traced".replace(".", "-")
        row[way] = {"step_seconds": [line["step_seconds"] for line in lines]}
        row[way] |= {} if options.tiny else fullest([exposed(trace) for trace in load_ranks(folder).values()])
    if not options.tiny:
        both = {way: row[way]["exposed_ms"]["reduce"] + row[way]["exposed_ms"]["gather"] for way in WAYS}
        row["exposed_on_over_off"] = both["on"] / both["off"]
    return row


def exposed(trace: Trace) -> Row:
    """Milliseconds of a step in which the device sums or gathers, and of these those without anything else."""
    span, gpu = place(trace).span, trace.gpu
    rows = {name: span == SPANS.index(name) for name in (Span.REDUCE, Span.GATHER)}
    begins = _begins(gpu.start_us[rows[Span.REDUCE]], gpu.start_us[rows[Span.GATHER]])
    rest = ~(rows[Span.REDUCE] | rows[Span.GATHER])
    work = union(gpu.start_us[rest], gpu.end_us[rest])
    steps = len(begins) - 1
    times: Row = {"exposed_ms": {}, "busy_ms": {}, "period_ms": (begins[-1] - begins[0]) / steps / 1e3}
    for name, mask in rows.items():
        busy = union(gpu.start_us[mask], gpu.end_us[mask]).within(begins[0], begins[-1])
        times["busy_ms"][name.value] = busy.length_us / steps / 1e3
        times["exposed_ms"][name.value] = (busy - work).length_us / steps / 1e3
    return times


def _begins(sums_us: np.ndarray, gathers_us: np.ndarray) -> list[float]:
    """When each step starts to sum: the first sum behind each gather that a sum follows, and the first of all."""
    sums_us, gathers_us = np.sort(sums_us), np.sort(gathers_us)
    number = np.searchsorted(gathers_us, sums_us)  # gathers before each sum
    return [float(sums_us[number == before].min()) for before in np.unique(number)]


def fullest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: sum(row["exposed_ms"].values()))


def planned(options: argparse.Namespace, model: str) -> Row:
    """Projected step and exposed exchanges of both ways."""
    row: Row = {}
    words = ("--on", f"{options.ranks}xH200", "--layout", "own", "--imbalance", "1")
    for way in WAYS:
        layout = runs.planned(model, *words, *overrides(options, model, way))
        row[way] = {"step_seconds": layout["step_seconds"], "terms": layout.get("terms")}
    return row


def main() -> None:
    parser = record.parser(
        __doc__,
        tiny=False,
        ranks=2,
        rounds=(2, "times that both ways are timed"),
        steps=(20, "of a timed run"),
        warm_up=(6, "steps that do not count"),
        limit=(300.0, "seconds of a run"),
        folder=(Path("runs"), "of runs"),
        models=([str], "those that are measured; without it, all"),
        also=([str], "overrides laid over every run"),
    )
    options = parser.parse_args()
    numbers = record.numbers_in(options.output)
    for model in options.models or (TINY if options.tiny else MODELS):
        numbers.setdefault(model, {})
        parts = {"same": same, "timed": timed, "traced": traced} | ({} if options.tiny else {"planned": planned})
        for name, part in parts.items():
            if name not in numbers[model]:
                numbers[model][name] = partial(part, options, model)()
                record.show({"model": model, "part": name, **numbers[model][name]})
                record.write(options, numbers)


if __name__ == "__main__":
    main()
