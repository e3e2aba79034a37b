"""A run that cannot fit into memory is refused before anything is made, and what it needs at least is no guess."""

from pathlib import Path

import pytest
import torch

from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.parallel.launch.host import host_bytes
from penstock.train.rehearsal import rehearse
from penstock.train.setup import find_shortage, least_memory_need, state_bytes

CPU = torch.device("cpu")
LAYOUTS = (
    (),
    ("training.precision=bf16",),
    ("training.precision=bf16", "parallel.expert=4", "training.micro_batch=1"),
    ("training.precision=bf16", "parallel.shard=full", "training.micro_batch=1"),
    ("training.precision=bf16", "parallel.shard=none", "training.micro_batch=1"),
    ("parallel.expert=2", "parallel.expert_tensor=2", "training.micro_batch=1"),
    ("parallel.tensor=2", "model.vocab_size=258", "training.micro_batch=2"),
    ("training.precision=bf16", "offload.optimizer=true", "training.micro_batch=1"),
)


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_the_state_of_a_rank_is_what_it_holds_or_little_less(overrides: tuple[str, ...]) -> None:
    run = load_run("debug-2l", overrides)
    world = 4 if overrides[1:] or "parallel" in "".join(overrides) else 1
    held = rehearse(run, world=world, rank=0)
    holds = held.weight_bytes + held.gradient_bytes + held.optimizer_bytes
    needs = least_memory_need(run, grid_of(run, world)).state
    passing_through = 0.5 if run.offload.optimizer else 0  # Room for what is on its way between host and device.
    assert (0.85 - passing_through) * holds <= needs <= 1.001 * holds


def test_one_rank_needs_the_state_of_the_run() -> None:
    run = load_run("deepseek-v2-lite-2l")
    assert least_memory_need(run, grid_of(run, 1)).state == pytest.approx(state_bytes(run), rel=1e-3)


@pytest.mark.parametrize(
    ("target", "overrides", "cause"),
    [
        ("deepseek-v3", (), "run deepseek-v3 does not fit .*: weights, gradients and optimizer are most"),
        ("debug", ("training.sequence_length=100000000",), "activations of training.sequence_length 100,000,000"),
        ("debug", ("training.global_batch=1000000000",), "rows of training.sequence_length 128"),
    ],
)
def test_what_does_not_fit_is_said_with_what_to_do(target: str, overrides: tuple[str, ...], cause: str) -> None:
    run = load_run(target, overrides)
    shortage = find_shortage(run, grid_of(run, 1), CPU, 1)
    assert shortage is not None
    with pytest.raises(
        type(shortage), match=f"{cause}.*; got a need of .* GB; fix: .*penstock plan.*check_memory=false"
    ):
        raise shortage
    wanted = load_run(target, [*overrides, "host.check_memory=false"])
    assert find_shortage(wanted, grid_of(wanted, 1), CPU, 1) is None


def test_ranks_of_a_machine_share_its_memory() -> None:
    run = load_run("debug")
    assert find_shortage(run, grid_of(run, 1), CPU, 1) is None
    assert "of 100000 ranks" in str(find_shortage(run, grid_of(run, 1), CPU, 100_000))


def test_a_container_has_what_its_limit_says(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert host_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemFree:   3 kB\n")
    assert host_bytes(tmp_path) == 1_024_000
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_bytes(tmp_path) == 1_024_000
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("5000\n")
    assert host_bytes(tmp_path) == 5000
