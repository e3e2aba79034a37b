"""Known chips: their names in drivers and compilers, and the peaks of their data sheets.

Kernels are chosen by the compiler's name, also for a chip that is not here. Model FLOPs utilization divides by the
peak; a device that is not here has none. Measured rates and all else that a plan reads: penstock/plan/hardware_data.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU. Peaks are of dense products in FLOP per second, None if unknown or absent."""

    pattern: str  # a word of the driver's name
    target: str  # the name that compilers and launch tables use
    name: str
    bf16: float
    fp8: float | None
    fp32: float | None
    memory: float  # bytes per second
    source: str


CHIPS: tuple[Chip, ...] = (
    Chip(
        "MI300X", "gfx942", "AMD Instinct MI300X", 1307e12, 2615e12, 163.4e12, 5.3e12, "AMD Instinct MI300X data sheet"
    ),
    Chip("MI325X", "gfx942", "AMD Instinct MI325X", 1307e12, 2615e12, 163.4e12, 6e12, "AMD Instinct MI325X data sheet"),
    Chip("MI350X", "gfx950", "AMD Instinct MI350X", 2307e12, 4614e12, 144.2e12, 8e12, "AMD Instinct MI350X data sheet"),
    Chip("MI355X", "gfx950", "AMD Instinct MI355X", 2517e12, 5033e12, 157.3e12, 8e12, "AMD Instinct MI355X data sheet"),
    Chip("GB200", "sm_100", "NVIDIA GB200", 2500e12, 5000e12, 80e12, 8e12, "NVIDIA GB200 NVL72 data sheet"),
    Chip("GB300", "sm_103", "NVIDIA GB300", 2500e12, 5000e12, 80e12, 8e12, "NVIDIA GB300 NVL72 data sheet"),
    Chip("B300", "sm_103", "NVIDIA B300 SXM6 AC", 2250e12, 4500e12, 75e12, 8e12, "NVIDIA HGX B300 data sheet"),
    Chip("B200", "sm_100", "NVIDIA B200", 2250e12, 4500e12, 75e12, 8e12, "NVIDIA HGX B200 data sheet"),
    Chip("H200", "sm_90", "NVIDIA H200", 989e12, 1979e12, 67e12, 4.8e12, "NVIDIA H200 data sheet"),
    Chip("H100", "sm_90", "NVIDIA H100 80GB HBM3", 989e12, 1979e12, 67e12, 3.35e12, "NVIDIA H100 SXM data sheet"),
    Chip("H800", "sm_90", "NVIDIA H800", 989e12, 1979e12, 67e12, 3.35e12, "NVIDIA H800 SXM data sheet"),
    Chip("A100", "sm_80", "NVIDIA A100-SXM4-80GB", 312e12, None, 19.5e12, 2.039e12, "NVIDIA A100 data sheet"),
    Chip("H20", "sm_90", "NVIDIA H20", 148e12, 296e12, 44e12, 4e12, "NVIDIA H20 data sheet"),
)


def chip_named(name: str) -> Chip | None:
    """The chip that a driver's name, or a part of it by which people know the chip, stands for; None if none does.

    Only whole words count, since GH200 is no H200; the name of a virtual GPU has a letter or two more: H100XM-80C.
    """
    end = r"(?:[A-Z]{1,2}(?=-[0-9]))?(?![A-Z0-9])"
    return next((chip for chip in CHIPS if re.search(rf"(?<![A-Z0-9]){chip.pattern}{end}", name.upper())), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP per second of a device, or None if it is not known."""
    chip = chip_named(device_name)
    return None if chip is None else chip.bf16
