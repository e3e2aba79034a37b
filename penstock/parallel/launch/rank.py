"""A rank of the local launcher: `python -m penstock.parallel.launch.rank LIFELINE WORK COUNT WORDS... ARGV...`.

LIFELINE is the reading end of a pipe that the launcher holds open. When the launcher dies, however it dies, the rank
stops after its step with a checkpoint, as after SIGTERM, and ends at the latest `ORPHAN_SECONDS` later. WORK is a
function as MODULE:NAME, which gets COUNT words; ARGV is the command line of the launcher.

The exit code is the function's. A rank that fails ends at once: threads that wait for lost ranks cannot be joined.
"""

from penstock.base.interrupts import end_at_once

end_at_once()

import os  # noqa: E402 - Ctrl-C during imports prints nothing
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from importlib import import_module  # noqa: E402

from penstock.base.errors import FAILED, LOST  # noqa: E402
from penstock.base.interrupts import INTERRUPTED, STOPPED  # noqa: E402

RankFunction = Callable[[Sequence[str]], int]
"""The work of a rank: takes the words of a command line, returns an exit code. Must be importable."""

ORPHAN_SECONDS = 120.0  # time for the current step and its checkpoint after the launcher has died


def follow_launcher(lifeline: int) -> None:
    """Stop this process when the other end of a pipe is closed."""

    def stop_at_end() -> None:
        os.read(lifeline, 1)  # nothing is ever written
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(STOPPED)

    threading.Thread(target=stop_at_end, name="penstock lifeline", daemon=True).start()


def be_a_rank(work: RankFunction, arguments: Sequence[str]) -> int:
    """The exit code of the work; prints the traceback of a bug."""
    try:
        return work(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - the last that this process does is to print it
        traceback.print_exc()
        return FAILED


def main() -> None:
    lifeline, target, count, *rest = sys.argv[1:]
    arguments, sys.argv = rest[: int(count)], rest[int(count) :]
    follow_launcher(int(lifeline))
    module, _, name = target.partition(":")
    work: RankFunction = vars(import_module(module))[name]
    code = be_a_rank(work, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (FAILED, LOST):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
