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


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the launches in `SMALL_TILES` of a test's module, so that few numbers are many tiles.

    Its keys are names below `penstock.kernels`. Tests that compile for a chip, or need a GPU, have the real launches.
    """
    if "target" not in request.fixturenames and not request.node.get_closest_marker("gpu"):
        for name, launch in getattr(request.module, "SMALL_TILES", {}).items():
            monkeypatch.setattr(f"penstock.kernels.{name}", launch)


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
