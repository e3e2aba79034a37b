"""A process of ours that does what may end it: libraries of others abort on damaged files, or ask for any memory.

    the caller                               the child, `serve` in its module
    child.ask({"open": "a.parquet"})  ->     answer({"open": "a.parquet"})
    {"blocks": 3}, b"..."             <-     {"blocks": 3}, b"..."
    ChildEndedError("SIGABRT")             <-     it has ended; the next `ask` starts another one

Requests and answers are a line of JSON and bytes, through pipes that no other program can open. The child ends when the
caller does, has a limit of memory (`use_all_memory` lifts it), and prints nothing.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

MOST_BYTES = 4 * 2**30  # of a child's memory

# The child imports what the caller would import.
_BEGIN = "import runpy, sys; module, *sys.path[:] = sys.argv[1:]; runpy.run_module(module, run_name='__main__')"

Answer = tuple[Mapping[str, Any], bytes]


class ChildEndedError(Exception):
    """The child has ended before it has answered; its argument says how."""


class Child:
    """Runs `module` when it is first asked. Threads may ask at once."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The answer to a request. Raises ChildEndedError, also after `seconds`, when the child is killed."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-P", "-c", _BEGIN, self._module, *sys.path]
                pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            answers = self._process.stdout
            assert answers is not None, "it was started with a pipe"
            limit = None if seconds is None else threading.Timer(seconds, self._process.kill)
            if limit is not None:
                limit.start()
            try:
                with suppress(BrokenPipeError):
                    _send(self._process.stdin, request, b"")
                if not (line := answers.readline()).endswith(b"\n"):
                    raise self._ended()
                head, size = json.loads(line)
                if len(content := answers.read(size)) < size:
                    raise self._ended()
                return head, content
            finally:
                if limit is not None:
                    limit.cancel()

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._ended()

    def _ended(self) -> ChildEndedError:
        assert self._process is not None, "nothing has ended"
        with suppress(BrokenPipeError), self._process:  # closes the pipes, and waits
            pass
        code, self._process = self._process.returncode, None
        return ChildEndedError(f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")


def serve(answer: Callable[[dict[str, Any]], Answer]) -> None:
    """Answer the requests of the process that has started this one."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints would be in the way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the caller decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, least = resource.getrlimit(resource.RLIMIT_DATA)  # that of the user
    limit = MOST_BYTES if least == resource.RLIM_INFINITY else min(MOST_BYTES, least)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, least))  # mapped files do not count
    for line in sys.stdin.buffer:
        request, _ = json.loads(line)
        _send(answers, *answer(request))


def use_all_memory() -> None:
    """Lift the limit of this child to the user's: drivers of GPUs map more than they use."""
    _, limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _send(pipe: Any, head: Mapping[str, Any], content: bytes) -> None:
    pipe.write(json.dumps([head, len(content)]).encode() + b"\n")
    pipe.write(content)
    pipe.flush()
