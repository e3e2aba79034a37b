"""Seconds of the processor until a refusal, of calls that the arguments alone decide: named ones and drawn ones.

python -m benchmarks.refusals --drawn 400 --output benchmarks/results/refusals.json
"""

import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record
from tests.cli.bad_calls import KINDS_OF_ARGUMENTS, calls

CALLS = (
    "train debgu", "train debug lr=3", "train debug training.lr=3", "train debug --lr 3", "train debug --steps 3",
    "train debug --tensor-model-parallel-size 2", "train debug per_device_train_batch_size=2",
    "train debug training.steps=banana", "train debug training.precision=bf61", "train debug --restarts many",
    "train missing.toml", "plan debgu --on 8xH100", "plan debug --on 8xH10O", "plan debug --on 8xH100 --layout ppp=2",
    "plan debug --on 8xH100 --only eep=2", "plan debug --on", "layout debug --wrld 4", "layout debug training.stpes=3",
    "tune debug --budgt 3", "tune debgu", "ladder debgu", "sample", "launch slrum debug", "kernels lst",
    "launch slurm debug --nodes 1 --gpus-per-node 1 --vendor nvida", "init --foce", "prove --drws 3", "config shwo",
    "train debug model.moe.top_k=1000", "train debug parallel.tensor=3", "layout debug parallel.tensor=7",
    "tune debug parallel.pipeline=9", "plan debug --on 8xH100 --top 3 --layout ep=2", "plan debug --on 8xH100 --png",
    "plan debug --on 8xH100 --explain memroy", "plan debug --on 8xH100 --only recompute=foo --price 2",
    "plan debug --on 8xH100 --software megatorn --layout own", "plan debug --on 8xH100 --tokens 2X",
)  # fmt: skip
"""Names, options, fields and values that are wrong, and fields that do not go together."""


def main() -> None:
    options = record.parser(__doc__, drawn=(400, "calls of tests/cli/bad_calls.py")).parse_args()
    named = {call: _seconds(shlex.split(call)) for call in CALLS}
    drawn = {call.words: _seconds(call.words) for call in calls(options.drawn, kinds=KINDS_OF_ARGUMENTS)}
    for words, seconds in sorted(drawn.items(), key=lambda item: -item[1])[:10]:
        print(f"{seconds:.2f} s  penstock {shlex.join(words)[:160]}")
    record.write(options, {"named": _summary(named), "drawn": _summary(drawn), "seconds": named})


def _seconds(words: Sequence[str]) -> float:
    """Seconds of the processor of a process that refuses these arguments."""
    command = [sys.executable, "-m", "penstock", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 2, shlex.join(words)[:160]
    return usage.ru_utime + usage.ru_stime


def _summary(seconds: Mapping[Any, float]) -> dict[str, float]:
    values = seconds.values()
    return {"calls": len(values), "median": statistics.median(values), "largest": max(values)}


if __name__ == "__main__":
    main()
