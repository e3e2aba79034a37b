"""Runs and plans of the product in processes of their own, as benchmarks start them, and figures of their steps."""

import json
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

QUIET = ("checkpoint.enabled=false", "evaluation.rows=0")
"""Overrides of runs whose steps alone are measured."""

VOCABULARY = 32_768
FIGURES = {
    "tokens_per_second": "tokens_per_second_per_device",
    "step_seconds": "step_seconds",
    "model_flops_utilization": "model_flops_utilization",
}

Line = dict[str, Any]


def penstock(*words: str | Path, **how: Any) -> str:
    """What `penstock WORDS` prints. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    printed: str = subprocess.run(command, **{"check": True, "stdout": subprocess.PIPE, "text": True, **how}).stdout
    return printed


def planned(*words: str, **how: Any) -> Line:
    """The one layout of `penstock plan WORDS`, as JSON."""
    (layout,) = json.loads(penstock("plan", *words, "--json", **how))["candidates"]
    return dict(layout)


def trained(
    target: str, overrides: Sequence[str], folder: Path, name: str, *, processes: int = 1, timeout: float | None = None
) -> list[Line]:
    """The metrics of each step of a run (docs/metrics.md); what it prints is shown.

    Args:
        target: preset or file.
        overrides: laid over it.
        folder: of runs.
        name: of this run.
        processes: ranks.
        timeout: seconds after which it is ended: CalledProcessError or TimeoutExpired if it did not end well.
    """
    words = ("train", target, *overrides, f"record.folder={folder}", "--name", name)
    penstock(*words, *(["--processes", f"{processes}"] if processes > 1 else []), stdout=None, timeout=timeout)
    return lines_of(folder / name)


def lines_of(folder: Path) -> list[Line]:
    """The metrics of a run; a last line that is not whole is left out."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def medians(lines: Sequence[Line], warm_up: int, **more: str) -> dict[str, Any]:
    """Medians of the steps after warm-up by `FIGURES` and `more`, and the extremes of steps and memory."""
    timed = lines[warm_up:]
    seconds = [line["step_seconds"] for line in timed]
    return {
        **{name: statistics.median(line[field] for line in timed) for name, field in (FIGURES | more).items()},
        "step_seconds_lowest": min(seconds),
        "step_seconds_highest": max(seconds),
        "peak_memory_gib": max(line["peak_memory_bytes"] for line in lines) / 2**30,
    }


def library_texts() -> list[str]:
    """Source files of the standard library of the running Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    return [file.read_text(errors="ignore") for file in files if "-packages" not in str(file)]


def make_tokenizer(path: Path) -> None:
    """Byte-pair encoding of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    tokenizer.save(str(path))
