"""The first minute of a new user: the debug preset on a CPU, from start to end.

python -m benchmarks.debug_cpu --output benchmarks/results/debug-cpu.json
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import record, runs


def main() -> None:
    options, begin = record.parser(__doc__).parse_args(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lines = runs.trained("debug", ["device=cpu"], Path(folder), "debug")
    held_out = [line["evaluation_bits_per_byte"] for line in lines if line.get("evaluation_bits_per_byte") is not None]
    numbers = {
        "seconds": time.perf_counter() - begin,
        "steps": len(lines),
        "tokens_per_second": statistics.median(line["tokens_per_second_per_device"] for line in lines),
        "first_bits_per_byte": held_out[0],
        "last_bits_per_byte": held_out[-1],
        "last_expert_load_max_over_mean": statistics.median(line["expert_load_max_over_mean"] for line in lines[-100:]),
    }
    record.show(numbers)
    record.write(options, numbers, cores=os.cpu_count())


if __name__ == "__main__":
    main()
