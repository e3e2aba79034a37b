"""Starts the ranks of a trial: here, or one beside each process that torchrun or srun has started.

    penstock tune RUN --processes 4                       `StartHere`: `penstock train` starts them
    torchrun --nnodes=2 ... -m penstock tune RUN          `Director` in the first process, `follow` in the others
    srun --nodes=2 --ntasks-per-node=8 penstock tune RUN  the same

The first process searches and decides. For each trial it writes a command to the store at which all have met; every
process then starts one rank, with its own place among the ranks, and says how that ended. The ranks of a trial are a
launch with a name of its own. The processes of the search use no GPU, so a trial that hangs, is killed or runs out of
memory takes nothing with it: its ranks are ended, and the next trial begins with fresh ones.

Keys of the store, for the trial NUMBER:  NUMBER the command; NUMBER/stop asks for the end; NUMBER/over and
NUMBER/failed count ranks; NUMBER/told/RANK is what a rank that failed has said. `left` counts processes that follow no
more.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.base.errors import FAILED, LOST, LostRankError, PenstockError
from penstock.parallel.launch.environment import variables_of_trial
from penstock.parallel.launch.rendezvous import Rendezvous

GRACE_SECONDS = 10.0  # time between the request to end and SIGKILL

POLL_SECONDS, LOOK_SECONDS = 0.05, 0.2
"""How often the first process looks for the end of a trial, and how often the others look for a trial or its stop."""

SETTLE_SECONDS = 0.5  # after the first failure, others may show that are its cause
FAREWELL_SECONDS = 60.0  # how long the first process waits for the others to end their ranks
OUTPUT_CHARACTERS = 64_000  # last characters of a failed rank's output that the first process gets
_FOLLOWER, _COMMAND_LINE = ("-m", "penstock.parallel.launch.rank"), "penstock.cli.main:main"


class RunningRanks(Protocol):
    """The ranks of a command."""

    def poll(self) -> int | None:
        """Exit code of all; None while they run."""
        ...

    def end(self) -> None:
        """End what still runs, and return when it has ended."""
        ...


class StartRanks(Protocol):
    """Starts so many ranks of a command, words behind `penstock`; their output goes to a file."""

    def start(self, arguments: Sequence[str], processes: int, output: Path) -> RunningRanks: ...


class _Process:
    """A process of the command line that ends with this one, also if this one is killed."""

    def __init__(self, arguments: Sequence[str], output: Path, variables: Mapping[str, str] | None = None) -> None:
        lifeline, self._ours = os.pipe()  # the process stops when `_ours` is closed
        command = [*_FOLLOWER, str(lifeline), _COMMAND_LINE, str(len(arguments)), *arguments, "penstock", *arguments]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env=None if variables is None else dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(lifeline,),
                start_new_session=True,  # a process group of its own, which `end` can kill
            )
        os.close(lifeline)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        if self._ours < 0:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        os.close(self._ours)
        self._ours = -1


class StartHere:
    """All ranks on this machine, started by the launcher of the verb itself."""

    def start(self, arguments: Sequence[str], processes: int, output: Path) -> RunningRanks:
        return _Process([*arguments, "--processes", str(processes)], output)


HERE = StartHere()


def run_ranks(
    starter: StartRanks,
    arguments: Sequence[str],
    processes: int,
    output: Path,
    *,
    seconds: float = 0.0,
    watch: Callable[[], str | None] = lambda: None,
) -> int | str | None:
    """Exit code of a command, None after the time limit (0 for none).

    `watch` ends it with a text: an empty one is a good end, with code 0, another one is returned.
    """
    end = time.monotonic() + (seconds or inf)
    with _stopped_by_signal() as signals:
        ranks = starter.start(arguments, processes, output)
        try:
            while (code := ranks.poll()) is None and not signals and time.monotonic() < end:
                if (verdict := watch()) is not None:
                    return verdict or 0
                time.sleep(POLL_SECONDS)
            watch()
            return code
        finally:
            ranks.end()


@contextmanager
def _stopped_by_signal() -> Iterator[list[int]]:
    """Inside, SIGTERM adds its number to the list, and at the end it is an exit.

    An exit from the signal itself could come while ranks are being started, which would then stay alive.
    """
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, previous)
    if signals:
        sys.exit(128 + signals[0])


@dataclass
class _OwnRank:
    """The rank of a trial that this process has started; `store` is that of the search, None without other ranks."""

    process: _Process
    number: int
    rank: int
    output: Path
    store: Store | None
    code: int | None = None

    def look(self) -> None:
        """Tell the others once if the rank has ended by itself."""
        if self.code is None and (code := self.process.poll()) is not None:
            self._tell(code)

    def end(self) -> None:
        """End the rank, and tell the others; that is no failure."""
        self.process.end()
        if self.code is None:
            self._tell(0)

    def _tell(self, code: int) -> None:
        self.code = code
        if self.store is None:
            return
        if code:
            text = self.output.read_text(encoding="utf-8", errors="replace")[-OUTPUT_CHARACTERS:]
            if code < 0:  # in the words of the launcher
                text += f"\nrank {self.rank} (process {self.process.pid}) was ended by {signal.Signals(-code).name}"
            self.store.set(f"{self.number}/told/{self.rank}", json.dumps({"code": code, "text": text}))
            self.store.add(f"{self.number}/failed", 1)
        self.store.add(f"{self.number}/over", 1)


class Director:
    """The first process: starts the ranks of all, in a context at whose end the others end, too."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._store = None if meeting.store is None else PrefixStore("tune", meeting.store)
        self._number = 0

    def start(self, arguments: Sequence[str], processes: int, output: Path) -> RunningRanks:
        """Start a rank beside each process of the launch, which are `processes`."""
        assert processes == self._meeting.world, "each process of the launch has one rank"
        self._number += 1
        name = f"{output.stem}-{self._number}-{os.getpid()}"
        if self._store is not None:
            self._store.set(f"{self._number}", json.dumps({"words": [*arguments], "name": name}))
        rank = _OwnRank(_Process(arguments, output, variables_of_trial(name)), self._number, 0, output, self._store)
        return _AllRanks(rank, processes)

    def __enter__(self) -> "Director":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss(error.exit_code if isinstance(error, PenstockError) else FAILED)

    def dismiss(self, code: int) -> None:
        """Let the other processes end with an exit code, unless they were told one before."""
        store, self._store = self._store, None
        if store is None:
            return
        store.set(f"{self._number + 1}", json.dumps({"end": code}))
        end = time.monotonic() + GRACE_SECONDS
        # Under srun the store ends with this process.
        while store.add("left", 0) < self._meeting.world - 1 and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


class _AllRanks:
    """The ranks of a trial, seen by the first process."""

    def __init__(self, rank: _OwnRank, world: int) -> None:
        self._own = rank
        self._world = world
        self._has_ended = False

    def poll(self) -> int | None:
        """0 if all have ended well, the code of one that failed, None while they run."""
        self._own.look()
        if self._count("failed"):
            time.sleep(SETTLE_SECONDS)
            self.end()
            return self._gather()
        return 0 if self._count("over") == self._world else None

    def end(self) -> None:
        """End all ranks. Raises a LostRankError if a process does not answer."""
        if self._has_ended:
            return
        self._has_ended = True
        store, number = self._own.store, self._own.number
        if store is not None:
            store.set(f"{number}/stop", "1")
        self._own.end()
        end = time.monotonic() + FAREWELL_SECONDS
        while (over := self._count("over")) < self._world:
            if time.monotonic() > end:
                raise LostRankError(
                    "processes of the search do not answer",
                    got=f"{over} of {self._world} have ended their rank",
                    fix="look at the machines of this launch, then --resume",
                )
            time.sleep(POLL_SECONDS)

    def _count(self, what: str) -> int:
        rank = self._own
        if rank.store is not None:
            return rank.store.add(f"{rank.number}/{what}", 0)
        return int(rank.code is not None and (what == "over" or rank.code != 0))

    def _gather(self) -> int:
        """Add what failed ranks have said to the output of the first; those that only lost another one come last."""
        store, number = self._own.store, self._own.number
        if store is None:
            return self._own.code or FAILED
        keys = {rank: f"{number}/told/{rank}" for rank in range(self._world)}
        failures: list[dict[str, Any]] = [
            {"rank": rank, **json.loads(store.get(key))} for rank, key in keys.items() if store.check([key])
        ]
        failures.sort(key=lambda failure: failure["code"] == LOST)
        with self._own.output.open("w", encoding="utf-8") as file:
            file.writelines(
                f"== rank {failure['rank']}, exit code {failure['code']}\n{failure['text']}\n" for failure in failures
            )
        return int(failures[0]["code"])


def follow(meeting: Rendezvous, folder: Path) -> int:
    """Start a rank whenever the first process starts a trial; returns the exit code that it gives at the end.

    `folder` takes the output of the ranks. Raises a LostRankError if the first process has gone.
    """
    assert meeting.store is not None, "there is another process to follow"
    try:
        return _follow(meeting, PrefixStore("tune", meeting.store), folder)
    except dist.DistError as error:
        raise LostRankError("the first process of the search has gone", got=str(error).partition("\n")[0]) from error


def _follow(meeting: Rendezvous, store: Store, folder: Path) -> int:
    output, number = folder / f"rank-{meeting.rank}.log", 0
    while True:
        number += 1
        command = json.loads(_wait_for(store, f"{number}"))
        if "end" in command:
            store.add("left", 1)
            return int(command["end"])
        with _stopped_by_signal() as signals:
            process = _Process(command["words"], output, variables_of_trial(command["name"]))
            rank = _OwnRank(process, number, meeting.rank, output, store)
            try:
                while not store.check([f"{number}/stop"]) and rank.code is None and not signals:
                    time.sleep(LOOK_SECONDS)
                    rank.look()
            finally:
                rank.end()


def _wait_for(store: Store, key: str) -> bytes:
    """A value that may come much later."""
    while not store.check([key]):  # `wait` prints a warning for each timeout
        time.sleep(LOOK_SECONDS)
    return store.get(key)
