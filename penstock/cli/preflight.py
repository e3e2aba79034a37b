"""`penstock preflight`: look at this machine before a run does, and say what is wrong with it.

    penstock preflight                               devices, links, host, disk, versions; some seconds
    penstock preflight deepseek-v2-lite              and whether the disk has room for the checkpoints of this run
    penstock preflight --hardware mine.toml          measured against a file of `penstock calibrate`
    penstock preflight --processes 1                 one device only, nothing between devices
    penstock preflight --json                        for programs
    torchrun --nnodes=2 --nproc-per-node=8 -m penstock preflight    and the network; each machine tells of itself

Exit codes: 0 nothing failed, warnings aside; 1 something did; 2 the question itself is wrong. Without GPUs everything
that a CPU has is looked at. What is looked at, and the thresholds, stand in penstock/tune/preflight.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.base.devices import chip_named
from penstock.base.errors import FAILED, DeviceError
from penstock.cli.main import main
from penstock.cli.output import print_next
from penstock.cli.verbs import Json, Overrides
from penstock.config.load import load_run
from penstock.config.run import Record, Run
from penstock.config.size import size_of
from penstock.parallel.launch.environment import Environment, gpu_vendor, read_environment, shell_variables
from penstock.parallel.launch.local import MOST_PROCESSES, LocalLaunch, facts_of_ranks, run_processes
from penstock.parallel.launch.rendezvous import meet_to_measure
from penstock.plan.hardware import Hardware
from penstock.plan.hardware_file import known_hardware, load_hardware, read_hardware
from penstock.train.run_folder import temporary_folder
from penstock.tune.preflight.gpus import (
    MEASURED,
    Gpu,
    NodeMeasurements,
    judge_gpus,
    judge_measured,
    measure,
    read_gpus,
)
from penstock.tune.preflight.host import (
    HARMFUL,
    PreflightCheck,
    Status,
    check_environment,
    check_versions,
    judge_disk,
    judge_host,
    read_disk,
    read_host,
)

CPU_RANKS = 2  # ranks without a GPU: enough to see that processes find each other
TIMEOUT_MINUTES = 2.0  # time that ranks wait for each other; it detects hanging links
STATE_BYTES = 12  # bytes of a parameter in a checkpoint: its float32 master and two moments
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
BROKEN = PreflightCheck(
    area="transfers",
    name="ranks together",
    status="failed",
    got="they did not come to an end; what they said stands above",
    expected=f"collectives of all ranks within {TIMEOUT_MINUTES:g} minutes",
    fix="NCCL_DEBUG=INFO penstock preflight; iommu=pt and ACS off; shared memory and peer access above",
)


def preflight(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="The run that is meant, if there is one.")
    ] = None,
    overrides: Overrides = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", metavar="F.toml", help="What to compare with, instead of the chip's.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=1, max=MOST_PROCESSES, help="Ranks to start; without it, one for each GPU, or 2."
        ),
    ] = None,
    as_json: Json = False,
    result: Annotated[Path | None, typer.Option("--result", hidden=True)] = None,
) -> int:
    """Check this machine: devices, links, host, disk, versions. Report faults and their fixes."""
    environment = read_environment()
    if result is not None:  # a rank that `_measured` has started
        result.write_bytes(MEASURED.dump_json(_be_a_rank(environment, processes or 0)))
        return 0
    run = load_run(target, overrides or ()) if target is not None else None
    # Of the ranks of a machine one looks, and before the others use its GPUs: they would be taken for strangers.
    looks = environment.local_rank == 0
    gpus = read_gpus() if looks else []
    known = _known(gpus, hardware)
    checks = _look(run, gpus, known) if looks else []
    measured = _measured_together(environment, processes, len(gpus))
    checks += judge_measured(measured, known) if measured is not None else [BROKEN]
    has_failed = any(check.status == "failed" for check in checks)
    if looks:
        print_checks(checks, environment, as_json=as_json)
        if not as_json and not has_failed:
            print_next("train", target or "debug", *(overrides or ()))
    return FAILED if has_failed else 0


def _measured_together(environment: Environment, processes: int | None, gpus: int) -> NodeMeasurements | None:
    """What ranks have measured: this process is one of them, or starts them."""
    if not environment.started_by:
        return _measured(environment, processes or gpus or CPU_RANKS, gpus)
    if processes is not None:
        raise DeviceError(f"{environment.started_by} has started the processes already", fix="no --processes")
    return _be_a_rank(environment, 0)


def _known(gpus: Sequence[Gpu], file: Path | None) -> Hardware | None:
    if file is not None:
        return read_hardware(file)
    chip = chip_named(gpus[0].name) if gpus else None
    return load_hardware(chip.pattern) if chip is not None and chip.pattern in known_hardware() else None


def _look(run: Run | None, gpus: Sequence[Gpu], known: Hardware | None) -> list[PreflightCheck]:
    record, checkpoint_bytes, kept = Record(), 0, 1
    if run is not None:
        size = size_of(run.model, run.training.sequence_length)
        record, kept = run.record, max(1, run.checkpoint.keep)  # 0 keeps all, so one at least
        checkpoint_bytes = STATE_BYTES * (size.parameters + size.mtp_parameters)
    return [
        *check_versions(),
        *check_environment(shell_variables(variable.name for variable in HARMFUL), has_gpu=bool(gpus)),
        *judge_host(read_host(len(gpus), sum(gpu.total_bytes for gpu in gpus))),
        *judge_disk(read_disk(Path(record.folder)), checkpoint_bytes, kept),
        *judge_gpus(gpus, gpu_vendor(), known),
    ]


def _measured(environment: Environment, ranks: int, gpus: int) -> NodeMeasurements | None:
    """Measurements of several ranks of this machine; None if they did not finish."""
    if gpus and ranks > gpus:
        raise DeviceError("--processes is more than GPUs", got=ranks, allowed=gpus)
    if ranks == 1:  # no process is started
        return _be_a_rank(environment, 0)
    with temporary_folder("preflight") as folder:
        result = folder / "measured.json"
        launch = LocalLaunch(processes=ranks, facts=facts_of_ranks(environment, ranks, on_cpu=not gpus))
        # Each rank runs this verb again, with the file that takes the measurements.
        code = run_processes(main, ["preflight", "--result", str(result), "--processes", str(ranks)], launch)
        return MEASURED.validate_json(result.read_bytes()) if code == 0 else None


def _be_a_rank(environment: Environment, expected: int) -> NodeMeasurements:
    assert expected in (0, environment.world_size), "the launcher starts as many ranks as it was asked for"
    with meet_to_measure(environment, "auto", TIMEOUT_MINUTES) as device:
        return measure(device, environment.local_world_size)


def print_checks(checks: Sequence[PreflightCheck], environment: Environment, *, as_json: bool) -> None:
    """Print all checks in one piece, so that lines of several machines do not mix."""
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    if as_json:
        head = {"host": platform.node(), "passed": not counts["failed"], "counts": counts}
        print(json.dumps({**head, "checks": [asdict(check) for check in checks]}, indent=2))
        return
    text = Text()
    for check in checks:
        text.append(f"{check.status:<8} ", STYLES[check.status])
        text.append(f"{check.area:<12} {check.name:<16} {check.got}\n")
        indent = " " * 39  # below the column of results
        if check.expected:
            text.append(f"{indent}expected: {check.expected}\n")
        if check.fix:
            text.append(f"{indent}fix: {check.fix}\n")
    text.append(", ".join(f"{count} {status}" for status, count in counts.items()) + f" on {platform.node()}")
    Console(no_color=not environment.color, highlight=False, soft_wrap=True).print(text)
