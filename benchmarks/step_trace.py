"""Where the time of a recorded step went, for the documents: one row for each rank, one for each phase.

    penstock train deepseek-v2-lite ... profile.start=5 profile.steps=1 'profile.ranks=[]'
    python -m benchmarks.step_trace runs/NAME --commit 1234567 --output step-trace.json

Times are those of `penstock trace`: pure is the transfer of collectives and of our own kernels between ranks, waiting
what goes by until the last rank has come.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import record

SHOWN = 0.005
"""Share of a step below which phases are put together."""


def distilled(run: Path) -> dict[str, Any]:
    """What the documents show of a run's recording."""
    traced = [sys.executable, "-m", "penstock", "trace", str(run), "--json"]
    answer = json.loads(subprocess.run(traced, check=True, capture_output=True, text=True).stdout)
    ranks = [_of_rank(int(rank), found, answer["collectives"]) for rank, found in answer["ranks"].items()]
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in answer["ranks"].values():
        for phase in found["phases"]:
            of_both = times[phase["name"], phase["pass"]]
            of_both[0] += phase["kernel_us"] / len(ranks)
            of_both[1] += phase["exposed_us"] / len(ranks)
    step_us = max(one["total_us"] for one in ranks)
    rows = [
        {"phase": name, "pass": of, "kernel_us": kernel_us, "exposed_us": exposed_us, "share": exposed_us / step_us}
        for (name, of), (kernel_us, exposed_us) in sorted(times.items(), key=lambda one: -one[1][1])
    ]
    large = [row for row in rows if row["share"] >= SHOWN]
    rest = {name: sum(row[name] for row in rows[len(large) :]) for name in ("kernel_us", "exposed_us", "share")}
    return {"ranks": ranks, "phases": [*large, {"phase": f"{len(rows) - len(large)} smaller", "pass": "", **rest}]}


def _of_rank(rank: int, found: dict[str, Any], collectives: list[dict[str, Any]]) -> dict[str, float]:
    """The step of one rank."""
    own = [one for one in collectives if one["rank"] == rank]
    kept = ("total_us", "compute_us", "exposed_communication_us", "idle_us")
    transfers = {name: sum(one[name] for one in own) for name in ("pure_us", "wait_us")}
    return {"rank": rank, **{name: found["timeline"]["all"][name] for name in kept}, **transfers}


def usual_speed(run: Path) -> float:
    """Tokens per second for each device in the last step, which was not recorded."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    speed: float = last["tokens_per_second_per_device"]
    return speed


def main() -> None:
    """Read a run, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that recorded a step on all ranks")
    record.add_arguments(parser)
    options = parser.parse_args()
    start = json.loads((options.run / "starts.jsonl").read_text().splitlines()[-1])
    numbers = {"run": start["command"], "tokens_per_second_per_device": usual_speed(options.run)}
    numbers |= distilled(options.run)
    for row in numbers["phases"]:
        print(f"{row['phase']:<28}{row['pass']:<10}{row['exposed_us'] / 1e3:>10.1f} ms  {row['share']:.1%}")
    of_run = {name: start[name] for name in ("device", "torch", "triton", "cuda", "python")}
    record.write(options, numbers, **of_run, devices=start["ranks"])


if __name__ == "__main__":
    main()
