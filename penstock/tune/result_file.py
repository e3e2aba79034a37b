"""Writes a measurement as JSON with command, commit and environment, in the form of benchmarks/results."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.base.errors import ConfigError
from penstock.base.files import write_whole
from penstock.base.origin import commit_of_code
from penstock.parallel.launch.process import device_name
from penstock.tune.kernels import environment as versions


def write_result(
    path: Path, *, command: str, commit: str, environment: Mapping[str, Any], numbers: Mapping[str, Any]
) -> None:
    """Write a measurement atomically; an empty commit asks git. Raises a ConfigError if it cannot be written."""
    result = {
        "command": command,
        "commit": commit or commit_of_code(),
        "environment": dict(environment),
        "numbers": dict(numbers),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def describe_machine(*, on_gpu: bool) -> dict[str, Any]:
    """The machine and the versions that decide speed."""
    return {
        "device": device_name(torch.device("cuda" if on_gpu else "cpu")),
        "devices": torch.cuda.device_count() if on_gpu else 0,
        **versions(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
    }
