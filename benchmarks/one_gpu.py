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
import subprocess
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import record, runs

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
    parser = record.parser(
        __doc__,
        preset="deepseek-v2-lite-8l",
        variants=("eager,torch,triton", f"of {', '.join(VARIANTS)}"),
        steps=30,
        warm_up=(10, "first steps that are not counted"),
        join=([Path], "run nothing, join these files"),
    )
    parser.add_argument("overrides", nargs="*", default=["training.global_batch=8", "training.micro_batch=4"])
    options = parser.parse_args()
    if options.join:
        join(options)
        return
    variants, failed = dict[str, Any](), list[str]()
    fixed = [f"training.steps={options.steps}", "schedule.warmup_steps=10", *runs.QUIET, *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.variants.split(","):
            try:
                lines = runs.trained(options.preset, [*fixed, *VARIANTS[name]], Path(folder), name)
            except subprocess.CalledProcessError:
                failed.append(name)
                continue
            losses = {"first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"]}
            variants[name] = runs.medians(lines, options.warm_up) | losses
            record.show({"variant": name, **variants[name]})
            speedups = {
                f"{fast}_over_{slow}": variants[fast]["tokens_per_second"] / variants[slow]["tokens_per_second"]
                for slow, fast in combinations(variants, 2)
            }
            numbers = {"preset": options.preset, "overrides": options.overrides, "variants": variants}
            # Again and again: a run may be cut off.
            environment = {"warm_up_steps": options.warm_up, "steps": options.steps}
            record.write(options, numbers | {"speedups": speedups}, **environment)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def join(options: argparse.Namespace) -> None:
    """Write the runs of other files into one, and the speed of each over that of the same micro-batch by torch."""
    presets: dict[str, dict[str, Any]] = {}
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.join]
    for path, numbers in zip(options.join, (part["numbers"] for part in parts), strict=True):
        given = dict(override.split("=", 1) for override in numbers["overrides"])
        if (rows := given.get("training.micro_batch")) is None:
            raise SystemExit(f"{path}: its overrides do not say training.micro_batch; fix: measure with it")
        variants = {f"{name}, {rows}": row for name, row in numbers["variants"].items()}
        presets.setdefault(numbers["preset"], {}).update(variants)
    ratios = {
        preset: {
            f"{name} over torch": row["tokens_per_second"] / torch["tokens_per_second"]
            for name, row in variants.items()
            if (torch := variants.get(f"torch, {name.rpartition(', ')[2]}")) is not None and torch is not row
        }
        for preset, variants in presets.items()
    }
    record.write_joined(options, parts, {"presets": presets, "ratios": ratios})


if __name__ == "__main__":
    main()
