"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
