"""Checkpoints are complete or absent after every failure or kill, and reading one never executes code."""

import errno
import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, NoSpaceError
from penstock.layout.sharding import LocalSlice
from penstock.models.huggingface.tensor_file import fingerprint
from penstock.parallel.shard import ShardedTensor, whole
from penstock.train import checkpoint
from penstock.train.checkpoint import CheckpointStore
from penstock.train.manifest import FACTS, MANIFEST, WrittenFiles, read_manifest, write_manifest
from tests.closeness import assert_equal


def _tensors(step: int) -> dict[str, Tensor]:
    """Every kind of tensor that a run has, with values that tell the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "step": torch.tensor(float(step)),
        "model.weight": torch.randn(30, 7, generator=generator),
        "model.low": torch.randn(5, generator=generator).bfloat16(),
        "model.counts": torch.arange(4) + step,
        "model.mask": torch.tensor([True, False]),
        "model.nothing": torch.zeros(0, 3),
        "model.turned": torch.randn(3, 5, generator=generator).t(),
        "moment1.a.0.b": torch.randn(2, 3, 4, generator=generator),
    }


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, ShardedTensor]:
    return {name: whole(tensor) for name, tensor in tensors.items()}


def _facts(step: int) -> dict[str, Any]:
    return {"step": step, "loader": {"document": 3, "offset": 10**12}, "share": 0.1, "name": "\u00e9", "nothing": None}


def _assert_holds(store: CheckpointStore, step: int) -> None:
    """The checkpoint of a step is what `_tensors` and `_facts` give."""
    into = {name: torch.full_like(tensor, 1) for name, tensor in _tensors(step).items()}
    assert store.load(step, _parts(into)) == _facts(step)
    assert_equal(into, _tensors(step))


def _save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, _parts(_tensors(step)), _facts(step))
    store.wait()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2, asynchronous=request.param)
    yield store
    store.close()


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointStore:
    """A store with steps 1 and 2."""
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    _save(store, 1, 2)
    return store


def test_what_is_saved_is_loaded_in_place_bit_for_bit(store: CheckpointStore) -> None:
    assert store.latest() is None
    _save(store, 10, 2_000_000)
    assert (store.steps(), store.latest()) == ([10, 2_000_000], 2_000_000)
    _assert_holds(store, 10)
    _assert_holds(store, 2_000_000)
    assert store.read_facts(10) == _facts(10)


def test_the_last_few_are_kept(store: CheckpointStore) -> None:
    _save(store, 1, 2, 3, 4)
    assert store.steps() == [3, 4]
    assert _names(store.path(4).parent) == ["step-000003", "step-000004"]
    assert {path.suffix for path in store.path(4).iterdir()} == {".safetensors", ".json"}
    _save(store, 2)  # a run that went back keeps what it saves
    for name in ("step-12", "step-000009.old", ".step-000009.partial-1"):
        (store.path(4).parent / name).mkdir()
    assert store.steps() == [2, 3, 4]


def test_checkpoints_of_every_so_many_steps_are_kept_beyond_the_last_few(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, asynchronous=False, keep_every=4)
    _save(store, *range(1, 12))
    assert store.steps() == [4, 8, 10, 11]
    _assert_holds(store, 4)


def test_a_copy_that_is_made_while_checkpoints_are_written_and_pruned_is_whole_or_refused(tmp_path: Path) -> None:
    source, over = tmp_path / "source", Event()

    def save() -> None:
        store = CheckpointStore(source, keep=1, asynchronous=True)
        for step in itertools.count(1):
            if over.is_set():
                break
            _save(store, step, step)  # the second replaces the first
        store.close()

    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(save)
        whole_ones = refused = 0
        for number in itertools.count():
            assert number < 2000 and not saving.done(), "the store does not save"
            target = tmp_path / f"copy-{number}"
            with suppress(OSError, shutil.Error):  # a file that was deleted; `cp -r` goes on with the next one too
                shutil.copytree(source, target)
            copy = CheckpointStore(target, keep=0, asynchronous=False)
            for step in copy.steps():
                try:
                    _assert_holds(copy, step)
                    whole_ones += 1
                except CheckpointError:
                    refused += 1
            if whole_ones > 5 and number > 20:
                break
        over.set()
        saving.result()


def test_a_checkpoint_of_the_same_step_is_replaced(saved: CheckpointStore) -> None:
    saved.save(2, _parts(_tensors(5)), _facts(5))
    into = _tensors(0)
    assert saved.load(2, _parts(into)) == _facts(5)
    assert_equal(into, _tensors(5))
    assert _names(saved.path(2).parent) == ["step-000001", "step-000002"]


def test_training_may_change_tensors_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = Event()
    write_parts = checkpoint.write_parts

    def wait_and_write(*arguments: Any) -> WrittenFiles:
        may_write.wait()
        return write_parts(*arguments)

    monkeypatch.setattr(checkpoint, "write_parts", wait_and_write)
    store = CheckpointStore(tmp_path, keep=0, asynchronous=True)
    tensors, facts = _tensors(1), _facts(1)
    store.save(1, _parts(tensors), facts)
    assert store.steps() == []
    for tensor in tensors.values():
        tensor.zero_()
    facts["loader"]["offset"] = -1
    may_write.set()
    store.wait()
    _assert_holds(store, 1)
    store.close()


def test_each_save_writes_its_own_values(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0, asynchronous=True)
    _save(store, *range(5))
    store.save(5, {"another": whole(torch.ones(2))}, {})  # other tensors need other buffers
    store.close()
    for step in range(5):
        _assert_holds(store, step)
    another = torch.zeros(2)
    store.load(5, {"another": whole(another)})
    assert another.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("holds", "keep", "keep_every", "left"),
    [
        (3, 3, 0, [2, 3, 4]),  # rotation would have needed room for four
        (2, 3, 0, [3, 4]),
        (1, 3, 0, [1]),  # the newest never goes
        (2, 3, 1, [1, 2]),
        (2, 0, 0, [1, 2]),
    ],
)
def test_on_a_full_disk_older_checkpoints_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: int, keep: int, keep_every: int, left: list[int]
) -> None:
    write_parts = checkpoint.write_parts

    def limited(folder: Path, *arguments: Any) -> WrittenFiles:
        if len(store.steps()) >= holds:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_parts(folder, *arguments)

    def usage(folder: Path) -> Mock:
        size = sum(file.stat().st_size for file in store.path(1).parent.rglob("*") if file.is_file())
        return Mock(free=holds * size // max(1, len(store.steps())) - size)

    monkeypatch.setattr(checkpoint, "write_parts", limited)
    monkeypatch.setattr("shutil.disk_usage", usage)
    store = CheckpointStore(tmp_path, keep=keep, keep_every=keep_every, asynchronous=False)
    for step in (1, 2, 3, 4):
        with nullcontext() if step in left or step <= holds or left[-1] == 4 else pytest.raises(NoSpaceError):
            _save(store, step)
    assert store.steps() == left
    _assert_holds(store, left[-1])


def test_a_folder_that_cannot_be_looked_at_frees_nothing(
    saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "write_parts", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr("shutil.disk_usage", Mock(side_effect=FileNotFoundError))
    with pytest.raises(NoSpaceError):
        _save(saved, 3)
    assert saved.steps() == [1, 2]


@pytest.mark.parametrize("phase", ["write_parts", "write_whole", "fingerprint", "write_manifest", "sync"])
def test_a_failure_in_any_phase_leaves_no_trace(
    saved: CheckpointStore, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, phase, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CheckpointError, match=r"cannot write .*step-000003; got No space left on device"):
            _save(saved, 3)
    assert _names(saved.path(1).parent) == ["step-000001", "step-000002"]
    _save(saved, 4)
    _assert_holds(saved, 4)


@pytest.mark.parametrize("call", ["save", "load", "wait", "close"])
def test_a_failure_in_the_background_is_raised_once_by_the_next_call(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=0, asynchronous=True)
    arguments: dict[str, tuple[object, ...]] = {"save": (2, _parts(_tensors(2)), {}), "load": (1, _parts(_tensors(1)))}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        store.save(1, _parts(_tensors(1)), {})
        with pytest.raises(CheckpointError, match=r"step-000001; got Input/output error"):
            getattr(store, call)(*arguments.get(call, ()))
    store.wait()
    store.close()


def test_facts_that_json_does_not_know_are_refused_at_once(store: CheckpointStore) -> None:
    for value in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            store.save(1, _parts(_tensors(1)), {"value": value})
    assert store.steps() == []


def test_a_step_without_checkpoint_is_refused_with_those_that_have_one(saved: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*; allowed: 1, 2"):
        saved.load(5, _parts(_tensors(5)))
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        saved.read_facts(5)


@pytest.mark.parametrize("name", ["*.safetensors", FACTS, MANIFEST])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused_and_fills_nothing(saved: CheckpointStore, name: str, how: str) -> None:
    path = next(saved.path(2).glob(name))
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 4  # one bit
    path.write_bytes(content[:-3] if how == "cut" else content)
    if how == "gone":
        path.unlink()
    into = {name: torch.zeros_like(tensor) for name, tensor in _tensors(2).items()}
    with pytest.raises(CheckpointError, match=f"{path.name}"):
        saved.load(2, _parts(into))
    assert not any(tensor.any() for tensor in into.values())
    _assert_holds(saved, 1)


def test_a_file_of_tensors_that_was_slipped_in_is_refused(saved: CheckpointStore) -> None:
    source = next(saved.path(1).glob("*.safetensors"))
    (saved.path(2) / "zzz.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match=r"was not saved with it; got zzz\.safetensors"):
        saved.load(2, _parts(_tensors(2)))


@pytest.mark.parametrize("change", ["flip", "cut", "swap"])
def test_a_damaged_file_that_the_manifest_vouches_for_is_one_line_too(saved: CheckpointStore, change: str) -> None:
    """A forged manifest with valid checksums raises nothing but a CheckpointError."""
    (path,) = saved.path(2).glob("*.safetensors")
    content = path.read_bytes()
    changed = {"flip": b"\xff" * 8 + content[8:], "cut": content[:9], "swap": b"\x10" + content[1:]}[change]
    path.write_bytes(changed)
    written = read_manifest(saved.path(2))
    files = written.files | {path.name: fingerprint(path)}
    write_manifest(saved.path(2), 2, WrittenFiles(written.tensors, files))
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged; got "):
        saved.load(2, _parts(_tensors(2)))


def test_parts_that_are_not_the_whole_are_our_fault_and_leave_no_trace(saved: CheckpointStore) -> None:
    half = ShardedTensor(tensor=torch.zeros(2, 3), shape=(4, 3), pieces=(LocalSlice(0, (3, 1), (0, 0), (2, 3)),))
    with pytest.raises(AssertionError, match=r"do not write half once, float32 \[4, 3\]: 6 of 12 elements are there"):
        saved.save(3, {"half": half}, {})
    with pytest.raises(AssertionError, match="unwritten once, .*: 0 of 2 elements"):
        saved.save(3, {"unwritten": whole(torch.zeros(2), writes=False)}, {})
    with pytest.raises(AssertionError, match="wrong: rectangles of 6 elements in 9"):
        saved.save(3, {"wrong": replace(half, tensor=torch.zeros(3, 3))}, {})
    assert _names(saved.path(1).parent) == ["step-000001", "step-000002"]


def test_some_of_the_tensors_can_be_loaded(saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(30, 7)
    assert saved.load(2, {"model.weight": whole(weight)}, all_of_it=False) == _facts(2)
    assert torch.equal(weight, _tensors(2)["model.weight"])
    with pytest.raises(CheckpointError, match=r"tensor model\.weight; got float32 \[30, 7\]"):
        saved.load(2, {"model.weight": whole(torch.zeros(7))}, all_of_it=False)
    with pytest.raises(CheckpointError, match=r"tensor model\.more; got none in the checkpoint"):
        saved.load(2, {"model.more": whole(torch.zeros(7))}, all_of_it=False)


def test_what_waits_in_host_memory_shares_blocks_of_sizes_that_pinning_does_not_round(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.ones(3, 1 << 13) for number in range(40)}
    tensors |= {f"low{number}": torch.ones(3, 1 << 13).bfloat16() for number in range(40)}
    store = CheckpointStore(tmp_path, keep=0, asynchronous=True)
    store.save(1, _parts(tensors), {})
    store.close()
    storages = [tensor.untyped_storage() for tensor in store._staged.values()]
    blocks = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert all(size.bit_count() == 1 for size in blocks.values())
    assert sum(blocks.values()) < 1.15 * sum(tensor.nbytes for tensor in tensors.values())


ROOT = Path(__file__).resolve().parents[2]

SAVES_UNTIL_KILLED = """
import itertools, pathlib, sys
from penstock.train.checkpoint import CheckpointStore
from tests.train.test_checkpoint import _facts, _parts, _tensors
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=2, asynchronous=True)
for step in itertools.count(1):
    store.save(step, _parts(_tensors(step)), _facts(step))
"""

DIES_AT_EACH_PHASE = """
import os, pathlib, signal, sys
from penstock.train import checkpoint
from tests.train.test_checkpoint import _facts, _parts, _save, _tensors
store = checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=False)
_save(store, 1)
def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)
for phase in ("write_parts", "write_whole", "write_manifest", "sync", "CheckpointStore._publish"):
    if os.fork() == 0:
        owner, _, name = phase.rpartition(".")
        setattr(getattr(checkpoint, owner) if owner else checkpoint, name, die)
        _save(store, 2)
        os._exit(3)
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL, phase
    names = sorted(os.listdir(sys.argv[1]))
    assert len(names) == 2 and names[0].startswith(".step-000002.partial-") and names[1] == "step-000001", names
    checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=False).load(1, _parts(_tensors(0)))
_save(store, 3)
assert os.listdir(sys.argv[1]) == ["step-000003"], "leftovers stay"
unfinished = checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=True)
unfinished.save(4, _parts(_tensors(4)), _facts(4))
print("alive")
"""


def _python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_process_killed_in_any_phase_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = _python(DIES_AT_EACH_PHASE, str(tmp_path))
    assert process.communicate()[0] == "alive\n"
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    assert store.steps() == [4], "a process that ends normally first completes its save"
    _assert_holds(store, 4)


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = _python(SAVES_UNTIL_KILLED, str(tmp_path))
    while not any(tmp_path.glob("step-000003")) or not any(tmp_path.glob(".step-*.partial-*")):
        assert process.poll() is None, "the process ended by itself"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    store = CheckpointStore(tmp_path, keep=2, asynchronous=False)
    steps = store.steps()
    assert len(steps) >= 2
    for step in steps:
        _assert_holds(store, step)
    _save(store, 10**6)
    assert _names(tmp_path) == [f"step-{steps[-1]:06d}", "step-1000000"]
