"""NUMA binding, over small trees of files that look like /sys."""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DeviceError
from penstock.parallel.launch import environment, process
from penstock.parallel.launch.environment import (
    Binding,
    Environment,
    choose_binding,
    gpu_vendor,
    parse_ranges,
    ranges,
    usable_cores,
)
from penstock.parallel.launch.process import bind_near, choose_device, peak_memory_bytes, prepare_process

BUS = ("0000:1b:00.0", "0000:2c:00.0", "0000:9a:00.0", "0000:ab:00.0")


@pytest.fixture(scope="session")
def two_sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes of four cores with two hardware threads each, two GPUs on each node."""
    root = tmp_path_factory.mktemp("sockets")
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        put(root / f"sys/devices/system/node/node{node}/cpulist", cores)
    for thread in range(16):
        siblings = f"{thread % 8},{thread % 8 + 8}"
        put(root / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list", siblings)
    for gpu, bus in enumerate(BUS):
        put(root / f"sys/bus/pci/devices/{bus}/numa_node", str(gpu // 2))
    return root


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def cores_of(root: Path, rank: int, allowed: range | set[int] = range(16), bus: tuple[str, ...] = BUS) -> list[int]:
    """Cores that a rank is bound to; empty if it is not."""
    binding = choose_binding(bus, rank, frozenset(allowed), root)
    return list(binding.cores) if binding else []


def test_ranks_share_the_cores_of_their_gpus_node_and_keep_hardware_threads_together(two_sockets: Path) -> None:
    assert [cores_of(two_sockets, rank) for rank in range(4)] == [
        [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15],
    ]  # fmt: skip
    whole_node = [4, 5, 6, 7, 12, 13, 14, 15]
    assert cores_of(two_sockets, 1, bus=BUS[1:3]) == cores_of(two_sockets, 0, bus=(BUS[3],)) == whole_node


@given(allowed=st.sets(st.integers(0, 15)), rank=st.integers(0, 3))
def test_a_binding_has_only_allowed_cores(allowed: set[int], rank: int, two_sockets: Path) -> None:
    own = set(cores_of(two_sockets, rank, allowed))
    assert own <= allowed
    assert not own & set(cores_of(two_sockets, rank ^ 1, allowed))  # the other rank of the node


def test_a_gpu_of_unknown_node_or_of_the_only_one_is_not_bound(two_sockets: Path, tmp_path: Path) -> None:
    root = tmp_path / "changed"
    shutil.copytree(two_sockets, root)
    put(root / f"sys/bus/pci/devices/{BUS[0]}/numa_node", "-1")  # the kernel's word for unknown
    assert cores_of(root, 0) == []
    assert cores_of(root, 1) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert cores_of(root, 0, bus=("0000:ff:00.0",)) == []
    shutil.rmtree(root / "sys/devices/system/node/node1")
    assert cores_of(root, 1) == []
    assert choose_binding(BUS, 0, frozenset(range(16)), root / "nothing here") is None


def test_cores_elsewhere_are_no_cores(two_sockets: Path) -> None:
    assert cores_of(two_sockets, 0, allowed={4, 5, 6, 7}) == []
    assert cores_of(two_sockets, 0, allowed={2}) == []  # two ranks share the node, and one core is allowed
    assert cores_of(two_sockets, 0, allowed={2, 10, 3}) == [2, 10]  # threads of one core stay together


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_the_inverse_of_parse_ranges(numbers: set[int]) -> None:
    ordered = tuple(sorted(numbers))
    assert parse_ranges(ranges(ordered)) == ordered
    assert str(Binding(node=1, cores=(4, 5, 6, 12), sharers=2)) == "cores 4-6,12 of NUMA node 1, divided by 2"


def test_a_process_is_bound_with_all_its_threads() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)  # any one that this process may use
    try:
        environment.bind(Binding(node=0, cores=(core,), sharers=1))
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
    finally:
        environment.bind(Binding(node=0, cores=tuple(before), sharers=1))


def test_the_driver_says_whose_gpus_there_are(tmp_path: Path) -> None:
    assert gpu_vendor(tmp_path) == "cpu"
    for file, vendor in {"dev/kfd": "amd", "proc/driver/nvidia/version": "nvidia"}.items():
        put(tmp_path / file, "")
        assert gpu_vendor(tmp_path) == vendor


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores(tmp_path) == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)):
        put(tmp_path / "sys/fs/cgroup/cpu.max", text)
        assert usable_cores(tmp_path) == cores


PLAIN = Environment(color=True, threads=1, world_size=1)


def rank_of_machine(rank: int, ranks: int) -> Environment:
    return replace(PLAIN, world_size=ranks, rank=rank, local_rank=rank, local_world_size=ranks, started_by="torchrun")


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> list[int]:
    """The machine has so many GPUs. Returns the list of those that become the current one."""
    taken: list[int] = []
    answers = {"is_available": gpus > 0, "device_count": gpus, "current_device": 0}  # by function of torch.cuda
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=0)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="device is cuda, but there is no GPU"):
        choose_device("cuda")
    pretend(monkeypatch, gpus=1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = pretend(monkeypatch, gpus=4)
    devices = [choose_device("auto", rank_of_machine(rank, 4)) for rank in range(4)]
    assert devices == [torch.device("cuda", rank) for rank in range(4)] and taken == [0, 1, 2, 3]
    assert choose_device("cpu", rank_of_machine(3, 4)) == torch.device("cpu")
    with pytest.raises(DeviceError, match="more processes than GPUs on this machine; got 5; allowed: 4"):
        choose_device("cuda", rank_of_machine(0, 5))


def test_a_task_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=1)
    task = replace(rank_of_machine(3, 4), started_by="srun")
    assert choose_device("auto", task) == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match="more processes than GPUs"):
        choose_device("auto", rank_of_machine(0, 4))


def test_each_rank_is_bound_by_the_addresses_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = Binding(node=1, cores=(4, 5), sharers=2)
    choose, bind = Mock(return_value=binding), Mock()

    def facts(gpu: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B + gpu, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    pretend(monkeypatch, gpus=2)
    monkeypatch.setattr(process, "choose_binding", choose)
    monkeypatch.setattr(process, "bind", bind)
    assert bind_near(torch.device("cuda", 1), rank_of_machine(1, 2)) is binding
    assert bind_near(torch.device("cuda", 1), PLAIN) is binding
    asked = [call.args[:2] for call in choose.call_args_list]
    assert asked == [(["0000:1b:00.0", "0000:1c:00.0"], 1), (["0000:1c:00.0"], 0)]
    assert bind.call_args_list == [call(binding)] * 2
    assert bind_near(torch.device("cpu"), PLAIN) is None


def test_the_seed_decides_every_draw() -> None:
    def drawn(seed: int) -> tuple[float, float]:
        prepare_process(PLAIN, seed=seed, deterministic=False)
        return random.random(), torch.rand(()).item()

    assert drawn(1) == drawn(1) != drawn(2)


def test_threads_are_those_that_were_chosen_and_never_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: 1)
    for threads, expected in ((2, 2), (None, 1)):
        prepare_process(replace(PLAIN, threads=threads), seed=0, deterministic=False)
        assert torch.get_num_threads() == expected


def test_deterministic_mode_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for deterministic, workspace in ((False, None), (True, ":4096:8"), (False, ":4096:8")):
        prepare_process(PLAIN, seed=0, deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace, "a library may have read it already"


def test_memory_grows_with_what_is_allocated() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert peak_memory_bytes(torch.device("cpu")) > block.nbytes
