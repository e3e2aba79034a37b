"""The first minute of a new user: the debug preset on a CPU, from start to end.

python -m benchmarks.debug_cpu --output benchmarks/results/debug-cpu.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record


def main() -> None:
    """Train once and read the run's own metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "penstock", "train", "debug", "device=cpu", f"record.folder={folder}"]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - begin
        lines = [json.loads(line) for line in (Path(folder) / "debug" / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["evaluation_bits_per_byte"] for line in lines if "evaluation_bits_per_byte" in line}
    held_out = {step: bits for step, bits in held_out.items() if bits is not None}
    numbers = {
        "seconds": seconds,
        "steps": len(lines),
        "tokens_per_second": statistics.median(line["tokens_per_second_per_device"] for line in lines),
        "first_bits_per_byte": held_out[min(held_out)],
        "last_bits_per_byte": held_out[max(held_out)],
        "last_expert_load_max_over_mean": statistics.median(line["expert_load_max_over_mean"] for line in lines[-100:]),
    }
    print(json.dumps(numbers, indent=1))
    record.write(options, numbers, cores=os.cpu_count())


if __name__ == "__main__":
    main()
