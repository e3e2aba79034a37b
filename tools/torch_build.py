"""Which build of PyTorch fits this machine. It is asked before there is an environment: any Python 3.11 runs this.

    python tools/torch_build.py            prints the build and why, in one line: cu130 NVIDIA H200, driver 580.65.06

Builds of the PyTorch in constraints.txt, on its own index, are cpu, cu126, cu130 and rocm7.2. Drivers are asked by
`nvidia-smi` and `rocminfo`; a machine without either, or on which they fail, gets the build for the CPU.
"""

import re
import subprocess
from dataclasses import dataclass

PATIENCE_SECONDS = 30
"""For which a driver may take to answer; one that loads at the first question needs some."""

CPU, CUDA_13, CUDA_12, ROCM = "cpu", "cu130", "cu126", "rocm7.2"

DRIVER_13, DRIVER_12 = 580, 525
"""The oldest drivers of CUDA 13 and 12."""

OLDEST_OF_13 = 7.5
"""Compute capability of Turing, the oldest that CUDA 13 knows."""

NEWEST_OF_12 = 9.0
"""That of Hopper, the newest that the build for CUDA 12.6 has kernels for."""

ROCM_CHIPS = frozenset(
    {"gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"}
)
"""That the build for ROCm has kernels for."""


@dataclass(frozen=True)
class Choice:
    """A build of PyTorch, as its index calls it, and why."""

    build: str
    why: str


def choose() -> Choice:
    """The build for the GPUs that are here."""
    return _for_nvidia() or _for_amd() or Choice(CPU, "no GPU found")


def _for_nvidia() -> Choice | None:
    """By driver and compute capability of the oldest GPU; None without one."""
    answer = _ask("nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader")
    gpus = re.findall(r"^(\d+)(\S*), *(\d+\.\d+), *(.+?) *$", answer, re.MULTILINE)
    if not gpus:
        return None
    major, minor, _, name = gpus[0]
    capabilities = [float(gpu[2]) for gpu in gpus]
    here = f"{name}, driver {major}{minor}"
    if int(major) >= DRIVER_13 and min(capabilities) >= OLDEST_OF_13:
        return Choice(CUDA_13, here)
    if int(major) >= DRIVER_12 and max(capabilities) <= NEWEST_OF_12:
        return Choice(CUDA_12, f"{here} (CUDA 13 needs driver {DRIVER_13} and a GPU of 2018 or newer)")
    return Choice(CPU, f"{here}: too old for this GPU, a driver {DRIVER_13} or newer makes it usable")


def _for_amd() -> Choice | None:
    """By the names of the GPUs' instruction sets; None without one."""
    answer = _ask("rocminfo")
    chips = re.findall(r"^ *Name: +(gfx[0-9a-f]+)", answer, re.MULTILINE)
    if not chips:
        return None
    known = next((chip for chip in chips if chip in ROCM_CHIPS), None)
    if known is None:
        return Choice(CPU, f"AMD {chips[0]}, for which PyTorch's build for ROCm has no kernels")
    return Choice(ROCM, f"AMD {known}")


def _ask(*command: str) -> str:
    """What a program prints; nothing where there is none, or it fails or hangs."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError):
        return ""
    return answer.stdout


if __name__ == "__main__":
    found = choose()
    print(found.build, found.why)
