"""What ranks do in tests of launching: `python -m tests.parallel.launch.ranks WORD FOLDER`, or the function alone."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import DataError, PenstockError
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.rendezvous import Rendezvous, start_process_group, stop_process_group
from penstock.train.step import StopRequest


def add_up(words: Sequence[str]) -> int:
    """Sum the ranks over gloo, write down the sum, then do what the first word says."""
    word, folder = words[0], Path(words[1])
    environment = read_environment()
    try:
        with Rendezvous(environment) as meeting:
            meeting.open(1)  # minutes
            attempt = meeting.agree(lambda: len(list(folder.glob("attempt-*-0"))))  # earlier starts
            start_process_group(meeting, torch.device("cpu"))
            total = torch.tensor([float(environment.rank + 1)])
            dist.all_reduce(total)
            facts = (total.item(), environment.world_size, environment.launch, os.environ.get("GLOO_SOCKET_IFNAME"))
            (folder / f"attempt-{attempt}-{environment.rank}").write_text(" ".join(map(str, facts)))
            dist.barrier()
            code = _act(word, attempt, environment.rank, folder)
            stop_process_group()
            return code
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def when(is_time: Callable[[], bool], act: Callable[[], None]) -> None:
    """Act beside the test, as soon as it is time."""

    def watch() -> None:
        while not is_time():
            time.sleep(0.005)
        act()

    threading.Thread(target=watch, daemon=True).start()


def wait_for_end(process: int) -> None:
    """Return when a process that need not be a child has ended; Linux only."""
    state = Path(f"/proc/{process}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":  # a zombie has ended
        time.sleep(0.01)


def _act(word: str, attempt: int, rank: int, folder: Path) -> int:
    if word == "mistake":
        raise DataError("the text is bad")
    if word == "mistake-of-one" and rank == 1:
        raise DataError("the text of rank 1 is bad")
    if word == "die-once" and rank == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "lose-one" and rank == 1 and attempt < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if word in {"mistake-of-one", "die-once"} or (word == "lose-one" and attempt < 2):
        dist.all_reduce(torch.ones(1))  # the others wait for rank 1
    if word == "lose-one" and attempt == 2 and rank == 0:
        (folder / f"ready-{rank}").touch()
        signal.pause()
    if word == "wait" or (word == "lose-one" and attempt == 2):
        with StopRequest() as stop:
            (folder / f"ready-{rank}").touch()
            while stop.signal is None:
                time.sleep(0.02)
            return stop.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(add_up(sys.argv[1:]))
