"""How long `penstock plan` searches, against the size of the cluster and the depth of the model.

    python -m benchmarks.search_cost --output benchmarks/results/search-cost.json

Each search runs in a process of its own, so that its time has the start of Python and torch in it and its memory is its
own. Needs no GPU. One line of JSON is printed for each search, and all are written to `--output`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks import record
from penstock.config.load import load_run
from penstock.parallel.launch.process import device_name
from penstock.plan.composer import meta_workers
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest
from penstock.tune.result_file import commit_of_code

DEVICES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS = (8, 16, 32, 48, 61)
BARS = (
    {"model": "deepseek-v3", "on": "1024xMI325X"},
    {"model": "deepseek-v3", "on": "1024xH100"},
    {"model": "qwen3-235b-a22b", "on": "256xH100"},
    {"model": "moe-2t", "on": "768xMI300X"},
    {"model": "deepseek-v3-8l", "on": "8xH100"},
    {"model": "deepseek-v3", "on": "512xH100"},
    {"model": "qwen3-235b-a22b", "on": "64xH100"},
    {"model": "mixtral-8x22b", "on": "32xH100"},
    {"model": "mixtral-8x22b", "on": "128xH100"},
    {"model": "llama4-maverick", "on": "128xH100"},
    {"model": "deepseek-v2", "on": "64xH100"},
)


def cases() -> list[dict[str, str]]:
    """Searches: those that have a bar, then one axis after the other."""
    by_world = [{"model": "deepseek-v3", "on": f"{devices}xMI300X"} for devices in DEVICES]
    by_layers = [{"model": f"deepseek-v3-{layers}l", "on": "256xMI300X"} for layers in LAYERS[:-1]]
    found = [*BARS, *by_world, *by_layers, {"model": "deepseek-v3", "on": "256xMI300X"}]
    return [case for number, case in enumerate(found) if case not in found[:number]]


def one(model: str, on: str) -> dict[str, Any]:
    """Search here; seconds are those of the search alone."""
    begin = time.perf_counter()
    with meta_workers() as workers:
        plan = search(SearchRequest(run=load_run(model), cluster=parse_cluster(on)), workers=workers)
    best = plan.candidates[0] if plan.candidates else None
    return {
        "search_seconds": time.perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "considered": plan.considered,
        "candidates": len(plan.candidates),
        "refusals": len(plan.refused),
        "best": "" if best is None else str(best.layout),
    }


def measured(case: dict[str, str]) -> dict[str, Any]:
    """Search in a new process; `seconds` are those of all of it, `others` processors that other programs used."""
    busy, used, begin = record.busy_seconds(), record.used_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.search_cost", "--one", case["model"], case["on"]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    others = (record.busy_seconds() - busy) - (record.used_seconds() - used)
    return {**case, "seconds": seconds, "others": others / seconds, **json.loads(done.stdout)}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description="Time of searches")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ON"))
    record.add_parts(parser)
    record.add_arguments(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    if options.join:
        parts = record.parts_of(options)
        rows = {(row["model"], row["on"]): row for part in parts for row in part["numbers"]["searches"]}
        found = [rows[case["model"], case["on"]] for case in cases() if (case["model"], case["on"]) in rows]
        record.write_joined(options, parts, {"searches": found})
        return
    found = list[dict[str, Any]]()
    for case in record.part_of(options, cases()):
        found.append(measured(case) | {"commit": options.commit or commit_of_code()})
        print(json.dumps(found[-1]), flush=True)
        record.write(
            options, {"searches": found}, cpus=len(os.sched_getaffinity(0)), cpu=device_name(torch.device("cpu"))
        )


if __name__ == "__main__":
    main()
