"""What holds for every test: no network, one thread for each process, the same random numbers every time.

Tests run several processes side by side, so each keeps to one thread. Triton decides when a kernel is decorated whether
it will be interpreted; a test far from the kernels may be the first to import one, so the decision is made here, before
any test module is collected.
"""

import os

for name, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Found examples are printed, not kept; a busy machine is no failure; the same examples on every machine.
settings.register_profile("penstock", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run."""
    torch.manual_seed(0)
