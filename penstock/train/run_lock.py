"""Locks of folders: one process at a time trains in a run folder, and leftovers of dead processes are found.

The first rank holds a lock of `flock` on `.lock` in the folder. The system releases it when the process ends, however
it ends. NFS, Lustre and other shared file systems keep such locks on their servers, so a process on another machine is
seen too. A file system without locks is told to the user.

A folder that is made under a hidden name is locked meanwhile. The next one of the same name deletes those that no
living process holds.
"""

import errno
import fcntl
import glob
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from penstock.base.errors import RunFolderError
from penstock.base.files import parse_json

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
