"""Clock and power of a GPU while it works, through NVML (package nvidia-ml-py) or AMD SMI (amdsmi), if installed.

A GPU that would draw more than its board may have lowers its clock, so products take longer than their peak says. A
thread asks for both ten times a second, because at the end of a step the device is idle and its clock high again; a
step has the median of its samples. Without the package, or where the driver tells nothing, all figures are None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from threading import Event, Thread
from typing import Any

import torch

EVERY_SECONDS = 0.1

MICRO = 1e6
"""AMD SMI has limits in microwatts, in some versions in watts: no board has a limit of `MICRO` / 10 watts."""

_SM_CLOCK = 1  # NVML_CLOCK_SM


@dataclass(frozen=True)
class PowerLimits:
    """Limits of the board; None where the driver does not tell."""

    watts: float | None = None
    clock_mhz: float | None = None


@dataclass(frozen=True)
class PowerReading:
    """Power and clock of one step, and the limits of the board; None where unknown."""

    watts: float | None = None
    clock_mhz: float | None = None
    limits: PowerLimits = PowerLimits()


NO_POWER = PowerReading()


class PowerMeter:
    """Samples one device from its creation until `close`."""

    def __init__(self, device: torch.device) -> None:
        name = "amdsmi" if torch.version.hip else "pynvml"
        self._limits, self._samples = PowerLimits(), list[tuple[float, float]]()  # watts, MHz
        self._ended, self._thread = Event(), Thread(target=self._sample, name="penstock-power", daemon=True)
        if device.type != "cuda" or find_spec(name) is None:
            return
        try:
            library = import_module(name)
        except (ImportError, OSError, KeyError):  # amdsmi looks for its library when it is imported
            return
        self._device = device
        library_error: type[Exception] = library.AmdSmiException if torch.version.hip else library.NVMLError
        self._errors = (RuntimeError, OSError, ImportError, library_error)
        limits: Callable[[Any, torch.device], PowerLimits] = _amd_limits if torch.version.hip else _nvidia_limits
        try:
            self._limits = limits(library, device)
            self._samples.append(self._ask())
        except self._errors:  # the driver does not tell, for instance of a part of a device
            return
        self._thread.start()

    def read(self) -> PowerReading:
        """The median of the samples since the last call; None without any."""
        taken = self._samples[:]
        del self._samples[: len(taken)]  # the thread only appends
        if not taken:
            return PowerReading(limits=self._limits)
        watts, clock_mhz = (median(values) for values in zip(*taken, strict=True))
        return PowerReading(watts, clock_mhz, self._limits)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            try:
                self._samples.append(self._ask())
            except self._errors:
                return

    def _ask(self) -> tuple[float, float]:
        power = float(torch.cuda.power_draw(self._device))
        # PyTorch passes the number of the vendor's library on: milliwatts of NVML, watts of AMD SMI.
        return power if torch.version.hip else power / 1e3, float(torch.cuda.clock_rate(self._device))


def _nvidia_limits(library: Any, device: torch.device) -> PowerLimits:
    library.nvmlInit()
    handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return PowerLimits(
        watts=library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        clock_mhz=float(library.nvmlDeviceGetMaxClockInfo(handle, _SM_CLOCK)),
    )


def _amd_limits(library: Any, _device: torch.device) -> PowerLimits:
    library.amdsmi_init()
    handle = library.amdsmi_get_processor_handles()[0]  # the GPUs of a node have the same limits
    cap = library.amdsmi_get_power_cap_info(handle)["power_cap"]
    clock = library.amdsmi_get_clock_info(handle, library.AmdSmiClkType.GFX)["max_clk"]
    watts = float(cap) if isinstance(cap, int | float) else None  # "N/A" where it is unknown
    return PowerLimits(
        watts=watts if watts is None or watts < MICRO / 10 else watts / MICRO,
        clock_mhz=float(clock) if isinstance(clock, int | float) else None,
    )
