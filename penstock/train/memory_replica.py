"""A checkpoint in the memory of this machine, for a restart that needs no disk.

Files below /dev/shm are memory of the machine and outlive the process that wrote them: a rank that dies takes nothing
with it. The folder belongs to the user alone, and its name to the folder of the run. It is made by the first rank of a
run on one machine and removed when the run ends as it should, or when the launcher gives up.
"""

import os
import shutil
import stat
from hashlib import sha256
from pathlib import Path

from penstock.base.errors import RunFolderError

MEMORY = Path("/dev/shm")


def memory_folder(run_folder: Path) -> Path:
    """Where the replica of a run is, if there is one."""
    return MEMORY / f"penstock-{os.getuid()}-{sha256(str(run_folder.resolve()).encode()).hexdigest()[:24]}"


def open_memory(run_folder: Path) -> Path:
    """The folder of the replica, which is made if it is missing. Raises a RunFolderError if it is not ours."""
    folder = memory_folder(run_folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RunFolderError(f"cannot make {folder}", got=error.strerror, fix="checkpoint.memory_every=0") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunFolderError(f"{folder} is not a folder of this user alone", fix="delete it")
    return folder


def remove_memory(run_folder: Path) -> None:
    """Give the memory back."""
    shutil.rmtree(memory_folder(run_folder), ignore_errors=True)
