"""A run that some ranks saved goes on alone, and the other way round, with the very same numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.config.parallel import Parallel
from penstock.parallel.axes import ALONE, Axis
from penstock.train.checkpoint import CheckpointStore
from penstock.train.optimizer import MasterAdamW
from penstock.train.state import TrainState, restore_state, save_state
from tests.distributed.pool import Pool
from tests.parallel.test_collectives import world
from tests.train.small_model import SETTINGS, SmallModel, holdings_of
from tests.train.test_state import IDENTITY, CountingBatches


def _state(axis: Axis, shard: str, seed: int) -> TrainState:
    model = SmallModel(torch.bfloat16, seed).eval()  # ranks draw no random numbers
    settings = Parallel.model_validate({"shard": shard})
    held = [replace(holding, data=axis) for holding in holdings_of(model)]
    optimizer = MasterAdamW(held, SETTINGS, parallel=settings, world=axis)
    return TrainState(identity=IDENTITY, modules=[model], optimizer=optimizer, batches=CountingBatches(), stage=axis)


def _train(state: TrainState, ranks: int, steps: int) -> list[float]:
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


def _go_on(folder: str, shard: str, begin: int | None, steps: int) -> list[float]:
    """Train on as many ranks as there are, from a checkpoint or from the start, and save."""
    axis = world() if dist.is_initialized() else ALONE.world
    state = _state(axis, shard, seed=0 if begin is None else 1)
    store = CheckpointStore(Path(folder), keep=0, asynchronous=True, world=axis)
    if begin is not None:
        restore_state(store, begin, state)
    losses = _train(state, axis.size, steps)
    save_state(store, (begin or 0) + steps, state, notes={})
    store.close()
    return losses


@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_a_run_that_changes_its_ranks_equals_one_that_does_not(ranks: Pool, tmp_path: Path, shard: Any) -> None:
    expected = _go_on(str(tmp_path / "alone"), shard, None, 8)
    folder = str(tmp_path / "changing")
    on_2 = ranks.run(2, _go_on, folder, shard, None, 3)
    on_4 = ranks.run(4, _go_on, folder, "optimizer", 3, 2)
    alone = _go_on(folder, "none", 5, 3)
    assert on_2 == [expected[:3]] * 2
    assert on_4 == [expected[3:5]] * 4
    assert alone == expected[5:]
