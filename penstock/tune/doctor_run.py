"""What the folder of a run says: configuration, and what its metrics have recorded. Nothing here imports PyTorch."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from penstock.base.devices import chip_named
from penstock.base.errors import RunFolderError
from penstock.config.load import RUN_FILE, load_run
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware, parse_cluster
from penstock.tune.doctor_evidence import Facts

METRICS = "metrics.jsonl"

USUAL = 0.5
"""Share of the recorded steps, the last ones, that stand for the usual step: the first compile, capture and warm up."""


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run."""
    return (path / RUN_FILE).is_file()


def facts_of(folder: Path) -> tuple[Facts, tuple[str, ...]]:
    """What is known of a run, and what is missing.

    Args:
        folder: with its configuration in it.

    Raises:
        ConfigError: the configuration cannot be read.
        RunFolderError: the metrics cannot be read.
    """
    run = load_run(str(folder.absolute()))
    lines = _lines(folder / METRICS)
    if not lines:
        return Facts(run=run, has_steps=False), (f"no step of the run is recorded: {folder / METRICS} has no line",)
    usual = lines[int(len(lines) * USUAL) :]
    step_seconds = _median(usual, "step_seconds")
    speed = _median(usual, "tokens_per_second_per_device")
    peaks = [line["peak_memory_bytes"] for line in lines if isinstance(line.get("peak_memory_bytes"), int)]
    return (
        Facts(
            run=run,
            world=round(run.tokens_per_step / (speed * step_seconds)) if speed and step_seconds else None,
            peak_bytes=max(peaks, default=None),
            step_seconds=step_seconds,
            phase_seconds=_phases(usual),
            repeated_steps=sum(bool(line.get("rows_left_out")) for line in lines),
            expert_load=_median(usual, "expert_rank_load_max_over_mean"),
        ),
        () if peaks else ("no memory is in the metrics",),
    )


def cluster_for(facts: Facts, on: str | None) -> Cluster | None:
    """What a run is on, or None if nobody knows.

    Args:
        facts: with the device and the number of ranks, if a trace or the metrics say.
        on: what the user says, which counts more.

    Raises:
        HardwareError: `on` is no hardware, or the ranks do not fill their nodes.
    """
    if on is not None:
        return parse_cluster(on)
    chip = None if facts.device is None else chip_named(facts.device)
    if chip is None or chip.pattern not in known_hardware() or facts.world is None:
        return None
    return cluster_of(facts.world, load_hardware(chip.pattern))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: a run that was killed may have left half of one, at the end."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    found = []
    rows = text.splitlines()
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
        except ValueError as error:
            if number == len(rows):
                break
            raise RunFolderError(f"{path}, line {number}, is no JSON: {error}") from error
        if isinstance(line, dict):
            found.append(line)
    return found


def _phases(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each phase over the lines that have phases."""
    told = [line["phase_seconds"] for line in lines if isinstance(line.get("phase_seconds"), dict)]
    medians = {name: _median(told, name) for name in dict.fromkeys(name for one in told for name in one)}
    return {name: value for name, value in medians.items() if value is not None}


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    return float(median(values)) if values else None
