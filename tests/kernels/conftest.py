"""Kernel tests run everywhere: on the GPU where there is one, else in Triton's interpreter on the CPU.

Triton decides when a kernel is decorated whether it will be interpreted, so the variable must be set before any test
module imports a kernel. Ahead-of-time compilation needs real compiled functions and lives in a process of its own
(`tests/kernels/ahead_of_time.py`).
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run."""
    torch.manual_seed(0)
