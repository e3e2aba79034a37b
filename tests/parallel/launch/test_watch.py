"""The rank that is lost is named: it does not answer, or does something else than the others."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.base.errors import LostRankError
from penstock.parallel.launch import rendezvous as module
from penstock.parallel.launch.rendezvous import RankAnswer, Watch, named, within

WHERE = "backward of step 7"
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_a_rank_that_does_not_answer_is_named_with_its_machine() -> None:
    answers = {rank: RankAnswer(WHERE, 60.0) for rank in (0, 1, 3)}
    assert str(named(answers, HOSTS, "a timeout")) == (
        "rank 2 on b: ended, or does not answer; got a timeout, the others are in backward of step 7; "
        "fix: look at this machine and at the output of this rank, then --resume"
    )


def test_of_ranks_that_all_answer_the_one_that_is_elsewhere_is_named() -> None:
    answers = {rank: RankAnswer("data of step 7" if rank == 3 else WHERE, 60.0) for rank in HOSTS}
    assert "the ranks do not meet: rank 3 on b is in data of step 7; got a timeout" in str(
        named(answers, HOSTS, "a timeout")
    )


def test_of_many_ranks_without_an_answer_some_are_named() -> None:
    error = named({0: RankAnswer(WHERE, 1.0)}, dict.fromkeys(range(20), "a"), "a timeout")
    assert "rank 1 on a, " in str(error) and "rank 8 on a and 11 more: ended" in str(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "ROLL_CALL_SECONDS", 0.02)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 600.0)
    return dist.PrefixStore("a", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def ended(error: LostRankError) -> None:
    raise AssertionError(error)


@pytest.fixture
def watch_of(store: Any) -> Iterator[Callable[..., Watch]]:
    """Makes watches, and ends their threads."""
    made: list[Watch] = []

    def make(rank: int, seconds: float = 60.0, leave: Callable[[LostRankError], object] = ended) -> Watch:
        made.append(Watch(store, rank, f"host-{rank}", timedelta(seconds=seconds), leave))
        return made[-1]

    yield make
    for watch in made:
        watch.stop()


def test_ranks_answer_while_their_training_thread_waits(
    watch_of: Callable[..., Watch], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = [watch_of(rank) for rank in range(2)]
    for watch in watches:
        watch.mark(WHERE)
    store.set("host/2", "host-2")  # its process is stopped
    store.set("roll", "1")
    store.wait(["here/1"])
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.0)
    error = watches[0].name(LostRankError("a rank is lost", got="a closed connection"), 3)
    assert str(error).startswith(
        "rank 2 on host-2: ended, or does not answer; got a closed connection, the others are in backward of step 7"
    )


def test_a_rank_that_ends_first_may_answer_before_it_is_asked(watch_of: Callable[..., Watch]) -> None:
    first, second = watch_of(0), watch_of(1)
    second.mark("data of step 7")
    second.stop()
    second.answer()
    first.mark(WHERE)
    assert "rank 1 on host-1 is in data of step 7" in str(first.name(LostRankError("lost"), 2))


class Looks(threading.Event):
    """In place of the event that ends the clock: before each look something is done, and at the end it is set."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        super().__init__()
        self._acts = iter(acts)

    def wait(self, timeout: float | None = None) -> bool:
        act = next(self._acts, self.set)
        act()
        return self.is_set()


def test_a_place_that_lasts_too_long_is_a_hang_and_work_without_a_place_is_not(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: list[LostRankError] = []
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # the test looks at the clock
    watch = Watch(store, 0, "host-0", timedelta(seconds=0.25), hung.append)

    def later(seconds: float, place: str | None = None) -> Callable[[], None]:
        def act() -> None:
            now[0] += seconds
            if place is not None:
                watch.mark(place)

        return act

    def looked(*acts: Callable[[], None]) -> list[str]:
        watch._is_over = Looks(*acts)
        watch._look_at_clock()
        return [str(error) for error in hung]

    short = [later(0.125, WHERE)] * 4  # together longer than the limit
    assert looked(*short, later(0.25)) == []
    assert looked(later(0.0, ""), later(9.0)) == []
    assert looked(later(0.0, WHERE), later(0.25), later(0.125)) == ["no progress; got backward of step 7 for 250 ms"]


def test_without_a_store_the_error_stays_as_it_is(
    watch_of: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(0)

    def gone(*arguments: object) -> None:
        raise dist.DistNetworkError("connection closed")

    monkeypatch.setattr(watch, "_answer", gone)
    error = LostRankError("a rank is lost")
    assert watch.name(error, 2) is error
    watch.answer()


def test_a_hang_is_noticed_while_the_store_does_not_answer(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hung: Future[LostRankError] = Future()
    is_cut, is_over = threading.Event(), threading.Event()

    class Cut:
        """A connection whose other end is not reached: calls wait."""

        def clone(self) -> "Cut":
            return self

        def set_timeout(self, timeout: timedelta) -> None:
            pass

        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            is_cut.set()
            return is_over.wait()

    watch = Watch(Cut(), 2, "host-2", timedelta(seconds=0.2), hung.set_result)  # type: ignore[arg-type]
    is_cut.wait()
    watch.mark(WHERE)
    assert hung.result().what == "no progress"
    is_over.set()
    watch.stop()


def test_a_call_has_a_time_limit_and_its_error_comes_through() -> None:
    assert within(600.0, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(600.0, lambda: {}["a"])
    wait = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.02, wait.wait)
    wait.set()
