"""The folder of a run, and its lock: one process at a time trains there.

    runs/NAME/config.toml     the resolved configuration; a folder with this file is a run folder
              metrics.jsonl   one JSON object a step
              starts.jsonl    one JSON object for each start: command, device, versions
              goodput.jsonl   where the wall clock went (penstock/train/goodput.py)
              checkpoints/    one folder for each saved step
              tensorboard/    event files
              wandb/          files of Weights & Biases (record.wandb)
              profile/        traces of recorded steps
              nonfinite.json  only after a NaN or infinity: its origin
              .lock           held by the process that trains
              saved           empty; made when the first checkpoint was complete
              launch          only if several ranks were started together: the name of their launch

A folder is created under a hidden name with its configuration, and then renamed, so it is complete and two runs never
get the same one. This happens just before the first step, after all checks of configuration, data, device and model.

A resumed run may change how it continues (steps, learning rate, evaluation, ...), not its identity: `FIXED` and `FREE`.

The first rank holds a lock of `flock` on `.lock` in the folder. The system releases it when the process ends, however
it ends. NFS, Lustre and other shared file systems keep such locks on their servers, so a process on another machine is
seen too. A file system without locks is told to the user. A folder that is made under a hidden name is locked
meanwhile. The next one of the same name deletes those that no living process holds.
"""

import errno
import fcntl
import glob
import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.base.errors import CheckpointError, RunFolderError, did_you_mean_path, system_errors
from penstock.base.files import parse_json, sync, write_whole
from penstock.config.load import RUN_FILE, dump_toml
from penstock.config.run import Run
from penstock.config.schema import as_toml, differences, leaves
from penstock.train.metrics import last_step

LOCK_FILE = ".lock"

WAIT_SECONDS = 5.0
"""How long a lock is waited for: its owner may have been killed just now."""

STALE_SECONDS = 60.0
"""Age of a hidden folder that may be deleted; a younger one may belong to a process that is about to lock it."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[str]:
    """Hold the lock of a folder; yields a notice for the user if its file system has no locks, else an empty text.

    Raises a RunFolderError that names the owner if another process holds the lock, and OSError if the file cannot be
    written.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        notice = _acquire(folder, descriptor, time.monotonic() + wait_seconds)
        try:
            yield notice
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(folder: Path, descriptor: int, deadline: float) -> str:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _in_use(folder, os.pread(descriptor, 4096, 0)) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return f"the file system of {folder} has no locks: do not train in it from two processes"
        else:
            since = datetime.now(UTC).isoformat(" ", "seconds")
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            return ""


def _in_use(folder: Path, content: bytes) -> RunFolderError:
    try:
        owner = parse_json(content)
        got = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, TypeError, KeyError):
        got = "a process that has just begun"
    what = f"{folder} is in use: another process trains in it"
    return RunFolderError(what, got=got, fix="wait for its end, or stop it")


@contextmanager
def hidden_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent` to fill and rename. It is locked, and deleted at the end unless it was renamed.

    Hidden folders of the same name that no living process holds are deleted first. Raises OSError.
    """
    draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    try:
        with locked(draft):
            _delete_stale(parent, name, draft.stat().st_mtime - STALE_SECONDS)
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def temporary_folder(purpose: str) -> AbstractContextManager[Path]:
    """A private folder among the temporary files of this machine, which a killed process does not leave for ever."""
    return hidden_folder(Path(tempfile.gettempdir()), f"penstock-{purpose}")


def _delete_stale(parent: Path, name: str, before: float) -> None:
    for draft in parent.glob(f".{glob.escape(name)}.*"):
        with suppress(OSError, RunFolderError):
            if draft.is_dir() and draft.stat().st_mtime < before and (draft / LOCK_FILE).is_file():
                with locked(draft, wait_seconds=0.0):
                    shutil.rmtree(draft, ignore_errors=True)


NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Names that are one path component on every system."""

CHECKPOINTS = "checkpoints"
"""Created with the folder of the run, so a missing one was removed."""

FIXED = ("model", "data", "seed", "name", "record.folder", "training.precision")
"""Options that a checkpoint is bound to."""

FREE = (
    *("model.moe.balance", "model.moe.router.expert_bias_rate", "data.corrupt", "data.cache"),
    *("model.attention.indexer.stage", "model.attention.indexer.loss_coef"),
)
"""Exceptions in FIXED: DeepSeek-V3 set the rate to 0 for its last part (arXiv 2412.19437, section 4.2), a run that
stopped at a corrupt record may skip it, and weights of an indexer's warm-up begin its sparse stage.
"""


class RunFolder:
    """Paths of one run, see the top of this file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / RUN_FILE
        self.metrics = path / "metrics.jsonl"
        self.starts = path / "starts.jsonl"
        self.goodput = path / "goodput.jsonl"
        self.checkpoints = path / CHECKPOINTS
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.profile = path / "profile"
        self.nonfinite = path / "nonfinite.json"
        self.launch = path / "launch"
        self.saved = path / "saved"

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    def write_config(self, run: Run) -> None:
        """Replace the configuration, or raise a RunFolderError."""
        with system_errors(RunFolderError, f"cannot write {self.config}"):
            write_whole(self.config, dump_toml(run))


def check_name(name: str) -> None:
    """Refuse names that are not one path component, by a RunFolderError."""
    if not NAME_PATTERN.fullmatch(name):
        raise RunFolderError(
            "the name of a run becomes a folder",
            got=repr(name),
            allowed="up to 200 letters, digits, '.', '_', '-', not first",
        )


def check_is_free(parent: Path, name: str) -> None:
    """Refuse a taken name, by a RunFolderError."""
    if (path := parent / name).exists():
        raise RunFolderError(f"{path} exists already", fix="--resume to go on with it, or another --name")


def create_run_folder(run: Run, *, number_if_taken: bool, launch: str = "") -> tuple[Run, RunFolder]:
    """Create the folder of a new run, with its configuration; returns the run under the name of its folder.

    With `number_if_taken` a taken name becomes name-2, name-3, ... Restarted ranks find the folder by the name of their
    launch (empty for none). Raises a RunFolderError if the name is taken or the folder cannot be created.
    """
    check_name(run.name)
    parent = Path(run.record.folder)
    with system_errors(RunFolderError, f"cannot make a run folder in {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(parent, run.name) as draft:
            (draft / CHECKPOINTS).mkdir()
            draft.chmod(0o755)  # mkdtemp creates private folders
            if launch:
                write_whole(draft / "launch", launch)
            while True:
                named = run.model_copy(update={"name": free_name(parent, run.name) if number_if_taken else run.name})
                check_is_free(parent, named.name)
                write_whole(draft / RUN_FILE, dump_toml(named))
                sync(draft)
                try:
                    draft.rename(parent / named.name)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                    continue  # another run took the name since it was looked for
                sync(parent)  # the name of the folder
                return named, RunFolder(parent / named.name)


def free_name(parent: Path, name: str) -> str:
    """The name, or the first free of name-2, name-3, ..."""
    number = 1
    while (parent / _numbered(name, number)).exists():
        number += 1
    return _numbered(name, number)


def new_folder(parent: Path, name: str) -> Path:
    """Create the folder `name`, or the first free of name-2, name-3, ...; no two callers get the same one."""
    while True:
        folder = parent / free_name(parent, name)
        with system_errors(RunFolderError, f"cannot make a folder in {parent}"):
            parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                if not folder.exists():  # a link to nowhere
                    raise
                continue  # another process took the name since it was looked for
        return folder


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def find_run_folder(parent: Path, name: str, *, newest: bool) -> RunFolder:
    """The folder of a run to resume: exactly `name`, or the `newest` of name, name-2, name-3, ...

    Raises a RunFolderError if there is none.
    """
    check_name(name)
    numbers = [1]
    if newest and parent.is_dir():
        matches = (re.fullmatch(re.escape(name) + r"-([0-9]+)", path.name) for path in parent.iterdir())
        numbers += [int(match[1]) for match in matches if match]
    folders = [RunFolder(parent / _numbered(name, number)) for number in sorted(numbers, reverse=True)]
    folder = next((folder for folder in folders if folder.exists), None)
    if folder is None:
        suggestion = did_you_mean_path(parent / name) or "leave out --resume to start it"
        raise RunFolderError(f"there is no run {name} in {parent} to resume", fix=suggestion)
    return folder


def find_launched(parent: Path, launch: str) -> RunFolder | None:
    """The folder that a launch has created, or None."""
    folders = [RunFolder(path.parent) for path in sorted(parent.glob("[!.]*/launch"))]
    return next((folder for folder in folders if folder.launch.read_text(encoding="utf-8") == launch), None)


@contextmanager
def training_in(folder: RunFolder) -> Iterator[str]:
    """Hold the lock of a run folder, and delete what a killed process left half-written there; yields a notice.

    Raises a RunFolderError if another process trains there, or the lock cannot be written.
    """
    with ExitStack() as stack:
        with system_errors(RunFolderError, f"cannot lock {folder.path}"):
            notice = stack.enter_context(locked(folder.path))
        _delete_leftovers(folder)
        yield notice


def _delete_leftovers(folder: RunFolder) -> None:
    for leftover in folder.checkpoints.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for draft in folder.path.glob(".*.draft"):
        draft.unlink(missing_ok=True)


def check_same_run(saved: Run, wanted: Run, folder: RunFolder) -> None:
    """Refuse to resume a run with another identity, by a CheckpointError that names the first fixed option."""
    changes = differences(saved, wanted)
    for difference in changes:
        if is_bound(difference.field):
            overrides = [f"{change.field}={change.right or 'none'}" for change in changes]
            command = shlex.join(["penstock", "train", "--from", str(folder.path), *overrides])
            fits = not difference.field.startswith("model.")  # its weights
            new = f"begin one with its weights: {command}" if fits else "start a new run"
            raise CheckpointError(
                f"a run cannot be resumed with another {difference.field}",
                got=difference.right or "none",
                allowed=difference.left or "none",
                fix=f"leave the override out, or {new}",
            )


def changes_since(saved: Mapping[str, Any], run: Run) -> list[str]:
    """Options whose value is another one than in `saved`, all options by path: `training.steps 4 -> 8`.

    The name is left out: a run whose name was taken gets the one of its folder after its options were saved.
    """
    now: dict[str, Any] = json.loads(json.dumps(leaves(run)))  # tuples are lists, as in what was saved
    return [
        f"{path} {as_toml(saved[path])} -> {as_toml(value)}"
        for path, value in now.items()
        if path in saved and path != "name" and saved[path] != value
    ]


def check_nothing_is_lost(folder: RunFolder) -> None:
    """Refuse to begin a run again, and to delete its metrics, if it had checkpoints and has none now.

    A run that ended before its first checkpoint was complete, whatever its metrics have, may begin again. Raises a
    RunFolderError if the folder of checkpoints is gone, or empty although a checkpoint was complete.
    """
    steps, is_there = last_step(folder.metrics), folder.checkpoints.is_dir()
    if steps == 0 or (is_there and (not folder.saved.exists() or any(folder.checkpoints.iterdir()))):
        return
    raise RunFolderError(
        f"{folder.checkpoints} {'holds no checkpoint' if is_there else 'is gone'}: the run cannot go on",
        got=f"{steps} steps in {folder.metrics}",
        fix=f"put the checkpoints back, or begin a new run: penstock train {folder.config}",
    )


def is_bound(field: str) -> bool:
    """Whether a checkpoint is bound to an option, given by its dotted path."""
    return _is_under(field, FIXED) and not _is_under(field, FREE)


def _is_under(field: str, parts: tuple[str, ...]) -> bool:
    return any(field == part or field.startswith(part + ".") for part in parts)


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, which then becomes `folder` in one step; an error leaves nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hidden_folder(folder.parent, folder.name) as draft:
        yield draft
        draft.chmod(0o755)  # mkdtemp creates private folders
        (draft / LOCK_FILE).unlink()
        sync(draft)  # the names of the files, whose content the caller has synced
        draft.rename(folder)
        sync(folder.parent)  # the name of the folder
