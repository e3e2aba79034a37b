"""Checkpoints of a run: atomic, the last few of them, written during training, readable by any layout.

`save` has five phases; the last four run in a thread if the store is asynchronous:

    1. stage     each rank copies its tensors to host memory (pinned for GPUs), so that training may change them
    2. write     each rank writes its rectangles as safetensors into `.step-000123.partial-PID`, and syncs them to disk
    3. seal      the first rank writes facts.json and manifest.json (penstock/train/manifest.py)
    4. publish   it renames the folder to `step-000123` and syncs the parent folder
    5. prune     it renames checkpoints older than the last `keep`, but not those of multiples of `keep_every`, to
                 hidden names, then deletes them

So a name without a leading dot always belongs to a complete checkpoint, which does not change: it can be copied while
the run goes on. If it is pruned meanwhile, the copy lacks files and is refused. Hidden leftovers of a killed process
are deleted by the next start, which holds the lock of the run folder, and by the next save; readers never do, because
another process may be writing them.

The ranks share a file system and end every phase together: an error on one rank is raised on all, with the same
message. One save runs at a time. An error in the thread is raised by the next `save`, `load`, `wait` or `close`. A
failed save leaves nothing behind, and older checkpoints are deleted only after a newer one is complete.

Nothing is unpickled: tensors are in safetensors files, everything else, messages between ranks included, is JSON.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from errno import EDQUOT, EIO, ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, DamagedError, NoSpaceError, PenstockError, every_kind, system_errors
from penstock.base.files import sync, write_whole
from penstock.models.huggingface.tensor_file import fingerprint
from penstock.parallel.axes import ALONE, Axis
from penstock.parallel.collectives import JsonGroup
from penstock.parallel.offload import host_tensors
from penstock.parallel.shard import ShardedTensor
from penstock.train.manifest import (
    FACTS,
    Manifest,
    WrittenFiles,
    check_files,
    check_no_more_tensors,
    check_tensors,
    check_there,
    describe,
    files_to_read,
    fill_parts,
    merge,
    parse_json,
    read_manifest,
    write_manifest,
    write_parts,
)


class CheckpointStore:
    """The checkpoints in one folder, which the first save creates.

    All ranks create the store and call `save`, `load`, `wait`, `close`, and what ends in `_of_all` together. The other
    methods only look at the folder, on each rank alone. A save leaves `keep` checkpoints, and those of multiples of
    `keep_every` steps; a `keep` of 0 keeps all. On a full disk older ones go before that where this makes room for the
    new one, but not the newest, and none of `keep_every`. `asynchronous` stores write in the background, which needs
    host memory for this rank's tensors. `mark` is a file that is made when a checkpoint is complete.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        asynchronous: bool,
        world: Axis = ALONE.world,
        *,
        mark: Path | None = None,
        keep_every: int = 0,
    ) -> None:
        self._folder = folder
        self._mark = mark
        self._keep = keep
        self._keep_every = keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._running: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}  # host memory that the saves share
        # Used by the thread while it runs, otherwise by `load`, never at once: every method waits first.
        self._messages = JsonGroup(world)
        self._owner = self._messages.from_first(os.getpid())  # in hidden names, the same on all ranks

    @property
    def rank(self) -> int:
        return self._messages.rank

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending, by the names of folders."""
        if not self._folder.is_dir():
            return []
        matches = (re.fullmatch(r"step-([0-9]{6,})", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def latest_of_all(self) -> int | None:
        """The newest step with a checkpoint, the same on all ranks, which call this together.

        A network file system may show an old list to some ranks, which would then resume from different steps. Raises a
        CheckpointError if some do not see the newest, if the folder cannot be read, or as `wait` does.
        """
        self.wait()
        with _Phase(self._messages, f"cannot read {self._folder}"):
            latest = self.latest()
        newest_of_ranks = self._messages.all_gather(latest)
        newest = max((step for step in newest_of_ranks if step is not None), default=None)
        blind = [str(rank) for rank, step in enumerate(newest_of_ranks) if step != newest]
        if newest is not None and blind:
            raise CheckpointError(
                f"not every rank sees {self.path(newest)}",
                got=f"{len(blind)} of {len(newest_of_ranks)} that do not: rank {', '.join(blind[:8])}",
                fix="put the run folder where all machines see the same files; if it is there, try again",
            )
        return newest

    def steps_of_all(self) -> list[int]:
        """Steps with a checkpoint, the newest first, as the first rank sees them; errors as of `latest_of_all`."""
        newest = self.latest_of_all()
        steps: list[int] = self._messages.from_first([] if newest is None else self.steps())
        return sorted(steps, reverse=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint on all ranks together; returns its new path. Raises a CheckpointError."""
        folder = self.path(step)
        damaged = folder.with_name(f"{folder.name}.damaged")
        with _Phase(self._messages, f"cannot rename {folder}"):
            if self.rank == 0:
                shutil.rmtree(damaged, ignore_errors=True)
                folder.rename(damaged)
                sync(self._folder)
        return damaged

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step, which may not exist."""
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, parts: Mapping[str, ShardedTensor], facts: Mapping[str, Any]) -> None:
        """Save a checkpoint after `step` optimizer steps; one of the same step is replaced.

        All ranks together write each tensor once, and tensors share no memory. They are copied (asynchronous) or
        written before this returns. `facts` are JSON values; those of the first rank are saved. Raises a
        CheckpointError if this save, or the one before in the background, fails.
        """
        self.wait()
        text = json.dumps(facts, allow_nan=False, indent=1)
        if self._thread is None:
            self._write(step, parts, text)
        else:
            self._running = self._thread.submit(self._write, step, self._stage(parts), text)

    def load(self, step: int, into: Mapping[str, ShardedTensor], *, all_of_it: bool = True) -> dict[str, Any]:
        """Fill tensors, on any device, from a checkpoint of any layout; returns its facts.

        All ranks together hold exactly the saved tensors (names, types, shapes), or some of them without `all_of_it`.
        A CheckpointError says that the checkpoint is missing, damaged, of another program, version or model, or
        unreadable. After damage in a tensor file the tensors are undefined; all other faults change nothing.
        """
        self.wait()
        folder = self.path(step)
        with _Phase(self._messages, f"cannot read {folder}"):
            manifest = read_manifest(self._existing(step))
        wanted = _same_step(self._messages.all_gather([step, describe(into)]))
        # Every rank checks before any rank fills.
        with _Phase(self._messages, f"cannot read {folder}"):
            saved = manifest.kinds if all_of_it else {name: manifest.kinds.get(name, "none") for name in wanted}
            check_tensors(folder, saved, wanted)
            check_no_more_tensors(folder, manifest)
            files = files_to_read(manifest.tensors, into)
            check_there(folder, files)
            facts = _checked_facts(folder, manifest)
        # Each file is checked by one of the ranks that read it, so that the disk is asked once.
        read = self._messages.all_gather(files)
        ours = [file for file in files if _checking_rank(file, read) == self.rank]
        with _Phase(self._messages, f"cannot read {folder}"):
            fill_parts(folder, manifest.tensors, into, {file: manifest.files[file] for file in ours})
        return facts

    def read_facts(self, step: int) -> dict[str, Any]:
        """Facts of a checkpoint, without its tensors, on this rank alone. Raises a CheckpointError as `load` does."""
        folder = self._existing(step)
        with system_errors(CheckpointError, f"cannot read {folder}"):
            return _checked_facts(folder, read_manifest(folder))

    def facts_of_all(self, step: int) -> dict[str, Any]:
        """`read_facts` on all ranks, which end it together."""
        with _Phase(self._messages, f"cannot read {self.path(step)}"):
            return self.read_facts(step)

    def wait(self) -> None:
        """Return when no save is running. Raises a CheckpointError, once, if the one in the background failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """`wait`, and end the thread; no saves may follow."""
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
        """Phase 1: copy the written tensors into host memory, which the next save reuses, since pinning is slow."""
        written = {
            f"{name} {number}": tensor.detach()
            for name, part in parts.items()
            if part.writes
            for number, tensor in enumerate(part.held)
        }
        if _sizes(written) != _sizes(self._staged):
            self._staged = {}  # freed before the new allocation
            self._staged = _on_host(written)
        for name, tensor in written.items():
            self._staged[name].copy_(tensor, non_blocking=True)
        # The copies run on the current stream, behind the kernels of the update; the thread reads the host memory.
        for device in {tensor.device for tensor in written.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        staged = {}
        for name, part in parts.items():
            first, *more = (self._staged.get(f"{name} {number}", held) for number, held in enumerate(part.held))
            staged[name] = replace(part, tensor=first, more=tuple(more))
        return staged

    def _write(self, step: int, parts: Mapping[str, ShardedTensor], facts: str) -> None:
        """Phases 2 to 5, again if older checkpoints made room."""
        while True:
            try:
                return self._try_to_write(step, parts, facts)
            except NoSpaceError:
                made_room = False
                if self.rank == 0:
                    with suppress(OSError):  # the others wait for the answer, whatever happens to this folder
                        made_room = self._make_room(step)
                if not self._messages.from_first(made_room):
                    raise

    def _make_room(self, step: int) -> bool:
        """Delete older checkpoints where that makes room for one as large as the newest; whether it did."""
        *older, newest = [old for old in self.steps() if old < step] or [step]
        needed, free = _bytes_in(self.path(newest)), shutil.disk_usage(self._folder).free
        chosen = list[int]()
        for old in older if self._keep else []:
            if free < needed and self._may_go(old):
                chosen.append(old)
                free += _bytes_in(self.path(old))
        if free < needed:
            return False
        for old in chosen:
            self._delete(old)
        return bool(chosen)

    def _try_to_write(self, step: int, parts: Mapping[str, ShardedTensor], facts: str) -> None:
        """Phases 2 to 5. All ranks leave together, after the first one has cleaned up."""
        partial = self._hidden(step, "partial")
        with _Phase(self._messages, f"cannot write {self.path(step)}"):
            try:
                self._write_phases(step, parts, facts, partial)
            finally:
                if self.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)  # renamed unless a phase failed

    def _write_phases(self, step: int, parts: Mapping[str, ShardedTensor], facts: str, partial: Path) -> None:
        is_first = self.rank == 0
        what = f"cannot write {self.path(step)}"
        with _Phase(self._messages, what):
            if is_first:
                for leftover in self._folder.glob(".step-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                partial.mkdir(parents=True)
        with _Phase(self._messages, what):
            written = write_parts(partial, parts, self.rank)
        ranks = self._messages.gather(asdict(written))
        if is_first:
            everything = merge(msgspec.convert(ranks, list[WrittenFiles]))
            write_whole(partial / FACTS, facts)
            everything.files[FACTS] = fingerprint(partial / FACTS)
            write_manifest(partial, step, everything)
            sync(partial)  # the names of all files are on disk before the folder has its name
            self._publish(step, partial)
            self._prune(step)

    def _publish(self, step: int, partial: Path) -> None:
        # A folder cannot be renamed over another, so for microseconds between the two renames neither exists.
        replaced = self._hidden(step, "replaced")
        if self.path(step).exists():
            self.path(step).rename(replaced)
        partial.rename(self.path(step))
        if self._mark is not None:
            self._mark.touch()
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Delete old checkpoints under hidden names, so that none is visible in part."""
        before = [old for old in self.steps() if old <= step]
        for old in before[: -self._keep] if self._keep else []:
            if self._may_go(old):
                self._delete(old)

    def _may_go(self, step: int) -> bool:
        return self._keep_every == 0 or step % self._keep_every != 0

    def _delete(self, step: int) -> None:
        hidden = self._hidden(step, "removed")
        self.path(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _hidden(self, step: int, why: str) -> Path:
        return self._folder / f".{self.path(step).name}.{why}-{self._owner}"


class _Phase:
    """A phase that all ranks end together: without error, or with that of the first rank that has one.

    Errors of the system (no space, no permission, a bad disk) become one line for the user, which begins with `what`.
    Program errors keep their traceback on their rank.
    """

    def __init__(self, messages: JsonGroup, what: str) -> None:
        self._messages = messages
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        description = self._describe(error)
        first = next(filter(None, self._messages.all_gather(description)), None)  # of the first rank with an error
        is_first_error = isinstance(error, CheckpointError) and description == first  # which itself propagates
        is_bug = error is not None and not isinstance(error, OSError | PenstockError)
        if first is not None and not is_first_error and not is_bug:
            name, line = first
            raise _KINDS.get(name, CheckpointError)(line) from error

    def _describe(self, error: BaseException | None) -> list[str] | None:
        """Kind and line of an error, as JSON values."""
        match error:
            case None:
                return None
            case PenstockError():
                return [type(error).__name__, str(error)]
            case OSError():  # a disk that cannot read a file any more has damaged it
                kinds = {EIO: DamagedError, ENOSPC: NoSpaceError, EDQUOT: NoSpaceError}
                kind = kinds.get(error.errno or 0, CheckpointError)
                return [kind.__name__, str(kind(self._what, got=error.strerror or error))]
            case _:
                line = str(CheckpointError(self._what, got=f"{type(error).__name__}: {error}"))
                return [CheckpointError.__name__, line]


_KINDS = every_kind(CheckpointError)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _same_step(ranks: list[tuple[int, dict[str, str]]]) -> dict[str, str]:
    """Kinds of the tensors that all ranks together want from one step."""
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


def _checking_rank(file: str, read: Sequence[Sequence[str]]) -> int:
    """The rank that checks a file, of those that read it; other files have others."""
    readers = [rank for rank, files in enumerate(read) if file in files]
    return readers[crc32(file.encode()) % len(readers)]


def _sizes(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host memory for each tensor, pinned for those of a GPU, in shared blocks by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, torch.Size]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kinds[tensor.dtype, tensor.device][name] = tensor.shape
    host: dict[str, Tensor] = {}
    for (dtype, device), shapes in kinds.items():
        host.update(zip(shapes, host_tensors(list(shapes.values()), dtype, device), strict=True))
    return host


def _checked_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    check_files(folder, {FACTS: manifest.files[FACTS]})
    facts: dict[str, Any] = parse_json(folder / FACTS)
    return facts
