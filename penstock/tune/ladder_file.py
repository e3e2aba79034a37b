"""A ladder as JSON: what became of each rung; and figures taken back from the file, so that none is measured twice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.tune.ladder import Measure, Outcome, gains
from penstock.tune.trial import Failure, Figures, Trial

Kept = Mapping[tuple[str, tuple[str, ...]], Figures]
"""Figures by the name of a rung and all of its overrides."""


def rungs_as_json(outcomes: Sequence[Outcome], flops_per_token: float) -> list[dict[str, Any]]:
    """Everything that is known about each rung.

    Args:
        outcomes: of the rungs so far.
        flops_per_token: of the model.
    """
    found = []
    for outcome, gain in zip(outcomes, gains(outcomes), strict=True):
        figures = outcome.figures
        found.append(
            {
                "name": outcome.rung.name,
                "what": outcome.rung.what,
                "kind": "size" if outcome.rung.is_size else "optimization",
                "state": outcome.state,
                "reason": outcome.reason,
                "changed": list(outcome.changed),
                "overrides": list(outcome.overrides),
                "seconds": outcome.seconds,
                "figures": None if figures is None else figures_as_json(figures, flops_per_token),
                "gain": None if gain is None else asdict(gain),
            }
        )
    return found


def figures_as_json(figures: Figures, flops_per_token: float) -> dict[str, Any]:
    """The figures of a trial, and what follows from them.

    Args:
        figures: of the trial.
        flops_per_token: of the model.
    """
    derived = {"jitter": figures.jitter, "flops_per_second_per_device": figures.flops_per_second(flops_per_token)}
    return asdict(figures) | derived


def read_kept(path: Path, environment: Mapping[str, Any], commit: str) -> Kept:
    """The figures of a ladder that was ended before its top.

    Args:
        path: file that an earlier ladder has written; may be missing.
        environment: of now.
        commit: of now.

    Raises:
        ConfigError: the file is no ladder, or was measured elsewhere or otherwise.
    """
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        rungs = result["numbers"]["rungs"]
        then = {**result["environment"], "commit": result["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no ladder to go on with", got=error, fix="leave out --resume") from error
    now = {**environment, "commit": commit}
    if then != now:
        others = [f"{key} {then.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)]
        raise ConfigError(f"{path} was measured with another environment", got=", ".join(others), fix="another --json")
    return {(rung["name"], tuple(rung["overrides"])): _figures(rung["figures"]) for rung in rungs if rung["figures"]}


def _figures(table: Mapping[str, Any]) -> Figures:
    names, lists = Figures.__dataclass_fields__, {"step_seconds", "losses"}
    values: dict[str, Any] = {name: tuple(table[name]) if name in lists else table[name] for name in names}
    return Figures(**values)


def recalling(kept: Kept, measure: Measure) -> Measure:
    """Measures what is not kept."""

    def recall(trial: Trial) -> Figures | Failure:
        figures = kept.get((trial.name, trial.overrides))
        return measure(trial) if figures is None else figures

    return recall
