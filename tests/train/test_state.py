"""A run that is stopped and resumed, on as many ranks or on others, equals one that was not stopped bit for bit."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, DataError
from penstock.config.parallel import Offload, Parallel
from penstock.config.run import Optimizer
from penstock.data.loader import Batch
from penstock.parallel.axes import ALONE, Axes, Axis
from penstock.train.checkpoint import CheckpointStore
from penstock.train.optimizer import MasterAdamW, clip_divisor
from penstock.train.state import (
    TrainState,
    check_same_model,
    random_state,
    restore_random_state,
    restore_state,
    save_state,
)
from tests.closeness import assert_equal
from tests.distributed.pool import Pool
from tests.parallel.test_collectives import world
from tests.train.small_model import SETTINGS, SmallModel, holdings_of, tokens

ON_DEVICE = Offload()
IDENTITY = {"layers": 2, "moe": {"top_k": 4, "experts": 8}, "heads": (1, 2)}


class CountingBatches:
    """Batches of random tokens; the state is their number."""

    def __init__(self) -> None:
        self.drawn = 0

    def next_batch(self) -> Batch:
        self.drawn += 1
        tokens_BS = tokens(self.drawn)[None]
        return Batch(tokens_BS=tokens_BS, labels_BS=tokens_BS, positions_BS=tokens_BS, documents_BS=None)

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def restore(self, state: Mapping[str, int]) -> None:
        if state.keys() != {"drawn"}:
            raise DataError("other data")
        self.drawn = state["drawn"]

    def close(self) -> None:
        pass


def _fresh(dtype: torch.dtype, seed: int, settings: Optimizer = SETTINGS, offload: Offload = ON_DEVICE) -> TrainState:
    random.seed(seed)
    np.random.seed(seed)
    model = SmallModel(dtype, seed)
    return _state(model, optimizer=MasterAdamW(holdings_of(model), settings, offload=offload))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=0, asynchronous=False)


def _state(model: nn.Module, **changes: Any) -> TrainState:
    fields = {
        "identity": IDENTITY,
        "modules": [model],
        "optimizer": changes.get("optimizer") or MasterAdamW(holdings_of(model), SETTINGS),
        "batches": CountingBatches(),
    }
    return TrainState(**(fields | changes))


def _tensors(state: TrainState) -> dict[str, Tensor]:
    return {name: part.decoded().tensor for name, part in state.parts().items()}


def _train(state: TrainState, steps: int) -> list[float]:
    """Losses of some steps, in which every random generator has its part."""
    losses = []
    for _ in range(steps):
        state.optimizer.zero_gradients()
        loss = state.modules[0](state.batches.next_batch().tokens_BS[0]) * (1.0 + random.random() + np.random.normal())
        loss.backward()
        state.optimizer.step(0.01, clip_divisor(state.optimizer.gradient_norm().item(), 1.0))
        losses.append(loss.item())
    return losses


FORMATS = [
    SETTINGS.model_copy(update={"moment_dtype": moments, "store_param_remainders": splits})
    for moments, splits in (("bf16", False), ("fp32", True), ("int8", True))
]


def _named(settings: Optimizer) -> str:
    return f"{settings.moment_dtype}-{settings.store_param_remainders}"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [SETTINGS, *FORMATS], ids=_named)
def test_a_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, settings: Optimizer, dtype: torch.dtype, asynchronous: bool
) -> None:
    whole = _fresh(dtype, 0, settings)
    expected = _train(whole, 6)

    store = CheckpointStore(tmp_path, keep=1, asynchronous=asynchronous)
    first = _fresh(dtype, 0, settings, Offload(optimizer=asynchronous))
    losses = _train(first, 3)
    save_state(store, 3, first, notes={"tokens_seen": 72})
    _train(first, 2)  # goes on while the checkpoint is written
    store.close()

    second = _fresh(dtype, 1, settings)
    store = CheckpointStore(tmp_path, keep=1, asynchronous=asynchronous)
    assert restore_state(store, 3, second) == {"tokens_seen": 72}
    assert losses + _train(second, 3) == expected
    store.close()
    assert_equal(_tensors(second), _tensors(whole))
    assert_equal(second.modules[0].state_dict(), whole.modules[0].state_dict())


def test_a_checkpoint_of_before_the_first_step_is_a_good_one(store: CheckpointStore) -> None:
    expected = _train(_fresh(torch.bfloat16, seed=0), 2)
    save_state(store, 0, _fresh(torch.bfloat16, seed=0), notes={})
    resumed = _fresh(torch.bfloat16, seed=1)
    restore_state(store, 0, resumed)
    assert _train(resumed, 2) == expected


def test_all_that_lasts_is_saved_once_and_weights_in_float32() -> None:
    state = _fresh(torch.bfloat16, seed=0)
    parts = state.parts()
    names = {name.removeprefix("model.") for name in parts if name.startswith("model.")}
    assert names == state.modules[0].state_dict().keys()
    assert "counts_F" in names and "scratch" not in names
    assert {name.partition(".")[0] for name in parts} == {"model", "moment1", "moment2", "step"}
    assert parts["model.counts_F"].tensor.dtype == torch.int64
    assert {part.tensor.dtype for name, part in parts.items() if name != "model.counts_F"} == {torch.float32}


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_are_written_by_the_first_rank_of_a_stage(rank: int) -> None:
    state = _state(SmallModel(), stage=Axis(name="stage", ranks=(4, 5), rank=rank))
    assert state.parts()["model.counts_F"].writes == (rank == 0)


def test_every_stage_of_a_rank_is_saved() -> None:
    first, last = SmallModel(), nn.Module()
    last.register_buffer("bias_E", torch.zeros(3))
    assert {"model.counts_F", "model.bias_E"} < _state(first, modules=[first, last]).parts().keys()


def test_a_parameter_that_would_not_be_saved_is_noticed() -> None:
    model = SmallModel()
    model.up.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"up\.weight is not trained, and would not be saved"):
        _state(model).parts()


def test_a_tied_parameter_is_saved_once(store: CheckpointStore) -> None:
    def build(value: float) -> TrainState:
        embed, head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        head.weight = embed.weight
        nn.init.constant_(head.weight, value)
        return _state(nn.ModuleDict({"embed": embed, "head": head}))

    save_state(store, 1, build(2.0), notes={})
    restored = build(0.0)
    restore_state(store, 1, restored)
    assert restored.modules[0].get_parameter("head.weight").tolist() == [[2.0] * 3] * 3


def test_another_model_is_refused_and_every_field_that_differs_is_named(store: CheckpointStore) -> None:
    state = _fresh(torch.float32, seed=0)
    save_state(store, 7, state, notes={})
    other = {"layers": 3, "moe": {"top_k": 4, "experts": 16}, "heads": [1, 2], "mtp": 1}
    with pytest.raises(CheckpointError) as caught:
        restore_state(store, 7, replace(state, identity=other))
    assert str(caught.value) == (
        "the checkpoint of step 7 is of another model; got layers = 3, moe.experts = 16, mtp = 1; "
        "allowed: layers = 2, moe.experts = 8, mtp = None; "
        "fix: resume with the configuration that it was saved with, or start a new run"
    )


def test_a_checkpoint_does_not_depend_on_the_precision_of_the_model(store: CheckpointStore) -> None:
    saved = _fresh(torch.bfloat16, seed=0)
    _train(saved, 2)
    save_state(store, 1, saved, notes={})
    restored = _fresh(torch.float32, seed=1)
    restore_state(store, 1, restored)
    assert_equal(_tensors(restored), _tensors(saved))
    for parameter, rounded in zip(restored.modules[0].parameters(), saved.modules[0].parameters(), strict=True):
        assert torch.equal(parameter.to(rounded.dtype), rounded)


@pytest.mark.parametrize("settings", FORMATS, ids=_named)
def test_a_checkpoint_is_of_float32_values_whatever_the_format_of_the_state(
    store: CheckpointStore, settings: Optimizer
) -> None:
    saved = _fresh(torch.bfloat16, 0, settings)
    _train(saved, 2)
    save_state(store, 1, saved, notes={})
    other = _fresh(torch.bfloat16, seed=1)
    restore_state(store, 1, other)
    assert_equal(_tensors(other), _tensors(saved))
    save_state(store, 2, other, notes={})
    again = _fresh(torch.bfloat16, 2, settings)
    restore_state(store, 2, again)
    assert_equal(_tensors(again), _tensors(saved))
    assert_equal(again.modules[0].state_dict(), saved.modules[0].state_dict())


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(3), lambda: torch.tensor(random.gauss(0, 1)), lambda: torch.tensor(np.random.normal(size=3))],
    ids=["torch", "python", "numpy"],
)
def test_every_generator_continues_where_it_was(draw: Callable[[], Tensor]) -> None:
    draw()  # a Gaussian draw leaves a second number behind, which belongs to the state
    state = random_state()
    expected = [draw() for _ in range(700)]
    restore_random_state(state)
    assert all(torch.equal(draw(), value) for value in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_on_a_gpu_is_saved_and_restored(tmp_path: Path, asynchronous: bool) -> None:
    def build(seed: int) -> TrainState:
        return _state(SmallModel(torch.bfloat16, seed).cuda())

    def train(state: TrainState) -> None:
        state.optimizer.zero_gradients()
        state.modules[0](state.batches.next_batch().tokens_BS[0].cuda()).backward()
        state.optimizer.step(0.01, clip_divisor(state.optimizer.gradient_norm().item(), 1.0))

    store = CheckpointStore(tmp_path, keep=0, asynchronous=asynchronous)
    state = build(0)
    train(state)
    save_state(store, 1, state, notes={})
    expected = {name: tensor.detach().clone() for name, tensor in _tensors(state).items()}
    following = torch.rand(4, device="cuda")
    train(state)  # changes every tensor while the checkpoint is written
    store.close()
    restored = build(1)
    restore_state(CheckpointStore(tmp_path, keep=0, asynchronous=False), 1, restored)
    assert torch.equal(torch.rand(4, device="cuda"), following)
    assert_equal(_tensors(restored), expected)


def test_a_checkpoint_from_before_there_was_a_choice_has_its_default() -> None:
    check_same_model(0, {"heads": [1, 2], "rate": 1e-3}, {"heads": (1, 2), "rate": 1e-3})  # as before and after JSON
    today = {"model.layers": 2, "model.moe.moe_layer_freq": 1, "model.attention.qk_norm": "none"}
    check_same_model(7, {"model.layers": 2}, today)
    with pytest.raises(CheckpointError, match=r"another model; got model\.moe\.moe_layer_freq = 2; allowed: .* = None"):
        check_same_model(7, {"model.layers": 2}, today | {"model.moe.moe_layer_freq": 2})


def _state_on_ranks(axis: Axis, shard: str, seed: int, settings: Optimizer) -> TrainState:
    model = SmallModel(torch.bfloat16, seed).eval()  # ranks draw no random numbers
    held = [replace(holding, data=axis) for holding in holdings_of(model)]
    optimizer = MasterAdamW(held, settings, parallel=Parallel.model_validate({"shard": shard}), axes=Axes(world=axis))
    return TrainState(identity=IDENTITY, modules=[model], optimizer=optimizer, batches=CountingBatches(), stage=axis)


def _train_on_ranks(state: TrainState, ranks: int, steps: int) -> list[float]:
    """Every rank does the same part of the same batch, so that sums over 1, 2 or 4 ranks are equal to the bit."""
    losses = []
    for _ in range(steps):
        state.optimizer.zero_gradients()
        loss = state.modules[0](state.batches.next_batch().tokens_BS[0])
        (loss / ranks).backward()
        state.optimizer.reduce_gradients()
        state.optimizer.step(0.01)
        losses.append(loss.item())
    return losses


def _go_on(folder: str, shard: str, begin: int | None, steps: int, settings: Optimizer) -> list[float]:
    """Train on as many ranks as there are, from a checkpoint or from the start, and save."""
    axis = world() if dist.is_initialized() else ALONE.world
    state = _state_on_ranks(axis, shard, 0 if begin is None else 1, settings)
    store = CheckpointStore(Path(folder), keep=0, asynchronous=True, world=axis)
    if begin is not None:
        restore_state(store, begin, state)
    losses = _train_on_ranks(state, axis.size, steps)
    save_state(store, (begin or 0) + steps, state, notes={})
    store.close()
    return losses


@pytest.mark.parametrize("settings", [SETTINGS, FORMATS[-1]], ids=_named)
@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_a_run_that_changes_its_ranks_equals_one_that_does_not(
    ranks: Pool, tmp_path: Path, shard: Any, settings: Optimizer
) -> None:
    expected = _go_on(str(tmp_path / "alone"), shard, None, 8, settings)
    folder = str(tmp_path / "changing")
    assert ranks.run(2, _go_on, folder, shard, None, 3, settings) == [expected[:3]] * 2
    assert ranks.run(4, _go_on, folder, "optimizer", 3, 2, settings) == [expected[3:5]] * 4
    assert _go_on(folder, "none", 5, 3, settings) == expected[5:]
