"""Tokens per second of a truncated DeepSeek-V2-Lite on one GPU: our kernels beside PyTorch's and plain eager PyTorch.

    python -m benchmarks.one_gpu --output benchmarks/results/one-gpu.json
    python -m benchmarks.one_gpu --preset qwen3-30b-a3b-8l --variants triton,squares training.global_batch=32 \
        training.micro_batch=4

All are the product itself, `penstock train`, on the same rows with the same seed; only `kernels.all` differs:

    eager    the definitions: a loop over experts, RMSNorm and SwiGLU written out, torch's own choice for attention
    torch    what PyTorch has fused: grouped_mm for the experts, RMSNorm, SiLU; cuDNN's attention first
    triton   our kernels, as `auto` chooses them on this GPU

and, if asked for, `triton` with cuDNN's attention (`cudnn`), with 8-bit products in squares of 128 (`squares`),
and with these and the output projection in 8 bits (`squares-head`). The fused loss is in all of them. Figures are
medians of the run's own metrics.jsonl after warm-up. The losses are kept: in 16 bits all are those of one model.

`--join` measures nothing: it puts the runs of other files into one, by preset, then variant and rows of a micro-batch
(benchmarks/jobs/one-gpu.toml).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import record

SQUARES = ("float8.dense=blockwise-square", "float8.experts=blockwise-square")
HEAD = "float8.head=blockwise-square"
VARIANTS = {
    "eager": ["kernels.all=reference"],
    "torch": ["kernels.all=torch"],
    "triton": ["kernels.all=auto"],
    "cudnn": ["kernels.all=auto", "kernels.attention=cudnn"],
    "squares": ["kernels.all=auto", *SQUARES],
    "squares-head": ["kernels.all=auto", *SQUARES, HEAD],
}


def main() -> None:
    options = parse_arguments()
    if options.join:
        join(options)
        return
    measured: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.variants.split(","):
            try:
                measured[name] = measure(options, name, VARIANTS[name], Path(folder))
            except subprocess.CalledProcessError:
                failed.append(name)
                continue
            write(options, measured)  # again and again: a run may be cut off
    for name, row in measured.items():
        print(
            f"{name:8} {row['tokens_per_second']:10,.0f} tokens/s  MFU {row['model_flops_utilization']:.3f}"
            f"  peak {row['peak_memory_gib']:.1f} GiB  loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        )
    print("  ".join(f"{name} {ratio:.2f}" for name, ratio in speedups(measured).items()))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def write(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    """Write down the variants that have been measured."""
    numbers = {"preset": options.preset, "overrides": options.overrides, "variants": measured}
    record.write(
        options, numbers | {"speedups": speedups(measured)}, warm_up_steps=options.warm_up, steps=options.steps
    )


def speedups(measured: dict[str, Any]) -> dict[str, float]:
    """The speed of each variant over that of each before it."""
    return {
        f"{fast}_over_{slow}": measured[fast]["tokens_per_second"] / measured[slow]["tokens_per_second"]
        for slow, fast in combinations(measured, 2)
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deepseek-v2-lite-8l")
    parser.add_argument("--variants", default="eager,torch,triton", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that are not counted")
    parser.add_argument("overrides", nargs="*", default=["training.global_batch=8", "training.micro_batch=4"])
    parser.add_argument("--join", nargs="+", type=Path, default=[], metavar="FILE", help="run nothing, join these")
    record.add_arguments(parser)
    return parser.parse_args()


def join(options: argparse.Namespace) -> None:
    """Write the runs of other files into one, and the speed of each over that of the same micro-batch by torch."""
    presets: dict[str, dict[str, Any]] = {}
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.join]
    for path, numbers in zip(options.join, (part["numbers"] for part in parts), strict=True):
        given = dict(override.split("=", 1) for override in numbers["overrides"])
        if (rows := given.get("training.micro_batch")) is None:
            raise SystemExit(f"{path}: its overrides do not say training.micro_batch; fix: measure with it")
        found = presets.setdefault(numbers["preset"], {})
        found |= {f"{name}, {rows}": row for name, row in numbers["variants"].items()}
    ratios = {
        preset: {
            f"{name} over torch": row["tokens_per_second"] / torch["tokens_per_second"]
            for name, row in found.items()
            if (torch := found.get(f"torch, {name.rpartition(', ')[2]}")) is not None and torch is not row
        }
        for preset, found in presets.items()
    }
    record.write_joined(options, parts, {"presets": presets, "ratios": ratios})


def measure(options: argparse.Namespace, name: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train in a process of its own and read the run's metrics."""
    fixed = [
        f"training.steps={options.steps}",
        "schedule.warmup_steps=10",
        "checkpoint.enabled=false",
        "evaluation.rows=0",
        f"record.folder={folder}",
    ]
    command = [sys.executable, "-m", "penstock", "train", options.preset, *fixed, *options.overrides, *overrides]
    subprocess.run([*command, "--name", name], check=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    timed = lines[options.warm_up :]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second_per_device"] for line in timed),
        "step_seconds": statistics.median(line["step_seconds"] for line in timed),
        "step_seconds_lowest": min(line["step_seconds"] for line in timed),
        "step_seconds_highest": max(line["step_seconds"] for line in timed),
        "model_flops_utilization": statistics.median(line["model_flops_utilization"] for line in timed),
        "peak_memory_gib": max(line["peak_memory_bytes"] for line in timed) / 2**30,
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
    }


if __name__ == "__main__":
    main()
