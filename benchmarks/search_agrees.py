"""Compare the layouts that a search ranks with `penstock plan --layout` of each, for drawn requests.

    python -m benchmarks.search_agrees --draws 300 --output benchmarks/results/search-agrees.json
    python -m benchmarks.search_agrees --draws 40 --random 2

A request is a model, a chip, 6 to 512 devices, which are rarely a power of two, and options that change the figures. Of
each shown layout, run, memory, step and dispatcher must be those of `--layout` with its parts, to the last digit.
`--random N` composes random legal layouts of each request as a search does, in place of searching.
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks import record
from penstock.base.errors import PenstockError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.plan.asked_layout import with_layout
from penstock.plan.assumptions import overheads_of, target_of
from penstock.plan.candidates import SearchSpace, run_of
from penstock.plan.composed_run import ComposedTimes
from penstock.plan.composer import Composer
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.layout_names import FIELDS, parse_layout
from penstock.plan.project import composed_projection, project
from penstock.plan.projection import Layout, Projection
from penstock.plan.rules import Sizes
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest, neutral_sizes, prepared_run

MODELS = (
    "deepseek-v2-lite", "deepseek-v2-lite-9l", "deepseek-v3-8l", "qwen3-30b-a3b", "qwen3-30b-a3b-7l", "gpt-oss-20b",
    "mixtral-8x7b", "olmoe-1b-7b", "moe-1t-8l", "glm-4.5", "deepseek-v2",
)  # fmt: skip

CHIPS = ("H100", "H200", "MI300X", "MI325X", "MI355X", "B200")

OPTIONS = (
    (),
    ("float8.dense=blockwise", "float8.experts=blockwise", "float8.first_layers=1", "float8.last_layers=1"),
    ("optimizer.method=muon",),
    ("optimizer.moment_dtype=int8", "optimizer.store_param_remainders=true"),
    ("training.sequence_length=65536",),
    ("model.layers=11",),
    ("model.moe.experts=96",),
    ("model.layers=23", "model.moe.experts=90"),
)

FIXED: tuple[Mapping[str, str], ...] = (
    *({},) * 6,
    {"micro_batch": "1"}, {"offload": "optimizer"}, {"recompute": "layer"}, {"shard": "full"}, {"tp": "1", "cp": "1"},
    {"pp": "1"}, {"etp": "2"}, {"sync_free_stage": "2"},
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A request and the command that asks the same."""

    command: str
    request: SearchRequest


def draws(count: int, seed: int, most: int = 512) -> Iterator[Drawn]:
    """So many requests that are legal, on up to `most` devices."""
    source = random.Random(seed)
    while count:
        model, chip, options = source.choice(MODELS), source.choice(CHIPS), source.choice(OPTIONS)
        fixed = source.choice(FIXED)
        devices = source.randrange(6, 65) if source.random() < 0.7 else 8 * source.randrange(1, most // 8 + 1)
        words = [*options, f"training.global_batch={devices * source.choice((4, 10, 12))}"]
        if devices & (devices - 1) == 0:
            continue
        try:
            run, cluster = load_run(model, words), parse_cluster(f"{devices}x{chip}")
        except PenstockError:  # of devices that do not fill nodes, or of an option that a model does not have
            continue
        only = ",".join(f"{name}={value}" for name, value in fixed.items())
        command = f"penstock plan {model} {' '.join(words)} --on {devices}x{chip}"
        request = SearchRequest(run=run, cluster=cluster, fixed=fixed, top=3)
        yield Drawn(f"{command} --only {only}" if only else command, request)
        count -= 1


def layout_text(layout: Layout) -> str:
    """A layout as `--layout` takes it."""
    return ",".join(f"{name}={value}" for name, value in asdict(layout).items() if name in FIELDS)


def asked_alone(request: SearchRequest, layout: Layout) -> Projection:
    """What `--layout` projects for a layout of a request."""
    run = with_layout(request.run, parse_layout(layout_text(layout)), request.cluster.devices)
    return project(run, request.cluster, request.assumptions)


def differences(request: SearchRequest, candidates: tuple[Projection, ...]) -> list[str]:
    """Candidates that `--layout` sees otherwise."""
    unequal = []
    for candidate in candidates:
        alone = asked_alone(request, candidate.layout)
        if alone != candidate:
            steps = f"{candidate.time.step_seconds!r} and {alone.time.step_seconds!r} s"
            sizes = f"{candidate.memory.total} and {alone.memory.total} bytes"
            run = "" if alone.run == candidate.run else ", another run"
            unequal.append(f"{layout_text(candidate.layout)}: {steps}, {sizes}{run}")
    return unequal


def layouts_of(space: SearchSpace, draws: int | None, seed: int) -> list[Sizes]:
    """All legal layouts, or so many random ones: families and their parts are drawn evenly.

    Layouts that share pieces follow each other: such pieces run once.
    """
    families = [family for family in space.families() if family.legal.any()]
    if draws is None or not families:
        return sorted((one for family in families for one in space.layouts(family)), key=_pieces)
    source, found = random.Random(seed), []
    legal = [np.argwhere(family.legal) for family in families]
    for _ in range(draws):
        at = source.randrange(len(families))
        dense, shard, rows, shape = source.choice(legal[at]).tolist()
        number = source.randrange(len(families[at].experts))
        stage = source.choice(families[at].experts[number].stages)
        saving = source.choice(space.savings)
        found.append(space.sizes(families[at], (dense, number, shard, rows), shape, saving, stage))
    return sorted(found, key=_pieces)


def _pieces(sizes: Sizes) -> tuple[str, ...]:
    names = ("ep", "etp", "tp", "cp", "dispatcher", "sync_free", "micro_batch", "recompute", "shard", "schedule", "pp")
    return tuple(f"{getattr(sizes, name)}" for name in names)


def random_layouts(request: SearchRequest, count: int, seed: int) -> tuple[Projection, ...]:
    """Random legal layouts of a request, composed as a search composes them; those that cannot run are left out."""
    run, cluster = prepared_run(request), request.cluster
    space = SearchSpace(neutral_sizes(request, run), run, request.fixed)
    composer = Composer(run, target_of(run, cluster, request.assumptions), overheads_of(cluster.hardware))
    times, projections = ComposedTimes(cluster, request.assumptions), []
    for sizes in layouts_of(space, count, seed):
        asked = run_of(run, sizes)
        try:
            projections.append(composed_projection(composer.composed(asked, grid_of(asked, cluster.devices)), times))
        except PenstockError:
            continue
    return tuple(projections)


def main() -> None:
    parser = record.parser(__doc__, draws=(300, "requests"), seed=1, random=(0, "layouts of each request"))
    options = parser.parse_args()
    rows, seconds, begin = 0, 0.0, time.perf_counter()
    unequal: dict[str, list[str]] = {}
    none = 0
    for number, drawn in enumerate(draws(options.draws, options.seed), 1):
        started = time.process_time()
        if options.random:
            shown = random_layouts(drawn.request, options.random, number)
        else:
            shown = search(drawn.request).candidates
        seconds = max(seconds, time.process_time() - started)
        rows, none = rows + len(shown), none + (not shown)
        if differing := differences(drawn.request, shown):
            unequal[drawn.command] = differing
        print(f"{number} {drawn.command}: {len(shown)} layouts, {len(differing)} differ", flush=True)
        numbers = {"requests": number, "without_layout": none, "layouts": rows, "differ": unequal}
        record.write(options, {**numbers, "longest_cpu_seconds": seconds}, seed=options.seed, random=options.random)
    print(f"{rows} layouts of {options.draws} requests, {len(unequal)} differ, {time.perf_counter() - begin:,.0f} s")


if __name__ == "__main__":
    main()
