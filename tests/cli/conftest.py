"""Every test of the command line starts in an empty folder, and leaves the process as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run may switch determinism on, and choose threads, for the whole process."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
