"""A ladder as JSON: what became of each rung; and trials taken back from the file, so that none is made twice.

Taken back are figures, and what was refused by configuration or found no memory: that would end so again. A trial that
crashed or was not done in time is made again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.files import read_json
from penstock.tune.ladder import Measure, Outcome, gains
from penstock.tune.trial import Failure, Figures, Trial


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the file of an earlier ladder has.

    Attributes:
        trials: by name and all overrides.
        rungs: as they stand in the file.
    """

    trials: Mapping[tuple[str, tuple[str, ...]], Figures | Failure]
    rungs: Sequence[Mapping[str, Any]] = ()

    def still_ahead(self, outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
        """The rungs of the file that this ladder has not come to, so that none is lost if it does not."""
        names = {outcome.rung.name for outcome in outcomes}
        return [rung for rung in self.rungs if rung["name"] not in names]


NOTHING_KEPT = Kept(trials={})


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
                "trial": outcome.trial,
                "fallback": list(outcome.fallback),
                "tried": [asdict(one) for one in outcome.tried],
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
    """The trials of a ladder that was ended before its top.

    Args:
        path: file that an earlier ladder has written; may be missing.
        environment: of now.
        commit: of now.

    Raises:
        ConfigError: the file is no ladder, or was measured elsewhere or otherwise.
    """
    if not path.exists():
        return NOTHING_KEPT
    try:
        result = read_json(path)
        numbers = result["numbers"]
        kept = _kept([*numbers["rungs"], *numbers["still_ahead"]])
        then = {**result["environment"], "commit": result["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no ladder to go on with", got=error, fix="leave out --resume") from error
    now = {**environment, "commit": commit}
    if then != now:
        others = [f"{key} {then.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)]
        raise ConfigError(f"{path} was measured with another environment", got=", ".join(others), fix="another --json")
    return kept


def _kept(rungs: Sequence[Mapping[str, Any]]) -> Kept:
    trials: dict[tuple[str, tuple[str, ...]], Figures | Failure] = {}
    for rung in rungs:
        for one in rung["tried"]:
            failure = Failure(kind=one["state"], reason=one["reason"], seconds=one["seconds"], had_begun=False)
            trials[one["trial"], tuple(one["overrides"])] = failure
        if rung["figures"]:
            trials[rung["trial"], tuple(rung["overrides"])] = _figures(rung["figures"])
    return Kept(trials=trials, rungs=rungs)


def _figures(table: Mapping[str, Any]) -> Figures:
    names, lists = Figures.__dataclass_fields__, {"step_seconds", "losses"}
    values: dict[str, Any] = {name: tuple(table[name]) if name in lists else table[name] for name in names}
    return Figures(**values)


def recalling(kept: Kept, measure: Measure) -> Measure:
    """Measures what is not kept."""

    def recall(trial: Trial) -> Figures | Failure:
        found = kept.trials.get((trial.name, trial.overrides))
        return measure(trial) if found is None else found

    return recall
