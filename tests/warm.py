"""Processes that begin with PyTorch imported: the import costs four seconds, and a test may start ten processes.

multiprocessing's fork server does it. It is a process that imports `IMPORTED` once and nothing else, computes nothing,
and forks: a child shares no state with pytest or with another child, as if it had been spawned.

What depends on a start from nothing does not belong here; the tests that use real programs are
tests/promises/test_packaging.py, tests/cli/test_preflight.py and the commands of README.md.
"""

import os
import runpy
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.run import Run
from penstock.data import evaluation
from penstock.data import open as opening
from penstock.data.sources import Source, Split
from penstock.data.synthetic import SyntheticTokens
from penstock.data.text import PlainText
from penstock.data.tokenizer import ByteTokenizer
from penstock.data.tokenizer_rules import Tokenizer
from penstock.parallel.launch import local, rank

IMPORTED = (
    "tests.plan.real_rank",
    "tests.distributed.one_loss",
    "tests.models.families",
    "penstock.cli.report",
    "tests.warm",
)

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(list(IMPORTED))


def run(
    function: Callable[..., int], *args: Any, folder: Path, environment: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Call a function of the top of a module in a process of its own, as `subprocess.run` calls a program.

    The function returns the exit code. `environment` has all variables of the process, which is killed after `timeout`
    seconds, and with the test. Returns the exit code, negative for a signal, and the output.
    """
    with TemporaryFile("w+", encoding="utf-8") as stdout, TemporaryFile("w+", encoding="utf-8") as stderr:
        outputs = _outputs(stdout.fileno(), stderr.fileno())
        process = CONTEXT.Process(target=_begin, args=(outputs, folder, dict(environment), function, args))
        process.start()
        try:
            process.join(timeout)  # seconds
        finally:
            if process.exitcode is None:
                process.kill()
                process.join()
        printed = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]  # the child wrote to the same files
    assert process.exitcode is not None
    return subprocess.CompletedProcess(function.__name__, process.exitcode, *printed)


def penstock(words: Sequence[str]) -> int:
    """`penstock WORDS`; the ranks that it starts are forks as well."""
    sys.argv = ["penstock", *words]
    vars(local)["start_rank"] = partial(
        start_rank, get_context("fork")
    )  # this process is a fork too: nothing is put back
    return main()


def script(path: str) -> int:
    """`python PATH`."""
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    return 0


def hasten_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels of this process run faster (tests/interpreter.py), where there are any and it knows how."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        interpreter = import_module("tests.interpreter")
        if import_module("triton").__version__.startswith(interpreter.VERSION):
            interpreter.hasten(patch)


def hasten_evaluation(patch: pytest.MonkeyPatch) -> None:
    """A process measures the held-out documents of a seed once; they take a third of the start of a small run."""
    measure, known = evaluation._measure, {}

    def once(source: Source, tokens: int) -> Any:
        if not isinstance(source, SyntheticTokens):
            return measure(source, tokens)
        key = source.fingerprint, tokens
        if key not in known:
            known[key] = measure(source, tokens)
        return known[key]

    patch.setattr(evaluation, "_measure", once)


def hasten_library(patch: pytest.MonkeyPatch) -> None:
    """A process reads the files of Python's library once for each split; that takes as long as three small steps."""
    open_library, known = opening.open_standard_library, {}

    def once(split: Split, tokenizer: Tokenizer, *, validation_share: float) -> PlainText:
        if not isinstance(tokenizer, ByteTokenizer):
            return open_library(split, tokenizer, validation_share=validation_share)
        key = split, validation_share, sysconfig.get_path("stdlib")
        if key not in known:
            known[key] = open_library(split, tokenizer, validation_share=validation_share)
        return known[key]

    patch.setattr(opening, "open_standard_library", once)


def hasten_searches(patch: pytest.MonkeyPatch) -> None:
    """A process runs a stage of a proxy model once for all its searches: four fifths of the work of a search.

    Only where some test has imported what searches: by itself the import takes longer than most tests.
    """
    composer = sys.modules.get("penstock.plan.composer")
    if composer is None:
        return
    run_proxy, known = composer.run_proxy, {}

    def once(run: Run, view: Any, target: Any, kinds: Sequence[str]) -> Any:
        gathers = composer.gathers_of(run, target.world)
        small = composer.proxy_model(run, view, gathers).model_copy(update={"name": ""})
        key = small.model_dump_json(), gathers, view, target, tuple(kinds)
        if key not in known:
            known[key] = run_proxy(run, view, target, kinds)
        return known[key]

    patch.setattr(composer, "run_proxy", once)


class WarmRank:
    """A rank that is no program of its own, as the launcher sees it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode


def do_nothing() -> None:
    """The preparation of most ranks."""


def start_rank(
    context: BaseContext,
    work: Callable[..., int],
    words: Sequence[str],
    variables: Mapping[str, str],
    lifeline: int,
    prepare: Callable[[], object] = do_nothing,
) -> WarmRank:
    """In the place of `local.start_rank`: ranks do not begin with imports, but with what a test prepares."""
    pipe = Connection(os.dup(lifeline), writable=False)
    arguments = (_outputs(1, 2), dict(variables), pipe, sys.argv, prepare, work, list(words))
    process = context.Process(target=_as_rank, args=arguments)  # type: ignore[attr-defined]
    process.start()
    pipe.close()
    return WarmRank(process)


def _close_others(descriptor: int) -> None:
    """Close every other end of a pipe, which a fork has inherited."""
    for other in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the list itself
            if other != descriptor and os.path.sameopenfile(other, descriptor):
                os.close(other)


def _outputs(*descriptors: int) -> list[Connection]:
    """What is printed to, in the form in which multiprocessing hands it to a child."""
    return [Connection(os.dup(descriptor), readable=False) for descriptor in descriptors]


def _as_rank(
    outputs: Sequence[Connection],
    variables: Mapping[str, str],
    pipe: Connection,
    argv: Sequence[str],
    prepare: Callable[[], object],
    work: Callable[..., int],
    words: Sequence[str],
) -> None:
    """Output and variables of the fork server are those of its own start."""
    _print_to(outputs)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [*argv]
    _close_others(pipe.fileno())
    for number in local.FORWARDED:
        signal.signal(number, signal.SIG_DFL)  # a fork has the handlers of the launcher
    rank.follow_launcher(pipe.fileno())
    prepare()
    code = rank.be_a_rank(work, words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _begin(
    outputs: Sequence[Connection], folder: Path, environment: Mapping[str, str], function: Callable[..., int], args: Any
) -> None:
    _print_to(outputs)
    os.environ.clear()  # those of the fork server's start
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(function(*args))


def _print_to(outputs: Sequence[Connection]) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)  # also what C libraries print
