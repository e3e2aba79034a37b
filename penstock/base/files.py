"""Small files that a user names: read up to a size limit, and parsed so that every fault is a ValueError.

Path.read_text would read a file of any size, also `/dev/zero`. tomllib and json raise other errors for nesting that
exhausts Python's stack and for integers with too many digits.
"""

import errno
import json
import tomllib
from pathlib import Path
from typing import Any

MOST_TOML_BYTES = 4 * 2**20
MOST_JSON_BYTES = 128 * 2**20
"""Several times the largest published tokenizer.json."""


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Content of a file. Raises OSError if it cannot be read or is larger than `most_bytes`."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)  # not by stat: a pipe or a device has no size
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes / 2**20:.0f} MiB", str(path))
    return content


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
    """Tables of a TOML file. Raises OSError or ValueError, as `read_bounded` and `parse_toml` do."""
    return parse_toml(read_bounded(path, MOST_TOML_BYTES).decode("utf-8-sig"))


def read_json(path: Path) -> Any:
    """The value that a JSON file holds. Raises OSError or ValueError, as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, MOST_JSON_BYTES))
