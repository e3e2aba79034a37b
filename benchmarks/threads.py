"""Steps of the debug preset on a CPU whose cores are also used by others, by how long waiting threads spin.

    python -m benchmarks.threads --output benchmarks/results/threads.json

One process for each core does nothing but count, as a browser or a compiler would; a run trains beside them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import record

SPINS = (300_000, 20_000, 1_000, 0)
"""How often a waiting thread looks before it sleeps: GNU OpenMP's GOMP_SPINCOUNT."""

BUSY = "while True: pass"


def main() -> None:
    """Measure each policy on an idle and on a busy machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    record.add_arguments(parser)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    numbers = {}
    for load in (0, cores):
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        try:
            for spins in SPINS:
                name = f"{'busy' if load else 'idle'}_{spins}"
                numbers[name] = tokens_per_second(spins, options.steps)
                print(f"{name:12} {numbers[name]:8,.0f} tokens/s", flush=True)
        finally:
            for other in others:
                other.kill()
    record.write(options, numbers, cores=cores, unit="tokens/s, median of steps")


def tokens_per_second(spins: int, steps: int) -> float:
    """Median over the steps of a run, its first quarter left out."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"training.steps={steps}",
            f"record.folder={folder}",
            "evaluation.rows=0",
            "checkpoint.enabled=false",
        ]
        command = [sys.executable, "-m", "penstock", "train", "debug", *overrides, "--name", "threads"]
        environment = {**os.environ, "GOMP_SPINCOUNT": str(spins)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "threads" / "metrics.jsonl").read_text().splitlines()
        return statistics.median(json.loads(line)["tokens_per_second_per_device"] for line in lines[steps // 4 :])


if __name__ == "__main__":
    main()
