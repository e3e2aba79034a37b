"""Checkpoints of a run: whole or not there, the last few of them, written while training goes on.

`save` goes through five phases; the last four run in a thread if the store is asynchronous:

    1. stage     copy tensors to host memory (pinned for GPUs), so that training may change them
    2. write     tensors by torch.distributed.checkpoint as safetensors, everything else as JSON, into
                 `.step-000123.partial-PID`, and sync all of it to disk
    3. seal      manifest.json: sizes and checksums (penstock/train/manifest.py)
    4. publish   rename to `step-000123` and sync the folder
    5. prune     hide (rename), then delete what is older than the last `keep`

A name without a leading dot therefore belongs to a whole checkpoint, wherever the process is killed. What a killed
process leaves under hidden names is deleted by the next save, and not sooner: whoever only reads must not touch what
another process may be writing.

One save runs at a time; the next one waits for it. An error in the thread is raised by the next `save`, `load`, `wait`
or `close`. A failed save leaves no trace, and older checkpoints are deleted only after a newer one is whole.

Nothing is ever unpickled: tensors are read by safetensors, the rest by the json module.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from penstock.base.errors import CheckpointError
from penstock.train.manifest import (
    FACTS,
    check_files,
    check_no_more_tensors,
    check_tensors,
    describe,
    parse_json,
    read_manifest,
    write_manifest,
)
from penstock.train.run_folder import write_whole

FILE_BYTES = 256 << 20
"""Tensors that share a file. The writer builds a file in memory first and holds Python's lock while it copies."""


class CheckpointStore:
    """The checkpoints in one folder, which is made by the first save.

    Args:
        folder: holds `step-000123`, one folder for each checkpoint.
        keep: how many stay after a save, the newest first; 0 keeps all.
        asynchronous: write in the background. Costs host memory of the size of a checkpoint.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._running: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}
        # To have no process group is on purpose. Filters set just around the calls would not be safe with threads.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending. Only names are looked at."""
        if not self._folder.is_dir():
            return []
        matches = (re.fullmatch(r"step-([0-9]{6,})", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """The newest step that has a checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step, which may not be there."""
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Save a checkpoint; one of the same step is replaced.

        Args:
            step: optimizer steps done.
            tensors: of any type and shape, on any device; no two of them share memory. All are copied before this
                returns (asynchronous) or written (else).
            facts: everything else, as JSON knows it.

        Raises:
            CheckpointError: this save, or the one before if that ran in the background, could not be written.
        """
        self.wait()
        text = json.dumps(facts, allow_nan=False, indent=1)
        if self._thread is None:
            self._write(step, {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, text)
        else:
            self._stage(tensors)
            self._running = self._thread.submit(self._write, step, self._staged, text)

    def load(self, step: int, into: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill tensors from a checkpoint. None of them is touched unless all of the checkpoint is good.

        Args:
            step: which checkpoint.
            into: exactly the tensors that were saved: names, types, shapes; on any device.

        Returns:
            The facts that were saved.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, of another program, version or model, or cannot
                be read.
        """
        self.wait()
        folder = self._existing(step)
        with _user_errors(f"cannot read {folder}"):
            manifest = read_manifest(folder)
            check_tensors(folder, manifest.tensors, describe(into))
            check_no_more_tensors(folder, manifest)
            check_files(folder, manifest.files)
            facts = _facts(folder)
            targets = {name: tensor.detach() for name, tensor in into.items()}
            state_dict_loader.load(targets, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
            return facts

    def read_facts(self, step: int) -> dict[str, Any]:
        """Facts of a checkpoint, without its tensors.

        Raises:
            CheckpointError: as for `load`, as far as facts are concerned.
        """
        folder = self._existing(step)
        with _user_errors(f"cannot read {folder}"):
            manifest = read_manifest(folder)
            check_files(folder, {FACTS: manifest.files[FACTS]})
            return _facts(folder)

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: the save that ran in the background failed. Said once.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread; there are no saves after that.

        Raises:
            CheckpointError: as for `wait`.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _existing(self, step: int) -> Path:
        folder = self.path(step)
        if not folder.is_dir():
            steps = ", ".join(str(step) for step in self.steps())
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._folder}", allowed=steps or "none")
        return folder

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Phase 1: copy tensors into host memory that is kept for the next save, since pinning is slow."""
        if describe(tensors) != describe(self._staged):
            self._staged = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                for name, tensor in tensors.items()
            }
        for name, copy in self._staged.items():
            copy.copy_(tensors[name].detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _write(self, step: int, tensors: Mapping[str, Tensor], facts: str) -> None:
        """Phases 2 to 5."""
        partial = self._hidden(step, "partial")
        with _user_errors(f"cannot write {self.path(step)}"):
            try:
                self._remove_leftovers()
                partial.mkdir(parents=True)
                _write_tensors(partial, tensors)
                write_whole(partial / FACTS, facts)
                write_manifest(partial, step, describe(tensors))
                _sync_folder(partial)
                self._publish(step, partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # not there any more if all went well
            if self._keep:
                for old in [old for old in self.steps() if old <= step][: -self._keep]:
                    self._remove(old)

    def _publish(self, step: int, partial: Path) -> None:
        # A folder cannot be renamed over another. Between the two renames neither is there, for microseconds.
        replaced = self._hidden(step, "replaced")
        if self.path(step).exists():
            self.path(step).rename(replaced)
        partial.rename(self.path(step))
        _sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, which takes time, so that it is never half there."""
        hidden = self._hidden(step, "removed")
        self.path(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _hidden(self, step: int, why: str) -> Path:
        return self._folder / f".{self.path(step).name}.{why}-{os.getpid()}"

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Turn what the system refuses (no space, no permission, a bad disk) into one line for the user."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, OSError):
            raise cause from error
        raise CheckpointError(what, got=cause.strerror or cause) from cause
    except OSError as error:
        raise CheckpointError(what, got=error.strerror or error) from error


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files_of(tensors), save_distributed=True)
    # Copying ahead runs on the thread's current GPU, which in a new thread is the first one and perhaps not ours.
    writer.per_thread_copy_ahead = 0
    state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=True)


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file for each tensor, from 1: in order, a new file when the next tensor would not fit."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += tensor.nbytes
    return files


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = parse_json(folder / FACTS)
    return facts


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
