"""The runs by which the plan is held against measurements: projection_cases.toml, which says how they were chosen."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.tune.trial import first_steps

Chosen = Literal["while the model was made", "after it was frozen"]

MADE: Chosen = "while the model was made"
FROZEN: Chosen = "after it was frozen"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is measured and projected.

    Attributes:
        name: of the case and its run.
        target: preset.
        overrides: laid over it.
        processes: ranks, one GPU each, of one machine.
        chosen: when.
    """

    name: str
    target: str
    overrides: tuple[str, ...]
    processes: int
    chosen: Chosen

    def every_override(self, steps: int) -> tuple[str, ...]:
        """What turns the target into the run that is measured."""
        # The runs were recorded when nothing was captured unless it was asked for.
        given = ("data.source=synthetic-random", "graphs.capture=none", "dispatch.sync_free=0", *self.overrides)
        return (*given, *first_steps(load_run(self.target, given), steps))

    def run(self, steps: int) -> Run:
        """The run that is measured, and projected."""
        return load_run(self.target, self.every_override(steps))


def _cases() -> tuple[Case, ...]:
    file: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    sizes = ("training.global_batch", "training.micro_batch", "training.sequence_length")
    return tuple(
        Case(
            name=table["name"],
            target=table["target"],
            overrides=(
                *(f"{field}={size}" for field, size in zip(sizes, table["batch"].split(" x "), strict=True)),
                *file["shared"].get(table.get("and"), ()),
                *table.get("overrides", ()),
            ),
            processes=table.get("processes", 1),
            chosen=FROZEN if table.get("frozen") else MADE,
        )
        for table in file["case"]
    )


CASES = _cases()


def named(names: Collection[str], chosen: str) -> tuple[Case, ...]:
    """Some of the cases.

    Args:
        names: of those that are wanted; empty takes all.
        chosen: only those that were chosen then; empty takes both halves.
    """
    unknown = set(names) - {case.name for case in CASES}
    assert not unknown, f"no such cases: {unknown}"
    return tuple(case for case in CASES if (not names or case.name in names) and chosen in ("", case.chosen))
