"""Import and export of layers in their full size: time, memory, and whether every bit comes back.

    python -m benchmarks.weights --output benchmarks/results/weights.json

A folder with Hugging Face names and random bfloat16 weights of a preset's first layers is made, imported, and exported
again, each in a process of its own whose peak memory the system counts. Needs about eight bytes a parameter on disk.
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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import blake2b
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks import record
from penstock.config.load import load_run
from penstock.models.count import count
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.weights import by_file_tensor, weight_mappings
from penstock.train.tensor_files import TensorEntry, write_entries

PRESET = "qwen3-235b-a22b-1l"
FILE_BYTES = 5 << 30
GIB = 2**30
Result = TypeVar("Result")


def make(preset: str, folder: Path) -> int:
    """Random weights of a preset, as their authors would keep them; returns bytes."""
    model = load_run(preset).model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(huggingface_config(model)))
    file: list[TensorEntry] = []
    total = 0
    for number, (line, *_) in enumerate(by_file_tensor(weight_mappings(model))):
        values = partial(_random, number, line.shape)
        file.append(TensorEntry(name=line.hf_name, dtype=torch.bfloat16, shape=line.shape, parts=(values,)))
        total += file[-1].nbytes
        if sum(entry.nbytes for entry in file) > FILE_BYTES:
            write_entries(folder / f"model-{number:05d}.safetensors", file)
            file = []
    write_entries(folder / "model-99999.safetensors", file)
    return total


def _random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def digests(folder: Path) -> dict[str, str]:
    """A hash of each tensor's values, by name."""
    return {name: blake2b(values, digest_size=16).hexdigest() for name, values in _values(folder)}


def _values(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name).bfloat16().contiguous()
                yield name, tensor.view(torch.uint8).numpy().tobytes()


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a process of its own: a child's peak memory begins with what its parent once held."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def timed(*words: str) -> dict[str, float]:
    """Run a verb; seconds, and the most memory that its process held."""
    begin = time.perf_counter()
    run = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    if status:
        raise SystemExit(f"penstock {' '.join(words)} failed")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gib": usage.ru_maxrss * 1024 / GIB,
    }


def measure(preset: str, folder: Path) -> dict[str, object]:
    """Make, import, export, compare; what is not needed any more is deleted on the way."""
    theirs, start, again = folder / "theirs", folder / "start", folder / "again"
    size = apart(make, preset, theirs)
    expected = apart(digests, theirs)
    largest = max(line_bytes(preset))
    imported = timed("import", str(theirs), "--output", str(start))
    shutil.rmtree(theirs)
    exported = timed("export", str(start), str(again), "--precision", "bf16")
    shutil.rmtree(start)
    found = apart(digests, again)
    model = load_run(preset).model
    counted = count(model, 4096)
    return {
        "preset": preset,
        "parameters": counted.parameters + counted.mtp_parameters,
        "bytes_there": size,
        "largest_tensor_bytes": largest,
        "import": imported | {"gb_per_second": size / imported["seconds"] / 1e9},
        "export": exported | {"gb_per_second": size / exported["seconds"] / 1e9},
        "tensors": len(expected),
        "tensors_equal": sum(found.get(name) == digest for name, digest in expected.items()),
        "tensors_too_many": len(found.keys() - expected.keys()),
    }


def line_bytes(preset: str) -> list[int]:
    """Bytes of every tensor there, in bfloat16."""
    return [2 * prod(line.shape) for line, *_ in by_file_tensor(weight_mappings(load_run(preset).model))]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    record.add_arguments(parser)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary one if left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        numbers = measure(options.preset, Path(folder))
    print(json.dumps(numbers, indent=1))
    record.write(options, numbers)


if __name__ == "__main__":
    main()
