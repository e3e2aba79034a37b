"""What captured passes and parts save, on one GPU: steps, launches, memory, and whether numbers are the same.

    python -m benchmarks.graphs --output benchmarks/results/graphs-h200.json
    python -m benchmarks.graphs --cases small,short --output benchmarks/results/graphs-parts-h200.json
    python -m benchmarks.graphs --auto --output benchmarks/results/graphs-auto-h200x2.json
    python -m benchmarks.graphs --sync-free --output benchmarks/results/sync-free-h200x2.json

Every case runs the same steps three times: eager, with passes captured (penstock/train/capture.py), and with the
static parts of layers captured (penstock/train/capture.py). `small` compares bits: it is
deterministic, and losses, norms, loads, held-out loss and the sums of weights and moments must be equal; `masked` has a
document mask and recomputes every layer. The others are DeepSeek-V2-Lite of few layers, with work for the GPU (`long`),
or so little that the host decides (`short`); these are not deterministic, so a second eager run says how far apart
losses are without graphs. `--auto` runs `penstock train` by its defaults beside `graphs.capture=none`, on one or two
GPUs, and `--sync-free` beside `dispatch.sync_free=0`, on two that share experts.
"""

import gc
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import record, runs
from penstock.config.load import load_run
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.process import peak_memory_bytes
from penstock.train.setup import Session, prepare
from penstock.train.step import StepResult, evaluate, train_step

FIXED = ["data.source=synthetic-random", "checkpoint.enabled=false", "training.precision=bf16", "graphs.capture=none"]
SMALL = ["training.deterministic=true", "training.global_batch=8", "evaluation.rows=8", "model.mtp_layers=1"]
LITE = ["evaluation.rows=0", "training.global_batch=8"]
CASES: dict[str, tuple[str, list[str]]] = {
    "small": ("debug", SMALL),
    "masked": ("debug", [*SMALL, "data.document_mask=true", 'recompute.modules=["layer"]']),
    "long": ("deepseek-v2-lite-4l", [*LITE, "training.micro_batch=2", "training.sequence_length=4096"]),
    "short": ("deepseek-v2-lite-4l", [*LITE, "training.micro_batch=1", "training.sequence_length=1024"]),
}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemsetAsync")
AUTO: dict[str, tuple[int, str, str]] = {
    "DeepSeek-V2-Lite, 8 layers, DP 2, 4 x 1 x 4,096": (2, "deepseek-v2-lite-8l", "8 1 4096"),
    "DeepSeek-V2-Lite, 8 layers, DP 2, 2 x 2 x 4,096": (2, "deepseek-v2-lite-8l", "8 2 4096"),
    "Qwen3-30B-A3B, 7 layers, DP 2, 4 x 1 x 2,048": (2, "qwen3-30b-a3b-7l", "8 1 2048"),
    "Qwen3-30B-A3B, 7 layers, DP 2, 2 x 2 x 2,048": (2, "qwen3-30b-a3b-7l", "8 2 2048"),
    "ERNIE-4.5-21B-A3B, 7 layers, EP 2, 8 x 1 x 4,096": (2, "ernie-4.5-21b-a3b-7l", "16 1 4096 EP"),
    "Llama-3.1-8B, 4 layers, TP 2, 8 x 1 x 2,048": (2, "llama3.1-8b-4l", "8 1 2048 parallel.tensor=2"),
}
"""GPUs, preset, and global batch, micro-batch, positions and overrides; EP shares experts over all GPUs.

Names end with the rows of each GPU."""
SYNC_FREE: dict[str, tuple[int, str, str]] = {
    f"{model}, 16 x {rows} x 4,096": (2, preset, f"16 {rows} 4096 EP")
    for rows in (1, 2)
    for model, preset in (
        ("ERNIE-4.5-21B-A3B, 7 layers", "ernie-4.5-21b-a3b-7l"),
        ("Qwen3-30B-A3B, 12 layers", "qwen3-30b-a3b-12l"),
        ("DeepSeek-V2-Lite, 8 layers", "deepseek-v2-lite-8l"),
    )
}
"""As `AUTO`; the rows are those of a step of both GPUs x micro-batch x positions."""

STEPS, WARM = 8, 3
"""Steps of a case, and those that are not timed: kernels are compiled in the first, the second captures."""


def main() -> None:
    options = record.parser(
        __doc__,
        cases=(",".join(CASES), "some of them, a,b"),
        auto=(False, "the default beside eager passes"),
        sync_free=(False, "the default beside counts that the host reads"),
        devices=(2, "GPUs of --auto and --sync-free"),
    ).parse_args()
    numbers: dict[str, Any] = {}
    if options.auto or options.sync_free:
        key, other, rows = ("eager", "graphs.capture=none", AUTO)
        if options.sync_free:
            key, other, rows = ("counted", "dispatch.sync_free=0", SYNC_FREE)
        for name, (devices, preset, sizes) in rows.items():
            if devices <= options.devices:
                numbers[name] = by_default(devices, preset, sizes, {key: [other], "auto": []})
                record.write(options, numbers, steps=STEPS, warm=WARM)
        return
    for name in options.cases.split(","):
        preset, overrides = CASES[name]
        fixed = [*FIXED, *overrides]
        eager, expected = measure(preset, fixed)
        numbers[name] = {"eager": eager}
        for key, capture in (("captured", "full"), ("parts", "partial")):
            row, results = measure(preset, [*fixed, f"graphs.capture={capture}"])
            compared = {
                "ratio": eager["step_ms"] / row["step_ms"],
                "same": results == expected,
                "loss_apart": apart(results, expected),
            }
            # Figures of passes stand beside their row, those of parts in it.
            numbers[name] |= {key: row, **compared} if key == "captured" else {key: row | compared}
        if preset != "debug":
            numbers[name]["loss_apart_of_two_eager_runs"] = apart(measure(preset, fixed)[1], expected)
        record.show({"case": name, **numbers[name]})
        record.write(options, numbers, steps=STEPS, warm=WARM)


def measure(preset: str, overrides: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Figures of a run, and everything that must be the same in another one."""
    session = prepare(load_run(preset, overrides), read_environment())
    torch.cuda.reset_peak_memory_stats()
    results, seconds, held_out = [], [], []
    for number in range(STEPS):
        begin = time.perf_counter()
        results.append(step(session, 1e-4 * (number + 1)))
        seconds.append(time.perf_counter() - begin)
        if session.held_out is not None and number % 3 == 2:
            held_out.append(evaluate(session.model, session.held_out, session.rule.cut, session.rule.loss).loss)
    kept = [(result.loss, result.mtp_losses, result.gradient_norm, result.layers) for result in results]
    state = {name: float(part.tensor.double().sum()) for name, part in session.state.optimizer.parts().items()}
    row: dict[str, Any] = {
        "step_ms": statistics.median(seconds[WARM:]) * 1e3,
        "second_step_ms": seconds[1] * 1e3,
        "peak_gb": peak_memory_bytes(session.device) / 1e9,
        "reserved_gb": torch.cuda.memory_reserved() / 1e9,
        **launches_of(session),
        **update_of(session),
    }
    if session.graphs is not None:
        row["pool_gb"] = session.graphs.pool_bytes / 1e9
        session.graphs.release()
    session.state.batches.close()
    del session
    gc.collect()
    torch.cuda.empty_cache()
    return row, [*kept, held_out, state]


def by_default(devices: int, preset: str, sizes: str, settings: dict[str, list[str]]) -> dict[str, Any]:
    """A run with each of two settings, the default last, and what the default chose."""
    rows, micro_batch, length, *more = sizes.split()
    fixed = [
        *runs.QUIET,
        "data.source=synthetic-random",
        f"training.global_batch={rows}",
        f"training.steps={2 * STEPS}",
    ]
    fixed += [f"training.micro_batch={micro_batch}", f"training.sequence_length={length}"]
    fixed += [word.replace("EP", f"parallel.expert={devices}") for word in more]
    found: dict[str, Any] = {"devices": devices, "overrides": fixed}
    with tempfile.TemporaryDirectory() as folder:
        for key, words in settings.items():
            command = ("train", preset, *fixed, *words, f"record.folder={folder}", "--name", key)
            printed = runs.penstock(*command, "--processes", f"{devices}")
            lines = runs.lines_of(Path(folder, key))
            found[key] = runs.medians(lines, WARM + 1) | {"loss": lines[-1]["loss"]}
            found[key]["said"] = re.findall(r"(?:graphs: |sync-free +)(.*)", printed)
    behind = re.search(r"(\d+)% of their time", " ".join(printed.split()))
    before, after = (found[key]["step_seconds"] for key in settings)
    return found | {"behind_percent": behind and int(behind[1]), "faster": before / after}


def step(session: Session, rate: float) -> StepResult:
    """One step, to its end on the device."""
    batch = session.state.batches.next_batch()
    result = train_step(session.model, session.state.optimizer, batch, session.rule, rate)
    torch.cuda.synchronize()
    return result


def launches_of(session: Session) -> dict[str, int]:
    """What the host launches in a step, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(session, 1e-6)
    calls = Counter(event.name for event in seen.events())
    return {"launches": sum(calls[name] for name in LAUNCHES), "graph_launches": calls["cudaGraphLaunch"]}


def update_of(session: Session) -> dict[str, float]:
    """Milliseconds of an update: of the host that launches it, and until it is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    session.state.optimizer.step(0.0)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    return {"update_host_ms": launched * 1e3, "update_ms": (time.perf_counter() - begin) * 1e3}


def apart(one: list[Any], other: list[Any]) -> float:
    """Largest difference of two runs' losses."""
    return max(abs(mine[0] - theirs[0]) for mine, theirs in zip(one[:STEPS], other[:STEPS], strict=True))


if __name__ == "__main__":
    main()
