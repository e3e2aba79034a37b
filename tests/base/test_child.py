"""A child answers, and whatever ends it is an error of the caller."""

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.base.child import MOST_BYTES, Answer, Child, ChildEndedError, serve


def answer(request: dict[str, Any]) -> Answer:
    """Run in the child."""
    if "signal" in request:
        os.kill(os.getpid(), request["signal"])
    if "size" in request:
        return {}, bytes(request["size"])
    print("a library prints something")  # noqa: T201
    return {"text": request["text"], "pid": os.getpid()}, request["text"].encode()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(__name__)
    yield child
    child.close()


def test_a_child_answers_with_values_and_bytes(child: Child) -> None:
    for text in ("a", "\u6c34\n", "x" * 100_000):
        head, content = child.ask({"text": text})
        assert (head["text"], content.decode()) == (text, text)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_the_end_of_a_child_is_an_error_and_the_next_question_starts_another(child: Child, number: int) -> None:
    first = child.ask({"text": "a"})[0]["pid"]
    with pytest.raises(ChildEndedError, match=f"was ended by {signal.Signals(number).name}"):
        child.ask({"signal": number})
    assert child.ask({"text": "a"})[0]["pid"] != first


def test_a_child_has_a_limit_of_memory(child: Child) -> None:
    with pytest.raises(ChildEndedError, match="ended with code 1"):
        child.ask({"size": MOST_BYTES})


def test_a_child_ends_with_its_caller() -> None:
    def ask(pids: Any) -> None:
        pids.put(Child(__name__).ask({"text": "a"})[0]["pid"])
        pids.get()  # for ever

    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    caller = context.Process(target=ask, args=(pids,))
    caller.start()
    number = os.pidfd_open(pids.get())
    caller.kill()
    caller.join()
    multiprocessing.connection.wait([number])  # until the process has ended


if __name__ == "__main__":
    serve(answer)
