"""Versions of Python, packages, PyTorch and the driver, and variables of the shell that slow a run down or break it.

Required package versions are those of our own package metadata. An NVIDIA driver must be new enough for PyTorch's CUDA.
ROCm's driver is shown but not judged: AMD supports several releases back and forth, and PyTorch finds no GPU otherwise.
Variables that Penstock sets itself (docs/environment.md) are not checked here, because every run reports them.
"""

import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.cuda.nccl

from penstock.base.origin import version_of
from penstock.parallel.launch.host import ROOT, Vendor, gpu_vendor, read_text
from penstock.tune.preflight.check import PreflightCheck, Status, fine

OLDEST_PYTHON = (3, 11)
OLDEST_TRITON = "3.6"

DRIVERS = {13: 580, 12: 525}
"""Oldest NVIDIA driver for a CUDA major version (NVIDIA, CUDA compatibility, minor version compatibility)."""

_BOUND = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\d.]+)$")


@dataclass(frozen=True, kw_only=True)
class Builds:
    """PyTorch and the layers below it; empty or None if missing."""

    torch: str
    cuda: str | None  # version of PyTorch's build
    hip: str | None  # version of PyTorch's build
    finds_gpus: bool
    collectives: str  # version of NCCL or RCCL
    triton: str
    vendor: Vendor
    driver: str


def check_versions() -> list[PreflightCheck]:
    return [_python(), *_packages(_requirements()), *judge_builds(read_builds())]


def read_builds(root: Path = ROOT) -> Builds:
    """The installed software; `root` is the root of the system's files."""
    on_gpu = torch.cuda.is_available()
    vendor = gpu_vendor(root)
    return Builds(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        finds_gpus=on_gpu,
        collectives=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        triton=version_of("triton") or version_of("pytorch-triton-rocm") or "" if find_spec("triton") else "",
        vendor=vendor,
        driver=_driver(vendor, root),
    )


def _driver(vendor: Vendor, root: Path) -> str:
    if vendor == "nvidia":
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", read_text(root / "proc/driver/nvidia/version"))
        return match[1] if match else ""
    return read_text(root / "sys/module/amdgpu/version") if vendor == "amd" else ""


def _python() -> PreflightCheck:
    got, oldest = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info >= OLDEST_PYTHON:
        return fine("versions", "Python", got)
    return PreflightCheck("versions", "Python", "failed", got, f">= {oldest}", "make a new environment")


def _requirements() -> list[str]:
    """Requirements of the installed package; none if it runs from source."""
    try:
        return [line for line in requires("penstock") or [] if ";" not in line]
    except PackageNotFoundError:
        return []


def _packages(requirements: Sequence[str]) -> Iterator[PreflightCheck]:
    wrong = 0
    for requirement in requirements:
        bound = _BOUND.match(requirement.replace(" ", ""))
        if bound is None:
            continue
        got = version_of(bound["name"])
        if not got or is_older(got, bound["version"]):
            wrong += 1
            got, fix = got or "not installed", f"pip install '{requirement}'"
            yield PreflightCheck("versions", bound["name"], "failed", got, f">= {bound['version']}", fix)
    if requirements and not wrong:
        yield fine("versions", "packages", f"all {len(requirements)} that are needed")


def is_older(got: str, bound: str) -> bool:
    """Whether a version is below a bound; suffixes (`+cu130`, `rc1`) are ignored."""

    def numbers(text: str) -> list[int]:
        match = re.match(r"\d+(\.\d+)*", text)
        return [int(part) for part in match[0].split(".")] if match else []

    left, right = numbers(got), numbers(bound)
    width = max(len(left), len(right))
    return left + [0] * (width - len(left)) < right + [0] * (width - len(right))


def judge_builds(builds: Builds) -> list[PreflightCheck]:
    """All checks of PyTorch and the layers below it."""
    checks = [_torch(builds), *_cuda_driver(builds), _triton(builds)]
    if builds.finds_gpus:
        checks.append(fine("versions", "RCCL" if builds.hip else "NCCL", builds.collectives or "unknown"))
    return checks


def _torch(builds: Builds) -> PreflightCheck:
    built = f"CUDA {builds.cuda}" if builds.cuda else f"ROCm {builds.hip}" if builds.hip else "no GPU"
    got = f"{builds.torch} for {built}"
    wanted = {"nvidia": "a build for CUDA", "amd": "a build for ROCm", "cpu": ""}[builds.vendor]
    fits = {"nvidia": builds.cuda, "amd": builds.hip, "cpu": "any"}[builds.vendor]
    if not fits:
        fix = "install PyTorch for them (https://pytorch.org/get-started), then pip install penstock again"
        return PreflightCheck("versions", "PyTorch", "failed", got, f"{wanted}: this machine has such GPUs", fix)
    if builds.vendor != "cpu" and not builds.finds_gpus:
        got += ", which finds no GPU"
        fix = "look at CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, at the container's devices, and at the driver"
        return PreflightCheck("versions", "PyTorch", "failed", got, "the GPUs of this machine", fix)
    return fine("versions", "PyTorch", got)


def _cuda_driver(builds: Builds) -> Iterator[PreflightCheck]:
    oldest = DRIVERS.get(int(builds.cuda.split(".")[0])) if builds.cuda else None
    if builds.driver and oldest is not None and is_older(builds.driver, str(oldest)):
        expected, fix = f">= {oldest} for CUDA {builds.cuda}", "a newer driver, or a PyTorch build for an older CUDA"
        yield PreflightCheck("versions", "driver", "failed", builds.driver, expected, fix)
    elif builds.driver:
        yield fine("versions", "driver", builds.driver)


def _triton(builds: Builds) -> PreflightCheck:
    """A CPU needs none; a GPU without it runs the slow reference operators."""
    if not builds.triton and builds.finds_gpus:
        expected = f">= {OLDEST_TRITON}: our kernels are written in it"
        fix = "install the Triton that belongs to this PyTorch; its GPU builds bring it"
        return PreflightCheck("versions", "Triton", "failed", "not installed", expected, fix)
    if builds.triton and is_older(builds.triton, OLDEST_TRITON):
        fix = "a newer PyTorch brings a newer Triton"
        return PreflightCheck("versions", "Triton", "warning", builds.triton, f">= {OLDEST_TRITON}", fix)
    return fine("versions", "Triton", builds.triton or "none, and a CPU needs none")


ON = r"1|true|on|yes|y"


@dataclass(frozen=True)
class HarmfulVariable:
    """A harmful variable."""

    name: str
    when: str  # pattern of harmful values, in any case
    what: str
    status: Status = "warning"


HARMFUL: tuple[HarmfulVariable, ...] = (
    HarmfulVariable("CUDA_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    HarmfulVariable("HIP_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    HarmfulVariable("AMD_SERIALIZE_KERNEL", "[1-3]", "the host waits for every kernel"),
    HarmfulVariable("AMD_SERIALIZE_COPY", "[1-3]", "the host waits for every copy"),
    HarmfulVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "kernels that could overlap run one after the other"),
    HarmfulVariable("GPU_MAX_HW_QUEUES", "1", "kernels that could overlap run one after the other"),
    HarmfulVariable("NCCL_P2P_DISABLE", r"(?!0$).+", "GPUs of a node speak through host memory"),
    HarmfulVariable("NCCL_SHM_DISABLE", r"(?!0$).+", "GPUs without a direct link speak over the network"),
    HarmfulVariable("NCCL_IB_DISABLE", r"(?!0$).+", "nodes speak over TCP and not over InfiniBand or RoCE"),
    HarmfulVariable("NCCL_NET_GDR_LEVEL", "0|LOC", "what goes to other nodes is copied to host memory first"),
    HarmfulVariable("NCCL_DEBUG", "INFO|TRACE", "every collective is logged"),
    HarmfulVariable("NCCL_ALGO", ".+", "one algorithm for all sizes; right for training.deterministic only"),
    HarmfulVariable("NCCL_PROTO", ".+", "one protocol for all sizes"),
    HarmfulVariable("NCCL_LAUNCH_MODE", "GROUP", "collectives of different groups wait for each other"),
    HarmfulVariable("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is checked by another one"),
    HarmfulVariable("TORCH_NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    HarmfulVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", ".+", "the driver is asked for every tensor"),
    HarmfulVariable("PYTORCH_NO_HIP_MEMORY_CACHING", ".+", "the driver is asked for every tensor"),
    HarmfulVariable("TRITON_INTERPRET", ON, "Triton's kernels are run by Python, number by number", status="failed"),
    HarmfulVariable("TRITON_ALWAYS_COMPILE", ON, "kernels are compiled anew in every process"),
    HarmfulVariable("PYTHONDEVMODE", ".+", "Python checks itself at every step"),
    HarmfulVariable("PYTHONMALLOC", ".*debug", "Python checks its memory at every step"),
)
"""Sources: NCCL, PyTorch, CUDA, HIP, Triton and Python, each on its own variables."""


def check_environment(variables: Mapping[str, str], *, has_gpu: bool) -> list[PreflightCheck]:
    """Harmful variables among those of `HARMFUL` that are set, or one passed check."""
    checks = []
    for variable in HARMFUL:
        value = variables.get(variable.name)
        if value is None or not re.fullmatch(variable.when, value.strip(), re.IGNORECASE):
            continue
        # Without a GPU, Triton's interpreter is how tests run kernels.
        status = variable.status if has_gpu or variable.status != "failed" else "warning"
        got, fix = f"{value.strip()}: {variable.what}", f"unset {variable.name}"
        checks.append(PreflightCheck("environment", variable.name, status, got, "not set", fix))
    return checks or [fine("environment", "variables", f"none of {len(HARMFUL)} that hurt is set")]
