"""Expert parallelism over 1, 2 and 4 GPUs with the same rows for each: what sharing the experts costs.

    python -m benchmarks.scaling --output benchmarks/results/scaling-h200x4.json

DeepSeek-V2-Lite with its first 8 layers, so that one GPU holds all experts: 4.6 B parameters, 77 GiB of weights,
gradients and optimizer on one rank. Every case is the product itself, `penstock train`, one process for each GPU, with
real text and natural routing. The rows of a step grow with the ranks, so a GPU has the same tokens in every case; it
shares its experts, and the work of the optimizer on them, with the others. Several micro-batches a step keep that
difference small beside the rest.

On one rank nothing travels, so that case is measured once, and both ways of dispatch are compared with it.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record, trials

METHODS = ("symmetric", "all-to-all")

ALONE = "none"
"""Way of dispatch of one rank."""


def main() -> None:
    """Measure every case, print it, and write all so far."""
    options = parse_arguments()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in sorted(options.ranks):
            for method in METHODS if ranks > 1 else (ALONE,):
                case = {"expert_ranks": ranks, "method": method}
                name, overrides = f"expert-{ranks}-{method}", overrides_of(options, ranks, method)
                cases.append(case | trials.measure(options, name, overrides, ranks, Path(temporary)))
                cases[-1] |= shares(cases[-1], cases)
                print_case(cases[-1])
                numbers = {
                    "target": options.target,
                    "rows_per_device": options.rows,
                    "micro_batch": options.micro_batch,
                    "overrides": options.overrides,
                    "cases": cases,
                }
                steps, warm_up = options.steps, options.warm_up
                record.write(options, numbers, ranks=max(options.ranks), steps=steps, warm_up_steps=warm_up)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=16, help="rows of a step for each GPU")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    trials.add_arguments(parser, target="deepseek-v2-lite-8l", steps=25, warm_up=8)
    return parser.parse_args()


def overrides_of(options: argparse.Namespace, ranks: int, method: str) -> list[str]:
    """So many ranks that share the experts, each with the same rows."""
    return [
        f"parallel.expert={ranks}",
        f"training.global_batch={options.rows * ranks}",
        f"training.micro_batch={options.micro_batch}",
        *([f"dispatch.method={method}"] if method != ALONE else []),
        *options.overrides,
    ]


def shares(case: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, float | None]:
    """Throughput of a GPU over that of one rank, and over that of two with the same way of dispatch."""

    def share(ranks: int, method: str) -> float | None:
        other = next((one for one in cases if (one["expert_ranks"], one["method"]) == (ranks, method)), None)
        if other is None or other["figures"] is None or case["figures"] is None:
            return None
        key = "tokens_per_second_per_device"
        return case["figures"][key] / other["figures"][key]

    return {"over_1": share(1, ALONE), "over_2": share(2, case["method"])}


def print_case(case: dict[str, Any]) -> None:
    name = f"EP {case['expert_ranks']} {case['method']:<12}"
    figures = case["figures"]
    if figures is None:
        print(f"{name}{case['reason']}", flush=True)
        return
    over = [f"{case[key]:.1%} of EP {key[-1]}" for key in ("over_1", "over_2") if case[key] is not None]
    print(
        f"{name}{figures['tokens_per_second_per_device']:>9,.0f} tokens/s/GPU  "
        f"peak {figures['peak_memory_bytes'] / 2**30:.1f} GiB  {', '.join(over)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
