"""How a run was started, each time: starts.jsonl, one JSON object for each process that made steps of it.

    time          when training began, UTC
    command       that was typed
    device        as the driver or the system reports it
    ranks         processes that trained together
    steps_done    before this start; more than 0 after resuming
    kernels       which backend runs each operator
    parameters    of the model, and active_parameters, those that one token meets
    penstock, torch, triton, cuda, hip, python, system    versions; null where there is none

Metrics say how a run went and config.toml what it is; without this file nobody knows where.
"""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from penstock import __version__
from penstock.base.errors import RunFolderError
from penstock.train.observer import RunStart, StepReport


class StartsFile:
    """Observer that adds a line to starts.jsonl.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, start: RunStart) -> None:
        """Write the line.

        Raises:
            RunFolderError: it cannot be written.
        """
        line = json.dumps(start_record(start, sys.argv)) + "\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {self._path}", got=error.strerror) from error

    def stepped(self, report: StepReport) -> None:
        """Nothing to write."""

    def saved(self, step: int) -> None:
        """Nothing to write."""

    def closed(self) -> None:
        """Nothing to close."""


def start_record(start: RunStart, words: Sequence[str]) -> dict[str, Any]:
    """The line of a start, as JSON values.

    Args:
        start: what is known before the first step.
        words: of the command, the program first.
    """
    program = Path(words[0]).name
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["penstock" if program == "__main__.py" else program, *words[1:]]),
        "device": start.device_name,
        "ranks": start.ranks,
        "steps_done": start.steps_done,
        "kernels": start.kernels,
        "parameters": start.parameters,
        "active_parameters": start.active_parameters,
        "penstock": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
