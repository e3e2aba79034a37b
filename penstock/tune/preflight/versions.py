"""Python, packages, PyTorch's build and the driver: whether they go together.

What Penstock needs of packages is what its own package says when it is installed, so no version is said twice. A driver
must be as new as the CUDA that PyTorch was built with; ROCm's kernel driver is told, not judged: AMD supports several
releases back and forth, and PyTorch sees no GPU where that does not hold.
"""

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import torch

from penstock.parallel.launch.host import ROOT, Vendor, gpu_vendor
from penstock.tune.preflight.check import Check, fine

OLDEST_PYTHON = (3, 11)
OLDEST_TRITON = "3.6"

DRIVERS = {13: 580, 12: 525}
"""Oldest NVIDIA driver for a CUDA of this major version (NVIDIA, CUDA compatibility, minor version compatibility)."""

_BOUND = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\d.]+)$")


@dataclass(frozen=True, kw_only=True)
class Builds:
    """PyTorch and what is below it.

    Attributes:
        torch: its version.
        cuda: of CUDA that it was built with, or None.
        hip: of ROCm that it was built with, or None.
        finds_gpus: it can use some.
        collectives: version of NCCL or RCCL, or empty.
        triton: its version, or empty.
        vendor: whose GPUs the machine has.
        driver: version of their driver, or empty.
    """

    torch: str
    cuda: str | None
    hip: str | None
    finds_gpus: bool
    collectives: str
    triton: str
    vendor: Vendor
    driver: str


def check_versions() -> list[Check]:
    """Everything that has a version."""
    return [_python(), *_packages(_requirements()), *judge_builds(read_builds())]


def read_builds(root: Path = ROOT) -> Builds:
    """What is installed here.

    Args:
        root: of the system's files.
    """
    on_gpu = torch.cuda.is_available()
    vendor = gpu_vendor(root)
    return Builds(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        finds_gpus=on_gpu,
        collectives=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        triton=_version("triton") or _version("pytorch-triton-rocm") if find_spec("triton") else "",
        vendor=vendor,
        driver=_driver(vendor, root),
    )


def _driver(vendor: Vendor, root: Path) -> str:
    """The kernel driver's version."""
    if vendor == "nvidia":
        found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _read(root / "proc/driver/nvidia/version"))
        return found[1] if found else ""
    return _read(root / "sys/module/amdgpu/version") if vendor == "amd" else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _python() -> Check:
    got, oldest = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info >= OLDEST_PYTHON:
        return fine("versions", "Python", got)
    return Check(
        area="versions", name="Python", status="failed", got=got, expected=f">= {oldest}", fix="make a new environment"
    )


def _requirements() -> list[str]:
    """What the installed package needs; nothing where it runs from its source."""
    try:
        return [line for line in requires("penstock") or [] if ";" not in line]
    except PackageNotFoundError:
        return []


def _packages(requirements: Sequence[str]) -> Iterator[Check]:
    """Packages that are missing or too old, or that all are there."""
    wrong = 0
    for requirement in requirements:
        bound = _BOUND.match(requirement.replace(" ", ""))
        if bound is None:
            continue
        got = _version(bound["name"])
        if not got or is_older(got, bound["version"]):
            wrong += 1
            yield Check(
                area="versions",
                name=bound["name"],
                status="failed",
                got=got or "not installed",
                expected=f">= {bound['version']}",
                fix=f"pip install '{requirement}'",
            )
    if requirements and not wrong:
        yield fine("versions", "packages", f"all {len(requirements)} that are needed")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_older(got: str, bound: str) -> bool:
    """Whether a version is below a bound; what is behind the numbers (`+cu130`, `rc1`) does not count."""

    def numbers(text: str) -> list[int]:
        found = re.match(r"\d+(\.\d+)*", text)
        return [int(part) for part in found[0].split(".")] if found else []

    left, right = numbers(got), numbers(bound)
    width = max(len(left), len(right))
    return left + [0] * (width - len(left)) < right + [0] * (width - len(right))


def judge_builds(builds: Builds) -> list[Check]:
    """PyTorch and what is below it."""
    return [_torch(builds), *_cuda_driver(builds), *_triton(builds), *_collectives(builds)]


def _torch(builds: Builds) -> Check:
    built = f"CUDA {builds.cuda}" if builds.cuda else f"ROCm {builds.hip}" if builds.hip else "no GPU"
    got = f"{builds.torch} for {built}"
    wanted = {"nvidia": "a build for CUDA", "amd": "a build for ROCm", "cpu": ""}[builds.vendor]
    fits = {"nvidia": builds.cuda, "amd": builds.hip, "cpu": "any"}[builds.vendor]
    if not fits:
        return Check(
            area="versions",
            name="PyTorch",
            status="failed",
            got=got,
            expected=f"{wanted}: this machine has such GPUs",
            fix="install PyTorch for them (https://pytorch.org/get-started), then pip install penstock again",
        )
    if builds.vendor != "cpu" and not builds.finds_gpus:
        return Check(
            area="versions",
            name="PyTorch",
            status="failed",
            got=f"{got}, which finds no GPU",
            expected="the GPUs of this machine",
            fix="look at CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, at the container's devices, and at the driver",
        )
    return fine("versions", "PyTorch", got)


def _cuda_driver(builds: Builds) -> Iterator[Check]:
    if not builds.driver:
        return
    oldest = DRIVERS.get(int(builds.cuda.split(".")[0])) if builds.cuda else None
    if oldest is not None and is_older(builds.driver, str(oldest)):
        yield Check(
            area="versions",
            name="driver",
            status="failed",
            got=builds.driver,
            expected=f">= {oldest} for CUDA {builds.cuda}",
            fix="a newer driver, or a PyTorch build for an older CUDA",
        )
    else:
        yield fine("versions", "driver", builds.driver)


def _triton(builds: Builds) -> Iterator[Check]:
    """A CPU needs none; a GPU without runs the reference operators, which is slow."""
    if not builds.triton and builds.finds_gpus:
        yield Check(
            area="versions",
            name="Triton",
            status="failed",
            got="not installed",
            expected=f">= {OLDEST_TRITON}: our kernels are written in it",
            fix="install the Triton that belongs to this PyTorch; its GPU builds bring it",
        )
    elif builds.triton and is_older(builds.triton, OLDEST_TRITON):
        yield Check(
            area="versions",
            name="Triton",
            status="warning",
            got=builds.triton,
            expected=f">= {OLDEST_TRITON}",
            fix="a newer PyTorch brings a newer Triton",
        )
    else:
        yield fine("versions", "Triton", builds.triton or "none, and a CPU needs none")


def _collectives(builds: Builds) -> Iterator[Check]:
    if builds.finds_gpus:
        yield fine("versions", "RCCL" if builds.hip else "NCCL", builds.collectives or "unknown")
