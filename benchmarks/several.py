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
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

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


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all parts share."""

    ranks: int
    folder: Path
    tokenizer: Path | None
    tiny: bool
    steps: int
    warm_up: int
    step_limit: float
    also: tuple[str, ...]

    @property
    def common(self) -> tuple[str, ...]:
        """Overrides of every step."""
        if self.tiny:
            model = ("model.moe.experts=16", "model.layers=3", "training.micro_batch=1", "device=cpu")
        else:
            model = ("training.micro_batch=4", "optimizer.learning_rate=1.05e-6", *self._fitting())
        batch = self.ranks * (2 if self.tiny else 32)
        text = () if self.tokenizer is None else (f"data.tokenizer={self.tokenizer}",)
        return (
            *(f"parallel.expert={self.ranks}", f"training.global_batch={batch}", "schedule.decay=constant"),
            *("schedule.warmup_steps=5", "schedule.decay_steps=0", "checkpoint.enabled=false", "evaluation.rows=0"),
            *("record.tensorboard=false", "record.every=1", f"record.folder={self.folder}", *text, *model),
        )

    def _fitting(self) -> tuple[str, ...]:
        """Fewer layers and rows where a GPU cannot hold its part of the whole model."""
        if torch.cuda.get_device_properties(0).total_memory > SMALL_MEMORY:
            return ()
        return (f"model.layers={6 * self.ranks // 2}", "training.micro_batch=2")

    @property
    def preset(self) -> str:
        return "debug" if self.tiny else "deepseek-v2-lite"

    def step(self, name: str, overrides: tuple[str, ...], limit: float) -> dict[str, Any]:
        """Train in processes of their own and read the run's metrics."""
        chosen = (*self.common, *(() if self.tiny else CAPTURED), *overrides, *self.also)
        chosen = (*chosen, f"training.steps={self.steps}")
        folder = name.replace(" ", "-").replace(",", "")
        shutil.rmtree(self.folder / folder, ignore_errors=True)  # of a call that was ended
        command = [sys.executable, "-m", "penstock", "train", self.preset, *chosen]
        metrics = self.folder / folder / "metrics.jsonl"
        try:
            subprocess.run([*command, "--name", folder, "--processes", str(self.ranks)], check=True, timeout=limit)
        except subprocess.TimeoutExpired:  # freeing much pinned memory takes minutes, after the last step
            if not metrics.exists() or len(metrics.read_text().splitlines()) < self.steps:
                raise
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return {"overrides": chosen, "run": folder, **figures(lines, lines[self.warm_up :])}


def figures(lines: list[dict[str, Any]], timed: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the timed lines."""
    found: dict[str, Any] = {"losses": [line["loss"] for line in lines]}
    for name in (
        *("tokens_per_second_per_device", "step_seconds", "model_flops_utilization", "expert_rank_load_max_over_mean"),
        *("balance_load_before", "balance_load_after", "balance_replicas"),
    ):
        values = [line[name] for line in timed if line[name] is not None]
        found[name] = statistics.median(values) if values else None
    found["peak_memory_bytes"] = max(line["peak_memory_bytes"] for line in lines)
    found["repeated_steps"] = sum(line["rows_left_out"] > 0 for line in lines)
    found["balance_slots_needed"] = max(line["balance_slots_needed"] for line in lines)
    found["layers"] = [
        {key: layer[key] for key in ("layer", "max_over_mean", "balance_load_before", "balance_load_after")}
        for layer in timed[-1]["layers"]
    ]
    return found


def layer(bench: Bench, wide: bool, limit: float) -> dict[str, Any]:
    """`benchmarks.balanced_layer` on all ranks."""
    output = bench.folder / "layer.json"
    options = [*(["--tiny"] if bench.tiny else []), *(["--v3"] if wide else []), "--output", str(output)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(bench.ranks)]
    subprocess.run([*launch, "-m", "benchmarks.balanced_layer", *options, "--commit", "-"], check=True, timeout=limit)
    rows: list[dict[str, Any]] = json.loads(output.read_text())["numbers"]["layers"]
    return {"rows": rows, **recovered(rows)}


def recovered(rows: list[dict[str, Any]]) -> dict[str, Any]:
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


def trace(bench: Bench, limit: float) -> dict[str, Any]:
    """A recorded step, and what the doctor says of it."""
    recorded = ("profile.start=3", "profile.steps=1", "profile.ranks=[]")
    row = bench.step("traced", (*WAYS["bounded"], *recorded), limit)
    doctor = [sys.executable, "-m", "penstock", "doctor", str(bench.folder / "traced")]
    said = subprocess.run(doctor, capture_output=True, text=True, timeout=limit)
    return {**row, "doctor": said.stdout[-6000:], "errors": said.stderr[-2000:]}


def plan(bench: Bench, measured: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Projected seconds of each measured step."""
    if bench.tiny:
        return {"projected": {}}
    device = torch.cuda.get_device_name().split()[1]
    found: dict[str, Any] = {}
    for name, row in measured.items():
        if name.startswith("step"):
            imbalance = row["balance_load_after"] or row["expert_rank_load_max_over_mean"] or 1.0
            chosen = [one for one in row["overrides"] if not one.startswith(("record.", "data.tokenizer"))]
            command = [sys.executable, "-m", "penstock", "plan", bench.preset, "--on", f"{bench.ranks}x{device}"]
            command += ["--layout", "own", "--imbalance", f"{imbalance}", "--json", *chosen]
            said = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            if said.returncode != 0:
                found[name] = {"error": said.stderr[-500:]}
                continue
            (one,) = json.loads(said.stdout)["candidates"]
            taken = {key: one[key] for key in ("step_seconds", "tokens_per_second_per_device")}
            found[name] = {**taken, "memory_bytes": one["memory"]["total"]}
    return {"projected": found}


Part = tuple[float, Callable[[Mapping[str, Any], float], dict[str, Any]]]
"""Most seconds, and what is run."""


def parts(bench: Bench) -> dict[str, Part]:
    """By name, the most valuable first."""

    def step(name: str, *overrides: str) -> Part:
        return bench.step_limit, lambda done, limit: bench.step(name, overrides, limit)

    found: dict[str, Part] = {
        f"step bf16, {way}": step(f"bf16 {way}", *WAYS[way]) for way in ("none", "bounded", "tight", "forced")
    }
    if not bench.tiny:
        for way in ("tight", "bounded", "forced"):
            found[f"step shared, {way}"] = step(f"shared {way}", "dispatch.overlap=shared", *WAYS[way])
    found["layer"] = 240.0, lambda done, limit: layer(bench, False, limit)
    if not bench.tiny:
        for way in ("none", "bounded", "tight", "forced"):
            found[f"step 8 bits, {way}"] = step(f"eight {way}", *EIGHT_BITS, *WAYS[way])
        found["trace"] = 200.0, lambda done, limit: trace(bench, limit)
    found["step bf16, exact"] = step("bf16 exact", *WAYS["exact"])
    if not bench.tiny:
        found["layer V3"] = 240.0, lambda done, limit: layer(bench, True, limit)
        found["plan"] = 120.0, lambda done, limit: plan(bench, done, limit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that are not timed: the second captures")
    parser.add_argument("--step-limit", type=float, default=130.0, help="most seconds of a run of steps")
    parser.add_argument("--folder", type=Path, default=Path("runs/several"), help="of the runs")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; bytes without it")
    parser.add_argument("--tiny", action="store_true", help="a small model on CPU ranks")
    parser.add_argument("also", nargs="*", help="overrides of every step, e.g. kernels.attention=flash-4")
    record.add_arguments(parser)
    options = parser.parse_args()
    begin = time.monotonic()
    bench = Bench(
        ranks=options.ranks,
        folder=options.folder.absolute(),
        tokenizer=None if options.tokenizer is None else options.tokenizer.absolute(),
        tiny=options.tiny,
        steps=options.steps,
        warm_up=options.warm_up,
        step_limit=options.step_limit,
        also=tuple(options.also),
    )
    bench.folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        numbers = json.loads(options.output.read_text())["numbers"]
    left = [name for name in parts(bench) if name not in numbers and options.only in name]
    for name, (limit, run) in parts(bench).items():
        if name not in left or time.monotonic() - begin + limit > options.seconds:
            continue
        started = time.monotonic()
        try:
            row = run(numbers, limit)
        except (subprocess.SubprocessError, OSError, KeyError) as error:
            print(f"{name}: {str(error)[-300:]}", flush=True)
            continue
        left.remove(name)
        numbers[name] = {**row, "seconds": time.monotonic() - started}
        print_row(name, numbers[name])
        record.write(options, numbers, ranks=bench.ranks, steps=bench.steps, warm_up_steps=bench.warm_up)
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)


def print_row(name: str, row: Mapping[str, Any]) -> None:
    shown = {key: value for key, value in row.items() if isinstance(value, float | int)}
    print(f"{name}: " + "  ".join(f"{key} {value:,.4g}" for key, value in shown.items()), flush=True)


if __name__ == "__main__":
    main()
