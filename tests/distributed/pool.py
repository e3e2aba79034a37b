"""One pool of worker processes for all distributed tests; they start warm (tests/warm.py).

    parent                                     worker (up to 8, started when first needed)
    run(n, function, *args)  -- pipe -->       makes a gloo group of n ranks, calls function(*args), destroys the group
    list of n results       <-- pipe --        what it returned, or its traceback

Values travel as bytes of `torch.save`, so tensors of every dtype do too, as copies; functions travel by name, so they
must stand at the top of a module. The group of a call meets at one store that lives as long as the pool, under a prefix
of its own.

Simpler than torch.testing's MultiProcessTestCase, which starts processes anew for every test.
"""

import faulthandler
import gc
import io
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.train.run_folder import temporary_folder
from tests import warm

MOST_RANKS = 8
LOCALHOST = "127.0.0.1"


class WorkerError(AssertionError):
    """A rank raised or did not answer; the text holds its traceback."""


class Pool:
    """Worker processes that live until `close`. After a hang all are killed, and the next call starts new ones.

    After one rank has failed the others must answer within `grace` seconds.
    """

    def __init__(self, grace: float = 60) -> None:
        self._grace = grace
        self._store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)  # outlives every group
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(temporary_folder("ranks"))
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._calls = 0

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
        """Call a function of the top of a module on every rank of a fresh process group; what each returned.

        Raises a WorkerError if a rank raised, or did not answer within `timeout` seconds.
        """
        assert 1 <= ranks <= MOST_RANKS, f"{ranks} ranks"
        self._start(ranks)
        self._calls += 1  # the prefix of this call's group
        for rank, (_, pipe) in enumerate(self._workers[:ranks]):
            pipe.send_bytes(_pack((str(self._calls), rank, ranks, timeout, function, args)))
        return self._collect(ranks, function.__name__, timeout)

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()  # a worker that hangs would not end otherwise
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _start(self, ranks: int) -> None:
        for number in range(len(self._workers), ranks):
            ours, theirs = warm.CONTEXT.Pipe()
            arguments = (theirs, self._store.port, self._stacks(number))
            process = warm.CONTEXT.Process(target=_work, args=arguments, daemon=True, name=f"ranks-{number}")
            process.start()
            theirs.close()  # so that the worker's end is an EOF here
            self._workers.append((process, ours))

    def _collect(self, ranks: int, name: str, timeout: float) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:ranks])}
        results: dict[int, Any] = {}
        failures: list[str] = []
        # Workers give up at the timeout by themselves where they can; starting them may take as long again.
        deadline = time.monotonic() + timeout + 60
        while waiting and (ready := wait(list(waiting), timeout=max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = _unpack(pipe.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"{name} on rank {rank} of {ranks}:\n{value}")
                    # Its peers wait for it in vain, and are soon told so by the connections that it closed.
                    deadline = min(deadline, time.monotonic() + self._grace)
        for rank in waiting.values():
            stack = self._stacks(rank).read_text() if self._stacks(rank).exists() else ""
            failures.append(f"{name} on rank {rank} of {ranks} hangs:\n{stack or 'its stack is not known'}")
        if waiting or any("the process died" in failure for failure in failures):
            self.close()
        if failures:
            raise WorkerError("\n".join(failures))
        return [results[rank] for rank in range(ranks)]

    def _stacks(self, number: int) -> Path:
        """File into which a worker writes its stack at the timeout."""
        return self._folder / f"{number}.txt"


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _work(pipe: Connection, port: int, stacks: Path) -> None:
    torch.set_num_threads(1)
    warm.hasten_interpreter(pytest.MonkeyPatch())
    warm.hasten_evaluation(pytest.MonkeyPatch())
    warm.hasten_library(pytest.MonkeyPatch())
    gc.freeze()  # imports are never garbage
    store = dist.TCPStore(LOCALHOST, port)
    with stacks.open("w") as stack_file:
        while True:
            try:
                data = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_answer(data, store, stack_file))


def _answer(data: bytes, store: dist.TCPStore, stack_file: Any) -> bytes:
    """(True, result) or (False, traceback), packed. The tests' own functions may raise anything at all."""
    try:
        call, rank, ranks, timeout, function, args = _unpack(data)
        faulthandler.dump_traceback_later(timeout, file=stack_file)
        own = dist.PrefixStore(call, store)
        dist.init_process_group("gloo", None, timedelta(seconds=timeout), world_size=ranks, rank=rank, store=own)
        torch.manual_seed(0)  # each call draws the same numbers
        result = _pack((True, function(*args)))
        dist.barrier()  # a rank that is done early must not close connections that others still read
    except BaseException:  # noqa: BLE001 # it is told to the parent, which raises it in the test
        return _pack((False, traceback.format_exc()))
    else:
        return result
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
