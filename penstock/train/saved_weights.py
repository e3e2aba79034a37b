"""Reads and writes the weights of a checkpoint one piece at a time, so that models of any size pass.

A piece is a tensor, or one expert's part of it. The written form is a checkpoint of step 0 with `model.*` tensors only,
in bfloat16 where the source has no more bits; `training.initial_weights` starts a run with it, in any layout.

    WEIGHTS/run.toml                a run that starts with them
            weights/step-000000     tensors, facts.json, manifest.json: penstock/train/manifest.py
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, RunFolderError, system_errors
from penstock.base.files import sync, write_whole
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.layout.sharding import LocalSlice, Rectangle
from penstock.models.huggingface.tensor_file import Make, TensorEntry, fingerprint
from penstock.models.parameters import refresh_float8
from penstock.parallel.axes import Axis
from penstock.parallel.shard import ShardedTensor
from penstock.train.checkpoint import CheckpointStore
from penstock.train.manifest import (
    FACTS,
    CheckpointFiles,
    Piece,
    SavedTensor,
    WrittenFiles,
    check_tensors,
    check_there,
    files_of,
    merge,
    read_manifest,
    write_manifest,
    write_pieces,
)
from penstock.train.run_folder import RunFolder
from penstock.train.state import TrainState, check_same_model, identity_of

Value = TypeVar("Value")

RUN_FILE = "run.toml"
WEIGHTS = "weights"
STEP = 0
PREFIX = "model."
"""Of weights in a checkpoint."""

THREADS = 2
"""That read and convert weights while others are written; more read no faster from one disk."""


@dataclass(frozen=True, kw_only=True)
class WeightPiece:
    """A rectangle of a weight."""

    name: str  # of the weight in `Decoder.state_dict()`
    shape: tuple[int, ...]  # of the whole weight
    rectangle: Rectangle
    dtype: torch.dtype  # float32, or bfloat16 where that holds every bit of the source
    parts: Sequence[Make]  # return the values, some rows each; called when they are written

    def values(self) -> Tensor:
        parts = [part().flatten() for part in self.parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self.rectangle.sizes)


def write_weights(folder: Path, pieces: Iterable[WeightPiece], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint of step 0 with weights only. The caller makes the folder appear atomically.

    `pieces` are each weight exactly once, in any order; those of one source file should be close together. `facts` are
    JSON values. Raises OSError if a file cannot be written.
    """
    folder.mkdir(parents=True)
    written = WrittenFiles({}, {})

    def entries() -> Iterator[Piece]:
        for piece in pieces:
            name, rectangle = PREFIX + piece.name, piece.rectangle
            written.tensors.setdefault(name, SavedTensor(f"float32 {list(piece.shape)}"))
            entry = TensorEntry(name=f"{name}{rectangle}", dtype=piece.dtype, shape=rectangle.sizes, parts=piece.parts)
            yield name, rectangle, entry

    write_pieces(written, folder, entries(), "tensors", threads=THREADS)
    write_whole(folder / FACTS, json.dumps(facts, allow_nan=False, indent=1))
    written.files[FACTS] = fingerprint(folder / FACTS)
    write_manifest(folder, STEP, merge([written]))
    sync(folder)


class SavedWeights:
    """The weights of a checkpoint, while `open_weights` holds it open. Several threads may read at once."""

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor], files: CheckpointFiles) -> None:
        self._folder, self._tensors, self._files = folder, tensors, files

    def read(self, name: str, rectangle: Rectangle, dtype: torch.dtype = torch.float32) -> Tensor:
        """A rectangle of a weight, float32 or bfloat16. Raises a CheckpointError if it cannot be read."""
        saved = self._tensors[PREFIX + name]
        tensor = torch.empty(rectangle.sizes, dtype=dtype)
        piece = LocalSlice(offset=0, strides=tensor.stride(), whole=rectangle.begin, sizes=rectangle.sizes)
        part = ShardedTensor(tensor=tensor, shape=saved.shape, pieces=(piece,))
        with system_errors(CheckpointError, f"cannot read {self._folder}"):
            self._files.fill(PREFIX + name, part, saved)
        return tensor


@contextmanager
def open_weights(store: CheckpointStore, step: int, weights: Mapping[str, Tensor]) -> Iterator[SavedWeights]:
    """Weights of a checkpoint, by name in the model; `weights` have the shape of each wanted one.

    What was read counts only when the context ends without an error: until then files are compared with their
    checksums. Raises a CheckpointError if the checkpoint is missing or damaged, or lacks a weight.
    """
    folder = store.path(step)
    wanted = {PREFIX + name: f"float32 {list(weight.shape)}" for name, weight in weights.items()}
    with system_errors(CheckpointError, f"cannot read {folder}"):
        manifest = read_manifest(folder)
        check_tensors(folder, {name: manifest.kinds.get(name, "none") for name in wanted}, wanted)
        expected = {name: manifest.files[name] for name in files_of(manifest, wanted)}
        check_there(folder, expected)
    with CheckpointFiles(folder, expected, along=True) as files:
        yield SavedWeights(folder, manifest.tensors, files)
        with system_errors(CheckpointError, f"cannot read {folder}"):
            files.finish()


def open_saved(folder: Path) -> tuple[Run, CheckpointStore]:
    """Configuration and checkpoints of a run, or of a folder of `penstock import`, for reading.

    Raises a RunFolderError if the folder is neither, and a ConfigError if its configuration cannot be read.
    """
    run = load_run(str(config_of(folder)))
    return run, CheckpointStore(_checkpoints_of(str(folder)), keep=0, asynchronous=False)


def chosen_step(store: CheckpointStore, folder: Path, step: int | None) -> int:
    """`step`, or that of the newest checkpoint. Raises a CheckpointError if there is no such checkpoint."""
    if step is not None:
        store.read_facts(step)  # refuses a step without a checkpoint
        return step
    newest = store.latest()
    if newest is None:
        raise CheckpointError(f"{folder} has no checkpoint yet", fix="wait for the first one, or let the run end")
    return newest


def read_chosen(
    store: CheckpointStore, folder: Path, step: int | None, read: Callable[[int], Value]
) -> tuple[int, Value]:
    """The step of `chosen_step` and `read` of it; a run that trains may remove it meanwhile, then of the newest again.

    Raises a CheckpointError as `chosen_step` and `read` do, also if the checkpoint of a given step was removed.
    """
    wanted = chosen_step(store, folder, step)
    while True:
        try:
            return wanted, read(wanted)
        except CheckpointError:
            newest = chosen_step(store, folder, step)
            if newest == wanted:
                raise
        wanted = newest


def config_of(source: Path) -> Path:
    """The configuration of a run, or of a folder of `penstock import`. Raises a RunFolderError for other folders."""
    config = next((path for path in (RunFolder(source).config, source / RUN_FILE) if path.is_file()), None)
    if config is None:
        is_theirs = any(source.glob("*.safetensors"))
        fix = f"penstock import {source} --output NAME makes one" if is_theirs else "give one, such as runs/debug"
        raise RunFolderError(f"{source} is not the folder of a run", fix=fix)
    return config


def check_initial_weights(run: Run) -> None:
    """Raise a CheckpointError if the weights that a run starts with are missing, or of another model."""
    source = run.training.initial_weights
    if not source:
        return
    store = CheckpointStore(_checkpoints_of(source), keep=0, asynchronous=False)
    step = store.latest()
    if step is None:
        raise _no_weights(source)
    check_same_model(step, store.read_facts(step)["model"], identity_of(run))


def _checkpoints_of(source: str) -> Path:
    run, imported = RunFolder(Path(source)), Path(source, WEIGHTS)
    return imported if imported.is_dir() and not run.exists else run.checkpoints


def _no_weights(source: str) -> CheckpointError:
    allowed = "a folder of `penstock import`, or of a run with a checkpoint"
    return CheckpointError(f"training.initial_weights: {source} has no weights", allowed=allowed)


def load_initial_weights(source: str, state: TrainState, world: Axis) -> str:
    """Start a new run with the weights of another run, or with imported ones. All ranks of `world` call it together.

    `source` is a folder of `penstock import`, or of a run, whose newest checkpoint is used; an empty one changes
    nothing. Returns a line for the user. Raises a CheckpointError if there are no weights, or they are damaged or of
    another model.
    """
    if not source:
        return ""
    store = CheckpointStore(_checkpoints_of(source), keep=0, asynchronous=False, world=world)
    try:
        weights = {name: part for name, part in state.parts().items() if name.startswith(PREFIX)}
        newest = store.latest_of_all()
        while newest is not None:
            step = newest
            try:
                check_same_model(step, store.facts_of_all(step)["model"], state.identity)
                store.load(step, weights, all_of_it=False)
                break
            except CheckpointError:
                newest = store.latest_of_all()  # the other run may have saved it meanwhile, and removed the one before
                if newest == step:
                    raise
        else:
            raise _no_weights(source)
    finally:
        store.close()
    state.optimizer.loaded()
    refresh_float8(state.modules)
    return f"begins with the weights of step {step} of {source}; optimizer, schedule and data are new"
