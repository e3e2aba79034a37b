"""Stopping on request: a signal sets a flag, and the loop stops after the step that is running, with a checkpoint.

    SIGINT (Ctrl-C)            stop after this step; exit code 130. A second one stops at once, without a checkpoint.
    SIGTERM (Slurm, a pod,     stop after this step; exit code 143. Repeats change nothing: whoever sends it is patient
    torchrun, systemd)         until SIGKILL, and the checkpoint is what the patience is for.

The code is not 0, because the run is not finished: a Kubernetes Job starts the pod again and a Slurm script can
requeue, where 0 would be taken for a run that is complete. Both codes are the shell's own, 128 + signal. Several ranks
may make one more step until all have heard of it (penstock/train/step.py). Give two steps and the checkpoint time:
`terminationGracePeriodSeconds`, or `sbatch --signal=TERM@120`.

A launcher that passes Ctrl-C on sends a second SIGINT right behind the terminal's own. Those within
`SAME_PRESS_SECONDS` are one press.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SAME_PRESS_SECONDS = 1.0
"""Interrupts closer together than this count as one."""


class StopRequest:
    """While it is entered, SIGINT and SIGTERM ask for a stop instead of ending the process.

    Args:
        notify: called once, when the first signal comes, between two operations of the thread that trains.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self.signal: signal.Signals | None = None
        self._first_seconds = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal as in a shell, or 0 if nobody asked for a stop."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; Python calls this between two bytecodes of the main thread."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_seconds = signal.Signals(number), now
            self._notify()
        elif number == signal.SIGINT and now - self._first_seconds > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
