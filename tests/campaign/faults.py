"""Faults of every kind, drawn by a seed. Each takes a folder, disturbs a run, lets it finish and compares it.

A fault returns how often it has happened: a process that ended before its moment was not disturbed.
"""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.train import loop
from tests.campaign.runs import (
    RESUME,
    STEPS,
    Reference,
    begin,
    end_of,
    finish,
    go_on,
    kill_all,
    output,
    wait_for_moment,
)

MOST_ATTEMPTS = 10
"""Of one run, before it is left alone."""

Fault = Callable[[Path, random.Random, Reference], int]


def _killed_once(folder: Path, draw: random.Random, wanted: Reference, saves: int = 0) -> bool:
    """SIGKILL of every process; whether it came before the end of the run."""
    process = go_on(folder, wanted)
    wait_for_moment(folder, process, draw, wanted, saves)
    kill_all(process)
    return end_of(process) == -signal.SIGKILL


def _killed(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """SIGKILL of every process at random moments."""
    kills = 0
    for _ in range(draw.randint(1, MOST_ATTEMPTS)):
        kills += _killed_once(folder, draw, wanted)
    finish(folder, wanted)
    return kills


def _launcher_killed(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """SIGKILL of the launcher: its ranks save and end by themselves."""
    process = go_on(folder, wanted)
    wait_for_moment(folder, process, draw, wanted)
    os.kill(process, signal.SIGKILL)
    killed = end_of(process) == -signal.SIGKILL
    finish(folder, wanted)
    return int(killed)


def _rank_killed(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """SIGKILL of one rank: the others end, and the launcher says which one it was."""
    process = go_on(folder, wanted)
    wait_for_moment(folder, process, draw, wanted)
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    if len(children) < 2:  # the ranks have not begun, or have ended
        kill_all(process)
        end_of(process)
        finish(folder, wanted)
        return 0
    os.kill(int(draw.choice(children)), signal.SIGKILL)
    code = end_of(process)
    assert code in (0, 1), output(folder)
    assert code == 0 or "was ended by SIGKILL" in output(folder), output(folder)
    finish(folder, wanted)
    return int(code == 1)


def _stopped(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """SIGTERM, SIGINT or SIGHUP: a checkpoint, and the shell's exit code."""
    number = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    process = go_on(folder, wanted)
    wait_for_moment(folder, process, draw, wanted)
    os.kill(process, number)
    code = end_of(process)
    assert code in (0, -number, 128 + number), (code, output(folder))
    finish(folder, wanted)
    return int(code != 0)


def _damaged(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """A file of the newest checkpoint is missing, cut, flipped, or that of another step: the one before serves."""
    _killed_once(folder, draw, wanted, saves=2)
    steps = sorted((folder / "runs/tiny/checkpoints").glob("step-*"))
    is_damaged = len(steps) > 1 and not steps[-1].name.endswith(f"{STEPS}")  # a run that has ended reads none
    if is_damaged:
        path = draw.choice(sorted(steps[-1].iterdir()))
        content = bytearray(path.read_bytes())
        kind = draw.choice(("missing", "cut", "flipped", "swapped"))
        if kind == "missing":
            path.unlink()
        elif kind == "swapped":
            path.write_bytes((steps[-2] / path.name).read_bytes())
        elif kind == "cut":
            path.write_bytes(content[: draw.randrange(len(content))])
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
    finish(folder, wanted)  # the damaged checkpoint is put aside, under a name that says so
    return int(is_damaged)


def _metrics_cut(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """The end of the metrics is missing, in the middle of a line, as after a power cut."""
    _killed_once(folder, draw, wanted, saves=2)
    path = folder / "runs/tiny/metrics.jsonl"
    cut = path.exists() and path.stat().st_size > 40
    if cut:
        newest = max((int(one.name[5:]) for one in (folder / "runs/tiny/checkpoints").glob("step-*")), default=0)
        lines = path.read_bytes().splitlines(keepends=True)  # those up to the checkpoint were synced before it
        kept = b"".join(lines[:newest])
        rest = b"".join(lines[newest:])
        path.write_bytes(kept + rest[: draw.randrange(len(rest) + 1)])
    finish(folder, wanted)
    return int(cut)


def _two_at_once(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """Two processes resume one folder: one trains, the other is refused with a line."""
    _killed_once(folder, draw, wanted, saves=2)
    if not (folder / "runs/tiny/config.toml").exists():
        finish(folder, wanted)
        return 0
    first = go_on(folder, wanted)
    second = begin(folder, (*RESUME, *[word for word in wanted.words if not word.startswith("parallel")]))
    codes = sorted((end_of(first), end_of(second)))
    assert codes in ([0, 0], [0, 2]), (codes, output(folder))  # the second may come after the end of the first
    finish(folder, wanted)
    return 1


def _clock_back(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """A run is killed, and goes on while the clock of the machine shows an earlier time."""
    _killed_once(folder, draw, wanted, saves=2)
    back = draw.uniform(60.0, 1e7)
    now = time.time

    def turn_back() -> None:
        vars(time)["time"] = lambda: now() - back

    process = go_on(folder, wanted, turn_back)
    wait_for_moment(folder, process, draw, wanted)
    kill_all(process)
    end_of(process)
    finish(folder, wanted)
    return 1


def _out_of_memory(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """An allocation fails in a step, an evaluation or a save: one line, and the next start goes on."""
    name, calls = draw.choice((("train_step", 15), ("evaluate", 3), ("save_state", 7)))
    left = draw.randint(1, calls)
    function: Callable[..., Any] = vars(loop)[name]

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return function(*arguments, **options)

    process = go_on(folder, wanted, lambda: vars(loop).update({name: fail}))
    code = end_of(process)
    assert code == 2, output(folder)
    assert "error: the GPU is out of memory" in output(folder), output(folder)
    finish(folder, wanted)
    return 1


def _full_disk(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """The disk is full at a random write: one line, and with more space the next start goes on.

    On a small file system of its own where this process may mount one, else by a limit on the size of files.
    """
    size = draw.randrange(20, 900)  # KiB; three checkpoints need about 600
    with _own_file_system(folder / "runs", size) as is_mounted:
        code = end_of(go_on(folder, wanted, (lambda: None) if is_mounted else partial(_limit_files, size)))
        said = output(folder)
        assert code == 0 or (code == 2 and said.count("error:") == 1 and "Traceback" not in said), (code, said)
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,size=100m", str(folder / "runs")], check=True)
        finish(folder, wanted)
    return int(code == 2)


def _read_only(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """The folder of runs takes no more writes after a kill: one line, and when it does the next start goes on.

    Where this process may not mount a file system, by the folder's permissions, which only stop users.
    """
    runs = folder / "runs"
    with _own_file_system(runs, 100_000) as is_mounted:
        _killed_once(folder, draw, wanted, saves=draw.randint(0, 2))
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(runs)], check=True)
        else:
            runs.chmod(0o555)
        code = end_of(go_on(folder, wanted))
        said = output(folder)
        assert code == 2 or not is_mounted, said
        assert code == 0 or (said.count("error:") == 1 and "Traceback" not in said), (code, said)
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,rw", str(runs)], check=True)
        else:
            runs.chmod(0o755)
        finish(folder, wanted)
    return int(code == 2)


@contextmanager
def _own_file_system(folder: Path, kib: int) -> Iterator[bool]:
    """Make a folder on a file system of its own, of so many KiB; yields whether this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


def _limit_files(kib: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 256, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


ALONE: dict[str, Fault] = {
    "killed": _killed,
    "stopped": _stopped,
    "checkpoint damaged": _damaged,
    "metrics cut": _metrics_cut,
    "two at once": _two_at_once,
    "clock back": _clock_back,
    "out of memory": _out_of_memory,
    "full disk": _full_disk,
    "read-only": _read_only,
}
TOGETHER: dict[str, Fault] = {
    "ranks killed": _killed,
    "launcher killed": _launcher_killed,
    "rank killed": _rank_killed,
    "ranks stopped": _stopped,
}
KILLS = ("killed", "ranks killed", "launcher killed", "rank killed")
"""Faults whose number is one of kills."""
