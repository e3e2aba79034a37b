"""A sink that can fail, hang or be slow, and a run that does not care.

A sink is somebody else's library that talks to somebody else's service, so what goes wrong in it cannot be listed, and
none of it is a reason to end a training. Each sink gets a thread of its own, which opens it, hands it one call after
the other, and closes it. What the sink raises ends that thread and nothing else: the user is told once, and the run
goes on. The thread that trains only puts reports into a queue; where a sink cannot keep up, steps are left out of it.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from penstock.train.observer import Observer, RunStart, StepReport

WAITING = 64
"""Reports that may wait for a sink: enough for a service that pauses, and little memory for wide models."""

CLOSE_SECONDS = 15.0
"""How long the end of a run waits for a sink."""

Call = Callable[[Observer], None]
"""What the sink shall do next."""


class BackgroundSink:
    """Observer that passes everything on to a sink in a thread, until the sink fails.

    Args:
        name: of the sink, for the user.
        open_sink: makes it, in the thread.
        tell: prints a line for the user; called by the thread that trains.
        close_seconds: how long `closed` waits for what is left to be told.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Observer],
        tell: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._tell = tell
        self._close_seconds = close_seconds
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)
        self._kept = _Kept()
        self._is_told = False
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def started(self, start: RunStart) -> None:
        """Pass it on."""
        self._pass_on(lambda sink: sink.started(start))

    def stepped(self, report: StepReport) -> None:
        """Pass it on, unless the sink is too far behind."""
        self._pass_on(lambda sink: sink.stepped(report))

    def saved(self, step: int) -> None:
        """Pass it on."""
        self._pass_on(lambda sink: sink.saved(step))

    def closed(self) -> None:
        """Wait until the sink has told everything and is closed, but not for ever."""
        missing = self._left_out
        if self._pass_on(None, self._close_seconds):
            self._thread.join(self._close_seconds)
        self._look()
        if self._thread.is_alive():
            self._tell(f"{self._name} has not ended after {self._close_seconds:g} s and is left behind")
        elif missing:
            self._tell(f"{self._name} was too slow for {missing} reports, which are missing there")

    def _pass_on(self, call: Call | None, seconds: float = 0.0) -> bool:
        """Whether the sink will hear of it."""
        self._look()
        if self._kept.error is not None:
            return False
        try:
            self._calls.put(call, block=seconds > 0, timeout=seconds or None)
        except queue.Full:
            self._left_out += 1
            return False
        return True

    def _look(self) -> None:
        """Tell the user, once, if the sink has failed."""
        error = self._kept.error
        if error is None or self._is_told:
            return
        self._is_told = True
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
        self._tell(f"{self._name} is off from here on, the run goes on without it ({why})")

    def _work(self) -> None:
        """The thread of the sink."""
        with self._kept, ExitStack() as cleanup:
            sink = self._open_sink()
            cleanup.callback(sink.closed)
            while (call := self._calls.get()) is not None:
                call(sink)


class _Kept:
    """Keeps what leaves it, whatever it is, for another thread to see.

    Attributes:
        error: what has left it, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True
