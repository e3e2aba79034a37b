"""How often the host waits for the device in a training step, at each sync-free stage, as the profiler sees it.

    torchrun --nproc-per-node 4 -m benchmarks.host_waits --output benchmarks/results/host-waits-h200x2.json

DeepSeek-V2-Lite of few layers, the experts shared by all ranks; one step after a warm-up step. A wait is a call of the
runtime that returns only when the device has caught up: a synchronize of stream, event or device, or a copy to pageable
memory. One of the step reads its figures (penstock/train/step.py); what is left, divided by layers and micro-batches,
is what router, dispatch, experts and combine cost. The loss and norm of that step stand beside, the same at all stages.
"""

import argparse
import gc
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from penstock.config.load import load_run
from penstock.parallel.launch.environment import read_environment
from penstock.train.setup import prepare
from penstock.train.step import train_step

WAITING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "hipStreamSynchronize")
"""Calls that wait. What `tensor.item()` and `tolist()` do ends in the first."""

CASES: dict[str, list[str]] = {
    f"{method}, {stage}, {kernels}": [
        f"dispatch.method={method}",
        f"dispatch.sync_free={stage}",
        f"kernels.all={kernels}",
    ]
    for kernels, method, stages in (
        ("reference", "all-to-all", (0,)),
        ("reference", "symmetric", (0,)),
        ("auto", "all-to-all", (0, 1)),
        ("auto", "all-gather", (1, 2, 3)),
        ("auto", "symmetric", (0, 1, 2, 3)),
    )
    for stage in stages
}

FIXED = [
    "model.layers=4",
    "training.micro_batch=1",
    "training.sequence_length=2048",
    "data.source=synthetic-random",
    "evaluation.rows=0",
    "checkpoint.enabled=false",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deepseek-v2-lite")
    parser.add_argument("--micro-batches", type=int, default=2)
    record.add_arguments(parser)
    options = parser.parse_args()
    environment = read_environment()
    torch.cuda.set_device(environment.local_rank)
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    fixed = [*FIXED, f"parallel.expert={ranks}", f"training.global_batch={ranks * options.micro_batches}"]
    rows: dict[str, Any] = {}
    for name, overrides in CASES.items():
        rows[name] = measure([*fixed, *overrides], options)
        if environment.rank == 0:
            print(f"{name:<32}" + "  ".join(f"{key} {value}" for key, value in rows[name].items()), flush=True)
            record.write(options, rows, ranks=ranks, fixed=fixed, micro_batches=options.micro_batches)
    dist.barrier()
    dist.destroy_process_group()


def measure(overrides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Waits of one step of this rank; a step that was made twice would count twice, and says so."""
    run = load_run(options.preset, overrides)
    session = prepare(run, read_environment())
    result = None
    for step in range(2):
        batch = session.state.batches.next_batch()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            result = train_step(session.model, session.state.optimizer, batch, session.rule, 1e-6 * (step + 1))
    session.state.batches.close()
    calls = Counter(event.name for event in seen.events())
    assert result is not None and run.model.moe is not None
    layers = run.model.moe_layers
    waits = sum(calls[name] for name in WAITING)
    row = {
        "waits": waits,
        "reads": calls["aten::_local_scalar_dense"],
        "of_a_layer_and_micro_batch": round((waits - 1) / layers / options.micro_batches, 2),
        "launches": calls["cudaLaunchKernel"] + calls["cudaLaunchKernelExC"] + calls["cuLaunchKernelEx"],
        "left_out": result.left_out,
        "loss": result.loss,
        "gradient_norm": result.gradient_norm,
    }
    del session
    gc.collect()
    torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
