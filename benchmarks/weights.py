"""Import and export beside the disk: rates, bytes, memory, and whether every bit comes back.

    python -m benchmarks.weights --folder /tmp --output benchmarks/results/weights-speed.json

A folder with Hugging Face names and random bfloat16 weights of a preset's first layers is imported and exported again,
in rounds that alternate with a plain loop: it reads the same files in blocks, writes their bytes past the page cache,
and syncs them. Rounds begin with the files in the page cache (`warm`) or not (`cold`). Each verb runs in a process of
its own that has imported its modules before; the system counts its bytes, and its memory from then on. Needs about
eight bytes a parameter on disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks import record
from penstock.cli.main import main as penstock
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.size import size_of
from penstock.models.build import meta_model
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.tensor_file import TensorEntry, in_files, write_entries
from penstock.models.huggingface.weights import by_file_tensor, weight_mappings

PRESET = "qwen3-30b-a3b"
LAYERS = 2
FILE_BYTES = 3 << 29
BLOCK_BYTES = 16 << 20


def make(run: Run, folder: Path) -> int:
    """Random weights of a model, as their authors would keep them; returns bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(huggingface_config(run.model)))
    entries = [
        TensorEntry(
            name=line.hf_name, dtype=torch.bfloat16, shape=line.shape, parts=(partial(_random, number, line.shape),)
        )
        for number, (line, *_) in enumerate(by_file_tensor(weight_mappings(run.model)))
    ]
    for number, group in enumerate(in_files(entries, lambda entry: entry.nbytes, FILE_BYTES)):
        write_entries(folder / f"model-{number:05d}.safetensors", group)
    return sum(entry.nbytes for entry in entries)


def _random(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Random bits of numbers below 2, which are faster to make than normal ones."""
    bits = torch.empty(shape, dtype=torch.int16)
    bits.random_(-(2**15), 2**15, generator=torch.Generator().manual_seed(seed))
    return bits.bitwise_and_(~0x4000).view(torch.bfloat16)


def equal(one: Path, other: Path) -> dict[str, int]:
    """Numbers of tensors that are equal in both folders, and that are in one of them."""
    places = [
        {name: path for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()}  # noqa: SIM118
        for folder in (one, other)
    ]
    same = 0
    for name in places[0].keys() & places[1].keys():
        tensors = [safe_open(at[name], "pt").get_tensor(name).bfloat16() for at in places]  # routers are float32
        same += torch.equal(*tensors)
    return {"tensors": len(places[0]), "tensors_equal": same, "tensors_too_many": len(places[1].keys() - places[0])}


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


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


def copy_plainly(source: Path, target: Path) -> dict[str, float]:
    """Read files in blocks and write them past the page cache; seconds of both, one after the other."""
    target.mkdir()
    block, reading, writing = mmap(-1, BLOCK_BYTES), 0.0, 0.0
    for path in sorted(source.rglob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            out = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
            begin = time.perf_counter()
            while got := file.readinto(block):
                reading += time.perf_counter() - begin
                begin = time.perf_counter()
                os.write(out, memoryview(block)[: got + -got % 4096])
                writing += time.perf_counter() - begin
                begin = time.perf_counter()
            writing += seconds_of(partial(os.fsync, out))
            os.close(out)
    return {"read": reading, "write": writing}


def _counts() -> dict[str, int]:
    """Bytes that this process asked for, took from the disk, and wrote past the page cache; peak of its memory."""
    lines = Path("/proc/self/io").read_text() + Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in lines.splitlines())
    peak = 1024 * int(fields["VmHWM"].split()[0])
    return {name: int(fields[name]) for name in ("rchar", "read_bytes", "write_bytes")} | {"peak": peak}


def verb(words: list[str]) -> None:
    """Print seconds, bytes and memory of a verb; its modules are imported first, by asking for its help."""
    with open(os.devnull, "w") as nothing:
        sys.stdout, stdout = nothing, sys.stdout
        penstock([words[0], "--help"])
        meta_model(load_run("debug").model)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, clock = _counts(), os.times()
        begin = time.perf_counter()
        code = penstock(words)
        seconds, after, end = time.perf_counter() - begin, _counts(), os.times()
        sys.stdout = stdout
    if code:
        raise SystemExit(f"penstock {' '.join(words)} failed")
    used = end.user + end.system - clock.user - clock.system
    numbers = {name: after[name] - before[name] for name in after}
    print(json.dumps({"seconds": seconds, "cpu_seconds": used} | numbers))


def measure_verb(*words: str | Path) -> dict[str, float]:
    """`verb` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.weights", "--verb", *map(str, words)]
    numbers: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return numbers


def one_round(
    theirs: Path, folder: Path, prepare: Callable[[Path], None], *, compared: bool
) -> dict[str, dict[str, float]]:
    """Both verbs, each behind a plain copy of the files that it reads."""
    found = {}
    with fresh(folder / "start") as start, fresh(folder / "again") as again:
        for name, source, words in (
            ("import", theirs, ("import", theirs, "--output", start)),
            ("export", start, ("export", start, again, "--precision", "bf16")),
        ):
            prepare(source)
            with fresh(folder / "plain") as plain:
                copied = copy_plainly(source, plain)
            prepare(source)
            found[name] = measure_verb(*words) | copied
            print(name, {key: round(one, 2) for key, one in found[name].items()}, flush=True)
        found["tensors"] = {name: float(value) for name, value in equal(theirs, again).items()} if compared else {}
    return found


def read_once(folder: Path) -> None:
    """Let the page cache have the files of a folder."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass


def summary(rounds: list[dict[str, dict[str, float]]], size: int, name: str) -> dict[str, float]:
    """Medians over rounds of a verb, in GB (10^9 bytes) and seconds; ratios are taken within a round."""
    several = [
        {
            "gb_per_second": size / row["seconds"] / 1e9,
            "disk_read_gb_per_second": size / row["read"] / 1e9,
            "disk_write_gb_per_second": size / row["write"] / 1e9,
            "over_slower_of_read_and_write": max(row["read"], row["write"]) / row["seconds"],
            "over_copy": (row["read"] + row["write"]) / row["seconds"],
            "cpu_seconds_per_gb": row["cpu_seconds"] / size * 1e9,
            "gb_read": row["rchar"] / 1e9,
            "gb_read_from_disk": row["read_bytes"] / 1e9,
            "gb_written": row["write_bytes"] / 1e9,
            "peak_gb_above_start": row["peak"] / 1e9,
        }
        for row in (verbs[name] for verbs in rounds)
    ]
    result = {figure: median(row[figure] for row in several) for figure in several[0]}
    return result | {"peak_gb_above_start": max(row["peak_gb_above_start"] for row in several)}


def main() -> None:
    parser = record.parser(
        __doc__,
        preset=PRESET,
        layers=LAYERS,
        rounds=5,
        urgent=(False, "before all other programs of the machine (root)"),
        folder=(Path, "where to work; a temporary one if left out"),
    )
    parser.add_argument("--verb", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verb:
        verb(options.verb)
        return
    if options.urgent:
        with suppress(PermissionError):  # it leads a session already
            os.setsid()
        Path("/proc/self/autogroup").write_text("-20")
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    run = load_run(options.preset, [f"model.layers={options.layers}"])
    counted = size_of(run.model, 4096)
    numbers: dict[str, object] = {
        "preset": options.preset,
        "layers": options.layers,
        "parameters": counted.parameters + counted.mtp_parameters,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        theirs = Path(name, "theirs")
        size = make(run, theirs)
        for state, prepare in (("warm", read_once), ("cold", forget)):
            rounds = [
                one_round(theirs, Path(name), prepare, compared=state == "warm" and number == 0)
                for number in range(options.rounds)
            ]
            numbers[state] = {verb: summary(rounds, size, verb) for verb in ("import", "export")}
            numbers |= rounds[0]["tensors"]
    numbers |= {"gigabytes": size / 1e9, "rounds": options.rounds, "cores": len(os.sched_getaffinity(0))}
    print(json.dumps(numbers, indent=1))
    record.write(options, numbers)


if __name__ == "__main__":
    main()
