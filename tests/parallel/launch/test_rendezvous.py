"""Ranks that find each other, agree and fail: as threads of one process, each with a meeting of its own."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from penstock.base.errors import ConfigError, DeviceError, LostRankError, PenstockError, RunFolderError, every_kind
from penstock.parallel.launch import rendezvous as module
from penstock.parallel.launch.environment import Environment
from penstock.parallel.launch.rendezvous import Rendezvous, start_process_group, stop_process_group
from tests.parallel.simulated import fake_rank

ALONE = Environment(color=False, threads=1, world_size=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that torchrun's agent would hold; it lives longer than the ranks."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.0)  # else each later rank to fail stays a second
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class LeavesError(Exception):
    """Stands for the end of the process."""


def environment_of(rank: int, world: int, port: int, started_by: str = "torchrun") -> Environment:
    where = f"127.0.0.1:{port}"
    facts: dict[str, Any] = {"started_by": started_by, "holds_store": started_by != "torchrun", "meeting_point": where}
    return Environment(color=False, threads=1, world_size=world, rank=rank, **facts)


def meeting_of(rank: int, world: int, store: TCPStore) -> Rendezvous:
    """The meeting of one rank; when the process should end, it raises."""

    def leave(code: int) -> None:
        raise LeavesError(code)

    return Rendezvous(environment_of(rank, world, store.port), leave)


def on_ranks(world: int, store: TCPStore, act: Callable[[Rendezvous], Any]) -> list[Future[Any]]:
    def run(rank: int) -> Any:
        with meeting_of(rank, world, store) as meeting:
            return act(meeting)

    with ThreadPoolExecutor(world) as pool:
        return [pool.submit(run, rank) for rank in range(world)]


def test_one_rank_asks_nobody() -> None:
    with Rendezvous(ALONE) as meeting:
        meeting.open(1)
        assert meeting.agree(lambda: {"folder": "runs/x"}) == {"folder": "runs/x"}
        start_process_group(meeting, torch.device("cpu"))
        assert not dist.is_initialized()
        stop_process_group()
        assert meeting.first_to_fail()


def test_rank_0_decides_and_all_get_its_answer(store: TCPStore) -> None:
    asked = []

    def act(meeting: Rendezvous) -> list[Any]:
        meeting.open(1)
        decided = meeting.agree(lambda: asked.append(meeting.rank) or ["runs/x", None, meeting.rank])
        return [decided, meeting.agree(lambda: meeting.rank + 7)]

    results = [future.result() for future in on_ranks(4, store, act)]
    assert results == [[["runs/x", None, 0], 7]] * 4
    assert asked == [0]


def test_an_error_of_rank_0_is_everybodys_and_one_rank_says_it(store: TCPStore) -> None:
    def act(meeting: Rendezvous) -> None:
        meeting.open(1)

        def fail() -> None:
            raise RunFolderError("runs/x exists already", got=Path("runs/x"), fix="--resume")

        meeting.agree(fail)

    errors = [future.exception() for future in on_ranks(4, store, act)]
    said = [str(error) for error in errors if isinstance(error, RunFolderError)]
    assert said == ["runs/x exists already; got runs/x; fix: --resume"]
    assert [error.args for error in errors if isinstance(error, LeavesError)] == [(2,)] * 3


def test_every_kind_of_error_travels(store: TCPStore) -> None:
    def act(meeting: Rendezvous) -> None:
        meeting.open(1)
        for kind in every_kind().values():

            def fail(kind: type[PenstockError] = kind) -> None:
                raise kind("a fault", got=3, fix="mend it")

            with pytest.raises(PenstockError) as refusal:
                meeting.agree(fail)
            assert type(refusal.value) is kind
            assert str(refusal.value) == "a fault; got 3; fix: mend it"

    for future in on_ranks(2, store, act):
        future.result()


@pytest.mark.parametrize(("fault", "code"), [(KeyError("a fault of ours"), 1), (ConfigError("only rank 2 sees it"), 2)])
def test_the_first_to_fail_speaks_and_the_others_leave_with_its_code(
    store: TCPStore, fault: Exception, code: int
) -> None:
    def act(meeting: Rendezvous) -> None:
        meeting.open(1)
        if meeting.rank == 2:
            raise fault
        assert meeting.store is not None
        meeting.store.wait(["code"])  # the first has told the store
        raise RuntimeError("connection closed by peer")

    *others, first = (future.exception() for future in on_ranks(3, store, act))
    assert first is fault
    assert [error.args for error in others if isinstance(error, LeavesError)] == [(code,)] * 2


def test_an_error_before_the_meeting_is_said_once(store: TCPStore) -> None:
    def act(meeting: Rendezvous) -> None:
        raise ConfigError("an unknown field")

    errors = sorted(type(future.exception()).__name__ for future in on_ranks(4, store, act))
    assert errors == ["ConfigError", *["LeavesError"] * 3]


def test_under_srun_rank_0_says_what_is_wrong_before_the_meeting() -> None:
    ranks = [Rendezvous(environment_of(rank, 2, 1, "srun")) for rank in range(2)]
    assert [meeting.first_to_fail() for meeting in ranks] == [True, False]


def test_restarted_ranks_do_not_believe_what_the_store_still_says(store: TCPStore) -> None:
    names = dist.PrefixStore("penstock", store)

    def words() -> list[bytes]:
        """What the other ranks have answered to the name that the store has."""
        name = names.get("name").decode()
        return [names.get(f"{name}/{rank}") for rank in (1, 2)]

    for round_number in range(3):
        old = words() if round_number else []

        def act(meeting: Rendezvous, number: int = round_number, old: Sequence[bytes] = old) -> int:
            while meeting.rank == 0 and not set(old).isdisjoint(words() if old else ()):
                time.sleep(0.01)  # the others find the old name first
            meeting.open(1)
            return meeting.agree(lambda: number)

        assert [future.result() for future in on_ranks(3, store, act)] == [round_number] * 3


def test_ranks_that_do_not_come_are_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # The time limit is of the others' coming only. A client of two threads would keep one waiting for the other.
    monkeypatch.setattr(Rendezvous, "_connect", lambda meeting: TCPStore("127.0.0.1", store.port, is_master=False))

    def act(meeting: Rendezvous) -> None:
        if meeting.rank not in (1, 3):
            meeting.open(0.2 / 60)  # a fifth of a second

    errors = [future.exception() for future in on_ranks(4, store, act)]
    # The first rank that fails reports it; all ranks know.
    said = next(error for error in errors if isinstance(error, DeviceError))
    assert "not every rank came" in str(said) or "waits for other ranks" in str(said)
    with pytest.raises(DeviceError, match="not every rank came within 600 ms; got 1 of 3; missing: rank 1, 2"):
        meeting_of(0, 3, store).open(0.01)


def test_an_address_without_a_store_is_an_error(store: TCPStore) -> None:
    with pytest.raises(DeviceError, match="rank 1 does not find the others at 127.0.0.1:1"):
        Rendezvous(environment_of(1, 2, 1)).open(0.1 / 60)  # port 1: nothing listens there


def test_a_fake_group_is_whatever_rank_it_is_told() -> None:
    with fake_rank(517, 1024):
        assert (dist.get_rank(), dist.get_world_size()) == (517, 1024)
        dist.all_reduce(torch.ones(3))
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [(2, 0, True), (3, 1, False)])
def test_behind_a_cut_link_one_rank_of_the_machine_says_so(
    rank: int, local_rank: int, speaks: bool, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REACH_SECONDS", 0.05)
    left: list[int] = []
    environment = replace(environment_of(rank, 4, store.port), local_rank=local_rank)
    meeting = Rendezvous(environment, left.append)
    is_over = threading.Event()
    monkeypatch.setattr(meeting, "_tell", lambda error: is_over.wait())  # a call to the store that is not answered
    with pytest.raises(LostRankError) as lost, meeting:
        raise LostRankError("no progress", got="forward of step 13 for 60 s")
    is_over.set()
    assert left == ([] if speaks else [75])
    told = f"rank 0 at 127.0.0.1:{store.port} is not reached from {socket.gethostname()}; got forward of step 13"
    assert str(lost.value).startswith(told) == speaks


def test_where_the_store_is_gone_a_rank_of_each_machine_speaks(store: TCPStore) -> None:
    def speaks(rank: int, started_by: str) -> bool:
        environment = replace(environment_of(rank, 4, store.port, started_by), local_rank=rank % 2)
        meeting = Rendezvous(environment)
        meeting.store = GoneStore()  # type: ignore[assignment]
        return meeting.first_to_fail()

    assert [speaks(rank, "torchrun") for rank in range(4)] == [True, False, True, False]
    assert [speaks(rank, "srun") for rank in range(4)] == [False, True, True, False]  # rank 0 held the store


class GoneStore:
    """A store whose process has ended."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Take a timeout."""

    def add(self, key: str, amount: int) -> int:
        """Fail."""
        raise dist.DistNetworkError("connection closed")
