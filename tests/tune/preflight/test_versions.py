"""Versions: what goes together, and what does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.parallel.launch.environment import LaunchFacts, settings
from penstock.tune.preflight.host import (
    HARMFUL,
    Builds,
    check_environment,
    check_versions,
    is_older,
    judge_builds,
    read_builds,
)

NVIDIA = Builds(
    torch="2.11.0+cu130",
    cuda="13.0",
    hip=None,
    finds_gpus=True,
    collectives="2.28.9",
    triton="3.6.0",
    vendor="nvidia",
    driver="580.65.06",
)
AMD = replace(NVIDIA, torch="2.11.0+rocm7.0", cuda=None, hip="7.0.51831", vendor="amd", driver="6.14.14")


def wrong(builds: Builds) -> dict[str, tuple[str, str]]:
    """Name of each check that is not ok: status and what was expected."""
    return {one.name: (one.status, one.expected) for one in judge_builds(builds) if one.status != "ok"}


def test_builds_that_go_together_pass() -> None:
    cpu = replace(NVIDIA, cuda=None, finds_gpus=False, triton="", vendor="cpu", driver="", collectives="")
    assert wrong(NVIDIA) == wrong(AMD) == wrong(cpu) == {}
    assert [one.name for one in judge_builds(AMD)] == ["PyTorch", "driver", "Triton", "RCCL"]


CPU_BUILD = {"torch": "2.11.0+cpu", "cuda": None, "finds_gpus": False, "triton": ""}  # on a machine with GPUs


@pytest.mark.parametrize(
    ("changes", "name", "status", "expected"),
    [
        (CPU_BUILD, "PyTorch", "failed", "a build for CUDA: this machine has such GPUs"),
        ({"vendor": "amd"}, "PyTorch", "failed", "a build for ROCm: this machine has such GPUs"),
        ({"finds_gpus": False}, "PyTorch", "failed", "the GPUs of this machine"),
        ({"triton": ""}, "Triton", "failed", ">= 3.6: our kernels are written in it"),
        ({"triton": "3.5.1"}, "Triton", "warning", ">= 3.6"),
    ],
)
def test_builds_that_do_not_go_together_are_told(
    changes: dict[str, Any], name: str, status: str, expected: str
) -> None:
    assert wrong(replace(NVIDIA, **changes))[name] == (status, expected)


@pytest.mark.parametrize(("cuda", "passes"), [("13.0", False), ("12.8", True)])
def test_a_driver_is_as_new_as_cuda_needs(cuda: str, passes: bool) -> None:
    assert ("driver" not in wrong(replace(NVIDIA, cuda=cuda, driver="575.51.03"))) is passes


def test_versions_are_compared_as_numbers() -> None:
    assert is_older("2.10.1", "2.11") and is_older("0.9", "0.20")
    for got, bound in (("2.11", "2.11.0"), ("2.11.0+cu130", "2.11"), ("3.7.0rc1", "3.6")):
        assert not is_older(got, bound)


NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  13\n"


@pytest.mark.parametrize(
    ("files", "vendor", "driver"),
    [
        ({"proc/driver/nvidia/version": NVRM}, "nvidia", "580.65.06"),
        ({"dev/kfd": "", "sys/module/amdgpu/version": "6.14.14\n"}, "amd", "6.14.14"),
    ],
)
def test_drivers_are_read_from_the_system(files: dict[str, str], vendor: str, driver: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert (read_builds(tmp_path).vendor, read_builds(tmp_path).driver) == (vendor, driver)


def test_this_environment_has_what_it_needs() -> None:
    found = check_versions()
    assert [one for one in found if one.status == "failed"] == []
    assert "packages" in {one.name for one in found}


def test_a_package_that_is_missing_or_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=99.0", "no-such-package>=1.0", "pytest>=8.2; extra == 'dev'"]
    monkeypatch.setattr("penstock.tune.preflight.host.requires", lambda name: needed)
    failed = {one.name: (one.got, one.fix) for one in check_versions() if one.status == "failed"}
    assert failed["no-such-package"] == ("not installed", "pip install 'no-such-package>=1.0'")
    assert failed["numpy"][1] == "pip install 'numpy>=99.0'"
    assert set(failed) == {"numpy", "no-such-package"}


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_DEBUG", "info", True),  # in any case
        ("NCCL_DEBUG", "WARN", False),
        ("NCCL_ALGO", "Tree", True),
        ("GPU_MAX_HW_QUEUES", "2", False),  # as Penstock sets it
        ("PYTHONMALLOC", "malloc_debug", True),
    ],
)
def test_a_variable_hurts_by_its_value(name: str, value: str, hurts: bool) -> None:
    (check,) = check_environment({name: value}, has_gpu=True)
    assert (check.status == "warning") is hurts
    assert (check.fix == f"unset {name}") is hurts
    assert hurts or check.got == f"none of {len(HARMFUL)} that hurt is set"


def test_the_interpreter_of_triton_spoils_a_run_on_gpus_only() -> None:
    for has_gpu, status in ((True, "failed"), (False, "warning")):
        assert [one.status for one in check_environment({"TRITON_INTERPRET": "1"}, has_gpu=has_gpu)] == [status]


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "cpu"])
def test_what_penstock_sets_itself_hurts_nowhere(vendor: str) -> None:
    set_here = settings(LaunchFacts(vendor=vendor, world=16, local_world=8, cores=64))  # type: ignore[arg-type]
    assert [one.name for one in check_environment(set_here, has_gpu=True) if one.status != "ok"] == []
