"""Cases by a seed, each read in a process that may die, and how each ended.

A case is refused with an error of one line, or read. Anything else is a fault: another exception, the death of the
process, more than 20 seconds of the processor, or more memory than its reader may have. One process reads cases in turn
until it dies; then the next one goes on behind the case that killed it.
"""

import json
import os
import random
import resource
import select
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.base.errors import PenstockError
from tests.fuzz.readers import Reader

MOST_SECONDS = 20  # of the processor
STUCK_SECONDS = 90.0  # of the clock, for a case that waits

READ, REFUSED = "read", "refused"


@dataclass(frozen=True)
class Ended:
    """How a case ended; `how` begins with `fault` for one."""

    reader: str
    seed: int
    how: str

    @property
    def is_fault(self) -> bool:
        """Whether it is neither read nor refused."""
        return self.how not in (READ, REFUSED)


def make_material(readers: Mapping[str, Reader], folder: Path) -> None:
    """Write the material of each reader into a folder of its name. In other processes: this one must have no thread."""
    made: dict[object, str] = {}
    for name, reader in readers.items():
        if reader.make in made:
            shutil.copytree(folder / made[reader.make], folder / name)
            continue
        made[reader.make] = name
        (folder / name).mkdir()
        process = os.fork()
        if process == 0:
            try:
                reader.make(folder / name)
            except BaseException:  # noqa: BLE001 - a fork must not go on behind its caller
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert status == 0, f"the material of {name} cannot be made"


def undamaged(readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """The same readers without damage."""
    return {name: replace(reader, damage=lambda folder, draw: None) for name, reader in readers.items()}


def cases(readers: Mapping[str, Reader], count: int, seed: int) -> list[tuple[str, int]]:
    """So many cases, in turn over the readers: each is a reader and a seed of its own."""
    names = sorted(readers)
    return [(names[number % len(names)], seed * 1_000_003 + number) for number in range(count)]


def run(
    readers: Mapping[str, Reader], todo: Sequence[tuple[str, int]], folder: Path, seconds: float = 1e9
) -> Iterator[Ended]:
    """Read cases until all are done, or the time is over."""
    place, end = 0, time.monotonic() + seconds
    while place < len(todo) and time.monotonic() < end:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            _work(readers, todo[place:], folder, writing)
        os.close(writing)
        for ended in _followed(process, reading, todo[place:], end):
            place += 1
            yield ended
        os.close(reading)


def _followed(process: int, pipe: int, todo: Sequence[tuple[str, int]], end: float) -> Iterator[Ended]:
    """Outcomes that a process reports, and at last what ended it."""
    buffer, told = b"", 0
    is_stuck = False
    while True:
        ready, _, _ = select.select([pipe], [], [], STUCK_SECONDS)
        is_stuck = not ready
        chunk = b"" if is_stuck else os.read(pipe, 65536)
        if not chunk:
            break
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            yield Ended(*todo[told], json.loads(line))
            told += 1
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return
    if is_stuck:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if told < len(todo):
        why = f"still waited after {STUCK_SECONDS:.0f} s" if is_stuck else f"its process ended with {code}"
        yield Ended(*todo[told], f"fault: {why}")


def _work(readers: Mapping[str, Reader], todo: Sequence[tuple[str, int]], folder: Path, pipe: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    for name, seed in todo:
        resource.setrlimit(resource.RLIMIT_DATA, (readers[name].most_bytes, hard))
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        how = attempt(readers[name], seed, folder / name)
        os.write(pipe, json.dumps(how).encode() + b"\n")
    os._exit(0)


def attempt(reader: Reader, seed: int, material: Path) -> str:
    """Damage the material of a reader, read it, and say how that ended."""
    place = material.with_name(f"{material.name}-case-{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(material, place, symlinks=True)
    try:
        os.chdir(place)
        reader.damage(Path(), random.Random(seed))
        reader.read(Path())
    except PenstockError as error:
        return REFUSED if "\n" not in str(error) else f"fault: an error of several lines: {error!r:.300}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is a fault
        lines = [f"{frame.filename.rpartition('site-packages')[2]}:{frame.lineno}" for frame in _frames(error)]
        return f"fault: {type(error).__name__}: {error!s:.200} at {' < '.join(lines[:6])}"
    finally:
        os.chdir("/")
        shutil.rmtree(place, ignore_errors=True)
    return READ


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(reversed(traceback.extract_tb(error.__traceback__)))


def summary(ended: Sequence[Ended]) -> dict[str, dict[str, int]]:
    """How many cases of each reader were read, refused, or a fault."""
    counts: dict[str, Counter[str]] = {}
    for one in ended:
        counts.setdefault(one.reader, Counter())["faults" if one.is_fault else one.how] += 1
    return {
        reader: {"cases": counts[reader].total(), **{how: counts[reader][how] for how in (READ, REFUSED, "faults")}}
        for reader in sorted(counts)
    }
