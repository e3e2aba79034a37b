"""Compare the layouts that a search ranks with `penstock plan --layout` of each, for drawn requests.

    python -m benchmarks.search_agrees --draws 300 --output benchmarks/results/search-agrees.json

A request is a model, a chip, 6 to 512 devices, which are rarely a power of two, and options that change the figures. Of
each shown layout, memory, step and dispatcher must be those of `project`, to the last digit.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import record
from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Plan
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest

MODELS = (
    "deepseek-v2-lite", "deepseek-v2-lite-8l", "deepseek-v3-8l", "qwen3-30b-a3b", "qwen3-30b-a3b-8l", "gpt-oss-20b",
    "mixtral-8x7b", "olmoe-1b-7b", "moe-1t-8l", "glm-4.5", "deepseek-v2",
)  # fmt: skip

CHIPS = ("H100", "H200", "MI300X", "MI325X", "MI355X", "B200")

OPTIONS = (
    (),
    (),
    ("float8.dense=blockwise", "float8.experts=blockwise", "float8.first_layers=1", "float8.last_layers=1"),
    ("optimizer.method=muon",),
    ("optimizer.moment_dtype=int8", "optimizer.store_param_remainders=true"),
    ("training.sequence_length=65536",),
    ("model.layers=11",),
    ("model.moe.experts=96",),
)


@dataclass(frozen=True)
class Drawn:
    """A request and the command that asks the same."""

    command: str
    request: SearchRequest


def draws(count: int, seed: int) -> Iterator[Drawn]:
    """So many requests that are legal."""
    source = random.Random(seed)
    while count:
        model, chip, options = source.choice(MODELS), source.choice(CHIPS), source.choice(OPTIONS)
        devices = source.randrange(6, 65) if source.random() < 0.7 else 8 * source.randrange(1, 65)
        words = [*options, f"training.global_batch={devices * source.choice((4, 10, 12))}"]
        try:
            request = SearchRequest(run=load_run(model, words), cluster=parse_cluster(f"{devices}x{chip}"), top=3)
        except PenstockError:  # of devices that do not fill nodes, or of an option that a model does not have
            continue
        yield Drawn(f"penstock plan {model} {' '.join(words)} --on {devices}x{chip}", request)
        count -= 1


def differences(plan: Plan) -> list[str]:
    """Layouts of a plan that `project` sees otherwise."""
    found = []
    for candidate in plan.candidates:
        alone = project(candidate.run, plan.cluster)
        if (alone.layout, alone.memories, alone.time) != (candidate.layout, candidate.memories, candidate.time):
            steps = f"{candidate.time.step_seconds!r} and {alone.time.step_seconds!r} s"
            found.append(f"{candidate.layout}: {steps}, {candidate.memory.total} and {alone.memory.total} bytes")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    record.add_arguments(parser)
    options = parser.parse_args()
    rows, seconds, begin = 0, 0.0, time.perf_counter()
    unequal: dict[str, list[str]] = {}
    nothing_fits = 0
    for number, drawn in enumerate(draws(options.draws, options.seed), 1):
        started = time.perf_counter()
        plan = search(drawn.request)
        seconds = max(seconds, time.perf_counter() - started)
        rows, nothing_fits = rows + len(plan.candidates), nothing_fits + (not plan.candidates)
        if found := differences(plan):
            unequal[drawn.command] = found
        print(f"{number} {drawn.command}: {len(plan.candidates)} layouts, {len(found)} differ", flush=True)
        numbers = {"requests": number, "nothing_fits": nothing_fits, "layouts": rows, "differ": unequal}
        record.write(options, {**numbers, "longest_search_seconds": seconds}, seed=options.seed)
    print(f"{rows} layouts of {options.draws} requests, {len(unequal)} differ, {time.perf_counter() - begin:,.0f} s")


if __name__ == "__main__":
    main()
