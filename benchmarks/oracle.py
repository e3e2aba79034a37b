"""Whole training steps beside plain PyTorch and `transformers`: how many draws agree, and how far they are apart.

    python -m benchmarks.oracle --draws 1000 --processes 16 --log oracle.jsonl --output benchmarks/results/oracle.json

The draws are the tests' own (tests/oracle/draws.py): five steps in float64 on a CPU. The exit code is 1 if one is over
a bound.
"""

import sys
import traceback
from collections import Counter
from typing import Any

from benchmarks import draws
from tests.oracle.draws import BOUNDS, LIKE_ROUNDING, STEPS, drawn, sensitivity, worst


def main() -> int:
    options = draws.options(__doc__, 1000)
    lines = draws.play(options, line_of)
    played = [line["figures"] for line in lines if line["figures"]]
    settings = Counter(f"{name} {value}" for line in lines for name, value in line["settings"].items())
    over = [line for line in lines if not line["unexplained"] and over_bounds(line["figures"])]
    numbers = {
        "steps": STEPS,
        "bounds": BOUNDS,
        "largest": {name: max((figures[name] for figures in played), default=0.0) for name in BOUNDS},
        "settings": dict(sorted(settings.items())),
        "over_bounds_like_rounding": len(over),
    }
    return draws.write(options, lines, numbers)


def over_bounds(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not value <= BOUNDS[name]}


def line_of(seed: int) -> dict[str, Any]:
    draw = drawn(seed)
    figures, text = {}, ""
    try:
        figures = worst(draw)
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        text = traceback.format_exc()[-1000:]
    apart = over_bounds(figures)
    if apart and not text:  # a step may enlarge rounding: by as much as ours does itself
        moved = sensitivity(draw)
        apart = {name: value for name, value in apart.items() if not value <= LIKE_ROUNDING * moved[name]}
    recipe, depths = draw.recipe, draw.model.mtp_layers
    settings = {"family": draw.model.family, "balance": recipe.balance, "method": recipe.method, "decay": recipe.decay}
    settings |= {"capacity": recipe.capacity, "depths": depths, "document mask": recipe.document_mask}
    return {"seed": seed, "settings": settings, "figures": figures, "unexplained": text or str(apart or "")}


if __name__ == "__main__":
    sys.exit(main())
