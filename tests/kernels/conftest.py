"""Kernel tests run everywhere: on the GPU where there is one, else in Triton's interpreter on the CPU.

Interpreted functions cannot be compiled, so ahead-of-time compilation has a process of its own
(`tests/kernels/ahead_of_time.py`).
"""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
