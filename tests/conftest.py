"""What holds for every test: no network, one thread for each process, the same random numbers every time.

Tests run several processes side by side, so each keeps to one thread. Triton decides when a kernel is decorated whether
it will be interpreted; a test far from the kernels may be the first to import one, so the decision is made here, before
any test module is collected.

Tests that take `ranks` share one pool of worker processes, so one of pytest's processes runs them all.
"""

import gc
import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

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
from xdist.remote import Producer  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402
from xdist.workermanage import WorkerController  # noqa: E402

from penstock.parallel.launch import local  # noqa: E402
from tests import warm  # noqa: E402
from tests.distributed.pool import Pool  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Found examples are printed, not kept; a busy machine is no failure; the same examples on every machine.
settings.register_profile("penstock", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("penstock")


def pytest_unconfigure() -> None:
    """At the end everything goes."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run.

    `torch.manual_seed` writes down for each kind of device that is not there who asked for it, which takes 3 ms.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def imports_are_frozen() -> None:
    """Whoever collects garbage need not look through all that was imported, which takes 0.3 s. Runs end the frost.

    What is frozen costs nothing here. To ask how much that is would count it, which takes 0.1 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def work_is_hastened() -> Iterator[None]:
    """Kernels, where they are interpreted, that is without a GPU; and the start of small runs."""
    with pytest.MonkeyPatch.context() as patch:
        warm.hasten_interpreter(patch)
        warm.hasten_evaluation(patch)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Runs a function on every rank of a fresh process group: `ranks.run(4, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that the test lets the product start begin with PyTorch imported (tests/warm.py)."""
    monkeypatch.setattr(local, "elastic_launch", partial(warm.launch, "forkserver"))


class _Together(LoadScopeScheduling):
    """Gives every test to the process that is free next, but those that share what takes long to make to one process:
    all tests of files that use `ranks`, and all of a file that keeps something from test to test.

    Marks `xdist_group` would say the same, but pytest-xdist 3.8 does not see them under pytest 9.2
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Forgets what is done: whenever a test ends, everything in `assigned_work` is counted."""
        super().mark_test_complete(node, item_index, duration)
        groups, nodeid = self.assigned_work[node], self.registered_collections[node][item_index]
        if all(groups[self._split_scope(nodeid)].values()):
            del groups[self._split_scope(nodeid)]

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        text = _text(self.config.rootpath / file)
        if "ranks: Pool" in text:
            return "ranks"
        return file if any(word in text for word in _KEPT) else nodeid


_KEPT = ("@cache\n", 'scope="module"', "from benchmarks.planning import")
"""What a file that keeps something has in it; the last one's functions do."""


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Only where the command asks for groups."""
    return _Together(config, log) if config.getvalue("dist") == "loadgroup" else None
