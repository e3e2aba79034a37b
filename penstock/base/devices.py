"""Known chips: their names in drivers and compilers, and the peaks of their data sheets.

Kernels are chosen by the compiler's name, also for a chip without a file. Model FLOPs utilization divides by the peak;
a device without a file has none. `penstock.plan.hardware_file` reads and checks the whole of each file.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGED = Path(__file__).with_name("hardware_data")  # a file for each chip that comes with the package


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


@cache
def chips() -> tuple[Chip, ...]:
    files = (tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(PACKAGED.glob("*.toml")))
    return tuple(
        Chip(
            pattern=file["name"],
            target=file["kernels"],
            name=file["driver"],
            bf16=file["peaks"]["bf16"],
            fp8=file["peaks"].get("fp8"),
            fp32=file["peaks"].get("fp32"),
            memory=file["peaks"]["memory_bytes_per_second"],
            source=file["peaks"]["source"],
        )
        for file in files
    )


def chip_named(name: str) -> Chip | None:
    """The chip that a driver's name, or a part of it by which people know the chip, stands for; None if none does.

    Only whole words count, since GH200 is no H200; the name of a virtual GPU has a letter or two more: H100XM-80C.
    """
    end = r"(?:[A-Z]{1,2}(?=-[0-9]))?(?![A-Z0-9])"
    return next((chip for chip in chips() if re.search(rf"(?<![A-Z0-9]){chip.pattern}{end}", name.upper())), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP per second of a device, or None if it is not known."""
    chip = chip_named(device_name)
    return None if chip is None else chip.bf16
