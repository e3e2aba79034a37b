"""Rendezvous of the ranks of a launch: they meet, agree, fail with one error, and start their process group.

    with Rendezvous(environment) as rendezvous:
        rendezvous.open(timeout_minutes=30)               wait until all ranks are there
        folder = rendezvous.agree(make_the_folder)        rank 0 decides, all get its result or its error
        start_process_group(rendezvous, device)

It needs torchrun's store only. Results are JSON; nothing is pickled.

torchrun keeps its store when it restarts ranks, with old answers in it. So each opening has its own name: rank 0 writes
it, each rank answers under the name that it reads, with a random word, and rank 0 publishes the list of words. A rank
whose word is not in the list has read an old name, and reads again.

When a run fails, ranks fail one after the other. The first prints its error, in which a lost rank is named
(`Watch`); the others leave quietly. On a machine that no longer reaches the store, such as behind a cut link, one rank
says so.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.base.errors import FAILED, LOST, DeviceError, LostRankError, PenstockError, every_kind
from penstock.base.numbers import time_text
from penstock.parallel.launch.environment import Environment, facts_of_machine, prepare_environment
from penstock.parallel.launch.process import choose_device, prepare_process

ROLL_CALL_SECONDS = 1.0  # between looks for a roll call, and at the clock
ANSWER_SECONDS = 4.0  # that answers are waited for
SHOWN = 8  # ranks that an error names

MARGIN = timedelta(seconds=15)  # collectives time out so much later than the clock: NCCL then ends the process
"""By which collectives time out later than the clock: NCCL then ends the process by itself."""

Result = TypeVar("Result")


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """The result of `act`, or its error. Raises a TimeoutError if that takes longer; its thread then waits on."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except Exception as error:  # noqa: BLE001 - it is raised in the thread of the caller
            future.set_exception(error)

    threading.Thread(target=run, name="penstock call", daemon=True).start()
    return future.result(seconds)


class RankAnswer(NamedTuple):
    """To a roll call."""

    place: str  # such as `backward of step 7`; empty outside of steps
    seconds: float  # since when


class Watch:
    """The two threads of one rank; `store` is that of all ranks.

        rank 0    backward of step 7 since 60 s, which is the timeout: it calls the roll and ends with
                  `rank 1 on node-b does not answer; got 3 of 4 that wait in backward of step 7; fix: ...`
        rank 1    is stopped, or its machine is dead: no answer
        others    a thread of each answers with what its training thread does, and since when

    A failed collective says at most which address it waited for, so a rank that loses another one calls the roll too,
    before its error is told. One thread looks for calls, on its own connection to the store. Another has the clock: if
    the network to the store is cut, calls to the store wait until TCP gives up, which takes a quarter of an hour.

    The clock runs while `mark` has named an activity. One that lasts longer than `timeout` is a hang, of which `leave`
    gets the error.
    """

    def __init__(
        self, store: Store, rank: int, host: str, timeout: timedelta, leave: Callable[[LostRankError], object]
    ) -> None:
        shared: Any = store  # PyTorch's stubs lack `clone`
        self._store: Store = shared.clone()
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._rank = rank
        self._timeout = timeout.total_seconds()
        self._leave = leave
        self._mark: tuple[str, float] | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # one thread at a time uses the store's connection
        self._store.set(f"host/{rank}", host)
        for work in (self._look_at_clock, self._look_for_call):
            threading.Thread(target=work, name="penstock watch", daemon=True).start()

    def mark(self, activity: str) -> None:
        """Say what the training thread begins, such as `forward of step 7`; empty for work that may take any time."""
        self._mark = (activity, time.monotonic()) if activity else None

    def stop(self) -> None:
        """End the threads, without waiting for them."""
        self._is_over.set()

    def answer(self) -> None:
        """Answer a roll call that may come, before this process ends."""
        with suppress(RuntimeError), self._lock:
            self._answer()

    def name(self, error: LostRankError, world: int) -> LostRankError:
        """The error with the ranks that do not answer a roll call, or as it is if the store has gone."""
        with suppress(RuntimeError), self._lock:
            return self._call(world, error.got)
        return error

    def _look_at_clock(self) -> None:
        while not self._is_over.wait(ROLL_CALL_SECONDS):
            mark = self._mark
            if mark is not None and time.monotonic() - mark[1] > self._timeout:
                self._leave(LostRankError("no progress", got=f"{mark[0]} for {time_text(self._timeout)}"))
                return

    def _look_for_call(self) -> None:
        with suppress(RuntimeError):  # the store has gone with its process
            while not self._is_over.wait(ROLL_CALL_SECONDS):
                with self._lock:
                    if self._store.check(["roll"]):
                        self._answer()
                        return

    def _answer(self) -> None:
        activity, since = self._mark or ("", time.monotonic())
        self._store.set(f"here/{self._rank}", json.dumps(RankAnswer(activity, time.monotonic() - since)))

    def _call(self, world: int, got: object) -> LostRankError:
        self._store.set("roll", "1")
        self._answer()
        missing = set(range(world))
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            is_last = time.monotonic() > deadline  # read before the check: a thread that stood still looks once more
            missing -= {rank for rank in missing if self._store.check([f"here/{rank}"])}
            if not missing or is_last:
                break
            time.sleep(0.1)
        here = sorted(set(range(world)) - missing)
        answers = {rank: RankAnswer(*json.loads(self._store.get(f"here/{rank}"))) for rank in here}
        hosts = {
            rank: self._store.get(f"host/{rank}").decode()
            for rank in range(world)
            if self._store.check([f"host/{rank}"])
        }
        return named(answers, hosts, got)


def named(answers: Mapping[int, RankAnswer], hosts: Mapping[int, str], got: object) -> LostRankError:
    """The error that names the ranks without an answer, or else those that do something else than most."""
    places = Counter(answer.place for answer in answers.values())
    ((usual, _),) = places.most_common(1)
    missing = [rank for rank in hosts if rank not in answers]
    if missing:
        shown = [f"rank {rank} on {hosts[rank]}" for rank in missing[:SHOWN]]
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        what = f"{', '.join(shown)}{more}: ended, or does not answer"
    else:
        odd = [rank for rank in hosts if answers[rank].place != usual]
        shown = [f"rank {rank} on {hosts[rank]} is in {answers[rank].place or 'no step'}" for rank in odd[:SHOWN]]
        what = f"the ranks do not meet: {', '.join(shown) or 'all do the same'}"
    where = f", the others are in {usual}" if usual else ""
    fix = "look at this machine and at the output of this rank, then --resume"
    return LostRankError(what, got=f"{got}{where}", fix=fix)


Json = TypeVar("Json")

LOOK_SECONDS = 0.1
LAST_WORD_SECONDS = 10.0  # in which a rank that failed before the rendezvous looks for the others
REACH_SECONDS = 20.0  # to reach the store at the end of a run: more than two times that of any single call
LEAVE_SECONDS = 1.0  # that a later rank to fail stays, so that the launcher sees the first one end


class Rendezvous:
    """`leave` ends the process at once: threads of a broken group cannot be joined."""

    def __init__(self, environment: Environment, leave: Callable[[int], object] = os._exit) -> None:
        self.rank = environment.rank
        self.world = environment.world_size
        self.timeout = timedelta(seconds=LAST_WORD_SECONDS)
        self.store: Store | None = None  # None before the ranks have met
        self.watch: Watch | None = None  # None for one rank too
        self._environment = environment
        self._leave = leave
        self._ending = threading.Lock()  # one thread ends the process
        self._is_cut_off = False  # whether the store is not reached at the end
        self._agreements = 0  # so far: each has its own key, the same on all ranks

    def open(self, timeout_minutes: float) -> None:
        """Wait until every rank is there, or raise a DeviceError. The timeout holds for later waits too."""
        self.timeout = timedelta(minutes=timeout_minutes)
        if self.world == 1:
            return
        try:
            store = PrefixStore("penstock", self._connect())
            name = self._collect_ranks(store) if self.rank == 0 else self._register(store)
        except RuntimeError as error:  # torch's DistError; its first line says what happened
            raise DeviceError(
                f"rank {self.rank} does not find the others at {self._environment.meeting_point}",
                got=str(error).partition("\n")[0],
                fix="look at the other ranks' output, and whether that machine can be reached",
            ) from error
        self.store = PrefixStore(name, store)
        self.watch = Watch(self.store, self.rank, socket.gethostname(), self.timeout, self._hang)

    def mark(self, activity: str) -> None:
        """See `Watch.mark`."""
        if self.watch is not None:
            self.watch.mark(activity)

    def host_of(self, rank: int) -> str:
        return socket.gethostname() if self.store is None else self.store.get(f"host/{rank}").decode()

    def agree(self, make: Callable[[], Json]) -> Json:
        """The JSON result of `make` on rank 0, or its PenstockError, on every rank. All call it, in the same order."""
        if self.world == 1:
            return make()
        assert self.store is not None, "ranks must meet before they agree"
        self._agreements += 1
        key = f"agreed/{self._agreements}"
        if self.rank > 0:
            message = json.loads(self.store.get(key))
            if "error" in message:
                raise every_kind()[message["error"]](message["facts"].pop("what"), **message["facts"])
            return message["value"]
        try:
            value = make()
        except PenstockError as error:
            facts = {"what": error.what, "got": error.got, "allowed": error.allowed, "fix": error.fix}
            texts = {name: None if fact is None else str(fact) for name, fact in facts.items()}
            self.store.set(key, json.dumps({"error": type(error).__name__, "facts": texts}))
            raise
        self.store.set(key, json.dumps({"value": value}))
        return value

    def first_to_fail(self) -> bool:
        """Whether this rank is the first that failed. Each rank asks once."""
        if self.world == 1:
            return True
        is_held_by_first = self._environment.holds_store
        if self.store is None and is_held_by_first:
            return self.rank == 0  # too early to count
        try:
            launch = f"{self._environment.launch}/{self._environment.restarts}"
            store = self.store or PrefixStore(f"early/{launch}", self._connect())
            store.set_timeout(timedelta(seconds=LAST_WORD_SECONDS))
            return store.add("failures", 1) == 1
        except RuntimeError:  # the store has gone with the process that held it
            return self._is_first_here(1 if is_held_by_first and self.store is not None else 0)

    def _is_first_here(self, first: int) -> bool:
        """Whether this rank speaks for its machine, on which `first` is the first rank that is left if it is there."""
        return self.rank == first or (self._environment.local_rank == 0 and self.rank > first)

    def _code_of_first(self, error: Exception) -> int:
        """Exit code of the rank that failed first: a launcher sees the same code from every rank."""
        code = _code_of(error)
        if self._is_cut_off:
            return code
        try:
            return int(self.store.get("code")) if self.store is not None and self.store.check(["code"]) else code
        except RuntimeError:
            return code

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.watch is not None:
            self.watch.stop()
        if self.world == 1 or not isinstance(error, Exception):
            return
        is_lost = isinstance(error, LostRankError)
        with self._ending, _deaf():  # a launcher that has seen the lost rank may end this one before it has spoken
            cause = self._last_word(error)
            if not is_lost and dist.is_initialized() and dist.get_backend() == "gloo":
                dist.destroy_process_group()  # its threads would abort the process at its end, after the error's line
            if cause is None or is_lost or self._holds_store:
                time.sleep(LEAVE_SECONDS)
            if cause is None:
                self._leave(self._code_of_first(error))
        if cause is not None and cause is not error:
            raise cause from error

    def _last_word(self, error: Exception) -> Exception | None:
        """The error that this rank tells; None if another rank speaks."""
        try:
            return within(REACH_SECONDS, partial(self._tell, error))
        except TimeoutError:
            self._is_cut_off = True
        if not self._is_first_here(0):
            return None
        if not isinstance(error, LostRankError):
            return error
        what = f"rank 0 at {self._environment.meeting_point} is not reached from {socket.gethostname()}"
        return LostRankError(what, got=error.got, fix="look at the network between the two, then --resume")

    def _tell(self, error: Exception) -> Exception | None:
        is_first = self.first_to_fail()
        if self.watch is not None:
            self.watch.answer()
        if not is_first:
            return None
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set("code", str(_code_of(error)))  # before this rank ends, which makes the others fail
        if self.watch is not None and isinstance(error, LostRankError):
            return self.watch.name(error, self.world)
        return error

    def _hang(self, error: LostRankError) -> None:
        """End this process, whose training thread waits for ever. Called by the thread of the watch."""
        with self._ending:
            cause = self._last_word(error)
            if cause is not None:
                sys.stderr.write(f"error: {cause}\n")
                sys.stderr.flush()
                sys.stdout.flush()
            if cause is not None or self._is_cut_off:
                self._leave(LOST)

    @property
    def _holds_store(self) -> bool:
        """Whether the store ends with this rank: with rank 0, unless the launcher holds it."""
        return self.rank == 0 and self._environment.holds_store

    def _connect(self) -> Store:
        # `torch.distributed.rendezvous` reads from the environment whether the launcher holds the store, and since
        # PyTorch 2.15 believes it only at MASTER_ADDR and MASTER_PORT, which srun does not set.
        address = urlsplit(f"tcp://{self._environment.meeting_point}")
        assert address.hostname is not None and address.port is not None, "several ranks have a meeting point"
        return TCPStore(
            address.hostname,
            address.port,
            self.world,
            is_master=self._holds_store,
            timeout=self.timeout,
            multi_tenant=self._holds_store,
        )

    def _collect_ranks(self, store: Store) -> str:
        name = uuid.uuid4().hex
        store.set("name", name)
        answers = [f"{name}/{rank}" for rank in range(1, self.world)]
        try:
            store.wait(answers, self.timeout)
        except RuntimeError as error:
            missing = [rank for rank, answer in enumerate(answers, start=1) if not store.check([answer])]
            raise DeviceError(
                f"not every rank came within {time_text(self.timeout.total_seconds())}",
                got=f"{self.world - len(missing)} of {self.world}; missing: rank {', '.join(map(str, missing[:8]))}",
                fix="look at the output of these ranks, or raise host.timeout_minutes",
            ) from error
        store.set(f"{name}/list", json.dumps([store.get(answer).decode() for answer in answers]))
        return name

    def _register(self, store: Store) -> str:
        word, deadline = uuid.uuid4().hex, time.monotonic() + self.timeout.total_seconds()
        answered = ""
        while time.monotonic() < deadline:
            name = store.get("name").decode()
            if name != answered:  # rank 0 may have replaced the name of an earlier start
                store.set(f"{name}/{self.rank}", word)
                answered = name
            if store.check([f"{name}/list"]) and json.loads(store.get(f"{name}/list"))[self.rank - 1] == word:
                return name
            time.sleep(LOOK_SECONDS)
        raise DeviceError("rank 0 waits for other ranks", got=f"{self.timeout} of waiting at rank {self.rank}")


def _code_of(error: Exception) -> int:
    return error.exit_code if isinstance(error, PenstockError) else FAILED


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore SIGTERM inside, in a process whose training has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def start_process_group(rendezvous: Rendezvous, device: torch.device) -> None:
    """Make the group of all ranks: NCCL (RCCL on AMD) between GPUs, gloo between CPUs; none for one rank."""
    if rendezvous.store is None:
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", rendezvous.store),
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=rendezvous.timeout + MARGIN,
        device_id=device if device.type == "cuda" else None,
    )


def start_fake_process_group(rank: int, world: int) -> None:
    """Pretend to be rank `rank` of `world`: collectives return at once and move nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    sys.excepthook = hook  # torch's puts the rank before each line of a traceback, once more for each group


@contextmanager
def meet_to_measure(environment: Environment, device_kind: str, timeout_minutes: float) -> Iterator[torch.device]:
    """Give the device of this rank while all ranks are in a process group, for commands that only measure."""
    with Rendezvous(environment) as meeting:
        prepare_environment(facts_of_machine(environment))
        device = choose_device(device_kind, environment)
        meeting.open(timeout_minutes)
        start_process_group(meeting, device)
        prepare_process(environment, seed=0, deterministic=False)
        yield device
        stop_process_group()


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
