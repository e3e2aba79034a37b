"""`penstock calibrate`: measure this machine, and write the file by which `penstock plan` knows it.

    penstock calibrate --output mine.toml                     one device
    penstock calibrate --output mine.toml --processes 8       and the links between eight
    torchrun ... -m penstock calibrate --output mine.toml     and the network, from ranks on several machines
    penstock calibrate > mine.toml                            without --output the file is printed

A chip that the package knows (`docs/hardware.md`) keeps its data sheet's peaks, and of collectives those that were not
measured. Nothing else should run on the machine meanwhile. A GPU takes about a minute, a CPU some seconds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer

from penstock.base.devices import chip_named
from penstock.base.errors import DeviceError
from penstock.cli.main import main
from penstock.cli.output import check_output, print_next, print_table
from penstock.cli.verbs import Force
from penstock.kernels.tuning import device_facts
from penstock.parallel.launch.environment import Environment, gpu_vendor, read_environment
from penstock.parallel.launch.local import MOST_PROCESSES, LocalLaunch, facts_of_ranks, run_processes
from penstock.parallel.launch.process import device_name
from penstock.parallel.launch.rendezvous import meet_to_measure
from penstock.plan.calibrate import (
    CPU_BUFFERS,
    CPU_SIZES,
    GPU_BUFFERS,
    GPU_SIZES,
    TransferPoints,
    device_memory,
    measure_device,
    measure_transfers,
    measured_hardware,
    rounded,
)
from penstock.plan.hardware import Hardware
from penstock.plan.hardware_file import hardware_text, known_hardware, load_hardware, write_hardware

TIMEOUT_MINUTES = 10.0  # of ranks that wait for each other


def calibrate(
    output: Annotated[Path | None, typer.Option("--output", help="File to write, instead of printing it.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, max=MOST_PROCESSES, help="Ranks to start here.")] = 1,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to measure.")] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="Name in the file, instead of the chip's.")] = None,
    force: Force = False,
) -> int:
    """Measure this machine: products, attention, memory, launches, and collectives between processes."""
    environment = read_environment()
    check_output(output, "--output", force=force)
    if processes > 1:
        if environment.started_by:
            raise DeviceError(f"{environment.started_by} has started the processes already", fix="no --processes")
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if not on_cpu and processes > torch.cuda.device_count():
            raise DeviceError("--processes is more than GPUs", got=processes, allowed=torch.cuda.device_count())
        command = ["calibrate", "--device", device, *(["--name", name] if name else [])]
        command += ["--output", str(output)] if output else []  # rank 0 writes it
        command += ["--force"] if force else []
        launch = LocalLaunch(processes=processes, facts=facts_of_ranks(environment, processes, on_cpu=on_cpu))
        return run_processes(main, command, launch)
    hardware = _measure(environment, device, name)
    comment = [f"{hardware.name}, measured by `penstock calibrate`."]
    if environment.rank > 0:  # all ranks have measured, the first tells
        return 0
    if output is None:
        print(hardware_text(hardware, comment), end="")
    else:
        write_hardware(output, hardware, comment)
        print_table(("operator", "sizes", "reached"), _rows(hardware))
        print(f"written to {output}; a cluster of 8 such devices is called 8x{output}")
        print_next("plan", "debug", "--on", f"1x{output}")
    return 0


def _measure(environment: Environment, device_kind: str, name: str | None) -> Hardware:
    """Measure on all ranks at the same time, because a step loads all devices too."""
    with meet_to_measure(environment, device_kind, TIMEOUT_MINUTES) as device:
        on_gpu = device.type == "cuda"
        facts = device_facts(device, "bf16" if on_gpu else "fp32")  # in which such a device trains
        findings = measure_device(device, facts, GPU_SIZES if on_gpu else CPU_SIZES)
        transfers: TransferPoints = {}
        in_node: TransferPoints = {}
        if environment.world_size > 1:
            buffers, local = GPU_BUFFERS if on_gpu else CPU_BUFFERS, environment.local_world_size
            transfers = measure_transfers(device, local, buffers)
            if 1 < local < environment.world_size:
                group, _ = dist.new_subgroups(local)
                in_node = measure_transfers(device, local, buffers, group)
            if on_gpu:  # the collectives' library has buffers of its own
                findings = replace(findings, context_bytes=device_memory(device)[1])
    # A known chip keeps the peaks of its data sheet.
    chip = chip_named(facts.name) if on_gpu else None
    known = chip is not None and chip.pattern in known_hardware()
    shown = device_name(device)
    described = f"{environment.world_size} x {shown}, torch {torch.__version__}"
    return rounded(
        measured_hardware(
            name or (chip.pattern if chip else shown),
            gpu_vendor() if on_gpu else "cpu",
            findings,
            transfers,
            in_node=in_node,
            known=load_hardware(chip.pattern) if chip is not None and known else None,
            where=described,
            kernels=facts.target if on_gpu else "",
        )
    )


def _rows(hardware: Hardware) -> list[tuple[str, str, str]]:
    rows = []
    for measured in hardware.measured:
        for point in measured.points:
            values = dict(iter(point))
            rate = values.get("flops_per_second")  # None: an operator that is timed, not counted
            reached = f"{rate / 1e12:.3g} TFLOP/s" if rate else f"{values['seconds'] * 1e6:.1f} us"
            dtype = f" {values['dtype']}" if rate else ""
            rows.append((f"{measured.operator}{dtype}", " x ".join(map(str, point.sizes)), reached))
    memory = hardware.peaks.memory_bytes_per_second * hardware.efficiency.memory  # bytes per second that a copy reaches
    rows.append(("copy", "", f"{memory / 1e9:.4g} GB/s"))
    rows.append(("smallest kernel", "", f"{hardware.host.kernel_seconds * 1e6:.3g} us"))
    rows.append(("host, an operator", "", f"{hardware.host.launch_seconds * 1e6:.3g} us"))
    return rows
