"""Files that a user names: opened without waiting, read up to a size limit, parsed, and written whole or not at all.

Path.read_text would read a file of any size, also `/dev/zero`, and wait for ever for the writer of a named pipe.
tomllib and json raise other errors for nesting that exhausts Python's stack and for integers with too many digits; here
every fault of the content is a ValueError.
"""

import errno
import glob
import json
import os
import socket
import stat
import time
import tomllib
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any

MOST_TOML_BYTES = 4 * 2**20
MOST_JSON_BYTES = 128 * 2**20  # several times the largest published tokenizer.json
STALE_SECONDS = 3600.0  # since the last write to a draft that no living process can be writing
_READ_BYTES = 2**20
_PASSED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # files that the shell opens, such as the pipe of `<(command)`


def open_file(path: Path, buffering: int = -1) -> Any:
    """`open` to read bytes. Raises OSError, also for a folder, a device, or a named pipe, which might wait for ever."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path has no null characters", str(path))
    return open(str(path), "rb", buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    # As an opener: from here on `open` closes the descriptor, also when a signal interrupts it.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    with ExitStack() as unless_returned:
        unless_returned.callback(os.close, descriptor)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode) and not path.startswith(_PASSED):
            raise OSError(errno.EINVAL, "it is a pipe or a device, no file", path)
        os.set_blocking(descriptor, True)
        unless_returned.pop_all()
    return descriptor


def open_to_append(path: Path) -> FileIO:
    """Open a file, or make it, to append without a buffer. Raises OSError, also for a link, a pipe or a device."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = FileIO(os.open(path, flags, 0o644), "ab")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, no file", str(path))
    return file


def most_unpacked(packed_bytes: int) -> int:
    """Bytes that compressed data may become: text compresses to a tenth, and what becomes 100 times as much is none."""
    return 64 * 2**20 + 100 * packed_bytes


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Content of a file. Raises OSError if it cannot be read or is larger than `most_bytes`."""
    content = bytearray()
    with open_file(path) as file:
        # In parts, because `read` takes the memory that it may need at once; not by stat, since /proc has no sizes.
        while len(content) <= most_bytes and (part := file.read(min(_READ_BYTES, most_bytes + 1 - len(content)))):
            content += part
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes / 2**20:.0f} MiB", str(path))
    return bytes(content)


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of a TOML text. Raises TOMLDecodeError, also for deep nesting and numbers with too many digits."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from error
    except ValueError as error:  # more digits than Python converts; the hint behind the semicolon is for programmers
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from error


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text holds. Raises ValueError if it is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Tables of a TOML file. Raises OSError or ValueError."""
    return parse_toml(read_bounded(path, MOST_TOML_BYTES).decode("utf-8-sig"))


def read_json(path: Path) -> Any:
    """The value that a JSON file holds. Raises OSError or ValueError."""
    return parse_json(read_bounded(path, MOST_JSON_BYTES))


def draft_of(path: Path) -> Path:
    """A hidden name beside a file for the one that will replace it. Raises OSError.

    Open it with `xb`, which follows no link that was planted under the name. Drafts that a killed process has left are
    deleted: those under this name, and those that nothing has written to for `STALE_SECONDS`.
    """
    start = f".{path.name[:150]}."
    # The machine too: containers that share a folder have the same numbers of processes.
    draft = path.with_name(f"{start}{socket.gethostname()[:40]}-{os.getpid()}.draft")
    for other in path.parent.glob(f"{glob.escape(start)}*.draft"):
        with suppress(FileNotFoundError):  # its process may rename it just now
            if other == draft or time.time() - other.lstat().st_mtime > STALE_SECONDS:
                other.unlink()
    return draft


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader, or a crash, finds the old content or the new. Raises OSError."""
    draft = draft_of(path)
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut the name never points to missing content
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
