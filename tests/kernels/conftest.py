"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.tuning import target_of


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` are skipped on machines without one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that was not written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialized memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    """A Hopper GPU."""
    if device.type == "cpu" or target_of(device) != "sm_90":
        pytest.skip("the kernel runs on Hopper only")
    return device
