"""Start the ranks of a run on this machine, as torchrun does, and end with their exit code.

    Ctrl-C, SIGTERM, SIGHUP    are forwarded to every rank; the launcher waits until they have saved
    exit code 2                a user's mistake: nothing is restarted, and the rank has printed its line itself
    a rank that dies           the others are ended; all start again, up to `restarts` times, with the same run; then
                               fewer, if the run allows it (`on_ranks`)
    SIGUSR1                    a run with fewer ranks saves, and all ranks start again
    the launcher dies          its ranks stop as after SIGTERM (penstock/parallel/launch/rank.py)

A rank gets the variables of torchrun, and meets the others at a store that the launcher holds; it listens on the
loopback only. torchrun itself is not used here: it repeats user mistakes and requested stops, reads pickles from a
port that is open to the network, and leaves semaphores and folders behind when it is killed.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from types import FrameType

import torch
from torch._C._distributed_c10d import TCPStore

from penstock.base.errors import FAILED, LOST, WRONG_INPUT, ConfigError, DeviceError
from penstock.config.fit import grid_of
from penstock.config.rules import problems
from penstock.config.run import Run
from penstock.parallel.launch.environment import (
    Environment,
    LaunchFacts,
    facts_of_machine,
    variables_of_rank,
)
from penstock.parallel.launch.rank import RankFunction

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LOOK_SECONDS = 0.05  # between looks for ranks that have ended
SETTLE_SECONDS = 0.5  # after the first failure, in which others may show that are its cause
ENDING_SECONDS = 30.0  # that a rank has between SIGTERM and SIGKILL
MOST_PROCESSES = 1024  # on one machine; each imports PyTorch
LOCALHOST = "127.0.0.1"  # an address, not a name: nothing is looked up

RankProcess = subprocess.Popen[bytes]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """Ranks to start here."""

    processes: int
    facts: LaunchFacts
    restarts: int = 0  # how often so many are started again after one has died
    fewer: tuple[int, ...] = ()  # ranks with which the run goes on after that, one number after the other
    name: str = field(default_factory=lambda: f"local-{uuid.uuid4().hex}")  # the same after a restart
    say: Callable[[str], None] = _say  # prints a line


def facts_of_ranks(environment: Environment, processes: int, *, on_cpu: bool = False) -> LaunchFacts:
    machine = replace(facts_of_machine(environment), world=processes, local_world=processes)
    return replace(machine, vendor="cpu") if on_cpu else machine


def facts_of_run(run: Run, machine: LaunchFacts) -> LaunchFacts:
    vendor = "cpu" if run.device == "cpu" else machine.vendor
    return replace(machine, vendor=vendor, deterministic=run.training.deterministic)


def processes_to_start(run: Run, environment: Environment, asked: int | None) -> int:
    """Number of ranks that a command starts on this machine; 1 means that it is the rank itself.

    `asked` is `--processes`; None asks for one for each GPU, or for as many as divide the run's batch. Raises a
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
    return next(iter(possible_ranks(run, gpus)), max(1, gpus))


def run_processes(work: RankFunction, arguments: Sequence[str], launch: LocalLaunch) -> int:
    """Start the ranks and wait for them. Returns the ranks' exit code, or 1 if one died too often."""
    sizes = (launch.processes, *launch.fewer)
    size_index, left = 0, launch.restarts  # in `sizes`; restarts with so many ranks
    with _SignalForwarder() as forwarder:
        for attempt in count():
            forwarder.expect_ranks(may_grow=size_index > 0)
            with ExitStack() as stack:
                ranks = _start(work, arguments, launch, sizes[size_index], attempt, stack)
                forwarder.forward_to(ranks)
                codes = _wait(ranks)
            if forwarder.signal is not None:  # a rank that the signal ended is no failure
                return 128 + forwarder.signal
            failed = [rank for rank, code in enumerate(codes) if _is_failure(code)]
            if not failed and not forwarder.grows:
                return max(codes)
            if WRONG_INPUT in codes:
                return WRONG_INPUT
            if forwarder.grows:  # SIGTERM may have ended ranks that were still starting
                size_index, left = 0, launch.restarts
                launch.say(f"all {launch.processes} ranks start again, as SIGUSR1 asked")
                continue
            cause = _cause(ranks, codes, failed)
            if left:
                left -= 1
                launch.say(f"{cause}; restart {launch.restarts - left} of {launch.restarts}")
            elif size_index + 1 < len(sizes):
                size_index, left = size_index + 1, launch.restarts
                launch.say(f"{cause}; the run goes on with {sizes[size_index]} of {launch.processes} ranks")
            else:
                launch.say(cause)
                break
    return FAILED


def _start(
    work: RankFunction, arguments: Sequence[str], launch: LocalLaunch, world: int, attempt: int, stack: ExitStack
) -> list[RankProcess]:
    """Start the ranks; `stack` holds the store at which they meet, and the pipe whose end tells them of our death."""
    facts = replace(launch.facts, world=world, local_world=world)
    listener = socket.create_server((LOCALHOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    lifeline, ours = os.pipe()
    stack.callback(os.close, lifeline)
    stack.callback(os.close, ours)
    stack.callback(lambda: store)  # it listens as long as it is referenced
    return [
        start_rank(work, arguments, variables_of_rank(facts, rank, launch.name, attempt, LOCALHOST, port), lifeline)
        for rank in range(world)
    ]


def start_rank(
    work: RankFunction, arguments: Sequence[str], variables: Mapping[str, str], lifeline: int
) -> RankProcess:
    target = f"{work.__module__}:{work.__qualname__}"
    # Without -P, Python would look for modules in the present folder first.
    command = [sys.executable, "-P", "-m", "penstock.parallel.launch.rank", str(lifeline), target, str(len(arguments))]
    paths = os.pathsep.join(filter(None, sys.path))  # it imports what we import
    return subprocess.Popen(
        [*command, *arguments, *sys.argv],
        env={**variables, "PYTHONPATH": paths},
        pass_fds=(lifeline,),
        stdin=subprocess.DEVNULL,
    )


def _wait(ranks: Sequence[RankProcess]) -> list[int]:
    """Exit codes of the ranks. After one has failed the others are ended."""
    while any(rank.poll() is None for rank in ranks):
        if any(_is_failure(rank.poll()) for rank in ranks):
            time.sleep(SETTLE_SECONDS)
            causes = [rank.poll() for rank in ranks]
            _end(ranks)
            return [0 if code is None else code for code in causes]  # 0 was ended because another one failed
        time.sleep(LOOK_SECONDS)
    return [code for rank in ranks if (code := rank.poll()) is not None]


def _end(ranks: Sequence[RankProcess]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        _send(ranks, number)
        deadline = time.monotonic() + ENDING_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


def _send(ranks: Sequence[RankProcess], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.kill(rank.pid, number)


def _is_failure(code: int | None) -> bool:
    """Whether a rank failed; one that was asked to stop has not."""
    return code not in (None, 0, *(128 + number for number in FORWARDED))


def _cause(ranks: Sequence[RankProcess], codes: Sequence[int], failed: Sequence[int]) -> str:
    """A line about the rank that failed by itself: one that was killed, rather than one that lost another."""
    rank = min(failed, key=lambda rank: (codes[rank] == LOST, codes[rank] > 0))
    code = codes[rank]
    if code == LOST:
        return "a rank was lost"  # the rank that noticed has said which one
    end = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    return f"rank {rank} (process {ranks[rank].pid}) {end}"


class _SignalForwarder:
    """Forwards signals to the ranks; `signal` is the first that came. The launcher goes on.

    SIGUSR1 stops ranks that are fewer than the run wants, and sets `grows`; others ignore it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.grows = False
        self._may_grow = False
        self._ranks: Sequence[RankProcess] = ()

    def expect_ranks(self, *, may_grow: bool) -> None:
        """From here on keep signals for the ranks of `forward_to`, which are being started."""
        self._ranks, self._may_grow, self.grows = (), may_grow, False

    def forward_to(self, ranks: Sequence[RankProcess]) -> None:
        """From here on forward to these ranks, also a signal that came while they were started."""
        self._ranks = ranks
        if self.signal is not None:
            _send(ranks, self.signal)
        elif self.grows:
            _send(ranks, signal.SIGTERM)

    def __enter__(self) -> "_SignalForwarder":
        handled = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]  # as by nohup
        self._previous = {number: signal.signal(number, self._forward) for number in handled}
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._grow)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        _send(self._ranks, number)

    def _grow(self, number: int, frame: FrameType | None) -> None:
        if self._may_grow:
            self.grows, self._may_grow = True, False
            _send(self._ranks, signal.SIGTERM)


def on_ranks(run: Run, world: int) -> Run:
    """The run with the largest divisor of `parallel.expert` that `world` ranks can have, for a run that lost some.

    Data-parallel ranks and accumulation follow: the global batch stays as it is. Pipeline, tensor and context sizes
    never change, nor do micro-batches.

        parallel.expert=4, global_batch=8, micro_batch=1
        4 ranks    expert 4, data 4, 2 micro-batches each
        2 ranks    expert 2, data 2, 4 micro-batches each

    Without `elastic.min`, or if there is none, it is the run as it is, which `grid_of` judges.
    """
    expert = run.parallel.expert
    if not run.elastic.min or _fits(run, world):
        return run
    for smaller in (size for size in range(expert - 1, 0, -1) if expert % size == 0):
        parallel = run.parallel.model_copy(update={"expert": smaller})
        candidate = run.model_copy(update={"parallel": parallel})
        if _fits(candidate, world) and not problems(candidate):
            return candidate
    return run


def possible_ranks(run: Run, limit: int) -> tuple[int, ...]:
    """Numbers of ranks that the run fits, at most `limit`, the largest first. Below `elastic.min` there are none."""
    return tuple(ranks for ranks in range(limit, max(run.elastic.min, 1) - 1, -1) if _fits(on_ranks(run, ranks), ranks))


def _fits(run: Run, world: int) -> bool:
    try:
        grid_of(run, world)
    except ConfigError:
        return False
    return True
