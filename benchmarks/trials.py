"""What benchmarks of whole runs share: their options, and one short run of the product (`penstock.tune.trial`)."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.layouts import make_tokenizer
from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.tune.trial import Failure, Trial, first_steps, run_trial


def add_arguments(parser: argparse.ArgumentParser, *, target: str, steps: int, warm_up: int) -> None:
    """What is trained for how long; and where the result goes."""
    parser.add_argument("--target", default=target)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warm-up", type=int, default=warm_up, help="first steps that are not counted")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds after which a case is ended; 0 never")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; made there if it is missing")
    record.add_arguments(parser)


def measure(
    options: argparse.Namespace, name: str, overrides: Sequence[str], processes: int, folder: Path
) -> dict[str, Any]:
    """The figures of a case; where it did not run, None and the reason.

    Args:
        options: with those of `add_arguments`.
        name: of the run, each its own.
        overrides: of the case; text and tokenizer are added.
        processes: ranks.
        folder: for runs, and for the tokenizer if none is given.
    """
    tokenizer = options.tokenizer or folder / "tokenizer.json"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    own = (f"data.tokenizer={tokenizer}", "data.source=standard-library", *overrides)
    try:
        every = (*own, *first_steps(load_run(options.target, own), options.steps))
    except PenstockError as error:
        return {"reason": str(error), "figures": None}
    found = run_trial(
        Trial(
            name=name,
            target=options.target,
            overrides=every,
            processes=processes,
            warm_up=options.warm_up,
            folder=folder,
            most_seconds=options.timeout,
        )
    )
    if isinstance(found, Failure):
        return {"reason": found.reason, "figures": None}
    return {"reason": "", "figures": asdict(found)}
