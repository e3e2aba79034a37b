"""The 8-bit formats of floating-point numbers, and which of them a chip computes with.

OCP's formats (OFP8) are those of NVIDIA and of AMD from gfx950 on. gfx942 computes with the older FNUZ forms: the same
bits, another exponent bias, no infinity, no negative zero; E4M3 ends at 240 there instead of 448.
"""

from dataclasses import dataclass
from typing import Literal

import torch

FormatName = Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: bits of exponent and mantissa.
        dtype: torch's.
        largest: largest finite number.
    """

    name: FormatName
    dtype: torch.dtype
    largest: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
E4M3_FNUZ = Format("e4m3", torch.float8_e4m3fnuz, 240.0)
E5M2_FNUZ = Format("e5m2", torch.float8_e5m2fnuz, 57344.0)

FNUZ_TARGETS = frozenset({"gfx942"})
"""Chips whose matrix units know only the FNUZ forms."""


def format_on(name: FormatName, target: str) -> Format:
    """The form in which a chip computes with a format.

    Args:
        name: e4m3 or e5m2.
        target: chip as compilers name it (`penstock.base.devices.Chip.target`); `cpu` and unknown ones take OCP's.
    """
    if target in FNUZ_TARGETS:
        return E4M3_FNUZ if name == "e4m3" else E5M2_FNUZ
    return E4M3 if name == "e4m3" else E5M2
