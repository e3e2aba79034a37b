"""Start the ranks of a run on this machine through torchrun's API, and end with their exit code.

    Ctrl-C, SIGTERM    are forwarded to every rank; the launcher waits until they have saved (penstock/train/stop.py)
    exit code 2        a user's mistake: nothing is restarted, and the rank has printed its line itself
    a rank that dies   the others are ended; all start again, up to `restarts` times, with the run of the same launch

torchrun's own restarts are not used, because they repeat user mistakes and requested stops, nor its signal handlers,
which give a rank 30 seconds, nor its log about a failed rank: the rank's own line is the useful one.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.base.errors import FAILED, WRONG_INPUT, ConfigError, DeviceError
from penstock.config.fit import grid_of
from penstock.config.run import Run
from penstock.parallel.launch.environment import (
    Environment,
    LaunchFacts,
    environment_for_children,
    facts_of_machine,
)

INTERRUPTED = 130
"""Exit code of a rank that Ctrl-C ended."""

MOST_PROCESSES = 1024
"""Ranks on one machine; each is a process that imports PyTorch."""

LOCALHOST = "127.0.0.1"
"""An address, not a name: nothing is looked up."""

RankFunction = Callable[[Sequence[str]], int]
"""The work of a rank: takes the words of a command line, returns an exit code. Must be importable."""


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """Ranks to start here."""

    processes: int
    facts: LaunchFacts
    restarts: int = 0  # how often all are started again after one has died
    name: str = field(default_factory=lambda: f"local-{uuid.uuid4().hex}")  # the same after a restart
    say: Callable[[str], None] = _say  # prints a line


def facts_of_ranks(environment: Environment, processes: int, *, on_cpu: bool = False) -> LaunchFacts:
    """Facts of so many ranks on this machine."""
    machine = replace(facts_of_machine(environment), world=processes, local_world=processes)
    return replace(machine, vendor="cpu") if on_cpu else machine


def facts_of_run(run: Run, machine: LaunchFacts) -> LaunchFacts:
    """Facts of machine and run together."""
    vendor = "cpu" if run.device == "cpu" else machine.vendor
    return replace(machine, vendor=vendor, deterministic=run.training.deterministic)


def processes_to_start(run: Run, environment: Environment, asked: int | None) -> int:
    """Number of ranks that a command starts on this machine; 1 means that it is the rank itself.

    `asked` is `--processes`; None asks for one process for each GPU, or for as many as divide the run's batch. Raises a
    DeviceError if this is a rank already or there are fewer GPUs than processes.
    """
    if environment.started_by:
        if asked is not None:
            raise DeviceError(
                f"{environment.started_by} has started the processes already",
                got=f"--processes {asked}",
                fix="leave out --processes, or start one command without it",
            )
        return 1
    if asked is not None and asked > MOST_PROCESSES:
        raise DeviceError("--processes is too many for one machine", got=asked, allowed=f"at most {MOST_PROCESSES}")
    gpus = 0 if run.device == "cpu" else torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise DeviceError(
            "--processes is more than the GPUs of this machine", got=asked, allowed=gpus, fix="device=cpu runs on none"
        )
    if asked is not None:
        return asked
    return next((ranks for ranks in range(gpus, 0, -1) if _fits(run, ranks)), max(1, gpus))


def _fits(run: Run, ranks: int) -> bool:
    try:
        grid_of(run, ranks)
    except ConfigError:
        return False
    return True


def run_processes(work: RankFunction, words: Sequence[str], launch: LocalLaunch) -> int:
    """Start the ranks and wait for them. Returns the ranks' exit code, or 1 if one died too often."""
    with environment_for_children(launch.facts), _quiet_agent(), _SignalForwarder() as forwarder:
        for attempt in range(launch.restarts + 1):
            try:
                codes = _run_once(work, words, launch)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
            else:
                return max(codes.values())
            if forwarder.signal is not None:  # a rank that the signal ended is no failure
                return 128 + forwarder.signal
            if failure.exitcode == WRONG_INPUT:
                return WRONG_INPUT
            code = failure.exitcode
            end = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
            again = f"; restart {attempt + 1} of {launch.restarts}" if attempt < launch.restarts else ""
            launch.say(f"rank {rank} (process {failure.pid}) {end}{again}")
    return FAILED


def _run_once(work: RankFunction, words: Sequence[str], launch: LocalLaunch) -> dict[int, int]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=launch.processes,
            run_id=launch.name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOCALHOST}:0",
            local_addr=LOCALHOST,
            max_restarts=0,
            start_method="spawn",  # CUDA does not survive a fork
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP,SIGQUIT",  # `_SignalForwarder` has the others
        )
        codes: dict[int, int] = elastic_launch(config, _be_a_rank)(work, list(words))
        return codes


def _be_a_rank(work: RankFunction, words: Sequence[str]) -> int:
    """Runs in the new process. Exit codes of failures end the process; others are returned."""
    with ExitStack() as stack:
        stack.push(_print_traceback)
        try:
            code = work(words)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
    if code in (WRONG_INPUT, FAILED):
        sys.exit(code)
    return code


def _print_traceback(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print the traceback of an exception, which multiprocessing does not."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)


class _SignalForwarder:
    """Forwards SIGINT and SIGTERM to processes started since; `signal` is the first that came. The launcher goes on."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "_SignalForwarder":
        self._others = multiprocessing.active_children()  # not ours to signal
        self._previous = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        for child in multiprocessing.active_children():
            if child.pid is not None and child not in self._others:
                os.kill(child.pid, number)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_AGENT)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_AGENT = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
