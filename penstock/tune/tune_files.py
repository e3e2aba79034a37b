"""The files of `penstock tune`: its journal after each trial, the tuned run, and JSON of everything."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.files import read_json, write_whole
from penstock.base.numbers import counted, time_text
from penstock.config.load import dump_toml, with_overrides
from penstock.config.run import Run
from penstock.config.schema import differences
from penstock.tune.search_loop import Search, TrialRecord, TrialResult, median_error, trial_key
from penstock.tune.trial import result_from

JOURNAL, TUNED, PAGE, EVERYTHING, BEGUN = "journal.json", "tuned.toml", "tune.html", "tune.json", "begun.json"

MOST_DEATHS = 2
"""Searches that may die with a trial, of a killed process or a lost machine, until it is not tried again."""


@dataclass(frozen=True, kw_only=True)
class Journal:
    """An earlier search: its results by key, and `rows` of a step of its trials, 0 for whole steps."""

    results: Mapping[str, TrialResult]
    rows: int


def read_journal(folder: Path, identity: Mapping[str, Any]) -> Journal | None:
    """An earlier search of this run on this machine, None without one; a ConfigError if it is of another one."""
    path = folder / JOURNAL
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        results = {trial["key"]: result_from(trial["result"]) for trial in saved["trials"]}
        then, rows = saved["identity"], int(saved["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no journal to go on with", got=error, fix="leave out --resume") from error
    if then != identity:
        others = [name for name in {**then, **identity} if then.get(name) != identity.get(name)]
        raise ConfigError(f"{path} is of another search", got=", ".join(others), fix="leave out --resume")
    return Journal(results=results, rows=rows)


def write_journal(folder: Path, identity: Mapping[str, Any], rows: int, search: Search) -> None:
    """Write all results, also those that a search which goes on has not come to; called after each trial."""
    results = dict(search.recorded)
    for record in search.records:
        results[trial_key(record.candidate, record.number, is_whole=record.is_whole)] = record.result
    trials = [{"key": key, "result": asdict(result)} for key, result in results.items()]
    saved = {"identity": identity, "rows": rows, "trials": trials}
    write_whole(folder / JOURNAL, json.dumps(saved, indent=1) + "\n")


def write_begun(folder: Path, key: str) -> None:
    """Note that a trial begins. If its result comes to the journal, that counts."""
    before, deaths = _read_begun(folder)
    write_whole(folder / BEGUN, json.dumps({"key": key, "deaths": deaths + 1 if before == key else 1}) + "\n")


def clear_begun(folder: Path) -> None:
    """Note that the search has ended, or was asked to, and no trial is to blame."""
    (folder / BEGUN).unlink(missing_ok=True)


def fatal_trials(folder: Path) -> dict[str, TrialResult]:
    """The trial with which searches of this folder have died, as a result by its key, if they were `MOST_DEATHS`."""
    key, deaths = _read_begun(folder)
    if deaths < MOST_DEATHS:
        return {}
    return {key: TrialResult(kind="crash", reason=f"{deaths} searches were killed in this trial")}


def _read_begun(folder: Path) -> tuple[str, int]:
    path = folder / BEGUN
    if not path.exists():
        return "", 0
    begun = read_json(path)
    return str(begun["key"]), int(begun["deaths"])


def gain_of(record: TrialRecord, over: TrialRecord) -> float:
    """Times that a record is faster than another, for the same tokens."""
    return over.even_step / record.even_step


def short_steps_text(search: Search, whole_rows: int) -> str:
    """How the seconds of whole steps came about, where trials made short ones; else empty."""
    first, whole = search.reference, search.whole
    if first is None or first.candidate.short is None:
        return ""
    change = first.candidate.key or "the run as it is"
    text = (
        f"trials made steps of {first.candidate.short.rows:,} of {whole_rows:,} rows; a whole step is the measured "
        f"short one x the projected whole one / the projected short one, {first.candidate.stretch:.4g} for {change}"
    )
    if whole is None:
        return f"{text}; no whole step was measured"
    outcome = time_text(whole.step) if whole.result.kind == "ran" else f"{whole.result.kind}, {whole.result.reason}"
    return f"{text}; the whole step of the best: expected {time_text(whole.expected)}, measured {outcome}"


def short_source(record: TrialRecord) -> str:
    """` from` the measured short step, if seconds of a trial are computed from one; else empty."""
    short = None if record.is_whole else record.candidate.short
    return "" if short is None else f" from {time_text(record.result.step)} ({counted(short.rows, 'row')})"


def line_gains(search: Search) -> dict[str, str]:
    """By changed field of the leader, what it gained, as measured: alone, or together with the other changes."""
    leader, first = search.leader, search.reference
    if leader is None or first is None:
        return {}
    ran = {
        record.candidate.key: record for record in search.records if record.result.kind == "ran" and not record.is_whole
    }
    whole = gain_of(leader, first)
    gains = {}
    for field in leader.candidate.choices:
        rest = " ".join(
            sorted(override for override in leader.candidate.overrides if override.partition("=")[0] != field)
        )
        if rest in ran:
            gains[field] = f"{gain_of(leader, ran[rest]):.3f} x, measured with and without it"
        else:
            gains[field] = f"part of {whole:.3f} x, measured with all changes"
    return gains


def write_tuned(path: Path, run: Run, reference: Run, search: Search, command: str) -> None:
    """Write the run of the leader, with a comment on each line that differs from the user's `run`."""
    leader = search.leader
    tuned = reference if leader is None else with_overrides(reference, leader.candidate.overrides)
    gains = line_gains(search)
    comments = {
        difference.field: f"was {difference.left}; " + gains.get(difference.field, "the run could not start otherwise")
        for difference in differences(run, tuned)
    }
    lines, section = [], ""
    for line in dump_toml(tuned).splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        name = section + line.partition(" = ")[0]
        # A list over several lines takes its comment after the bracket.
        lines.append(f"{line}  # {comments[name]}" if " = " in line and name in comments else line)
    head = f"# {command}\n# {search.ending}; {len(search.records)} trials\n"
    write_whole(path, head + "\n".join(lines) + "\n")


def search_json(
    search: Search, spent: Mapping[str, float], next_wins: Sequence[str], whole_rows: int
) -> dict[str, Any]:
    """Everything, for `--json`; `whole_rows` has a step of the run."""
    leader, first = search.leader, search.reference
    return {
        "ending": search.ending,
        "objective": search.settings.objective,
        "trials": [
            {
                "change": list(record.candidate.overrides),
                "source": record.candidate.source,
                "is_whole": record.is_whole,
                "projected_seconds": record.projected,
                "projected_terms": dict(record.candidate.terms),
                "expected_seconds": record.expected,
                "expected_deviation": record.estimated.deviation,
                **asdict(record.result),
                "short_rows": None
                if record.is_whole or record.candidate.short is None
                else record.candidate.short.rows,
                "stretch": 1.0 if record.is_whole else record.candidate.stretch,
                "measured_seconds": record.result.step if record.result.step_seconds else None,
                "whole_seconds": record.step if record.result.step_seconds else None,
            }
            for record in search.records
        ],
        "short_steps": short_steps_text(search, whole_rows) or None,
        "candidates": len(search.candidates),
        "leader": None if leader is None else list(leader.candidate.overrides),
        "gain": None if leader is None or first is None else gain_of(leader, first),
        "gains": line_gains(search),
        "median_error": median_error(search.records, corrected=False),
        "median_error_corrected": median_error(search.records, corrected=True),
        "spent_seconds": dict(spent),
        "next": list(next_wins),
    }
