"""Ctrl-C while modules are imported ends the program at once.

An import may turn a KeyboardInterrupt into another error or print it in the middle of a callback, and no work has begun
that needs an orderly end. `penstock/__main__.py` calls this before its own imports.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, STOPPED = 130, 143  # exit codes after Ctrl-C and SIGTERM, as in a shell


def end_at_once() -> None:
    """Let Ctrl-C end the process silently, unless another handler is installed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _RAISE:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if `end_at_once` was in effect."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _RAISE)


@contextmanager
def imports_end_at_once() -> Iterator[None]:
    """End the process at once on Ctrl-C inside, and raise KeyboardInterrupt again behind."""
    end_at_once()
    try:
        yield
    finally:
        raise_again()


_RAISE = signal.default_int_handler


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # without handlers and without a traceback
