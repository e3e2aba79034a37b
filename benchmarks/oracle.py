"""Whole training steps beside plain PyTorch and `transformers`: how many draws agree, and how far they are apart.

    python -m benchmarks.oracle --draws 1000 --processes 16 --log oracle.jsonl --output benchmarks/results/oracle.json

The draws are the tests' own (tests/oracle/draws.py): five steps in float64 on a CPU. Each is a line of the log, and
draws that the log has are not played again.
"""

import argparse
import json
import multiprocessing
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import record
from tests.oracle.draws import BOUNDS, STEPS, drawn, worst


def main() -> int:
    """Play the draws and record how far they are apart; the exit code is 1 if one is over a bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True)
    record.add_arguments(parser)
    options = parser.parse_args()
    options.log.touch()
    lines = [json.loads(line) for line in options.log.read_text().splitlines()]
    rest = sorted(set(range(options.draws)) - {line["seed"] for line in lines})
    with options.log.open("a", buffering=1) as log, multiprocessing.Pool(options.processes, _prepare) as pool:
        for line in pool.imap_unordered(play, rest):
            lines.append(line)
            log.write(json.dumps(line) + "\n")
            if line["unexplained"]:
                print(f"seed {line['seed']}: {line['unexplained']}", flush=True)
    numbers = total(lines)
    print(numbers, flush=True)
    record.write(options, numbers, transformers=transformers.__version__)
    return 1 if numbers["unexplained"] else 0


def _prepare() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def play(seed: int) -> dict[str, Any]:
    """The line of a draw."""
    draw = drawn(seed)
    figures, text = {}, ""
    try:
        figures = worst(draw)
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        text = traceback.format_exc()[-1000:]
    apart = {name: value for name, value in figures.items() if not value <= BOUNDS[name]}
    recipe, depths = draw.recipe, draw.model.mtp_layers
    settings = {"family": draw.model.family, "balance": recipe.balance, "method": recipe.method, "decay": recipe.decay}
    settings |= {"capacity": recipe.capacity, "depths": depths, "document mask": recipe.document_mask}
    return {"seed": seed, "settings": settings, "figures": figures, "unexplained": text or str(apart or "")}


def total(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a log, and the largest differences."""
    played = [line["figures"] for line in lines if line["figures"]]
    settings = Counter(f"{name} {value}" for line in lines for name, value in line["settings"].items())
    return {
        "draws": len(lines),
        "steps": STEPS,
        "bounds": BOUNDS,
        "largest": {name: max((figures[name] for figures in played), default=0.0) for name in BOUNDS},
        "settings": dict(sorted(settings.items())),
        "unexplained": {line["seed"]: line["unexplained"] for line in lines if line["unexplained"]},
    }


if __name__ == "__main__":
    sys.exit(main())
