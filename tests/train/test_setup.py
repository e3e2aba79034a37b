"""A session holds everything that a run needs, and leaves nothing on disk."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.base.errors import ConfigError, DataError, DeviceError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.parallel import Offload, Recompute
from penstock.config.run import Data, Evaluation, Optimizer, Run
from penstock.parallel.launch.environment import host_bytes
from penstock.train import setup
from penstock.train.setup import (
    Rehearsal,
    Session,
    find_shortage,
    least_memory_need,
    open_texts,
    prepare,
    rehearse,
    state_bytes,
)
from penstock.train.step import train_step
from tests.closeness import assert_equal
from tests.train.tiny_run import CPU, ENVIRONMENT, TRAINING, byte_run, random_batch, tiny_run


def session_of(run: Run) -> Session:
    session = prepare(run, ENVIRONMENT)
    session.state.batches.close()
    return session


def test_a_session_is_complete_and_nothing_is_written(tmp_path: Path) -> None:
    session = session_of(tiny_run(tmp_path / "runs"))
    assert session.model.whole.training
    assert session.state.modules == session.model.modules
    assert session.device == torch.device("cpu")
    assert session.device_name
    assert session.held_out is not None
    assert 0 < session.held_out.tokens <= 3 * 12
    assert session.size.flops_per_token > 0
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_bound_to_the_model_less_what_may_change(tmp_path: Path) -> None:
    identity = session_of(tiny_run(tmp_path)).state.identity
    assert identity["model.layers"] == 2
    assert identity["model.moe.experts"] == 4
    assert all(name.startswith("model.") for name in identity)
    assert "model.moe.router.expert_bias_rate" not in identity
    assert not any(name.startswith("model.moe.balance") for name in identity)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (session_of(tiny_run(tmp_path, seed=seed)).model for seed in (1, 1, 2))
    assert torch.equal(first.whole.head_VD, again.whole.head_VD)
    assert not torch.equal(first.whole.head_VD, other.whole.head_VD)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_of_state_are_those_of_the_tensors(precision: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, training=TRAINING.model_copy(update={"precision": precision}))
    session = session_of(run)
    held = [*session.model.whole.parameters(), *(tensor for _, tensor in session.state.optimizer.gradients())]
    held += [part.tensor for name, part in session.state.optimizer.parts().items() if name != "step"]
    # A float32 weight is its own master.
    assert state_bytes(run) == sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def test_a_run_may_keep_its_optimizer_on_the_host(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, offload=Offload(optimizer=True))
    memory = session_of(run).state.optimizer.memory()
    assert memory.host == 2 * memory.weights, "float32 weights stay, their moments go"
    assert session_of(tiny_run(tmp_path)).state.optimizer.memory().host == 0


def test_held_out_documents_of_one_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some text to learn from " * 40)
    (tmp_path / "held_out.txt").write_text("x")
    files = {"files": (f"{tmp_path}/train.txt",), "validation_files": (f"{tmp_path}/held_out.txt",)}
    data = Data(source="text", document_mask=True, **files)
    with pytest.raises(DataError, match="predict no text.*evaluation.rows"):
        open_texts(byte_run(tmp_path, data=data, evaluation=Evaluation(rows=2)))


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
    holds = held.memory.weights + held.memory.gradients + held.memory.optimizer
    needs = least_memory_need(run, grid_of(run, world))
    passing_through = 0.5 if run.offload.optimizer else 0  # Room for what is on its way between host and device.
    assert (0.85 - passing_through) * holds <= needs.state <= 1.001 * holds
    assert 0.85 * held.memory.host <= needs.offloaded <= 1.001 * held.memory.host


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
    told = str(find_shortage(run, grid_of(run, 1), CPU, 1))
    assert re.search(f"{cause}.*; got a need of .* GB; fix: .*penstock plan.*check_memory=false", told)
    fitting = load_run("debug")
    assert find_shortage(fitting, grid_of(fitting, 1), CPU, 1) is None
    assert "of 100000 ranks" in str(find_shortage(fitting, grid_of(fitting, 1), CPU, 100_000)), "they share the memory"
    wanted = load_run(target, [*overrides, "host.check_memory=false"])
    assert find_shortage(wanted, grid_of(wanted, 1), CPU, 1) is None


def test_a_run_whose_offloaded_state_is_more_than_the_hosts_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortage(*overrides: str, ranks: int = 1) -> DeviceError | None:
        run = load_run("deepseek-v2-lite", ["offload.optimizer=true", "offload.gradients=true", *overrides])
        return find_shortage(run, grid_of(run, 1), torch.device("cuda"), ranks)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=85 * 10**9))
    monkeypatch.setattr(setup, "host_bytes", lambda: 128 * 2**30)
    told = str(shortage())
    assert re.search("memory of this machine: gradients and optimizer in host memory.*got a need of 251.* GB", told)
    smaller = "optimizer.moment_dtype=int8", "optimizer.store_param_remainders=true"
    assert all(word in told for word in smaller)
    assert shortage(*smaller) is None
    assert "of 2 ranks" in str(shortage(*smaller, ranks=2)), "they share the memory"


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


V3 = ("parallel.pipeline=16", "parallel.tensor=2", "parallel.expert=32")


def of(*overrides: str, world: int, rank: int = 0, preset: str = "deepseek-v2-lite") -> Rehearsal:
    return rehearse(load_run(preset, overrides), world=world, rank=rank)


def test_a_rank_of_a_thousand_knows_its_groups_and_its_stage() -> None:
    rehearsal = of(*V3, world=1024, rank=517, preset="deepseek-v3")
    axes = rehearsal.model.axes
    assert axes.tensor.ranks == (516, 517) and axes.tensor.rank == 1
    assert axes.expert.ranks == tuple(range(512, 544))
    assert list(rehearsal.stages) == [8]
    assert rehearsal.model.pipeline is not None and rehearsal.model.pipeline.schedule.ranks == 16
    assert all(parameter.is_meta for _, parameter in rehearsal.model.named_parameters())


def test_the_stages_of_all_ranks_together_are_the_model() -> None:
    whole = of(world=1)
    parts = [of("parallel.pipeline=4", world=4, rank=rank) for rank in range(4)]
    assert sum(part.dense for part in parts) == whole.dense
    assert sum(part.expert for part in parts) == whole.expert


def test_experts_are_divided_and_the_optimizer_of_dense_matrices_too() -> None:
    alone, shared = of(world=1), of("parallel.expert=4", world=4)
    assert shared.expert == alone.expert // 4 and shared.dense == alone.dense
    # Master and two moments of 4 bytes, for the experts that are here and a quarter of everything else.
    assert shared.memory.optimizer == pytest.approx(12 * (shared.expert + shared.dense / 4), rel=1e-3)
    assert shared.memory.gradients == 4 * (shared.expert + shared.dense)


@pytest.mark.parametrize("rank", [0, 3])
def test_fsdp_divides_weights_and_gradients_among_the_ranks(rank: int) -> None:
    alone, sharded = of(world=1), of("parallel.shard=full", world=8, rank=rank)
    assert sharded.memory.weights == pytest.approx(4 * (alone.dense + alone.expert) / 8, rel=0.01)
    assert sharded.memory.gradients == pytest.approx(sharded.memory.weights, rel=0.01)


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rank is not a rank of --fake-world; got 4; allowed: 0 to 3"):
        of(world=4, rank=4)


@pytest.mark.often("saved-fp32", "recomputed-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("modules", [(), ("layer",)], ids=["saved", "recomputed"])
def test_gradients_in_host_memory_are_those_of_the_device_to_the_bit(
    precision: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    training = TRAINING.model_copy(update={"precision": precision, "global_batch": 6})
    few_bits = Optimizer(learning_rate=1e-2, moment_dtype="int8", store_param_remainders=True)
    outcomes = []
    for offload in (Offload(optimizer=True), Offload(optimizer=True, gradients=True)):
        run = tiny_run(
            tmp_path, training=training, optimizer=few_bits, offload=offload, recompute=Recompute(modules=modules)
        )
        session = session_of(run)
        results = []
        for seed in range(4):
            batch = random_batch(6, 12, seed=seed)
            result = train_step(session.model, session.state.optimizer, batch, session.rule, 1e-2)
            results.append((result.loss, result.gradient_norm))
        tensors = {name: part.decoded().tensor for name, part in session.state.parts().items()}
        memory = session.state.optimizer.memory()
        outcomes.append((results, tensors, memory))
    (plain, state, before), (found, other, after) = outcomes
    assert found == plain
    assert_equal(other, state)
    assert after.host > before.host and after.weights == before.weights
    assert least_memory_need(run, grid_of(run, 1)).state < state_bytes(run)
