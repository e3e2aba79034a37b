"""How long `penstock plan` searches, against the size of the cluster and the depth of the model.

    python -m benchmarks.search_cost --output benchmarks/results/search-cost.json

Each search runs in a process of its own, so that its time has the start of Python and torch in it and its memory is its
own. Needs no GPU. One line is printed for each search, and all are written to `--output`.
"""

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
from penstock.tune.kernels import commit_of_code

CASES = tuple(
    dict.fromkeys(
        (
            ("deepseek-v3", "1024xMI325X"),  # those of `docs/plan.md` first
            ("deepseek-v3", "1024xH100"),
            ("qwen3-235b-a22b", "256xH100"),
            ("moe-2t", "768xMI300X"),
            ("deepseek-v3-8l", "8xH100"),
            ("deepseek-v3", "512xH100"),
            ("qwen3-235b-a22b", "64xH100"),
            ("mixtral-8x22b", "32xH100"),
            ("mixtral-8x22b", "128xH100"),
            ("llama4-maverick", "128xH100"),
            ("deepseek-v2", "64xH100"),
            *(("deepseek-v3", f"{1 << power}xMI300X") for power in range(6, 14)),
            *((f"deepseek-v3-{layers}l", "256xMI300X") for layers in (8, 16, 32, 48)),
        )
    )
)
"""Models and clusters: those that have a bar, then one axis after the other."""


def searched(model: str, on: str) -> dict[str, Any]:
    """Search here; seconds are those of the search alone."""
    begin = time.perf_counter()
    with meta_workers() as workers:
        plan = search(SearchRequest(run=load_run(model), cluster=parse_cluster(on)), workers=workers)
    return {
        "search_seconds": time.perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "considered": plan.considered,
        "candidates": len(plan.candidates),
        "refusals": len(plan.refused),
        "best": str(plan.candidates[0].layout) if plan.candidates else "",
    }


def measured(model: str, on: str) -> dict[str, Any]:
    """Search in a new process; `seconds` are those of all of it, `others` processors that other programs used."""
    busy, used, begin = record.busy_seconds(), record.used_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.search_cost", "--search", model, on]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    others = (record.busy_seconds() - busy) - (record.used_seconds() - used)
    return {"model": model, "on": on, "seconds": seconds, "others": others / seconds, **json.loads(done.stdout)}


def main() -> None:
    only = ([str], "a model and a cluster: search here, as each search of this benchmark does")
    options = record.parser(__doc__, parts=True, search=only).parse_args()
    if options.search:
        print(json.dumps(searched(*options.search)))
        return
    if options.join:
        parts = record.parts_of(options)
        rows = {(row["model"], row["on"]): row for part in parts for row in part["numbers"]["searches"]}
        record.write_joined(options, parts, {"searches": [rows[case] for case in CASES if case in rows]})
        return
    searches = list[dict[str, Any]]()
    for case in record.part_of(options, CASES):
        searches.append(measured(*case) | {"commit": options.commit or commit_of_code()})
        record.show(searches[-1])
        environment = {"cpus": len(os.sched_getaffinity(0)), "cpu": device_name(torch.device("cpu"))}
        record.write(options, {"searches": searches}, **environment)


if __name__ == "__main__":
    main()
