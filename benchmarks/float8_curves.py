"""Loss curves in 16 and in 8 bits: the same run, seed and text, once for each recipe.

python -m benchmarks.float8_curves --output benchmarks/results/float8-curves-debug.json
python -m benchmarks.float8_curves --target benchmarks/float8_curves.toml --cases none rows-2 --output one.json
python -m benchmarks.float8_curves --target benchmarks/float8_curves.toml --cases blockwise --output two.json
python -m benchmarks.float8_curves --cases --add-to one.json two.json --output c.json

The last line trains nothing and joins what two GPUs have trained. benchmarks/float8_curves.toml is a model of 1.3 B
parameters, for which text is best packed beforehand (`--set data.source=packed ...`).

What is a difference worth? Case `rows-2` makes passes of so many rows instead of the preset's: the same run, whose sums
are rounded in another order. Case `bf16` is the run in bfloat16, which a debug preset in float32 is not.

A case is a recipe for dense products and experts; `+dispatch` behind it sends rows in 8 bits too, those of
`blockwise-square` as `blockwise`. The last loss is the mean over the last `--last` steps, because a single one depends
on its text.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import record

CASES = ("none", "blockwise", "blockwise-e5m2", "blockwise-square", "tensorwise", "rowwise", "mxfp8", "nvfp4")
E5M2 = "-e5m2"
"""Behind a recipe."""

POINTS = 200
"""Of a curve in the file; each is the mean of the steps since the one before."""


def main() -> None:
    """Train every case and compare each with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="debug", help="preset or TOML file")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides of every case")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--last", type=int, default=100, help="steps whose mean is the last loss")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument(
        "--add-to", type=Path, nargs="*", default=[], help="earlier results of the same run, whose cases are kept"
    )
    parser.add_argument("--folder", type=Path, help="for the runs; without it they are not kept")
    parser.add_argument("--parallel", type=int, default=1, help="cases that run at once")
    parser.add_argument("--timeout", type=float, default=None, help="seconds after which a case is ended")
    record.add_arguments(parser)
    options = parser.parse_args()
    cases = [case for file in options.add_to for case in json.loads(file.read_text("utf-8"))["numbers"]["cases"]]
    for case in cases:
        _add(options, case, cases)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.parallel) as pool:
        trained = pool.map(partial(_train, options, folder=options.folder or Path(temporary)), options.cases)
        for case, lines in zip(options.cases, trained, strict=True):
            cases.append(_figures(case, lines, options.last))
            _add(options, cases[-1], cases)


def _add(options: argparse.Namespace, case: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Hold a case against the first one, print it, and write all so far."""
    case["difference"] = case["last_loss"] / cases[0]["last_loss"] - 1
    print(_row(case), flush=True)
    record.write(options, {"target": options.target, "steps": options.steps, "cases": cases})


def overrides_of(case: str) -> list[str]:
    """What a case changes: `none`, or a recipe, with `-e5m2` for gradients, with `+dispatch` for rows that travel."""
    if case.startswith("rows-"):
        return [f"training.micro_batch={case.removeprefix('rows-')}"]
    if case == "bf16":
        return ["training.precision=bf16"]
    recipe, _, also = case.partition("+")
    is_wide = recipe.endswith(E5M2)
    recipe = recipe.removesuffix(E5M2)
    changes = [f"float8.dense={recipe}", f"float8.experts={recipe}", *["float8.gradients=e5m2"] * is_wide]
    return [*changes, f"float8.dispatch={recipe.removesuffix('-square')}"] if also == "dispatch" else changes


def _train(options: argparse.Namespace, case: str, folder: Path) -> list[dict[str, Any]]:
    name = case.replace("+", "-")
    own = [f"name={name}", f"record.folder={folder}", f"training.steps={options.steps}", "checkpoint.enabled=false"]
    words = [sys.executable, "-m", "penstock", "train", options.target, *own, *options.set, *overrides_of(case)]
    subprocess.run(words, check=True, timeout=options.timeout, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]


def _figures(case: str, lines: Sequence[dict[str, Any]], last: int) -> dict[str, Any]:
    losses = [line["loss"] for line in lines]
    width = max(1, len(losses) // POINTS)
    held_out = [line["evaluation_loss"] for line in lines if line.get("evaluation_loss") is not None]
    return {
        "case": case,
        "last_loss": fmean(losses[-last:]),
        "held_out_loss": held_out[-1] if held_out else None,
        "tokens": lines[-1]["tokens_seen"],
        "curve": [
            [lines[end - 1]["step"], fmean(losses[end - width : end])] for end in range(width, len(losses) + 1, width)
        ],
    }


def _row(figures: dict[str, Any]) -> str:
    held_out = "" if figures["held_out_loss"] is None else f"  held out {figures['held_out_loss']:.4f}"
    return f"{figures['case']:24} last {figures['last_loss']:.4f}  {figures['difference']:+.3%}{held_out}"


if __name__ == "__main__":
    main()
