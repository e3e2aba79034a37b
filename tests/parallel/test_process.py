"""Device, threads, seeds and memory of the process."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.parallel import process
from penstock.parallel.environment import Environment
from penstock.parallel.process import choose_device, device_name, peak_memory_bytes, prepare_process, usable_cores

PLAIN = Environment(color=True, threads=1, world_size=1)


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Threads and determinism belong to the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_a_missing_gpu_is_refused_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="device is cuda, but there is no GPU"):
        choose_device("cuda")


def test_auto_takes_a_gpu_and_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")


def test_the_cpu_has_a_name() -> None:
    assert device_name(torch.device("cpu"))


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(process, "CGROUP_CPU_LIMIT", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores() == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)):
        limit.write_text(text + "\n")
        assert usable_cores() == cores


def test_the_seed_decides_every_draw() -> None:
    draws = []
    for seed in (1, 1, 2):
        prepare_process(PLAIN, seed=seed, deterministic=False)
        draws.append((random.random(), torch.rand(()).item()))
    assert draws[0] == draws[1] != draws[2]


def test_threads_are_those_that_were_chosen() -> None:
    prepare_process(Environment(color=True, threads=2, world_size=1), seed=0, deterministic=False)
    assert torch.get_num_threads() == 2


def test_threads_are_never_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(process, "usable_cores", lambda: 1)
    prepare_process(Environment(color=True, threads=None, world_size=1), seed=0, deterministic=False)
    assert torch.get_num_threads() == 1


def test_deterministic_mode_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare_process(PLAIN, seed=0, deterministic=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare_process(PLAIN, seed=0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    prepare_process(PLAIN, seed=0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_grows_with_what_is_allocated() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert peak_memory_bytes(torch.device("cpu")) > block.nbytes
