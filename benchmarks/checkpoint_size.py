"""Checkpoints of many gigabytes beside the rate of the disk, and what an asynchronous save costs the steps.

    python -m benchmarks.checkpoint_size FOLDER... --gigabytes 30 --output benchmarks/results/checkpoints-size.json

Rates: a state of `--gigabytes` is saved to each folder and loaded. Its tensors are views of one buffer of 256 MiB, so
that a machine with less memory can play it, and the peak of the resident set is that of saving and loading. Beside each
round a plain loop writes files of the same sizes past the page cache, syncs them, and reads them.

Steps: a run with a save after every tenth step, by the clock of its goodput ledger. The processor time of the same
steps without saves shows what the thread that writes takes from them.

Restarts: one of two ranks is killed, and all go on from a checkpoint on disk.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from penstock.parallel.shard import whole
from penstock.train.checkpoint import CheckpointStore
from penstock.train.goodput import wall_seconds
from penstock.train.manifest import FILE_BYTES

TENSOR_BYTES = 256 << 20
WRITTEN_BYTES, READ_BYTES = 16 << 20, 4 << 20  # at once, by the plain loop
EVERY = 10
KILLED_AT = 58
RESTART = ("checkpoint.every=30",)
RUN = ("debug-2l", "training.steps=80", "evaluation.rows=0", "checkpoint.keep=1", "record.tensorboard=false")


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def write_plainly(folder: Path, size: int, values: torch.Tensor) -> None:
    """Files of `FILE_BYTES`, written one after another."""
    block = memoryview(values.view(-1).view(torch.uint8)[:WRITTEN_BYTES].numpy()).cast("B")
    folder.mkdir()
    for number in range(size // FILE_BYTES):
        file = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        for _ in range(FILE_BYTES // WRITTEN_BYTES):
            os.write(file, block)
        os.fsync(file)
        os.close(file)


def read_plainly(folder: Path) -> None:
    block = bytearray(READ_BYTES)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def aligned(size: int) -> torch.Tensor:
    """Random float32 values at an address of a page, as a plain direct write wants them."""
    memory = torch.empty(size + 4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096
    return memory[begin : begin + size].random_(0, 255).view(torch.float32)


def rates(folder: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    """GB/s of saving and loading, and of the disk beside them."""
    values = aligned(TENSOR_BYTES)
    count = 4 * max(1, round(gigabytes * 1e9 / TENSOR_BYTES / 4))  # whole files
    parts = {f"tensor {number:04d}": whole(values) for number in range(count)}
    size, found = count * TENSOR_BYTES, list[dict[str, float]]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(rounds):
        with fresh(folder / "plain") as plain:
            written = seconds_of(lambda at=plain: write_plainly(at, size, values))
            forget(plain)
            read = seconds_of(lambda at=plain: read_plainly(at))
        with fresh(folder / "checkpoints") as checkpoints:
            store = CheckpointStore(checkpoints, keep=1, asynchronous=False)
            saved = seconds_of(lambda to=store: to.save(1, parts, {}))
            forget(checkpoints)
            loaded = seconds_of(lambda of=store: of.load(1, parts))
        times = {"disk_write": written, "disk_read": read, "save": saved, "load": loaded}
        found.append({name: size / one / 1e9 for name, one in times.items()})
        print(folder, {name: round(one, 2) for name, one in found[-1].items()}, flush=True)
    middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {
        "gigabytes": size / 1e9,
        "gigabytes_per_second": found,
        "save_over_disk": middle["save"] / middle["disk_write"],
        "load_over_disk": middle["load"] / middle["disk_read"],
        "resident_gigabytes_before": before * 1024 / 1e9,
        "resident_gigabytes_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def steps(folder: Path, every: int, words: list[str]) -> dict[str, float]:
    """Seconds of a run: its steps, its saves, and of the processor."""
    with fresh(folder / "runs") as runs:
        command = ["train", *RUN, f"checkpoint.every={every}", f"record.folder={runs}", *words, "--name", "run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "penstock", *command], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
        saved = runs / "run" / "checkpoints" / f"step-{lines[-1]['step']:06d}"
        return {
            "step": statistics.median(line["step_seconds"] for line in lines),
            "steps": len(lines),
            "in_saves": wall_seconds(runs / "run" / "goodput.jsonl")["checkpoint"],
            "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "megabytes": sum(path.stat().st_size for path in saved.iterdir()) / 1e6,
        }


def cost_of_saves(folder: Path, rounds: int, words: list[str]) -> dict[str, Any]:
    """The share of ten steps that the training thread spends in a save, and that the processor works more."""
    pairs = [(steps(folder, EVERY, words), steps(folder, 0, words)) for _ in range(rounds)]
    share, more = [], []
    for saving, plain in pairs:
        saves = saving["steps"] / EVERY - 1  # both save at the end
        blocked = (saving["in_saves"] - plain["in_saves"]) / saves
        share.append(blocked / (EVERY * saving["step"]))
        more.append(saving["processor"] / plain["processor"] - 1)
        print(folder, f"blocked {share[-1]:.2%}, processor {more[-1]:+.2%}", saving, plain, flush=True)
    found = {"blocked_share_of_ten_steps": statistics.median(share), "more_processor_time": statistics.median(more)}
    return found | {"with_saves": [one for one, _ in pairs], "without": [one for _, one in pairs]}


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def restart(folder: Path) -> dict[str, float]:
    """Seconds from the death of one of two ranks to a step that was not made before, and the repeated steps."""
    with fresh(folder / "runs") as runs:
        command = ["train", *RUN, "training.steps=100000", "training.micro_batch=1", *RESTART, f"record.folder={runs}"]
        command += ["--name", "run", "--processes", "2", "--restarts", "1"]
        launcher = subprocess.Popen([sys.executable, "-m", "penstock", *command], stdout=subprocess.DEVNULL)
        metrics = runs / "run" / "metrics.jsonl"
        while last_step(metrics) < KILLED_AT:
            time.sleep(0.01)
        os.kill(int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1]), signal.SIGKILL)
        begin, made = time.perf_counter(), last_step(metrics)
        lowest = made
        while (now := last_step(metrics)) <= made:
            lowest = min(lowest, now)
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        launcher.terminate()
        launcher.wait()
        return {"seconds": seconds, "repeated_steps": made - lowest}


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints at size")
    parser.add_argument("folders", type=Path, nargs="+", help="such as one on a disk and one in memory")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[30.0], help="of each folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs="*", default=[], help="further overrides of the run")
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers: dict[str, Any] = {}
    for folder, gigabytes in zip(options.folders, options.gigabytes, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        found = rates(folder, gigabytes, options.rounds) if gigabytes else {}
        numbers[folder.name] = found | cost_of_saves(folder, options.rounds, options.run)
    where = options.folders[0]
    numbers["restart"] = {"disk": [restart(where) for _ in range(options.rounds)]}
    print(numbers["restart"])
    record.write(options, numbers)


if __name__ == "__main__":
    main()
