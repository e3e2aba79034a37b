"""A run that is stopped and continued is, bit for bit, the run that was not stopped."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, DataError
from penstock.data.batch import Batch
from penstock.train.checkpoint import CheckpointStore
from penstock.train.optimizer import MasterAdamW
from penstock.train.state import (
    TrainState,
    check_same_model,
    random_state,
    restore_random_state,
    restore_state,
    save_state,
)
from tests.train.small_model import SETTINGS, SmallModel, tokens

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


def _fresh(dtype: torch.dtype, seed: int) -> TrainState:
    model = SmallModel(dtype, seed)
    random.seed(seed)
    np.random.seed(seed)
    optimizer = MasterAdamW(model.named_parameters(), SETTINGS)
    return TrainState(identity=IDENTITY, model=model, optimizer=optimizer, batches=CountingBatches())


def _train(state: TrainState, steps: int) -> list[float]:
    """Losses of some steps, in which every random generator has its part."""
    losses = []
    for _ in range(steps):
        state.optimizer.zero_gradients()
        loss = state.model(state.batches.next_batch().tokens_BS[0]) * (1.0 + random.random() + np.random.normal())
        loss.backward()
        state.optimizer.clip(state.optimizer.gradient_norm(), 1.0)
        state.optimizer.step(0.01)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, dtype: torch.dtype, asynchronous: bool) -> None:
    whole = _fresh(dtype, seed=0)
    expected = _train(whole, 6)

    store = CheckpointStore(tmp_path, keep=1, asynchronous=asynchronous)
    first = _fresh(dtype, seed=0)
    losses = _train(first, 3)
    save_state(store, 3, first, notes={"tokens_seen": 72})
    _train(first, 2)  # goes on while the checkpoint is written
    store.close()

    second = _fresh(dtype, seed=1)
    store = CheckpointStore(tmp_path, keep=1, asynchronous=asynchronous)
    assert restore_state(store, 3, second) == {"tokens_seen": 72}
    assert losses + _train(second, 3) == expected
    store.close()
    for name, tensor in whole.tensors().items():
        assert torch.equal(second.tensors()[name], tensor), name


def test_a_checkpoint_of_before_the_first_step_is_a_good_one(tmp_path: Path) -> None:
    expected = _train(_fresh(torch.bfloat16, seed=0), 2)
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    save_state(store, 0, _fresh(torch.bfloat16, seed=0), notes={})
    resumed = _fresh(torch.bfloat16, seed=1)
    restore_state(store, 0, resumed)
    assert _train(resumed, 2) == expected


def test_all_that_lasts_is_saved_and_nothing_else() -> None:
    state = _fresh(torch.bfloat16, seed=0)
    names = {name.removeprefix("model.") for name in state.tensors() if name.startswith("model.")}
    assert names == state.model.state_dict().keys()
    assert "counts_F" in names
    assert "scratch" not in names


def test_a_tied_parameter_is_saved_once(tmp_path: Path) -> None:
    def build(value: float) -> TrainState:
        embed, head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        head.weight = embed.weight
        nn.init.constant_(head.weight, value)
        model = nn.ModuleDict({"embed": embed, "head": head})
        optimizer = MasterAdamW(model.named_parameters(), SETTINGS)
        return TrainState(identity=IDENTITY, model=model, optimizer=optimizer, batches=CountingBatches())

    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    save_state(store, 1, build(2.0), notes={})
    restored = build(0.0)
    restore_state(store, 1, restored)
    assert restored.model.get_parameter("head.weight").tolist() == [[2.0] * 3] * 3


def test_another_model_is_refused_and_every_field_that_differs_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    state = _fresh(torch.float32, seed=0)
    save_state(store, 7, state, notes={})
    other = {"layers": 3, "moe": {"top_k": 4, "experts": 16}, "heads": [1, 2], "mtp": 1}
    changed = TrainState(identity=other, model=state.model, optimizer=state.optimizer, batches=state.batches)
    with pytest.raises(CheckpointError) as caught:
        restore_state(store, 7, changed)
    assert str(caught.value) == (
        "the checkpoint of step 7 is of another model; got layers = 3, moe.experts = 16, mtp = 1; "
        "allowed: layers = 2, moe.experts = 8, mtp = None; "
        "fix: resume with the configuration that it was saved with, or start a new run"
    )


def test_the_same_model_is_the_same_before_and_after_json() -> None:
    check_same_model(0, {"heads": [1, 2], "rate": 1e-3}, {"heads": (1, 2), "rate": 1e-3})


def test_other_precision_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    save_state(store, 1, _fresh(torch.bfloat16, seed=0), notes={})
    with pytest.raises(CheckpointError, match=r"tensor model\.embed\.weight .*got bfloat16 .* allowed: float32"):
        restore_state(store, 1, _fresh(torch.float32, seed=0))


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_on_a_gpu_is_saved_and_restored(tmp_path: Path, asynchronous: bool) -> None:
    def build(seed: int) -> TrainState:
        model = SmallModel(torch.bfloat16, seed).cuda()
        optimizer = MasterAdamW(model.named_parameters(), SETTINGS)
        return TrainState(identity=IDENTITY, model=model, optimizer=optimizer, batches=CountingBatches())

    def train(state: TrainState) -> None:
        state.optimizer.zero_gradients()
        state.model(state.batches.next_batch().tokens_BS[0].cuda()).backward()
        state.optimizer.clip(state.optimizer.gradient_norm(), 1.0)
        state.optimizer.step(0.01)

    store = CheckpointStore(tmp_path, keep=0, asynchronous=asynchronous)
    state = build(0)
    train(state)
    save_state(store, 1, state, notes={})
    expected = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    following = torch.rand(4, device="cuda")
    train(state)  # changes every tensor while the checkpoint is written
    store.close()
    restored = build(1)
    restore_state(CheckpointStore(tmp_path, keep=0, asynchronous=False), 1, restored)
    assert torch.equal(torch.rand(4, device="cuda"), following)
    for name, tensor in restored.tensors().items():
        assert torch.equal(tensor, expected[name]), name
