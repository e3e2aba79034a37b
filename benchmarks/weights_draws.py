"""Folders that `transformers` saves, with edited keys and tensors: how many give its model, or a refusal by name.

    python -m benchmarks.weights_draws --draws 5000 --output benchmarks/results/weights-draws.json

The draws are the tests' own (tests/models/huggingface/draws.py): logits and gradients in float64 on a CPU.
"""

import argparse
import sys
from collections import Counter

import torch
import transformers

from benchmarks import record
from tests.models.huggingface.draws import EXPLAINED, drawn, outcome


def main() -> int:
    """Run the draws and record how they ended; the exit code is 1 if one is not explained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    record.add_arguments(parser)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    unexplained: dict[int, str] = {}
    for seed in range(options.first, options.first + options.draws):
        draw = drawn(seed)
        try:
            how = outcome(draw)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:  # a traceback is a fault
            how = f"{type(error).__name__}: {error}"
        if how not in EXPLAINED:
            unexplained[seed] = how
            print(f"seed {seed}, {draw.family.model_type}: {how}", flush=True)
        counts.setdefault(draw.family.model_type, Counter())[how if how in EXPLAINED else "unexplained"] += 1
    total = sum(counts.values(), Counter())
    print(dict(total), flush=True)
    numbers = {
        "draws": options.draws,
        "first": options.first,
        "outcomes": dict(total),
        "families": {family: dict(sorted(count.items())) for family, count in sorted(counts.items())},
        "unexplained": unexplained,
    }
    record.write(options, numbers, transformers=transformers.__version__)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
