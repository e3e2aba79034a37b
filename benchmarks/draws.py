"""Draws of a harness of the tests, by seed, on several processes; a log keeps each, so that a record can go on."""

import argparse
import json
import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import record

Line = dict[str, Any]


def options(doc: str | None, draws: int) -> argparse.Namespace:
    """Of such a benchmark, whose log has a JSON line for each draw; those that it has are kept."""
    made = record.parser(doc, draws=(draws, "seeds, from 0 on"), processes=1)
    made.add_argument("--log", type=Path, required=True)
    return made.parse_args()


def play(given: argparse.Namespace, line_of: Callable[[int], Line]) -> list[Line]:
    """The lines of all draws, by seed: `line_of` gives that of a seed, with `seed` and the text `unexplained`."""
    given.log.touch()
    lines = [json.loads(line) for line in given.log.read_text().splitlines()]
    rest = sorted(set(range(given.draws)) - {line["seed"] for line in lines})
    with given.log.open("a", buffering=1) as log, multiprocessing.Pool(given.processes, prepare) as pool:
        for line in pool.imap_unordered(line_of, rest):
            lines.append(line)
            log.write(json.dumps(line) + "\n")
            if line["unexplained"]:
                print(f"seed {line['seed']}: {line['unexplained']}", flush=True)
    return sorted((line for line in lines if line["seed"] < given.draws), key=lambda line: line["seed"])


def write(given: argparse.Namespace, lines: list[Line], numbers: Line) -> int:
    """Write the numbers with those of draws that are not explained; 1 if there are any."""
    unexplained = {line["seed"]: line["unexplained"] for line in lines if line["unexplained"]}
    numbers = {"draws": len(lines), **numbers, "unexplained": unexplained}
    print(numbers, flush=True)
    record.write(given, numbers, transformers=transformers.__version__)
    return 1 if unexplained else 0


def prepare() -> None:
    """Of a process that draws: one thread, and nothing of `transformers` on the terminal."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
