"""Every kernel benchmark in one run on one machine, into one file.

    python -m benchmarks.kernels.every --output benchmarks/results/kernels-h200.json

`docs/kernels.md` is made from that file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from benchmarks import record

PARTS = {
    "grouped_gemm": ["benchmarks.kernels.grouped_gemm"],
    "pointwise": ["benchmarks.kernels.pointwise"],
    "linear_cross_entropy": ["benchmarks.kernels.linear_cross_entropy"],
    "expert_block": ["benchmarks.kernels.expert_block"],
    "expert_block_skewed": ["benchmarks.kernels.expert_block", "--skew", "0.6"],
}


def main() -> None:
    """Run the parts one after the other, each in a process of its own, and join what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in PARTS.items():
            print(f"== {name}", flush=True)
            output = Path(folder) / f"{name}.json"
            subprocess.run([sys.executable, "-m", *arguments, "--output", str(output), "--commit", "-"], check=True)
            numbers[name] = json.loads(output.read_text())["numbers"]
    record.write(options, numbers, triton=triton.__version__)


if __name__ == "__main__":
    main()
