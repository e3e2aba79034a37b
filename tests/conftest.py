"""What holds for every test: no network, one thread for each process, the same random numbers every time.

Tests run several processes side by side, so each keeps to one thread. Triton decides when a kernel is decorated whether
it will be interpreted; a test far from the kernels may be the first to import one, so the decision is made here, before
any test module is collected.

Tests that take `ranks` share one pool of worker processes, so one of pytest's processes runs them all; another one runs
all that start warm (tests/warm.py), whose server takes six seconds to import what it forks.

`make test` has a budget of six minutes on two cores (docs/decisions/0153). Two things keep it:

- `@pytest.mark.often("*sm_90*")` names the cases of a parametrized test that `make test` runs; the others are slow.
- `examples(60)` of tests/examples.py draws a third as many examples when slow tests are left out.

`pytest --budget 5` fails every test that is not marked slow and takes longer than 5 s.

Tests marked `cluster` run only where the markers of the command name them, as `make test-cluster` does.
"""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch asks for the name of each address that its store listens at; a lost answer takes 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

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
settings.register_profile("often", settings.get_profile("penstock"), max_examples=33)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long a test may take."""
    parser.addoption(
        "--budget", type=float, metavar="S", help="fail each test that takes over S seconds and is not slow"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws fewer examples where slow tests are left out; before any test module is imported.

    Signals have their usual effect, also where this was started by nohup or in the background.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    settings.load_profile("often" if config.option.markexpr == "not slow" else "penstock")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The cases that `often` does not name are slow, and without a GPU the tests that need one are skipped.

    A pattern of `often` that names no case is a mistake in the test.
    """
    if "cluster" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("cluster") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    unused: dict[str, set[str]] = {}
    has_gpu = torch.cuda.is_available()
    for item in items:
        if not has_gpu and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        mark = item.get_closest_marker("often")
        if mark is not None and isinstance(item, pytest.Function):
            matching = {pattern for pattern in mark.args if fnmatchcase(item.callspec.id, pattern)}
            if not matching:
                item.add_marker(pytest.mark.slow)
            test = item.nodeid.partition("[")[0]
            unused[test] = unused.get(test, set(mark.args)) - matching
    are_all_cases_here = not any("::" in argument for argument in config.args)
    wrong = [f"{test} has no case {sorted(patterns)}" for test, patterns in unused.items() if patterns]
    if wrong and are_all_cases_here:
        raise pytest.UsageError("; ".join(wrong))
    if hasattr(config, "workerinput"):  # a process of xdist: what takes long does not stand at the end
        items.sort(key=lambda item: not any(word in _text(item.path) for word in _LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that is over its budget fails."""
    report = yield
    budget = item.config.option.budget
    is_over = budget is not None and call.duration > budget and "slow" not in item.keywords
    if is_over and call.when == "call" and report.passed:
        report.outcome, report.longrepr = "failed", f"it took {call.duration:.1f} s; its budget is {budget:g} s"
    return report


def pytest_unconfigure() -> None:
    """At the end everything goes, also the process that compiles: a worker of xdist leaves it behind."""
    gc.unfreeze()
    if "tests.kernels.ahead_of_time" in sys.modules:
        sys.modules["tests.kernels.ahead_of_time"].end_compiler()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run."""
    # `torch.manual_seed` records the call stack for each kind of device that is missing, which takes 3 ms.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session", autouse=True)
def thaws() -> Iterator[list[bool]]:
    """Runs end with `gc.unfreeze`; that the next test looks through all imports takes 0.2 s. It is put off."""
    asked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: asked.append(True))
        yield asked


@pytest.fixture(scope="module", autouse=True)
def what_runs_kept_is_collected(thaws: list[bool]) -> Iterator[None]:
    """What runs of a module had frozen is looked through once, behind its last test."""
    yield
    if thaws:
        thaws.clear()
        THAW()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def imports_are_frozen() -> None:
    """The garbage collector need not look through all that was imported. What is frozen costs nothing here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def work_is_hastened() -> Iterator[None]:
    """Kernels, where they are interpreted, that is without a GPU; the start of small runs; and searches of layouts."""
    with pytest.MonkeyPatch.context() as patch:
        warm.hasten_interpreter(patch)
        warm.hasten_evaluation(patch)
        warm.hasten_library(patch)
        warm.hasten_searches(patch)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Runs a function on every rank of a fresh process group: `ranks.run(4, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def gpu_memory() -> Iterator[None]:
    """For tests that take tens of GiB of a GPU: one of them runs at a time on a machine, and gives back what it took.

    A lock does it, because processes of one GPU need not be those of one run of pytest.
    """
    with (Path(tempfile.gettempdir()) / "penstock-gpu-memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Ranks that the test lets the product start begin with PyTorch imported (tests/warm.py).

    The test may give what each of them does first: a function of the top of a module.
    """

    def begin_with(prepare: Callable[[], object]) -> None:
        monkeypatch.setattr(local, "start_rank", partial(warm.start_rank, warm.CONTEXT, prepare=prepare))

    begin_with(warm.do_nothing)
    return begin_with


class _Together(LoadScopeScheduling):
    """Gives every test to the process that is free next, with all its cases, and to one process those that share what
    takes long to make: all tests of files that use `ranks` or start warm, and all of a file that keeps something. What
    has most cases comes first, and of equal parts those of files that start programs or search.

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
        if any(word in text for word in _WARM):
            return "warm"
        return file if any(word in text for word in _KEPT) else nodeid.partition("[")[0]


THAW = gc.unfreeze

_KEPT = ("@cache\n", 'scope="module"', "from benchmarks.planning import")
"""What a file that keeps something has in it; the last one's functions do."""


_WARM = ("warm.run(", "warm.CONTEXT", "warm_ranks", "tests.cli.bad_calls")
_LONG = ("subprocess", "search(")


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Only where the command asks for groups."""
    return _Together(config, log) if config.getvalue("dist") == "loadgroup" else None
