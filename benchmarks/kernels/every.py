"""Every kernel benchmark in one run on one machine, into one file.

    python -m benchmarks.kernels.every --output benchmarks/results/kernels-h200.json

`docs/kernels.md` is made from that file. Each part is a process of its own.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from benchmarks import record

PARTS = {
    "grouped_gemm": ["grouped_gemm"],
    "pointwise": ["pointwise"],
    "linear_cross_entropy": ["linear_cross_entropy"],
    "expert_block": ["expert_block"],
    "expert_block_skewed": ["expert_block", "--skew", "0.6"],
}


def main() -> None:
    options, numbers = record.parser(__doc__).parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (module, *more) in PARTS.items():
            print(f"== {name}", flush=True)
            output = Path(folder, f"{name}.json")
            command = [sys.executable, "-m", f"benchmarks.kernels.{module}", *more, "--output", str(output)]
            subprocess.run([*command, "--commit", "-"], check=True)
            numbers[name] = record.numbers_in(output)
    record.write(options, numbers, triton=triton.__version__)


if __name__ == "__main__":
    main()
