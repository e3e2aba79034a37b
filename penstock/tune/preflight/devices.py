"""GPUs: how many, of one kind, whole, free, and whether each reaches the others without the host.

Everything is asked of PyTorch, which answers for NVIDIA and AMD alike; names and sizes are compared with what the
package knows of a chip (docs/hardware.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.base.devices import chip_named
from penstock.parallel.launch.host import Vendor
from penstock.plan.hardware import Hardware
from penstock.tune.preflight.check import Check, fine

OTHERS_BYTES = 3 << 30
"""Of a GPU that has nothing to do: driver, firmware, and our own context. What is beyond belongs to somebody."""

WHOLE = 0.95
"""Share of a chip's memory; what has less is a part of one (MIG, CPX)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as the driver reports it.
        total_bytes: of its memory.
        free_bytes: of it now.
        reaches: numbers of the GPUs whose memory it can read and write by itself.
    """

    name: str
    total_bytes: int
    free_bytes: int
    reaches: frozenset[int]


def read_gpus() -> list[Gpu]:
    """Every GPU that PyTorch finds."""
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [_read_gpu(number, numbers) for number in numbers]


def _read_gpu(number: int, numbers: Sequence[int]) -> Gpu:
    free, total = torch.cuda.mem_get_info(number)
    reaches = {other for other in numbers if other != number and torch.cuda.can_device_access_peer(number, other)}
    return Gpu(name=torch.cuda.get_device_name(number), total_bytes=total, free_bytes=free, reaches=frozenset(reaches))


def judge_gpus(gpus: Sequence[Gpu], vendor: Vendor, known: Hardware | None) -> list[Check]:
    """Everything about the GPUs.

    Args:
        gpus: that PyTorch finds.
        vendor: whose the machine has, by their driver.
        known: the chip as the package, or a file, knows it; None if nothing does.
    """
    if not gpus:
        return [_none(vendor)]
    return [*_kind(gpus), *_known(gpus, known), *_whole(gpus, known), *_free(gpus), *_reach(gpus)]


def _none(vendor: Vendor) -> Check:
    if vendor == "cpu":
        return fine("devices", "GPUs", "none; runs use the CPU")
    return Check(
        area="devices",
        name="GPUs",
        status="failed",
        got=f"none that PyTorch can use, though there is a driver of {vendor}",
        expected="the GPUs of this machine",
        fix="see the versions above, CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, and the container's devices",
    )


def _kind(gpus: Sequence[Gpu]) -> Iterator[Check]:
    kinds = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    got = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if len(kinds) == 1:
        yield fine("devices", "GPUs", got)
        return
    yield Check(
        area="devices",
        name="GPUs",
        status="warning",
        got=got,
        expected="one kind: all wait for the slowest",
        fix="leave the others out: CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES",
    )


def _known(gpus: Sequence[Gpu], known: Hardware | None) -> Iterator[Check]:
    if known is None and chip_named(gpus[0].name) is None:
        yield Check(
            area="devices",
            name="chip",
            status="warning",
            got=f"nothing is known of {gpus[0].name}",
            expected="its peak, for model FLOPs utilization and for plans",
            fix="penstock calibrate --output mine.toml, and penstock preflight --hardware mine.toml",
        )


def _whole(gpus: Sequence[Gpu], known: Hardware | None) -> Iterator[Check]:
    if known is None:
        return
    wanted = known.memory.capacity_bytes
    for number, gpu in enumerate(gpus):
        if gpu.total_bytes < WHOLE * wanted:
            yield Check(
                area="devices",
                name=f"GPU {number}",
                status="warning",
                got=f"{gpu.total_bytes / 1e9:.0f} GB of memory",
                expected=f"{wanted / 1e9:.0f} GB: this is a part of an {known.name}",
                fix="switch partitions off (nvidia-smi -mig 0, amd-smi set --compute-partition SPX), if you may",
            )


def _free(gpus: Sequence[Gpu]) -> Iterator[Check]:
    busy = 0
    for number, gpu in enumerate(gpus):
        used = gpu.total_bytes - gpu.free_bytes
        if used <= OTHERS_BYTES:
            continue
        busy += 1
        yield Check(
            area="devices",
            name=f"GPU {number}",
            status="failed" if used > gpu.total_bytes / 2 else "warning",
            got=f"{used / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB are taken",
            expected=f"<= {OTHERS_BYTES / 1e9:.1f} GB: no other process",
            fix="end it; nvidia-smi or amd-smi process names it",
        )
    if not busy:
        yield fine("devices", "memory", f"{min(gpu.free_bytes for gpu in gpus) / 1e9:.1f} GB free on each")


def _reach(gpus: Sequence[Gpu]) -> Iterator[Check]:
    pairs = len(gpus) * (len(gpus) - 1)
    apart = [
        f"{number} to {other}"
        for number, gpu in enumerate(gpus)
        for other in range(len(gpus))
        if other != number and other not in gpu.reaches
    ]
    if pairs and not apart:
        yield fine("devices", "peer access", f"all {pairs} ways between {len(gpus)} GPUs")
    elif apart:
        more = f" and {len(apart) - 4} more" if len(apart) > 4 else ""
        yield Check(
            area="devices",
            name="peer access",
            status="warning",
            got=f"none from GPU {', '.join(apart[:4])}{more}",
            expected="every GPU reads and writes the others' memory; else all goes through the host's",
            fix="nvidia-smi topo -m or amd-smi topology; IOMMU off or in passthrough (iommu=pt), ACS off",
        )
