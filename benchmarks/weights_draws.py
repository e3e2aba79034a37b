"""Folders that `transformers` saves, with edited keys and tensors: how many give its model, or a refusal by name.

    python -m benchmarks.weights_draws --draws 5000 --log weights.jsonl --output benchmarks/results/weights-draws.json

The draws are the tests' own (tests/models/huggingface/draws.py): logits and gradients in float64 on a CPU.
"""

import argparse
import sys
from collections import Counter
from typing import Any

import transformers

from benchmarks import record, seeds
from tests.models.huggingface.draws import EXPLAINED, drawn, outcome


def main() -> int:
    """Run the draws and record how they ended; the exit code is 1 if one is not explained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    seeds.add_arguments(parser, 5000)
    record.add_arguments(parser)
    options = parser.parse_args()
    lines = seeds.play(options, line_of)
    families: dict[str, Counter[str]] = {}
    for line in lines:
        families.setdefault(line["family"], Counter())[line["outcome"]] += 1
    unexplained = {line["seed"]: line["unexplained"] for line in lines if line["unexplained"]}
    numbers = {
        "draws": len(lines),
        "outcomes": dict(sum(families.values(), Counter())),
        "families": {family: dict(sorted(count.items())) for family, count in sorted(families.items())},
        "unexplained": unexplained,
    }
    print(numbers["outcomes"], flush=True)
    record.write(options, numbers, transformers=transformers.__version__)
    return 1 if unexplained else 0


def line_of(seed: int) -> dict[str, Any]:
    """How the draw of a seed ended."""
    draw = drawn(seed)
    try:
        end = outcome(draw)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:  # a traceback is a fault
        end = f"{type(error).__name__}: {error}"
    explained = end in EXPLAINED
    return {
        "seed": seed,
        "family": draw.family.model_type,
        "outcome": end if explained else "unexplained",
        "unexplained": "" if explained else end,
    }


if __name__ == "__main__":
    sys.exit(main())
