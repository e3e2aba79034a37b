"""Facts of a run from its folder: configuration and metrics. Imports no PyTorch."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from penstock.base.devices import chip_named
from penstock.base.errors import RunFolderError
from penstock.base.files import open_file
from penstock.config.load import RUN_FILE, load_run
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware, parse_cluster
from penstock.tune.doctor.evidence import LayerLoads, PowerFacts, RunFacts

METRICS = "metrics.jsonl"

STARTS = "starts.jsonl"
"""One line for each process start of a run (penstock/train/run_folder.py); older runs have no such file."""

WARM_UP, RECORDED = 5, 2  # steps before the recorded ones, which compile and allocate; and the number of recorded steps
USUAL = 0.5  # share of the metrics, the last part, that the medians are of: the first steps compile and warm up
LAYERS = 64  # steps whose layers are read, evenly spaced
NEAREST_STEPS = 4  # number of steps next to the recorded ones that tell their time without a profiler


def is_run(path: Path) -> bool:
    return (path / RUN_FILE).is_file()


def is_planned(path: Path) -> bool:
    """Whether a path is the TOML file of a run that is only planned."""
    return path.suffix == ".toml" and path.is_file()


def facts_of(folder: Path, lines: Sequence[dict[str, Any]] | None = None) -> tuple[RunFacts, tuple[str, ...]]:
    """Facts of a run, and the missing inputs; `lines` of metrics.jsonl are read if they are None.

    Raises a ConfigError or a RunFolderError if configuration or metrics cannot be read.
    """
    run = load_run(str(folder.absolute()))
    lines = json_lines(folder / METRICS, LAYERS) if lines is None else lines
    device = next((start["device"] for start in reversed(json_lines(folder / STARTS)) if "device" in start), None)
    if not lines:
        missing = f"no step of the run is recorded: {folder / METRICS} has no line"
        return RunFacts(run=run, device=device, has_steps=False), (missing,)
    # The profiler slows the steps that it records, and the next one, in which ranks wait for others' files.
    first = run.profile.start
    disturbed = range(first, first + run.profile.steps + 1) if first else range(0)
    calm = [line for line in lines[1:] if _step(line) not in disturbed]
    usual = _last(calm) or _last(lines)
    step_seconds = _median(usual, "step_seconds")
    speed = _median(usual, "tokens_per_second_per_device")
    peaks = [line["peak_memory_bytes"] for line in lines if isinstance(line.get("peak_memory_bytes"), int)]
    facts = RunFacts(
        run=run,
        device=device,
        # The metrics do not tell the number of ranks: tokens of a step over those of one device.
        world=round(run.tokens_per_step / (speed * step_seconds)) if speed and step_seconds else None,
        peak_bytes=max(peaks, default=None),
        step_seconds=step_seconds,
        beside_seconds=_beside(calm, disturbed),
        # A line's phases are those of the step before it.
        phase_seconds=_phases(_last([line for line in lines if _step(line) - 1 not in disturbed])),
        repeated_steps=sum(bool(line.get("rows_left_out")) for line in lines),
        expert_load=_median(usual, "expert_rank_load_max_over_mean"),
        layer_loads=_layer_loads(usual),
        power=_power(usual),
    )
    return facts, () if peaks else ("no memory is in the metrics",)


def _layer_loads(lines: Sequence[dict[str, Any]]) -> tuple[LayerLoads, ...]:
    """Loads of the ranks by layer, from the lines that have layers; none if ranks share no experts."""
    by_layer: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        for entry in line.get("layers") or ():
            by_layer.setdefault(entry["layer"], []).append(entry)
    loads = []
    for layer, entries in sorted(by_layer.items()):
        step, computed = _median(entries, "rank_load"), _median(entries, "balance_load_after")
        if step is not None:
            loads.append(LayerLoads(layer=layer, step=step, computed=step if computed is None else computed))
    return tuple(loads)


def _power(lines: Sequence[dict[str, Any]]) -> PowerFacts | None:
    """Power and clock of the first rank's device, or None if some of it is unknown."""
    names = ("power_watts", "power_limit_watts", "clock_mhz", "clock_limit_mhz")
    watts, limit_watts, clock_mhz, limit_mhz = (_median(lines, name) for name in names)
    if not watts or not limit_watts or not clock_mhz or not limit_mhz:
        return None
    return PowerFacts(watts=watts, limit_watts=limit_watts, clock_mhz=clock_mhz, limit_mhz=limit_mhz)


def recording_command(folder: Path) -> str:
    """Command that records two steps of a run, from its newest checkpoint if there is one. Raises as `facts_of`."""
    run, facts = load_run(str(folder.absolute())), facts_of(folder)[0]
    ranks = f" --processes {facts.world}" if facts.world is not None and facts.world > 1 else ""
    saved = (re.fullmatch(r"step-([0-9]{6,})", path.name) for path in (folder / "checkpoints").glob("step-*"))
    done = max((int(match[1]) for match in saved if match), default=0)
    start = done + WARM_UP
    steps = max(run.training.steps, start + RECORDED)
    more = f" training.steps={steps}" if steps > run.training.steps else ""
    target = f"{folder} --resume" if done else f"{folder / RUN_FILE}"
    return f"penstock train {target}{more} profile.start={start} profile.steps={RECORDED}{ranks}"


def cluster_for(facts: RunFacts, on: str | None) -> Cluster | None:
    """The cluster of a run, or None if it is unknown. The user's `--on` takes precedence over the facts.

    Raises a HardwareError if `on` is no hardware, or the ranks do not fill their nodes.
    """
    if on is not None:
        return parse_cluster(on)
    chip = None if facts.device is None else chip_named(facts.device)
    if chip is None or chip.pattern not in known_hardware() or facts.world is None:
        return None
    return cluster_of(facts.world, load_hardware(chip.pattern))


def compared(facts: RunFacts, cluster: Cluster) -> tuple[str, ...]:
    """A note if the plan is of another device than the run; otherwise none."""
    device, planned = facts.device, cluster.hardware.name
    if device is None or device == planned:
        return ()
    chip = chip_named(device)
    if chip is not None and chip is chip_named(planned):
        return ()
    return (
        f"two machines are compared: the run was on {device}, and the plan is of {cluster.devices} x {planned}; "
        "what a trace says is of the first, what the plan says is of the second",
    )


def json_lines(path: Path, layers: int = 0) -> list[dict[str, Any]]:
    """The complete lines of a JSON lines file; none of a missing file.

    So many lines as `layers`, evenly spaced, keep their `layers` entry, which is most of a long run's file. Raises a
    RunFolderError if the file cannot be read, or a line before the last is damaged.
    """
    try:
        with open_file(path) as file:
            rows = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    lines: list[dict[str, Any]] = []
    every = -(-len(rows) // layers) if layers else 0
    for number, row in enumerate(rows, start=1):
        try:
            line = msgspec.json.decode(row)
        except (ValueError, RecursionError) as error:
            if number == len(rows):
                break  # a killed run may leave an incomplete last line
            raise RunFolderError(f"{path}, line {number}, is no JSON: {error}") from error
        if isinstance(line, dict):
            if not every or (len(rows) - number) % every:
                line.pop("layers", None)
            _keep_well_formed(line)
            lines.append(line)
    return lines


_KINDS = {
    "tokens_seen": int,
    "device": str,
    "ranks": int,
    "steps_done": int,
    "parameters": int,
    "active_parameters": int,
}
"""Types of what a line of metrics.jsonl or starts.jsonl says."""


def _keep_well_formed(line: dict[str, Any]) -> None:
    """Leave out what is of another type than a run writes: a file of others may hold anything."""
    if "layers" in line:
        layers = line["layers"] if isinstance(line["layers"], list) else []
        entries = [layer for layer in layers if isinstance(layer, dict) and type(layer.get("layer")) is int]
        line["layers"] = [entry for entry in entries if isinstance(entry.get("max_over_mean"), int | float)]
    phases, losses = line.get("phase_seconds", {}), line.get("mtp_losses", [])
    if not isinstance(phases, dict) or not all(isinstance(phase, int | float) for phase in phases.values()):
        del line["phase_seconds"]
    if not isinstance(losses, list) or not all(isinstance(loss, int | float) for loss in losses):
        del line["mtp_losses"]
    for name, kind in _KINDS.items():
        if name in line and type(line[name]) is not kind:
            del line[name]


def _step(line: dict[str, Any]) -> int:
    number = line.get("step")
    return number if isinstance(number, int) else 0


def _last(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return lines[int(len(lines) * USUAL) :]


def _beside(calm: Sequence[dict[str, Any]], disturbed: range) -> float | None:
    """Longest time among the steps nearest to the recorded ones; None without a recording or such steps."""
    if not disturbed:
        return None
    nearest = sorted(calm, key=lambda line: abs(_step(line) - disturbed.start))[:NEAREST_STEPS]
    times = [line["step_seconds"] for line in nearest if isinstance(line.get("step_seconds"), int | float)]
    return float(max(times)) if times else None


def _phases(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    tables = [line["phase_seconds"] for line in lines if isinstance(line.get("phase_seconds"), dict)]
    medians = {name: _median(tables, name) for name in dict.fromkeys(name for table in tables for name in table)}
    return {name: value for name, value in medians.items() if value is not None}


def _median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    return float(median(values)) if values else None
