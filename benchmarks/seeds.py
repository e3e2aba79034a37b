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


def add_arguments(parser: argparse.ArgumentParser, draws: int) -> None:
    """The options of such a benchmark."""
    parser.add_argument("--draws", type=int, default=draws, help="seeds, from 0 on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True, help="a JSON line for each draw; those that it has are kept")


def play(options: argparse.Namespace, line_of: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all draws, by seed: `line_of` gives that of a seed, with `seed` and the text `unexplained`."""
    options.log.touch()
    lines = [json.loads(line) for line in options.log.read_text().splitlines()]
    rest = sorted(set(range(options.draws)) - {line["seed"] for line in lines})
    with options.log.open("a", buffering=1) as log, multiprocessing.Pool(options.processes, _prepare) as pool:
        for line in pool.imap_unordered(line_of, rest):
            lines.append(line)
            log.write(json.dumps(line) + "\n")
            if line["unexplained"]:
                print(f"seed {line['seed']}: {line['unexplained']}", flush=True)
    return sorted((line for line in lines if line["seed"] < options.draws), key=lambda line: line["seed"])


def _prepare() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
