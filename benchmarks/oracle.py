"""Whole training steps beside plain PyTorch and `transformers`: how many draws agree, and how far they are apart.

    python -m benchmarks.oracle --draws 1000 --processes 16 --log oracle.jsonl --output benchmarks/results/oracle.json

The draws are the tests' own (tests/oracle/draws.py): five steps in float64 on a CPU.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import transformers

from benchmarks import record, seeds
from tests.oracle.draws import BOUNDS, LIKE_ROUNDING, STEPS, drawn, sensitivity, worst


def main() -> int:
    """Play the draws and record how far they are apart; the exit code is 1 if one is over a bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    seeds.add_arguments(parser, 1000)
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers = total(seeds.play(options, line_of))
    print(numbers, flush=True)
    record.write(options, numbers, transformers=transformers.__version__)
    return 1 if numbers["unexplained"] else 0


def line_of(seed: int) -> dict[str, Any]:
    """The line of a draw."""
    draw = drawn(seed)
    figures, text = {}, ""
    try:
        figures = worst(draw)
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        text = traceback.format_exc()[-1000:]
    apart = {name: value for name, value in figures.items() if not value <= BOUNDS[name]}
    if apart and not text:  # a step may enlarge rounding: by as much as ours does itself
        moved = sensitivity(draw)
        apart = {name: value for name, value in apart.items() if not value <= LIKE_ROUNDING * moved[name]}
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
        "over_bounds_like_rounding": sum(_is_over(line["figures"]) and not line["unexplained"] for line in lines),
        "unexplained": {line["seed"]: line["unexplained"] for line in lines if line["unexplained"]},
    }


def _is_over(figures: dict[str, float]) -> bool:
    return any(not value <= BOUNDS[name] for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
