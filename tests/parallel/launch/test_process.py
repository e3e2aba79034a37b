"""Device, threads, seeds and memory of the process."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.parallel.launch import process
from penstock.parallel.launch.environment import Environment
from penstock.parallel.launch.host import Binding
from penstock.parallel.launch.process import bind_near, choose_device, device_name, peak_memory_bytes, prepare_process

PLAIN = Environment(color=True, threads=1, world_size=1)


def rank_of_machine(rank: int, ranks: int) -> Environment:
    """One of the ranks that torchrun started on a machine."""
    return replace(PLAIN, world_size=ranks, rank=rank, local_rank=rank, local_world_size=ranks, started_by="torchrun")


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


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    devices = [choose_device("auto", rank_of_machine(rank, 4)) for rank in range(4)]
    assert devices == [torch.device("cuda", rank) for rank in range(4)]
    assert taken == [0, 1, 2, 3]
    assert choose_device("cpu", rank_of_machine(3, 4)) == torch.device("cpu")
    with pytest.raises(DeviceError, match="more processes than GPUs on this machine; got 5; allowed: 4"):
        choose_device("cuda", rank_of_machine(0, 5))


def test_a_task_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    task = replace(rank_of_machine(3, 4), started_by="srun")
    assert choose_device("auto", task) == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match="more processes than GPUs"):
        choose_device("auto", rank_of_machine(0, 4))


def test_each_rank_is_bound_by_the_addresses_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, bound = [], []
    binding = Binding(node=1, cores=(4, 5), sharers=2)

    def choose(bus_ids: list[str], local_rank: int, allowed: frozenset[int]) -> Binding:
        asked.append((bus_ids, local_rank))
        return binding

    def facts(gpu: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B + gpu, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(process, "choose_binding", choose)
    monkeypatch.setattr(process, "bind", bound.append)
    assert bind_near(torch.device("cuda", 1), rank_of_machine(1, 2)) is binding
    assert bind_near(torch.device("cuda", 1), PLAIN) is binding
    assert asked == [(["0000:1b:00.0", "0000:1c:00.0"], 1), (["0000:1c:00.0"], 0)]
    assert bound == [binding, binding]
    assert bind_near(torch.device("cpu"), PLAIN) is None


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
