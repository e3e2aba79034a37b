"""Checkpoints of a run: whole or not there, the last few of them, written while training goes on, read by any layout.

`save` goes through five phases; the last four run in a thread if the store is asynchronous:

    1. stage     each rank copies what it writes to host memory (pinned for GPUs), so that training may change it
    2. write     each rank writes its rectangles as safetensors into `.step-000123.partial-PID`, and syncs them to disk
    3. seal      the first rank writes facts.json and manifest.json (penstock/train/manifest.py)
    4. publish   it renames the folder to `step-000123` and syncs the folder above
    5. prune     it hides (renames), then deletes what is older than the last `keep`

A name without a leading dot therefore belongs to a whole checkpoint, wherever a process is killed. What a killed
process leaves under hidden names is deleted by the next save, and not sooner: whoever only reads must not touch what
another process may be writing.

The ranks share a file system and end every phase together: an error on one is an error on all, with the same line. One
save runs at a time; the next one waits for it. An error in the thread is raised by the next `save`, `load`, `wait` or
`close`. A failed save leaves no trace, and older checkpoints are deleted only after a newer one is whole.

Nothing is ever unpickled: tensors are read by safetensors, the rest by the json module; ranks, too, talk in JSON.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.base.errors import CheckpointError, PenstockError
from penstock.parallel.axes import ALONE, Axis
from penstock.parallel.collectives import JsonGroup
from penstock.parallel.copies import host_tensors
from penstock.parallel.shard import ShardedTensor
from penstock.train.manifest import (
    FACTS,
    WrittenFiles,
    check_files,
    check_no_more_tensors,
    check_tensors,
    describe,
    files_of,
    fill_parts,
    merge,
    parse_json,
    read_manifest,
    write_manifest,
    write_parts,
)
from penstock.train.run_folder import sync, write_whole
from penstock.train.tensor_files import fingerprint


class CheckpointStore:
    """The checkpoints in one folder, which is made by the first save.

    With many ranks, all of them make the store and call `latest_of_all`, `save`, `load`, `wait` and `close` in the same
    order. The other methods look at the folder only, each rank for itself.

    Args:
        folder: holds `step-000123`, one folder for each checkpoint; all ranks see it.
        keep: how many stay after a save, the newest first; 0 keeps all.
        asynchronous: write in the background. Costs host memory for what the rank writes, in the blocks of
            `penstock.parallel.copies.host_tensors`.
        world: all ranks of the run.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool, world: Axis = ALONE.world) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._running: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}
        # Used by the thread while it runs, and else by `load`: never by two at once.
        self._messages = JsonGroup(world)
        self._owner = self._messages.from_first(os.getpid())

    @property
    def rank(self) -> int:
        """Ours among those that save together."""
        return self._messages.rank

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending. Only names are looked at."""
        if not self._folder.is_dir():
            return []
        matches = (re.fullmatch(r"step-([0-9]{6,})", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        """The newest step that has a checkpoint."""
        return max(self.steps(), default=None)

    def latest_of_all(self) -> int | None:
        """The newest step that has a checkpoint, the same on all ranks, which call this together.

        A network file system may show some ranks an old list. Each for itself, they would go different ways, and wait
        for each other; or the first, which cuts off figures that come again, would start anew.

        Raises:
            CheckpointError: some ranks do not see the newest, the folder cannot be read, or as for `wait`.
        """
        self.wait()
        with self._phase(f"cannot read {self._folder}"):
            own = self.latest()
        newest_of_ranks = self._messages.all_gather(own)
        newest = max((step for step in newest_of_ranks if step is not None), default=None)
        blind = [str(rank) for rank, step in enumerate(newest_of_ranks) if step != newest]
        if newest is not None and blind:
            raise CheckpointError(
                f"not every rank sees {self.path(newest)}",
                got=f"{len(blind)} of {len(newest_of_ranks)} that do not: rank {', '.join(blind[:8])}",
                fix="put the run folder where all machines see the same files; if it is there, try again",
            )
        return newest

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step, which may not be there."""
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, parts: Mapping[str, ShardedTensor], facts: Mapping[str, Any]) -> None:
        """Save a checkpoint; one of the same step is replaced.

        Args:
            step: optimizer steps done.
            parts: what this rank holds. No two tensors that are written share memory, and all ranks together write each
                tensor once. They are copied before this returns (asynchronous) or written (else).
            facts: everything else, as JSON knows it; those of the first rank are saved.

        Raises:
            CheckpointError: this save, or the one before if that ran in the background, could not be written.
        """
        self.wait()
        text = json.dumps(facts, allow_nan=False, indent=1)
        if self._thread is None:
            self._write(step, parts, text)
        else:
            self._running = self._thread.submit(self._write, step, self._stage(parts), text)

    def load(self, step: int, into: Mapping[str, ShardedTensor], *, all_of_it: bool = True) -> dict[str, Any]:
        """Fill tensors from a checkpoint of any layout. None of them is touched unless all of it is good.

        Args:
            step: which checkpoint.
            into: what this rank holds, on any device. All ranks together hold exactly the tensors that were saved:
                names, types, shapes.
            all_of_it: False lets tensors of the checkpoint be left out; what is not needed is not read.

        Returns:
            The facts that were saved.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, of another program, version or model, or cannot
                be read.
        """
        self.wait()
        folder = self.path(step)
        with self._phase(f"cannot read {folder}"):
            manifest = read_manifest(self._existing(step))
        wanted = _same_step(self._messages.all_gather([step, describe(into)]))
        with self._phase(f"cannot read {folder}"):
            saved = manifest.kinds if all_of_it else {name: manifest.kinds.get(name, "none") for name in wanted}
            check_tensors(folder, saved, wanted)
            check_no_more_tensors(folder, manifest)
            # Every file is read whole once, by one of the ranks, to be checked.
            ours = files_of(manifest, wanted)[self.rank :: self._messages.ranks]
            check_files(folder, {name: manifest.files[name] for name in ours})
            facts = _facts(folder)
        with self._phase(f"cannot read {folder}"):
            fill_parts(folder, manifest.tensors, into)
        return facts

    def read_facts(self, step: int) -> dict[str, Any]:
        """Facts of a checkpoint, without its tensors. Each rank for itself.

        Raises:
            CheckpointError: as for `load`, as far as facts are concerned.
        """
        folder = self._existing(step)
        try:
            manifest = read_manifest(folder)
            check_files(folder, {FACTS: manifest.files[FACTS]})
            return _facts(folder)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}", got=error.strerror or error) from error

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
            self._messages.close()

    def _existing(self, step: int) -> Path:
        folder = self.path(step)
        if not folder.is_dir():
            steps = ", ".join(str(step) for step in self.steps())
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._folder}", allowed=steps or "none")
        return folder

    def _stage(self, parts: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Phase 1: copy what we write into host memory that is kept for the next save, since pinning is slow."""
        written = {name: part.tensor.detach() for name, part in parts.items() if part.writes}
        if _sizes(written) != _sizes(self._staged):
            self._staged = {}  # given back before there are others
            self._staged = _on_host(written)
        for name, tensor in written.items():
            self._staged[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in written.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: replace(part, tensor=self._staged.get(name, part.tensor)) for name, part in parts.items()}

    def _write(self, step: int, parts: Mapping[str, ShardedTensor], facts: str) -> None:
        """Phases 2 to 5. All ranks leave together, after the first one has cleaned up."""
        partial = self._hidden(step, "partial")
        with self._phase(f"cannot write {self.path(step)}"):
            try:
                self._write_phases(step, parts, facts, partial)
            finally:
                if self.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)  # not there any more if all went well

    def _write_phases(self, step: int, parts: Mapping[str, ShardedTensor], facts: str, partial: Path) -> None:
        is_first = self.rank == 0
        what = f"cannot write {self.path(step)}"
        with self._phase(what):
            if is_first:
                self._remove_leftovers()
                partial.mkdir(parents=True)
        with self._phase(what):
            written = write_parts(partial, parts, self.rank)
        ranks = self._messages.gather(asdict(written))
        if is_first:
            everything = merge([WrittenFiles.from_json(one) for one in ranks])
            write_whole(partial / FACTS, facts)
            everything.files[FACTS] = fingerprint(partial / FACTS)
            write_manifest(partial, step, everything)
            sync(partial)
            self._publish(step, partial)
            self._prune(step)

    def _publish(self, step: int, partial: Path) -> None:
        # A folder cannot be renamed over another. Between the two renames neither is there, for microseconds.
        replaced = self._hidden(step, "replaced")
        if self.path(step).exists():
            self.path(step).rename(replaced)
        partial.rename(self.path(step))
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Delete old checkpoints, which takes time, so that none is ever half there."""
        if self._keep:
            for old in [old for old in self.steps() if old <= step][: -self._keep]:
                hidden = self._hidden(old, "removed")
                self.path(old).rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)

    def _hidden(self, step: int, why: str) -> Path:
        return self._folder / f".{self.path(step).name}.{why}-{self._owner}"

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _phase(self, what: str) -> "_Phase":
        return _Phase(self._messages, what)


class _Phase:
    """Something that all ranks do, and end together: well, or with the error of the first rank that has one.

    What the system refuses (no space, no permission, a bad disk) becomes one line for the user. A fault of ours keeps
    its traceback on the rank that has it.

    Args:
        messages: between the ranks.
        what: cannot be done, if there is an error.
    """

    def __init__(self, messages: JsonGroup, what: str) -> None:
        self._messages = messages
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = self._line(error)
        line = next(filter(None, self._messages.all_gather(own)), None)
        is_said = isinstance(error, CheckpointError) and own == line
        is_ours = error is not None and not isinstance(error, OSError | PenstockError | SafetensorError)
        if line is not None and not is_said and not is_ours:
            raise CheckpointError(line) from error

    def _line(self, error: BaseException | None) -> str | None:
        match error:
            case None:
                return None
            case PenstockError():
                return str(error)
            case OSError():
                return str(CheckpointError(self._what, got=error.strerror or error))
            case _:
                return str(CheckpointError(self._what, got=f"{type(error).__name__}: {error}"))


def _same_step(ranks: list[tuple[int, dict[str, str]]]) -> dict[str, str]:
    """Kinds of the tensors that all ranks together want, each of which asks for the same step."""
    steps = [step for step, _ in ranks]
    if len(set(steps)) > 1:
        raise CheckpointError(
            "ranks want to read checkpoints of different steps",
            got=steps,
            fix="put the run folder where all machines see the same files",
        )
    wanted: dict[str, str] = {}
    for _, kinds in ranks:
        for name, kind in kinds.items():
            assert wanted.setdefault(name, kind) == kind, f"{name} is {kind} on one rank, {wanted[name]} on another"
    return wanted


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host memory for each tensor, pinned for those of a GPU; those of one dtype and device share blocks."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
    found: dict[str, Tensor] = {}
    for (dtype, device), names in kinds.items():
        shapes = [tuple(tensors[name].shape) for name in names]
        found.update(zip(names, host_tensors(shapes, dtype, device), strict=True))
    return found


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = parse_json(folder / FACTS)
    return facts
