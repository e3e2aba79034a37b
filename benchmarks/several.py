"""DeepSeek-V2-Lite on the GPUs of one node with and without balanced dispatch, in parts that can be resumed.

    python -m benchmarks.several --output benchmarks/results/several-h200x4.json --seconds 540
    python -m benchmarks.several --tiny --output several.json       # a small model on CPU ranks: that all parts run

Each call does the parts that the file does not have yet, the most valuable first, and begins none that may not end in
time; each part is processes of its own. Call it again until it says that nothing is left.

    step bf16      training steps on real text, expert parallelism over all GPUs, forward and backward captured:
                   natural routing without balance, with `dispatch.balance` bounded (to 5 % and to 2 %), and forced
                   balance as the limit
    step shared    the same with shared experts computed while tokens travel
    layer          the workloads W0 to W9 of one MoE layer (benchmarks/balanced_layer.py)
    step 8 bits    as step bf16 with 8-bit products and rows
    trace          a step of bounded recorded on all ranks: the doctor's words on it
    exact          step bf16 with `dispatch.balance` exact
    layer V3       the layer at the width of DeepSeek-V3
    plan           what `penstock plan` projects for each step that was measured

A step's figures are medians over the steps after warm-up. Imbalance is that of metrics.jsonl: the rows of the fullest
rank of each layer and micro-batch over its even share, where a plan of replicas measures it.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, runs

CAPTURED = ("dispatch.method=symmetric", "dispatch.sync_free=2", "graphs.capture=full")
EIGHT_BITS = (
    *("float8.dense=blockwise-square", "float8.experts=blockwise-square", "float8.dispatch=blockwise"),
    *("dispatch.overlap=shared", "dispatch.engines=true"),
)
WAYS: Mapping[str, tuple[str, ...]] = {
    "none": ("dispatch.row_capacity_factor=1.5", "dispatch.layer_capacity_factor=3"),
    "bounded": ("dispatch.balance=bounded",),
    "tight": ("dispatch.balance=bounded", "dispatch.balance_tolerance=0.02"),
    "forced": ("model.moe.balance.force_load_balance=true", "dispatch.row_capacity_factor=1.05"),
    "exact": ("dispatch.balance=exact",),
}
SMALL_MEMORY = 100e9
"""Bytes of a GPU below which the model has fewer layers: 16-bit weights, masters, moments and sums are 18 B each."""

Row = dict[str, Any]
Part = tuple[float, Callable[[], Row]]
"""Most seconds, and what is run."""


@dataclass(frozen=True)
class Bench:
    """What all parts share: options, and the rows of parts that are done."""

    options: argparse.Namespace
    numbers: Row

    @property
    def preset(self) -> str:
        return "debug" if self.options.tiny else "deepseek-v2-lite"

    def common(self) -> list[str]:
        """Overrides of every step; fewer layers and rows where a GPU cannot hold its part of the whole model."""
        ranks, tokenizer = self.options.ranks, self.options.tokenizer
        if self.options.tiny:
            model = ["model.moe.experts=16", "model.layers=3", "training.micro_batch=1", "device=cpu"]
        else:
            model = [*CAPTURED, "training.micro_batch=4", "optimizer.learning_rate=1.05e-6"]
            if torch.cuda.get_device_properties(0).total_memory <= SMALL_MEMORY:
                model += [f"model.layers={6 * ranks // 2}", "training.micro_batch=2"]
        return [
            *(f"parallel.expert={ranks}", f"training.global_batch={ranks * (2 if self.options.tiny else 32)}"),
            *("schedule.decay=constant", "schedule.warmup_steps=5", "schedule.decay_steps=0", *runs.QUIET),
            *("record.tensorboard=false", "record.every=1", f"training.steps={self.options.steps}"),
            *([] if tokenizer is None else [f"data.tokenizer={tokenizer.absolute()}"]),
            *model,
        ]

    def step(self, name: str, *overrides: str) -> Row:
        """Train in processes of their own and read the run's metrics."""
        options, folder = self.options, self.options.folder.absolute()
        given, run = [*self.common(), *overrides, *options.also], name.replace(" ", "-").replace(",", "")
        shutil.rmtree(folder / run, ignore_errors=True)  # of a call that was ended
        how = {"processes": options.ranks, "timeout": options.step_limit}
        try:
            lines = runs.trained(self.preset, given, folder, run, **how)
        except subprocess.TimeoutExpired:  # freeing much pinned memory takes minutes, after the last step
            if (
                not (folder / run / "metrics.jsonl").exists()
                or len(lines := runs.lines_of(folder / run)) < options.steps
            ):
                raise
        return {"overrides": given, "run": run, **figures(lines, lines[options.warm_up :])}

    def layer(self, *more: str) -> Row:
        """`benchmarks.balanced_layer` on all ranks."""
        output = self.options.folder.absolute() / "layer.json"
        words = [*(["--tiny"] if self.options.tiny else []), *more, "--output", str(output), "--commit", "-"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.options.ranks)]
        subprocess.run([*launch, "-m", "benchmarks.balanced_layer", *words], check=True, timeout=240)
        rows: list[Row] = record.numbers_in(output)["layers"]
        return {"rows": rows, **recovered(rows)}

    def trace(self) -> Row:
        """A recorded step, and what the doctor says of it."""
        row = self.step("traced", *WAYS["bounded"], "profile.start=3", "profile.steps=1", "profile.ranks=[]")
        said = runs.penstock("doctor", self.options.folder / "traced", check=False, stderr=subprocess.STDOUT)
        return {**row, "doctor": said[-8000:]}

    def plan(self) -> Row:
        """Projected seconds of each measured step."""
        device, ranks = torch.cuda.get_device_name().split()[1], self.options.ranks
        projected: Row = {}
        for name, row in self.numbers.items():
            if name.startswith("step"):
                imbalance = row["balance_load_after"] or row["expert_rank_load_max_over_mean"] or 1.0
                given = [override for override in row["overrides"] if not override.startswith("data.tokenizer")]
                words = ("--on", f"{ranks}x{device}", "--layout", "own", "--imbalance", f"{imbalance}", *given)
                layout = runs.planned(self.preset, *words)
                projected[name] = {key: layout[key] for key in ("step_seconds", "tokens_per_second_per_device")}
                projected[name]["memory_bytes"] = layout["memory"]["total"]
        return {"projected": projected}

    def parts(self) -> dict[str, Part]:
        """By name, the most valuable first."""

        def step(name: str, *overrides: str) -> Part:
            return self.options.step_limit, partial(self.step, name, *overrides)

        ways = ("none", "bounded", "tight", "forced")
        parts = {f"step bf16, {way}": step(f"bf16 {way}", *WAYS[way]) for way in ways}
        if self.options.tiny:
            return parts | {"layer": (240.0, self.layer), "step bf16, exact": step("bf16 exact", *WAYS["exact"])}
        for way in ways[:0:-1]:
            parts[f"step shared, {way}"] = step(f"shared {way}", "dispatch.overlap=shared", *WAYS[way])
        parts["layer"] = 240.0, self.layer
        parts |= {f"step 8 bits, {way}": step(f"eight {way}", *EIGHT_BITS, *WAYS[way]) for way in ways}
        parts["trace"] = 200.0, self.trace
        parts["step bf16, exact"] = step("bf16 exact", *WAYS["exact"])
        return parts | {"layer V3": (240.0, partial(self.layer, "--v3")), "plan": (120.0, self.plan)}


def figures(lines: list[Row], timed: list[Row]) -> Row:
    """Medians of the timed lines."""
    row: Row = {"losses": [line["loss"] for line in lines]}
    for name in (
        *("tokens_per_second_per_device", "step_seconds", "model_flops_utilization", "expert_rank_load_max_over_mean"),
        *("balance_load_before", "balance_load_after", "balance_replicas"),
    ):
        values = [line[name] for line in timed if line[name] is not None]
        row[name] = statistics.median(values) if values else None
    row["peak_memory_bytes"] = max(line["peak_memory_bytes"] for line in lines)
    row["repeated_steps"] = sum(line["rows_left_out"] > 0 for line in lines)
    row["balance_slots_needed"] = max(line["balance_slots_needed"] for line in lines)
    kept = ("layer", "max_over_mean", "balance_load_before", "balance_load_after")
    return row | {"layers": [{key: layer[key] for key in kept} for layer in timed[-1]["layers"]]}


def recovered(rows: list[Row]) -> Row:
    """Share of the lost time that each way gets back, with W0 without balance as the limit."""
    times = {(row["workload"], row["way"]): row["ms"] for row in rows}
    limit = times["W0", "none"]
    shares = {
        f"{workload}, {way}": (times[workload, "none"] - ms) / (times[workload, "none"] - limit)
        for (workload, way), ms in times.items()
        if way != "none" and times[workload, "none"] > 1.02 * limit
    }
    costs = {f"{name}, {way}": ms / times[name, "none"] for (name, way), ms in times.items() if name in ("W0", "W3")}
    return {"recovered_share": shares, "over_none": {name: cost for name, cost in costs.items() if "none" not in name}}


def main() -> None:
    parser = record.parser(
        __doc__,
        seconds=(540.0, "of this call"),
        only=("", "parts whose name contains this"),
        ranks=torch.cuda.device_count() or 2,
        steps=7,
        warm_up=(3, "first steps that are not timed: the second captures"),
        step_limit=(130.0, "most seconds of a run of steps"),
        folder=(Path("runs/several"), "of the runs"),
        tokenizer=(Path, "tokenizer.json; bytes without it"),
        tiny=(False, "a small model on CPU ranks"),
    )
    parser.add_argument("also", nargs="*", help="overrides of every step, e.g. kernels.attention=flash-4")
    options, begin = parser.parse_args(), time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    numbers = record.numbers_in(options.output)
    parts = Bench(options, numbers).parts()
    left = [name for name in parts if name not in numbers and options.only in name]
    for name in list(left):
        limit, run = parts[name]
        started = time.monotonic()
        if started - begin + limit > options.seconds:
            continue
        try:
            numbers[name] = run()
        except (subprocess.SubprocessError, OSError, KeyError) as error:
            print(f"{name}: {str(error)[-300:]}", flush=True)
            continue
        left.remove(name)
        numbers[name] |= {"seconds": time.monotonic() - started}
        record.show({"part": name, **numbers[name]})
        steps = {"steps": options.steps, "warm_up_steps": options.warm_up}
        record.write(options, numbers, ranks=options.ranks, **steps)
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
