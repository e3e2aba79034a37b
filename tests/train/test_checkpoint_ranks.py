"""Many ranks save one checkpoint and fail together; ranks of another layout, or one process, read it."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import CheckpointError
from penstock.parallel.shard import ShardedTensor, whole
from penstock.train import checkpoint
from penstock.train.checkpoint import CheckpointStore
from penstock.train.manifest import WrittenFiles
from tests.closeness import assert_equal
from tests.distributed.pool import Pool, WorkerError
from tests.parallel.test_collectives import world
from tests.train.layouts import Layout, ranks_of
from tests.train.test_checkpoint import _names, _parts

ON_4 = {
    "experts": Layout((4, 1, 1), (1, 1, 1)),
    "gate_up": Layout((2, 1), (2, 1), shards=2),
    "out": Layout((1, 2), (1, 1), copies=2),
    "norm": Layout((1,), (1,), shards=4),
    "first_stage": Layout((1, 1), (1, 1)),  # held by one rank alone
    "step": Layout((), (), copies=4),
}
ON_2 = {
    "experts": Layout((1, 2, 1), (1, 1, 1)),
    "gate_up": Layout((1, 1), (1, 1), shards=2),
    "out": Layout((2, 1), (1, 1)),
    "norm": Layout((1,), (1,), copies=2),
    "first_stage": Layout((1, 1), (1, 1)),
    "step": Layout((), (), copies=2),
}


def _tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "experts": torch.randn(4, 6, 2, generator=generator),
        "gate_up": torch.randn(8, 3, generator=generator),
        "out": torch.randn(4, 4, generator=generator).bfloat16(),
        "norm": torch.randn(6, generator=generator),
        "first_stage": torch.randn(5, 2, generator=generator),
        "step": torch.tensor(float(step)),
    }


def _store(folder: str, *, asynchronous: bool = True) -> CheckpointStore:
    return CheckpointStore(Path(folder), keep=2, asynchronous=asynchronous, world=world())


def _ours(step: int, layouts: dict[str, Layout]) -> dict[str, ShardedTensor]:
    return ranks_of(_tensors(step), layouts, dist.get_world_size())[dist.get_rank()]


def _save_while_training(folder: str) -> float:
    store = _store(folder)
    total = torch.ones(())
    for step in (1, 2, 3):
        parts = _ours(step, ON_4)
        store.save(step, parts, {"step": step, "rank": dist.get_rank()})
        for part in parts.values():
            part.tensor.zero_()
        dist.all_reduce(total)
    store.close()
    return total.item()


def _load(folder: str, step: int) -> dict[str, Any]:
    store = _store(folder)
    expected = _ours(step, ON_2)
    into = {
        name: ShardedTensor(tensor=torch.zeros_like(part.tensor), shape=part.shape, pieces=part.pieces)
        for name, part in expected.items()
    }
    facts = store.load(step, into)
    store.close()
    assert all(torch.equal(into[name].tensor, part.tensor) for name, part in expected.items())
    return facts


def _assert_holds(folder: Path, step: int) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in _tensors(step).items()}
    CheckpointStore(folder, keep=0, asynchronous=False).load(step, _parts(into))
    assert_equal(into, _tensors(step))


def test_four_ranks_save_while_they_train_and_others_read(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(4, _save_while_training, str(tmp_path)) == [64.0] * 4
    assert _names(tmp_path) == ["step-000002", "step-000003"]
    for step in (2, 3):
        _assert_holds(tmp_path, step)
    assert ranks.run(2, _load, str(tmp_path), 3) == [{"step": 3, "rank": 0}] * 2


def _fail_on_rank_1(folder: str, is_ours: bool) -> tuple[str, str]:
    """Type and line of the error of a save that fails on one rank, between two that do not."""
    store = _store(folder)
    store.save(1, _ours(1, ON_4), {})
    store.wait()

    def fail(*arguments: Any) -> WrittenFiles:
        write_parts(*arguments)
        raise AssertionError("what a mess") if is_ours else OSError(errno.ENOSPC, "No space left on device")

    write_parts = checkpoint.write_parts
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint, "write_parts", fail)
        store.save(2, _ours(2, ON_4), {})
        with pytest.raises((CheckpointError, AssertionError)) as caught:
            store.wait()
    left = _names(Path(folder))
    assert left == ["step-000001"], f"a failed save left {left}"
    dist.barrier()
    store.save(3, _ours(3, ON_4), {})
    store.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("is_ours", [False, True])
def test_an_error_on_one_rank_fails_the_save_on_all_and_leaves_nothing(
    ranks: Pool, is_ours: bool, tmp_path: Path
) -> None:
    got = ranks.run(4, _fail_on_rank_1, str(tmp_path), is_ours)
    if is_ours:
        assert got.pop(1) == ("AssertionError", "what a mess")
    reason = "AssertionError: what a mess" if is_ours else "No space left on device"
    kind = "CheckpointError" if is_ours else "NoSpaceError"
    assert set(got) == {(kind, f"cannot write {tmp_path}/step-000002; got {reason}")}
    assert _names(tmp_path) == ["step-000001", "step-000003"]
    _assert_holds(tmp_path, 3)


def _refused(folder: str, steps: list[int]) -> str:
    store = _store(folder, asynchronous=False)
    into = _ours(1, ON_2)
    for part in into.values():
        part.tensor.zero_()
    with pytest.raises(CheckpointError) as caught:
        store.load(steps[dist.get_rank()], into)
    assert len(set(steps)) == 1 or not any(part.tensor.any() for part in into.values())
    store.close()
    return str(caught.value)


def test_damage_is_refused_by_all_ranks_with_one_line(ranks: Pool, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    for step in (1, 2):
        store.save(step, _parts(_tensors(step)), {})
    path = tmp_path / "step-000002" / "tensors-00000-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    first, second = ranks.run(2, _refused, str(tmp_path), [2, 2])
    assert first == second
    assert f"{path} is damaged" in first

    first, second = ranks.run(2, _refused, str(tmp_path), [1, 2])
    assert first == second
    assert first.startswith("ranks want to read checkpoints of different steps; got [1, 2]; fix: ")


def _save_then_rank_1_is_killed(folder: str) -> None:
    store = _store(folder, asynchronous=False)
    store.save(1, _ours(1, ON_2), {})
    if dist.get_rank() == 1:
        patch = pytest.MonkeyPatch()
        patch.setattr(checkpoint, "write_parts", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    store.save(2, _ours(2, ON_2), {})


def test_a_rank_that_is_killed_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    pool = Pool(grace=20)
    try:
        with pytest.raises(WorkerError, match="on rank 1 of 2:\nthe process died") as caught:
            pool.run(2, _save_then_rank_1_is_killed, str(tmp_path))
        assert "LostRankError: another rank has ended" in str(caught.value)
    finally:
        pool.close()
    assert [name for name in _names(tmp_path) if not name.startswith(".")] == ["step-000001"]
    _assert_holds(tmp_path, 1)
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    store.save(3, {"w": whole(torch.ones(2))}, {})
    assert _names(tmp_path) == ["step-000001", "step-000003"]


def _newest_seen(folder: str, hidden: list[list[int]]) -> int | str | None:
    """What ranks agree on, or their error, if each of them does not see some steps."""
    store = _store(folder, asynchronous=False)
    with pytest.MonkeyPatch.context() as patch:
        steps = [step for step in store.steps() if step not in hidden[dist.get_rank()]]
        patch.setattr(store, "steps", lambda: steps)
        try:
            return store.latest_of_all()
        except CheckpointError as error:
            return str(error)
        finally:
            store.close()


def test_ranks_go_on_with_one_checkpoint_or_name_the_rank_that_does_not_see_it(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, _newest_seen, str(tmp_path), [[], []]) == [None, None]
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    for step in (1, 2):
        store.save(step, {"w": whole(torch.ones(2))}, {})
    assert ranks.run(2, _newest_seen, str(tmp_path), [[], [1]]) == [2, 2]
    for hidden, rank in (([[], [2]], 1), ([[1, 2], []], 0)):
        first, second = ranks.run(2, _newest_seen, str(tmp_path), hidden)
        assert first == second
        assert f"not every rank sees {tmp_path}/step-000002; got 1 of 2 that do not: rank {rank}; fix: " in str(first)
