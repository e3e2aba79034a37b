"""Seconds of the processor until a refusal, of calls that the arguments alone decide.

python -m benchmarks.refusals --output benchmarks/results/refusals.json
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys

from benchmarks import record

CALLS = (
    "train debgu", "train debug lr=3", "train debug training.lr=3", "train debug --lr 3", "train debug --steps 3",
    "train debug --tensor-model-parallel-size 2", "train debug per_device_train_batch_size=2",
    "train debug training.steps=banana", "train debug training.precision=bf61", "train debug --restarts many",
    "train missing.toml", "plan debgu --on 8xH100", "plan debug --on 8xH10O", "plan debug --on 8xH100 --layout ppp=2",
    "plan debug --on 8xH100 --only eep=2", "plan debug --on", "layout debug --wrld 4", "layout debug training.stpes=3",
    "tune debug --budgt 3", "tune debgu", "ladder debgu", "sample", "launch slrum debug", "kernels lst",
    "launch slurm debug --nodes 1 --gpus-per-node 1 --vendor nvida", "init --yess", "prove --drws 3", "config shwo",
)  # fmt: skip
"""Names, options, fields and values that are wrong."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    seconds = {}
    for call in CALLS:
        process = subprocess.Popen([sys.executable, "-m", "penstock", *shlex.split(call)], stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 2, call
        seconds[call] = usage.ru_utime + usage.ru_stime
        print(f"{seconds[call]:.2f} s  penstock {call}", flush=True)
    numbers = {"calls": len(seconds), "median": statistics.median(seconds.values()), "most": max(seconds.values())}
    record.write(options, numbers | {"seconds": seconds})


if __name__ == "__main__":
    main()
