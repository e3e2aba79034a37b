"""Stop requests: a signal sets a flag, and the loop stops after the running step, with a checkpoint.

    SIGINT (Ctrl-C)            stop after this step; exit code 130. A second one stops at once, without a checkpoint.
    SIGTERM (Slurm, a pod,     stop after this step; exit code 143. Repeats change nothing: the sender waits until
    torchrun, systemd)         SIGKILL, and the checkpoint needs that time.
    SIGHUP (the terminal is    stop after this step; exit code 129. What is printed goes nowhere, since a lost terminal
    lost)                      refuses it. Under nohup the signal is ignored, and the run goes on.

The exit codes are the shell's 128 + signal, not 0, because the run is unfinished: a Kubernetes Job restarts the pod and
a Slurm script can requeue. Several ranks may make one more step until all know of the request
(penstock/train/step.py). Allow for two steps and the checkpoint: `terminationGracePeriodSeconds`, or
`sbatch --signal=TERM@120`.

A launcher that forwards Ctrl-C sends a second SIGINT right after the terminal's. Those within `SAME_PRESS_SECONDS`
count as one.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SAME_PRESS_SECONDS = 1.0


class StopRequest:
    """Context in which signals request a stop; `notify` is called once, in the training thread."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self.signal: signal.Signals | None = None  # the first one
        self.has_failed = False  # this rank cannot go on, so no rank applies the step
        self._first_seconds = 0.0  # when it came
        self._previous: dict[signal.Signals, Any] = {}  # handlers to restore
        self._terminals: list[int] = []  # descriptors of output

    @property
    def exit_code(self) -> int:
        """128 + signal as in a shell, or 0 without a request."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]  # a lost one is none any more
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Python calls this between two bytecodes of the main thread."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        if self.signal is None:
            self.signal, self._first_seconds = signal.Signals(number), now
            self._notify()
        elif number == signal.SIGINT and now - self._first_seconds > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
