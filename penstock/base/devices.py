"""What devices can do at most: dense bf16 matrix products per second, from the vendors' data sheets.

Model FLOPs utilization divides by these peaks. A device that is not here has no utilization; none is guessed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """One device by a part of the name that its driver reports.

    Attributes:
        pattern: part of the device's name.
        bf16: dense bfloat16 FLOP per second.
        source: where the figure comes from.
    """

    pattern: str
    bf16: float
    source: str


# The first match wins, so longer names stand before the shorter names that they contain.
PEAKS: tuple[Peak, ...] = (
    Peak("MI300X", 1307e12, "AMD Instinct MI300X data sheet"),
    Peak("MI325X", 1307e12, "AMD Instinct MI325X data sheet"),
    Peak("MI355X", 2517e12, "AMD Instinct MI355X data sheet"),
    Peak("GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet"),
    Peak("GB300", 2500e12, "NVIDIA GB300 NVL72 data sheet"),
    Peak("B200", 2250e12, "NVIDIA HGX B200 data sheet"),
    Peak("H200", 989e12, "NVIDIA H200 data sheet"),
    Peak("H100", 989e12, "NVIDIA H100 SXM data sheet"),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP per second of a device, or None if it is not in the table."""
    return next((peak.bf16 for peak in PEAKS if peak.pattern in device_name), None)
