"""A whole model on one GPU, as `penstock plan MODEL --on 1xCHIP` proposes it where nothing else fits.

    python -m benchmarks.whole_one qwen3-30b-a3b --on H200 --output whole-qwen3.json
    python -m benchmarks.whole_one deepseek-v2-lite --on H100 --output whole-lite.json

The optimizer's state and the sums of gradients are in host memory. `--on` names the chip that the run is planned for;
on a GPU with more memory the rest is held by another process. The speed, and the memory of GPU and host, are beside
the plan of the same run on the chip that measures (`--measured-on`).
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, runs
from penstock.config.load import load_run
from penstock.plan.asked_layout import with_overrides
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection, memory_margin
from penstock.plan.what_if import with_state_in_host_memory

HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
"""Holds bytes of the GPU until its input ends."""

# The memory of a virtual machine may grow while it is used.
FIXED = ("schedule.warmup_steps=1", "schedule.decay_steps=0", "host.check_memory=false", *runs.QUIET)


@contextmanager
def held(size: int) -> Iterator[None]:
    """Another process has `size` bytes of the GPU."""
    if size <= 0:
        yield
        return
    command = [sys.executable, "-c", HOLD, f"{size}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline() != "held\n":
            raise SystemExit(f"{size / 1e9:.1f} GB of the GPU are not free")
        try:
            yield
        finally:
            process.stdin.close()


def compared(rows: list[dict[str, Any]], plan: Projection) -> dict[str, Any]:
    """What was measured, medians after the first step, beside the plan."""
    speeds = [row["tokens_per_second_per_device"] for row in rows]
    speed = statistics.median(speeds[1:])
    planned = plan.time.tokens_per_second_per_device
    return {
        "tokens_per_second": speeds,
        "median_after_first": speed,
        "model_flops_utilization": statistics.median(row["model_flops_utilization"] for row in rows[1:]),
        "peak_memory_gb": max(row["peak_memory_bytes"] for row in rows) / 1e9,
        "peak_host_memory_gb": max(row["peak_host_memory_bytes"] for row in rows) / 1e9,
        "losses": [row["loss"] for row in rows],
        "start_seconds": rows[0]["wall_seconds"]["start"],
        "plan": {
            "tokens_per_second": planned,
            "memory_gb": (plan.memory.total - plan.memory.reserve) / 1e9,
            "host_gb": max(memory.host for memory in plan.memories) / 1e9,
        },
        "plan_over_measured_speed": planned / speed,
    }


def main() -> None:
    parser = record.parser(
        __doc__,
        on=("H200", "chip that the run is planned for"),
        measured_on=("H200", "chip that is here"),
        steps=4,
    )
    parser.add_argument("target", help="preset")
    parser.add_argument("overrides", nargs="*", default=["training.global_batch=64"])
    options = parser.parse_args()
    cluster, here = parse_cluster(f"1x{options.on}"), parse_cluster(f"1x{options.measured_on}")
    run = load_run(options.target, options.overrides)
    proposed = with_state_in_host_memory(run, cluster, project, memory_margin(cluster))
    if proposed is None:
        raise SystemExit(f"{options.target} does not fit one {options.on} with its state in the host")
    words = [*options.overrides, *proposed[0]]
    free = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    size = free - cluster.hardware.memory.capacity_bytes if options.on != options.measured_on else 0
    with held(size), tempfile.TemporaryDirectory() as folder:
        fixed = [f"training.steps={options.steps}", *FIXED]
        rows = runs.trained(options.target, [*fixed, *words], Path(folder), "whole")
    numbers = {"overrides": words, **compared(rows, project(with_overrides(run, proposed[0], 1), here))}
    record.show(numbers)
    record.write(options, numbers, planned_for=options.on)


if __name__ == "__main__":
    main()
