"""Folders that `transformers` saves, with edited keys and tensors: how many give its model, or a refusal by name.

    python -m benchmarks.weights_draws --draws 5000 --log weights.jsonl --output benchmarks/results/weights-draws.json

The draws are the tests' own (tests/models/huggingface/draws.py): logits and gradients in float64 on a CPU. The exit
code is 1 if one is not explained.
"""

import sys
from collections import Counter
from typing import Any

from benchmarks import draws
from tests.models.huggingface.draws import EXPLAINED, drawn, outcome


def main() -> int:
    options = draws.options(__doc__, 5000)
    lines = draws.play(options, line_of)
    families: dict[str, Counter[str]] = {}
    for line in lines:
        families.setdefault(line["family"], Counter())[line["outcome"]] += 1
    by_family = {family: dict(sorted(count.items())) for family, count in sorted(families.items())}
    return draws.write(options, lines, {"outcomes": dict(sum(families.values(), Counter())), "families": by_family})


def line_of(seed: int) -> dict[str, Any]:
    draw = drawn(seed)
    try:
        end = outcome(draw)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:  # a traceback is a fault
        end = f"{type(error).__name__}: {error}"
    unexplained = "" if end in EXPLAINED else end
    family = draw.family.model_type
    return {
        "seed": seed,
        "family": family,
        "outcome": "unexplained" if unexplained else end,
        "unexplained": unexplained,
    }


if __name__ == "__main__":
    sys.exit(main())
