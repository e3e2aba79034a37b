"""The Python files of the running Python's own standard library: real text on every machine, with no download.

Some 1,800 files and 30 MB, the test suites among them. The same Python has the same files, so that two machines train
on the same tokens. What differs between builds of one version is left out: installed packages, compiled files, and the
files in which a build writes down its own settings. Files that are empty or not UTF-8 are left out too.
"""

import os
import sysconfig
from pathlib import Path

from penstock.base.errors import DataError
from penstock.data.files import unreadable
from penstock.data.sources import Split, in_split
from penstock.data.text import PlainText
from penstock.data.tokenizer import Tokenizer

_FOREIGN_FOLDERS = ("__pycache__", "site-packages", "dist-packages")
_BUILD_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


def open_standard_library(split: Split, tokenizer: Tokenizer, *, validation_share: float) -> PlainText:
    """Returns the standard library's files of one split, in the order of their paths.

    A file is held out by a hash of its path inside the library: the split is the same on every machine, and a file that
    both of two Python versions have is in the same split of both.

    Args:
        split: which part.
        tokenizer: what encodes the text.
        validation_share: share of the files that is held out.

    Raises:
        DataError: this Python has no source files, or one cannot be read.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = _source_files(library)
    if not paths:
        raise DataError(
            f"this Python has no source files in {library}",
            fix='set data.source to "text" or "jsonl" and give data.files',
        )
    chosen = [
        path for path in paths if in_split(split, path.relative_to(library).as_posix().encode(), validation_share)
    ]
    return PlainText([path for path in chosen if _is_text(path)], tokenizer)


def _source_files(library: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [
            name for name in subfolders if name not in _FOREIGN_FOLDERS and not name.startswith(_BUILD_PREFIXES)
        ]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(_BUILD_PREFIXES)]
    # By parts and not by the whole string, so that the separator of the operating system does not matter.
    return sorted(paths, key=lambda path: path.relative_to(library).parts)


def _is_text(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return len(content) > 0
