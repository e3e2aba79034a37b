"""Loss curves in 16 and in 8 bits: the same runs, seeds and text, once for each recipe.

python -m benchmarks.float8_curves --target benchmarks/float8_curves_debug.toml --cases none rows-16 blockwise \
    --seeds 0 1 2 3 --parallel 6 --output benchmarks/results/float8-curves-calm.json
python -m benchmarks.float8_curves --target benchmarks/float8_curves.toml --cases none rows-4 --output one.json
python -m benchmarks.float8_curves --target benchmarks/float8_curves.toml --cases blockwise --output two.json
python -m benchmarks.float8_curves --cases --add-to one.json two.json --output c.json

The last line trains nothing and joins what two GPUs have trained, cases and seeds. A run that a file of `--add-to` has
is not trained again: a benchmark that was ended goes on from its own output. benchmarks/float8_curves.toml is a model
of 1.3 B parameters, for which text is best packed beforehand (`--set data.source=packed ...`).

What is a difference worth? Every case is trained once for each seed and held against the first case's run of the same
seed, which began with the same weights and read the same text; the standard error over the seeds is beside the mean.
Case `rows-2` makes passes of so many rows instead of the target's: the same run, whose sums are rounded in another
order. Case `bf16` is the run in bfloat16, which a debug preset in float32 is not. Cases of `OPTIMIZERS` store the state
of the optimizer in fewer bits, or are trained with Muon; case `qat-mxfp4` has experts rounded to MXFP4 in products.

Other cases are a recipe for dense products and experts; `+head` behind it has the output projection in 8 bits too, and
case `head` this alone by squares (with `--set model.vocab_size=272` for the debug model); `+dispatch` sends rows in 8
bits, those of `blockwise-square` as `blockwise`. The last loss is the mean over the last `--last` steps, because a
single one depends on its text.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import record, runs
from penstock.config.load import load_run

Case = dict[str, Any]
"""As in the file: its name, the figures of each seed, means over the seeds, and what they are beside the first case."""

CASES = ("none", "blockwise", "blockwise-e5m2", "blockwise-square", "tensorwise", "rowwise", "mxfp8")
E5M2 = "-e5m2"
"""Behind a recipe."""

OPTIMIZERS = {
    "muon": ("optimizer.method=muon",),
    "moments-bf16": ("optimizer.moment_dtype=bf16",),
    "moments-int8": ("optimizer.moment_dtype=int8",),
    "remainders": ("optimizer.store_param_remainders=true",),
    "moments-int8-remainders": ("optimizer.moment_dtype=int8", "optimizer.store_param_remainders=true"),
}
"""Cases of the optimizer, whose products are not in 8 bits."""

POINTS = 200
"""Of a curve in the file; each is the mean of the steps since the one before."""


def main() -> None:
    """Train every case with every seed and hold each against the first."""
    options = record.parser(
        __doc__,
        target=(str, "preset or TOML file (default: that of --add-to, or debug)"),
        set=([str], "overrides of every case"),
        steps=(int, "of each run (default: those of --add-to, or 2000)"),
        last=(100, "steps whose mean is the last loss"),
        cases=list(CASES),
        seeds=([int], "each case is trained with each (default: the target's)"),
        add_to=([Path], "earlier results of the same run, whose cases are kept"),
        folder=(Path, "for the runs; without it they are not kept"),
        parallel=(1, "runs at once"),
        timeout=(float, "seconds after which a run is ended"),
    ).parse_args()
    curves = joined(options.add_to, target=options.target, steps=options.steps)
    options.target, options.steps = curves.target, curves.steps
    curves.order += options.cases
    if options.cases and not options.seeds:
        options.seeds = [load_run(options.target, [f"training.steps={options.steps}", *options.set]).seed]
    # Seed by seed: a benchmark that is ended has whole seeds.
    wanted = dict.fromkeys((case, seed) for seed in options.seeds for case in options.cases)
    pairs = [pair for pair in wanted if not curves.has(*pair)]
    if not pairs:
        # The machine that joins says nothing of those that trained.
        record.write(options, curves.numbers(), **curves.environment)
    failed = _train_all(options, pairs, curves)
    for case in curves.numbers()["cases"]:
        record.show(case)
    if failed:
        raise SystemExit(f"{failed} of {len(pairs)} runs failed")


@dataclass
class Curves:
    """All that was trained so far.

    Attributes:
        target: preset or file of all runs.
        steps: of each run.
        cases: of each name, without what they are beside the first.
        order: names in the order of the file, some more than once; all are held against the first.
        failed: runs that gave nothing, by case and seed, and why.
        environment: of the first file that was joined.
    """

    target: str
    steps: int
    cases: dict[str, Case] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def has(self, case: str, seed: int) -> bool:
        """Whether this run is there."""
        return case in self.cases and any(run["seed"] == seed for run in self.cases[case]["seeds"])

    def add(self, case: Case) -> None:
        """Take a case, or further seeds of one that is there.

        Raises:
            ValueError: a seed of it is there already, or its curve has other steps.
        """
        name = case["case"]
        self.cases[name] = united(self.cases[name], case) if name in self.cases else case
        self.order.append(name)

    def numbers(self) -> dict[str, Any]:
        """What the file says: every case beside the first one, which may not be there yet."""
        names = [name for name in dict.fromkeys(self.order) if name in self.cases]
        first = self.order[0] if self.order else ""
        failed = [
            {"case": case, "seed": seed, "why": why}
            for (case, seed), why in self.failed.items()
            if not self.has(case, seed)
        ]
        cases = [compared(self.cases[name], self.cases.get(first)) for name in names]
        return {"target": self.target, "steps": self.steps, "first": first, "cases": cases, "failed": failed}


def joined(files: Sequence[Path], *, target: str | None = None, steps: int | None = None) -> Curves:
    """Join results of one target: cases, and the seeds of each case.

    Args:
        files: results with seeds.
        target: what they must have trained, if it is given.
        steps: how long.

    Returns:
        All of it; without files nothing yet of the preset `debug` and 2,000 steps, or of what is given.

    Raises:
        ValueError: the files are of different runs, or name no seeds, or have the same run twice.
    """
    nothing: dict[str, Any] = {"numbers": {"target": "debug", "steps": 2000}, "environment": {}}
    results = {file: json.loads(file.read_text("utf-8")) for file in files}
    first = next(iter(results.values()), nothing)
    curves = Curves(
        target=first["numbers"]["target"] if target is None else target,
        steps=first["numbers"]["steps"] if steps is None else steps,
        environment=first["environment"],
    )
    for file, result in results.items():
        numbers = result["numbers"]
        for name, wanted in (("target", curves.target), ("steps", curves.steps)):
            if numbers[name] != wanted:
                raise ValueError(f"{name} of {file}: got {numbers[name]}; allowed: {wanted}; fix: join one kind of run")
        if any("seeds" not in case for case in numbers["cases"]):
            raise ValueError(f"cases of {file} have no seeds: an earlier benchmark wrote it; fix: train them again")
        curves.order.append(numbers["first"])
        for case in numbers["cases"]:
            curves.add(case)
        curves.failed |= {(run["case"], run["seed"]): run["why"] for run in numbers["failed"]}
    return curves


def united(one: Case, other: Case) -> Case:
    """One case of the seeds of two.

    Raises:
        ValueError: they have a seed in common, or curves of different steps.
    """
    name = one["case"]
    seeds = sorted([*one["seeds"], *other["seeds"]], key=lambda run: run["seed"])
    twice = {run["seed"] for run in one["seeds"]} & {run["seed"] for run in other["seeds"]}
    if twice:
        raise ValueError(f"case {name} has seeds {sorted(twice)} twice; allowed: once; fix: leave out one of the files")
    if [step for step, _ in one["curve"]] != [step for step, _ in other["curve"]]:
        raise ValueError(f"curves of case {name} have other steps; allowed: the same; fix: join runs of one length")
    weight = len(one["seeds"]) / len(seeds)
    curve = [
        [step, weight * loss + (1 - weight) * also]
        for (step, loss), (_, also) in zip(one["curve"], other["curve"], strict=True)
    ]
    return one | _means(seeds) | {"curve": curve, "seeds": seeds}


def compared(case: Case, first: Case | None) -> Case:
    """A case with its differences from the first one, which may not be there, and their standard errors.

    `difference` and `held_out_difference` are the mean over the seeds that both have of how much larger its loss is, as
    a share of the first one's; None without such a seed, and their errors with fewer than two.
    """
    last, last_error = _beside(case, first, "last_loss")
    held_out, held_out_error = _beside(case, first, "held_out_loss")
    differences = {"difference": last, "difference_error": last_error}
    return case | differences | {"held_out_difference": held_out, "held_out_error": held_out_error}


def _beside(case: Case, first: Case | None, figure: str) -> tuple[float | None, float | None]:
    bases = {run["seed"]: run[figure] for run in ([] if first is None else first["seeds"])}
    both = [(run[figure], bases.get(run["seed"])) for run in case["seeds"]]
    more = [loss / base - 1 for loss, base in both if loss is not None and base is not None]
    error = stdev(more) / sqrt(len(more)) if len(more) > 1 else None
    return (fmean(more) if more else None), error


def _means(seeds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    held_out = [run["held_out_loss"] for run in seeds if run["held_out_loss"] is not None]
    return {
        "last_loss": fmean(run["last_loss"] for run in seeds),
        "held_out_loss": fmean(held_out) if held_out else None,
    }


def overrides_of(case: str) -> list[str]:
    """What a case changes: `none`, or a recipe, with `-e5m2` for gradients, with `+dispatch` or `+head` for more."""
    if case.startswith("rows-"):
        return [f"training.micro_batch={case.removeprefix('rows-')}"]
    if case == "bf16":
        return ["training.precision=bf16"]
    if case == "head":
        return ["float8.head=blockwise-square"]
    if case == "qat-mxfp4":
        return ["qat.experts=mxfp4"]
    if case in OPTIMIZERS:
        return list(OPTIMIZERS[case])
    recipe, _, also = case.partition("+")
    is_wide = recipe.endswith(E5M2)
    recipe = recipe.removesuffix(E5M2)
    changes = [f"float8.dense={recipe}", f"float8.experts={recipe}", *["float8.gradients=e5m2"] * is_wide]
    if also == "head":
        changes.append(f"float8.head={recipe}")
    return [*changes, f"float8.dispatch={recipe.removesuffix('-square')}"] if also == "dispatch" else changes


def _train_all(options: argparse.Namespace, pairs: Sequence[tuple[str, int]], curves: Curves) -> int:
    """Train what is missing and write all so far after each run. Returns how many runs failed."""
    failed = 0
    for case, seed, found in _runs(options, pairs):
        if isinstance(found, str):
            failed += 1
            curves.failed[case, seed] = found
            print(f"{case}, seed {seed}: FAILED, {found}", flush=True)
        else:
            curves.add(found)
            record.show({"case": case, "seed": seed, "last": found["last_loss"], "held out": found["held_out_loss"]})
        record.write(options, curves.numbers())
    return failed


def _runs(options: argparse.Namespace, pairs: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, Case | str]]:
    """Case, seed, and figures of each run in the order in which they end, or why there are none."""
    with tempfile.TemporaryDirectory() as temporary:
        pool = ThreadPoolExecutor(options.parallel)
        try:
            folder = options.folder or Path(temporary)
            runs = {pool.submit(_train, options, case, seed, folder): (case, seed) for case, seed in pairs}
            for run in as_completed(runs):
                case, seed = runs[run]
                try:
                    yield case, seed, of_run(case, seed, run.result(), options.last)
                except subprocess.CalledProcessError as error:
                    yield case, seed, f"exit code {error.returncode}"
                except subprocess.TimeoutExpired as error:
                    yield case, seed, f"ended after {error.timeout:.0f} s"
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C the rest does not begin


def _train(options: argparse.Namespace, case: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    name = f"{case.replace('+', '-')}-seed-{seed}"
    overrides = [f"training.steps={options.steps}", "checkpoint.enabled=false", *options.set, f"seed={seed}"]
    overrides += overrides_of(case)
    return runs.trained(options.target, overrides, folder, name, timeout=options.timeout)


def of_run(name: str, seed: int, lines: Sequence[dict[str, Any]], last: int) -> Case:
    """A case of one seed.

    Args:
        name: of the case.
        seed: of the run.
        lines: what it recorded of each step (docs/metrics.md).
        last: steps whose mean is the last loss.
    """
    losses = [line["loss"] for line in lines]
    width = max(1, len(losses) // POINTS)
    held_out = [line["evaluation_loss"] for line in lines if line.get("evaluation_loss") is not None]
    run = {"seed": seed, "last_loss": fmean(losses[-last:]), "held_out_loss": held_out[-1] if held_out else None}
    return {
        "case": name,
        **_means([run]),
        "tokens": lines[-1]["tokens_seen"],
        "curve": [
            [lines[end - 1]["step"], fmean(losses[end - width : end])] for end in range(width, len(losses) + 1, width)
        ],
        "seeds": [run],
    }


if __name__ == "__main__":
    main()
