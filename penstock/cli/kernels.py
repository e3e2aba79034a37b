"""`penstock kernels`: which implementation of each operator runs and why, and how fast each is on this GPU.

    penstock kernels list deepseek-v2-lite                  on the device that the run would take here
    penstock kernels list deepseek-v2-lite --device H200    on a GPU that is not here
    penstock kernels tune deepseek-v2-lite                  measure on the present GPU; later runs choose by it
    penstock kernels tune my.toml training.micro_batch=4 --output mine.json

`tune` adds to a file of the user's own, ~/.config/penstock/kernels/DEVICE.json, which comes before what the package
knows about the device. Another file takes effect with `kernels.measured=FILE`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from penstock.base.errors import DeviceError, KernelError
from penstock.cli.output import print_table
from penstock.cli.verbs import Json, Overrides, Target, group_app
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels.choose import Measurements, OperatorTimes, load, save, shown, user_file
from penstock.kernels.tuning import DeviceFacts, device_facts, named_device
from penstock.models.kernels import kernel_choices, shapes_of
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.process import choose_device
from penstock.tune.kernels import CallTimer, GpuCallTimer, environment, measure, merged, winner, workload_of

app = group_app("List which kernels will run and why; measure them on this GPU.")


@app.command("list")
def list_choices(
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="A preset, a TOML file, or a run folder.")
    ] = "debug",
    overrides: Overrides = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, or the name of a GPU: H200.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show which implementation of each operator will run, and why. Nothing runs."""
    run = load_run(target, overrides or ())
    if device in ("auto", "cpu", "cuda"):
        facts = device_facts(choose_device(run.device if device == "auto" else device), run.training.precision)
    else:  # the name of a GPU, which need not be here
        facts = named_device(device, run.training.precision)
    choices = kernel_choices(run, facts)
    if as_json:
        described = asdict(facts) | {"packages": sorted(facts.packages)}
        report = {"run": run.name, "device": described, "shapes": asdict(shapes_of(run))}
        print(json.dumps(report | {"choices": [asdict(choice) for choice in choices]}, indent=2))
        return
    print(f"{run.name} on {facts.name}: {facts.dtype}, {shapes_of(run).tokens} tokens in a micro-batch")
    rows = [(choice.op, choice.direction.replace("_", " "), shown(choice), choice.reason) for choice in choices]
    print_table(("operator", "direction", "runs", "why"), rows)


@app.command()
def tune(
    target: Target,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", help="File to write, instead of the user's own.")] = None,
) -> None:
    """Time every implementation of every operator on this GPU for a run's shapes, and write down the times."""
    run = load_run(target, overrides or ())
    if not torch.cuda.is_available():
        raise DeviceError(
            "kernels are measured on a GPU, and there is none",
            got=f"PyTorch {torch.__version__}",
            fix="tune on the machine that trains; `penstock kernels list` works anywhere",
        )
    facts = device_facts(choose_device("cuda"), run.training.precision)  # of the GPU that is here
    path = output or user_file(facts.name)
    if path is None:
        raise KernelError("this user has no home folder to write to", fix="--output FILE")
    tune_on(run, facts, choose_device("cuda"), GpuCallTimer(), path)


def tune_on(run: Run, facts: DeviceFacts, device: torch.device, clock: CallTimer, path: Path) -> None:
    """Measure every operator with the shapes of a run, print the times, and write them to or add them to a file."""
    old = load(path) if path.exists() else None
    console = Console(no_color=not read_environment().color, highlight=False)
    entries: list[OperatorTimes] = []
    with console.status("measuring") as status:
        for entry in measure(workload_of(run, device), facts, clock):
            entries.append(entry)
            status.update(f"measuring: {len(entries)} done, the last {entry.op} {entry.direction}")
    print_entries(entries)
    new = Measurements(device=facts.name, environment=environment(), entries=tuple(entries))
    kept = merged(old, new)  # Entries of the same shapes are replaced, others stay.
    save(path, kept)
    print(f"{len(entries)} entries of {len(kept.entries)} in {path} are new")
    if path != user_file(facts.name):
        print(f"it takes effect with kernels.measured={path}")


def print_entries(entries: Sequence[OperatorTimes]) -> None:
    backends = list(dict.fromkeys(name for entry in entries for name in entry.microseconds))
    rows = []
    for entry in entries:
        times = [f"{entry.microseconds[name]:.1f}" if name in entry.microseconds else "-" for name in backends]
        best = winner(entry) if entry.microseconds else "-"
        rows.append((entry.op, entry.direction.replace("_", " "), f"{entry.skew:g}", *times, best))
    print_table(("operator", "direction", "skew", *(f"{name} us" for name in backends), "fastest"), rows)
