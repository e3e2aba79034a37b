"""Which rank is lost: every rank answers a roll call, and a rank whose step hangs calls one.

    rank 0    backward of step 7 since 60 s, which is the timeout: it calls the roll and ends with
              `rank 1 on node-b does not answer; got 3 of 4 that wait in backward of step 7; fix: ...`
    rank 1    is stopped, or its machine is dead: no answer
    others    a thread of each answers with what its training thread does, and since when

A failed collective says at most which address it waited for, so a rank that loses another one calls the roll too,
before its error is told. One thread looks for calls, on its own connection to the store. Another has the clock: if the
network to the store is cut, calls to the store wait until TCP gives up, which takes a quarter of an hour.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from penstock.base.errors import LostRankError
from penstock.base.numbers import time_text

LOOK_SECONDS = 1.0  # between looks for a roll call, and at the clock
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
        while not self._is_over.wait(LOOK_SECONDS):
            mark = self._mark
            if mark is not None and time.monotonic() - mark[1] > self._timeout:
                self._leave(LostRankError("no progress", got=f"{mark[0]} for {time_text(self._timeout)}"))
                return

    def _look_for_call(self) -> None:
        with suppress(RuntimeError):  # the store has gone with its process
            while not self._is_over.wait(LOOK_SECONDS):
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
