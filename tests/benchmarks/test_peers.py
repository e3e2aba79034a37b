"""The benchmark beside other trainers reads their logs right and judges a peer by its fastest run."""

import argparse
import subprocess

import pytest

from benchmarks.peers.__main__ import last_error, read_log, summary

STEP = (
    "[rank0]:[titan] - root - step: {:2}  loss: {:.5f}  grad_norm: 1.2  memory: 102.25GiB(73.1%)  tps: {:,}  tflops: 1"
)
HEAD = "[titan] - root - Model deepseek_v3 cut size: 4,594,374,656 total parameters\n"


def test_the_figures_of_a_peer_are_medians_after_its_warm_up():
    log = HEAD + "\n".join(STEP.format(step, 9.0 - step, 100 if step < 3 else 52_000 + step) for step in range(1, 8))
    assert read_log(log, warm_up=2) == {
        "tokens_per_second": 52_005,
        "peak_memory_gib": 102.25,
        "first_loss": 8.0,
        "last_loss": 2.0,
        "parameters": 4_594_374_656,
    }


def test_a_log_without_enough_steps_is_a_failed_run():
    with pytest.raises(subprocess.CalledProcessError):
        read_log(HEAD + STEP.format(1, 9.0, 100), warm_up=2)


def test_a_failed_run_is_named_by_its_first_error():
    log = "step\ntorch.OutOfMemoryError: CUDA out of memory.\nChildFailedError: later"
    assert last_error(log) == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_peer_is_judged_by_its_fastest_run_and_a_failed_run_does_not_count():
    runs = {
        "penstock, auto-8": {"tokens_per_second": 90.0},
        "torchtitan 0.2.2, a": {"tokens_per_second": 40.0},
        "torchtitan 0.2.2, b": {"tokens_per_second": 45.0},
        "torchtitan 0.2.2, c": {"failed": "out of memory"},
    }
    written = summary(argparse.Namespace(model="cut", rows=32), runs)
    assert written["best"]["torchtitan 0.2.2"] == "torchtitan 0.2.2, b"
    assert written["ratios"] == {"penstock, auto-8 over torchtitan 0.2.2": 2.0}
