"""How even steps are: the median step, the 99th of 100 and the slowest, with and without what is done about it.

    python -m benchmarks.jitter --output benchmarks/results/jitter-h200x4.json

Two things are switched on and off: whether Python's garbage is collected between steps (training.collect_garbage_every)
or whenever Python likes, and whether passes are captured into graphs (graphs.capture), which leaves the host little to
be late with. Every case is the product itself, `penstock train`, one process for each GPU. Ranks wait for each other
in every layer, so the slowest makes the step.
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import record, trials

DEFAULTS = [
    "parallel.expert=4",
    "training.global_batch=8",
    "training.micro_batch=2",
    # Of graphs; and the same without them, so that one thing is compared.
    "dispatch.sync_free=2",
]

GARBAGE = {
    "between steps": "training.collect_garbage_every=50",
    "whenever Python likes": "training.collect_garbage_every=0",
}

GRAPHS = ("none", "full")


def main() -> None:
    """Measure every case, print it, and write all so far."""
    options = parse_arguments()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for graphs, garbage in product(GRAPHS, GARBAGE):
            overrides = [*options.overrides, GARBAGE[garbage], f"graphs.capture={graphs}"]
            name = f"{graphs}-{len(cases)}"
            measured = trials.measure(options, name, overrides, options.ranks, Path(temporary))
            cases.append({"garbage": garbage, "graphs": graphs} | measured)
            print_case(cases[-1])
            numbers = {"target": options.target, "overrides": options.overrides, "cases": cases}
            record.write(options, numbers, ranks=options.ranks, steps=options.steps, warm_up_steps=options.warm_up)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("overrides", nargs="*", default=DEFAULTS)
    trials.add_arguments(parser, target="deepseek-v2-lite-8l", steps=220, warm_up=20)
    return parser.parse_args()


def print_case(case: dict[str, Any]) -> None:
    name = f"garbage {case['garbage']:<23}graphs {case['graphs']:<8}"
    figures = case["figures"]
    if figures is None:
        print(f"{name}{case['reason']}", flush=True)
        return
    median, p99, slowest = (figures[f"step_seconds_{key}"] for key in ("median", "p99", "highest"))
    print(
        f"{name}p50 {median * 1e3:.1f} ms  p99 {p99 * 1e3:.1f} ms ({p99 / median:.3f})  slowest {slowest * 1e3:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
