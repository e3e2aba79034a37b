"""Facts about a device that the choice of kernels depends on; the device may be present or only known by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from penstock.base.devices import chip_named, chips
from penstock.base.errors import DeviceError, did_you_mean
from penstock.base.origin import version_of
from penstock.kernels.tuning import target_of

Dtype = Literal["bf16", "fp32"]  # compute dtype of a model, as in `training.precision`

TRITON = "triton"  # Triton's package, which may be missing
PACKAGES: tuple[str, ...] = (TRITON,)  # that some backend needs besides PyTorch
FLASH_4 = "flash-attn-4"  # optional package of attention kernels


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device and the packages installed for it."""

    kind: Literal["cuda", "cpu"]  # `cuda` for AMD's too
    name: str  # as the driver reports it; `CPU` for every CPU
    target: str  # the chip as launch tables name it
    packages: frozenset[str]  # those of `PACKAGES` that are installed, and `FLASH_4` if it is
    dtype: Dtype

    @property
    def has_triton(self) -> bool:
        return TRITON in self.packages


def installed(packages: Iterable[str] = PACKAGES) -> frozenset[str]:
    """Those of the packages that can be imported; imports none."""
    return frozenset(package for package in packages if find_spec(package) is not None)


def extras() -> frozenset[str]:
    """`FLASH_4` if it is installed; imports nothing."""
    return frozenset() if version_of(FLASH_4) is None else frozenset({FLASH_4})


def device_facts(device: torch.device, dtype: Dtype) -> DeviceFacts:
    is_gpu = device.type == "cuda"
    return DeviceFacts(
        kind="cuda" if is_gpu else "cpu",
        name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
        target=target_of(device),
        packages=installed() | extras(),
        dtype=dtype,
    )


def named_device(name: str, dtype: Dtype) -> DeviceFacts:
    """The facts of a GPU by name, with `PACKAGES` installed and no others; raises DeviceError for unknown names.

    The name is the driver's, or the part of it by which people know the chip: `H200`.
    """
    chip = chip_named(name)
    if chip is None:
        known = [chip.pattern for chip in chips()]
        raise DeviceError(
            "no device is known by this name",
            got=repr(name),
            allowed=f"auto, cpu, cuda, or {', '.join(known)}",
            fix=did_you_mean(name, ("auto", "cpu", "cuda", *known)),
        )
    return DeviceFacts(
        kind="cuda",
        name=chip.name if name.lower() == chip.pattern.lower() else name,
        target=chip.target,
        packages=frozenset(PACKAGES),
        dtype=dtype,
    )
