"""Every launch of a product of 8-bit numbers on the same operands: the option `--launches` of `float8_products`.

What was measured is printed and written after each case, a case being one product of one layer, so an ended run keeps
what it has. A launch that has not been compiled takes seconds before it runs; `--compile` does nothing but that, in
`--workers` processes, each with a context of the GPU, and leaves the results in Triton's cache:

    python -m benchmarks.kernels.float8_products --launches --only "V2-Lite" --compile --workers 12
    python -m benchmarks.kernels.float8_products --launches --only "V2-Lite" --candidates bf16,bare,gluon,gluon_double

A kernel that never ends and one that is compiled for minutes look alike from outside. `Watch` names what was begun and
not ended, and ends the process: nothing else helps against a kernel that does not end.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

import torch
import triton

from benchmarks import record
from benchmarks.kernels.float8_layers import (
    ON_GPU,
    PASSES,
    RECIPES,
    TARGET,
    Layer,
    Shape,
    Ways,
    bare,
    check,
    draw,
    make_room,
    plain,
    product_of,
    timed,
)
from benchmarks.kernels.launches_tried import CANDIDATES

NAMED = ("bf16", "bare")
"""What is compared with the candidates: our product in 16 bits, and the launch of the table."""

ENDED_BY_WATCH = 3
"""Exit status."""


class Watch:
    """Ends the process when something takes too long.

    Attributes:
        seconds: that anything may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Name `what` on stderr and end the process, unless the block ends in time."""
        timer = threading.Timer(self.seconds, self._end, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, what: str) -> None:
        print(f"float8_products: {what} did not end within {self.seconds:g} s", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ENDED_BY_WATCH)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this mode."""
    names = dict.fromkeys([*NAMED, *(name for candidates in candidates_here() for name in candidates)])
    parser.add_argument("--launches", action="store_true", help="bare products only, with each launch of this chip")
    parser.add_argument(
        "--candidates",
        type=lambda text: tuple(text.split(",")),
        default=tuple(names),
        help=f"which of these, by commas: {', '.join(names)}",
    )
    parser.add_argument("--compile", action="store_true", help="only compile the launches, into Triton's cache")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that one launch may take")


def refuse_unknown(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """End the process unless each name is one of some product's candidates."""
    known = {*NAMED, *(name for candidates in candidates_here() for name in candidates)}
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--candidates: {', '.join(unknown)} is none of {', '.join(sorted(known))}")


def candidates_here() -> Sequence[dict]:
    """Of each product on this chip."""
    return [dict(candidates) for candidates in CANDIDATES.get(TARGET, {}).values()]


def run(options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    """Measure all shapes, or compile for them."""
    if options.compile:
        compile_all(options, shapes)
        return
    watch, rows = Watch(options.patience), []
    for shape in shapes:
        layer = draw(shape, RECIPES[options.recipe])
        for which in PASSES:
            rows.append(measure(layer, which, options, watch))
            print(line(rows[-1]), flush=True)
            numbers = {"recipe": options.recipe, "rows": rows, "summary": summarize(rows)}
            record.write(options, numbers, triton=triton.__version__)
        del layer
    for name, figures in summarize(rows).items():
        print(f"{name:42} " + ", ".join(f"{key} {figure:.3f}" for key, figure in figures.items()))


def ways_of(layer: Layer, which: str, names: Sequence[str]) -> Ways:
    """The ways to compute a product that are asked for."""
    ways: Ways = {"bf16": partial(plain, layer, which), "bare": partial(bare, layer, which)}
    for name, launch in CANDIDATES.get(TARGET, {}).get(product_of(layer, which), {}).items():
        ways[name] = partial(bare, layer, which, launch)
    return {name: way for name, way in ways.items() if name in names}


def measure(layer: Layer, which: str, options: argparse.Namespace, watch: Watch) -> dict:
    """One case: milliseconds of each way, and TFLOP/s."""
    name = f"{layer.shape.name}, {which}"
    with watch.over(f"{name}, check of the table's launch"):
        decibels = check(layer, which)
    ways = ways_of(layer, which, options.candidates)
    for way in ways:
        first_call(ways, way, name, watch)
    with watch.over(f"{name}, all in turns"):
        times = timed(ways, options.rounds)
    flops = 2 * layer.shape.rows * layer.shape.depth * layer.shape.width
    return {
        "layer": layer.shape.name,
        "grouped": bool(layer.shape.experts),
        "pass": which,
        "decibels": decibels,
        "milliseconds": times,
        "tflops": {way: flops / milliseconds / 1e9 for way, milliseconds in times.items()},
    }


def first_call(ways: Ways, way: str, name: str, watch: Watch) -> float:
    """Seconds until a way was compiled and launched; it has ended, too, when this returns."""
    start = time.perf_counter()
    with watch.over(f"{name}, {way}: compiling"):
        ways[way]()
    seconds = time.perf_counter() - start
    with watch.over(f"{name}, {way}: running"):
        if ON_GPU:
            torch.cuda.synchronize()
    return seconds


def compile_all(options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    """Launch everything once, a candidate of a product always in the same process: most shapes share its kernels."""
    jobs: dict[tuple[bool, bool, str], list[tuple[Shape, str]]] = {}
    for shape in shapes:
        for which in PASSES:
            is_gradient = which == "weight gradient"
            for name in options.candidates:
                jobs.setdefault((bool(shape.experts), is_gradient, name), []).append((shape, which))
    start = time.perf_counter()
    with ProcessPoolExecutor(max_workers=options.workers, mp_context=get_context("spawn")) as pool:
        work = [
            pool.submit(compile_one, name, tuple(cases), options.recipe, options.patience)
            for (_, _, name), cases in jobs.items()
        ]
        try:
            for done in as_completed(work):
                for text in done.result():
                    print(text, flush=True)
        except BrokenProcessPool:
            print("float8_products: a worker ended; what the others compiled is kept", file=sys.stderr)
            sys.exit(ENDED_BY_WATCH)
    print(f"{time.perf_counter() - start:.1f} s with {options.workers} workers")


def compile_one(name: str, cases: Sequence[tuple[Shape, str]], recipe: str, patience: float) -> list[str]:
    """Runs in another process; what it took, a line for each case that has the candidate."""
    found, watch, layer = [], Watch(patience), None
    for shape, which in cases:
        if layer is None or layer.shape != shape:
            layer = None
            layer = make_room(shape, RECIPES[recipe])
        ways = ways_of(layer, which, [name])
        if ways:
            seconds = first_call(ways, name, f"{shape.name}, {which}", watch)
            found.append(f"{seconds:6.1f} s  {name:22} {product_of(layer, which):15} {shape.name}, {which}")
    return found


def summarize(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Speed of each launch over the table's, geometric mean over the layers, by kind of layer and pass."""
    found = {}
    for grouped in (False, True):
        for which in PASSES:
            times = [row["milliseconds"] for row in rows if row["grouped"] == grouped and row["pass"] == which]
            if times and all("bare" in one for one in times):
                found[f"{'grouped' if grouped else 'dense'}, {which}"] = {
                    name: statistics.geometric_mean(one["bare"] / one[name] for one in times) for name in times[0]
                }
    return found


def line(row: dict) -> str:
    """One case for the terminal, the fastest way first."""
    figures = sorted(row["tflops"].items(), key=lambda item: -item[1])
    return f"{row['layer']}, {row['pass']}, {row['decibels']:.1f} dB, TFLOP/s: " + ", ".join(
        f"{name} {figure:.0f}" for name, figure in figures
    )
