"""Compare the best of searches with every layout of small spaces, and with random layouts of large ones.

    python -m benchmarks.search_exact --output benchmarks/results/search-exact.json
    python -m benchmarks.search_exact --draws 100 --only deepseek-v3 --processes 8
    python -m benchmarks.search_exact --draws 200 --requests 20 --output benchmarks/results/search-drawn.json

Every layout is composed of the pieces that the search itself looks at last. A layout counts if it fits with the room
that the search leaves; its schedule is played. `better` is the speed of the best of them, as `--layout` projects it,
over the search's best, less one: at most 0 if the search missed nothing. `--requests N` draws N requests as
`benchmarks.search_agrees` does, on up to 2,048 devices, and compares random layouts of each.

Of random layouts those are `slower` whose inner ranks alone compute longer than the fastest so far: no schedule is
shorter than that. Every 20th of these is played as well, and must not be faster than this work.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any

from benchmarks import record
from benchmarks.search_agrees import asked_alone, layout_text, layouts_of
from benchmarks.search_agrees import draws as drawn_requests
from penstock.base.errors import KernelError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, overheads_of, target_of
from penstock.plan.candidates import SearchSpace, run_of
from penstock.plan.composed_run import ComposedTimes
from penstock.plan.composer import Composer, meta_workers
from penstock.plan.hardware import Cluster
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.projection import Projection, layout_of, memory_margin
from penstock.plan.rules import Sizes
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest, neutral_sizes, prepared_run
from penstock.tune.kernels import commit_of_code

_SHORT = {"cp": "1", "etp": "1"}

WHOLE: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("debug", "4xH200", {"cp": "1"}),
    ("deepseek-v2-lite-6l", "2xA100", _SHORT),
    ("deepseek-v2-lite-6l", "4xH100", {**_SHORT, "recompute": "none"}),
    ("deepseek-v2-lite-8l", "8xH200", {**_SHORT, "recompute": "none", "offload": "none"}),
    ("deepseek-v2-lite", "8xH100", {**_SHORT, "tp": "1", "micro_batch": "1"}),
    ("qwen3-30b-a3b-8l", "4xMI300X", {**_SHORT, "offload": "none"}),
    ("qwen3-30b-a3b", "8xH100", {**_SHORT, "tp": "1", "micro_batch": "2", "vpp": "2"}),
    ("mixtral-8x7b-2l", "4xH100", {**_SHORT, "recompute": "none"}),
    ("mixtral-8x7b", "8xH200", {**_SHORT, "tp": "1", "micro_batch": "1", "offload": "none"}),
    ("gpt-oss-20b-4l", "8xH200", {**_SHORT, "offload": "none"}),
    ("olmoe-1b-7b-8l", "4xH100", {**_SHORT, "offload": "none"}),
    ("llama3.1-8b-6l", "8xMI355X", {"cp": "1"}),
)
"""Model, cluster, and parts that are fixed: every legal layout of them is played."""

LARGE: tuple[tuple[str, str], ...] = (
    ("deepseek-v3", "512xH100"),
    ("deepseek-v3", "1024xH100"),
    ("qwen3-235b-a22b", "64xH100"),
    ("qwen3-235b-a22b", "256xH100"),
    ("mixtral-8x22b", "32xH100"),
    ("mixtral-8x22b", "128xH100"),
    ("moe-2t", "768xMI300X"),
    ("llama4-maverick", "128xH100"),
    ("deepseek-v2", "64xH100"),
)


BATCH, BATCHES = 200, 3
"""Layouts that are played with the same pieces, and such batches of a process: it keeps what it has run in memory."""

CHECKED = 20  # of so many layouts that must be slower one is played


def compared(request: SearchRequest, draws: int | None, seed: int, processes: int) -> dict[str, Any]:
    """The search's best beside the best of other layouts, which so many processes play."""
    run, cluster = prepared_run(request), request.cluster
    begin = time.perf_counter()
    with meta_workers() as workers:
        plan = search(request, workers=workers)
    seconds = time.perf_counter() - begin
    space = SearchSpace(neutral_sizes(request, run), run, request.fixed)
    looked, slower, fitting, fastest, best = 0, 0, 0, float("inf"), None
    play = partial(played, run, cluster, all_of_them=draws is None)
    # Not an executor: with a number of tasks for a child, that of Python 3.11 can wait for ever.
    with get_context("spawn").Pool(processes, maxtasksperchild=BATCHES) as pool:
        batches = list(batched(layouts_of(space, draws, seed), BATCH))
        answers = pool.imap(play, batches, chunksize=1)
        for sizes, (more, some, seconds_of_best, best_of_some) in zip(batches, answers, strict=True):
            looked, slower, fitting = looked + len(sizes), slower + more, fitting + some
            if seconds_of_best < fastest:
                fastest, best = seconds_of_best, best_of_some
    found = plan.candidates[0] if plan.candidates else None
    speed = 0.0 if found is None else found.time.tokens_per_second_per_device
    # What `--layout` prints of the best of them; its rare stages are not approximate.
    alone = None if best is None else _alone(request, run, best)
    other = 0.0 if alone is None else alone.time.tokens_per_second_per_device
    return {
        "found": None if found is None else f"{found.layout}",
        "tokens_per_second_per_device": speed,
        "best_of_others": other,
        "best_other_layout": None if alone is None else layout_text(alone.layout),
        "better": None if best is None or found is None else other / speed - 1,
        "layouts": looked,
        "slower": slower,
        "fitting": fitting,
        "legal": space.count,
        "search_seconds": seconds,
    }


def _alone(request: SearchRequest, run: Run, sizes: Sizes) -> Projection:
    return asked_alone(request, layout_of(run_of(run, sizes), sizes.grid, sizes.dispatcher, sizes.shard))


def played(
    run: Run, cluster: Cluster, layouts: Sequence[Sizes], *, all_of_them: bool
) -> tuple[int, int, float, Sizes | None]:
    """How many layouts are slower by their work alone, and fit of the others; step and layout of the fastest."""
    composer = Composer(run, target_of(run, cluster, DEFAULT_ASSUMPTIONS), overheads_of(cluster.hardware))
    times = ComposedTimes(cluster)
    limit = cluster.hardware.memory.capacity_bytes * (1 - memory_margin(cluster))
    slower, fitting, fastest, best = 0, 0, float("inf"), None
    for sizes in layouts:
        asked = run_of(run, sizes)
        try:
            composed = composer.composed(asked, grid_of(asked, sizes.world), closely=False)
        except KernelError:  # the search refuses it with this reason
            continue
        inner = composed.inner_places
        if not all_of_them and (work := times.bound(composed, inner)) >= fastest:
            slower += 1
            if slower % CHECKED == 0:
                assert times.seconds(composed) >= work * (1 - 1e-9), f"{sizes} is faster than its work"
            continue
        if composed.fullest_of(inner) > limit or composed.fullest_of(range(sizes.pp)) > limit:
            continue
        if composed.most_host_bytes > cluster.hardware.host_link.memory_bytes:
            continue
        fitting += 1
        if (seconds := times.seconds(composed)) < fastest:
            fastest, best = seconds, sizes
    return slower, fitting, fastest, best


def batched(layouts: Iterable[Sizes], most: int) -> Iterator[list[Sizes]]:
    """The layouts, so many at a time."""
    layouts = iter(layouts)
    while some := list(islice(layouts, most)):
        yield some


def cases(only: str, draws: int, requests: int, seed: int) -> Iterable[tuple[str, SearchRequest, int | None]]:
    """By name; `requests` are drawn in place of those of this file."""
    for drawn in drawn_requests(requests, seed, most=2048):
        yield drawn.command, drawn.request, draws
    if requests:
        return
    for model, on, fixed in WHOLE:
        parts = ",".join(f"{name}={value}" for name, value in fixed.items())
        if only in f"{model} {on}":
            request = SearchRequest(run=load_run(model), cluster=parse_cluster(on), fixed=fixed, top=1)
            yield f"{model} on {on}, {parts}", request, None
    for model, on in LARGE:
        if only in f"{model} {on}":
            yield f"{model} on {on}", SearchRequest(run=load_run(model), cluster=parse_cluster(on), top=1), draws


def main() -> None:
    options = record.parser(
        __doc__,
        parts=True,
        draws=(2000, "random layouts of each large space"),
        requests=(0, "requests that are drawn in place of cases"),
        seed=1,
        only=("", "cases whose model and cluster contain this"),
        processes=(1, "that play layouts"),
    ).parse_args()
    if options.join:
        parts = record.parts_of(options)
        found = {name: {"commit": part["commit"], **row} for part in parts for name, row in part["numbers"].items()}
        every = [name for name, *_ in cases("", 0, options.requests, options.seed)]
        record.write_joined(options, parts, {name: found[name] for name in every if name in found})
        return
    numbers: dict[str, Any] = {}
    commit = options.commit or commit_of_code()
    asked = list(cases(options.only, options.draws, options.requests, options.seed))
    for name, request, draws in record.part_of(options, asked):
        numbers[name] = row = compared(request, draws, options.seed, options.processes) | {"commit": commit}
        better = "none fits" if row["better"] is None else f"{row['better']:+.2%}"
        print(
            f"{name}: {row['layouts']:,} layouts, {row['slower']:,} slower, {row['fitting']:,} fit, best {better}",
            flush=True,
        )
        record.write(options, numbers, seed=options.seed, draws=options.draws, requests=options.requests)


if __name__ == "__main__":
    main()
