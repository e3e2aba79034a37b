"""How a measurement is written down: command, commit, environment, numbers, in one JSON file.

Run benchmarks as modules from the root of the repository, `python -m benchmarks.one_gpu`. On a machine that has the
files but not their history, `--commit` says which commit they are.
"""

import argparse
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.config.versions import new_path
from penstock.tune.result_file import write_result

Item = TypeVar("Item")

_NEW_VALUES = {("graphs.capture", "passes"): "full", ("graphs.capture", "parts"): "partial"}  # of recorded overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two options that every benchmark has."""
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of these files, where there is no repository")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark whose cases are divided among processes, and joined behind them."""
    parser.add_argument("--part", default="0/1", metavar="K/N", help="only every N-th case, from case K on")
    parser.add_argument("--join", nargs="+", type=Path, default=[], metavar="FILE", help="run nothing, join these")


def part_of(options: argparse.Namespace, cases: Sequence[Item]) -> Sequence[Item]:
    """Those of the cases that `--part` asks for."""
    first, every = map(int, options.part.split("/"))
    return cases[first::every]


def parts_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results that `--join` names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in options.join]


def write_joined(options: argparse.Namespace, parts: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
    """Write the numbers of several results, with the environment of the first, and the commit of the last one.

    Which part each was, is left out.
    """
    commands = dict.fromkeys(part["command"] for part in parts)
    write_result(
        options.output,
        command=" && ".join(
            dict.fromkeys(re.sub(r" --(part|output|commit) \S+| --known( (?!--)\S+)+", "", one) for one in commands)
        ),
        commit=parts[-1]["commit"],
        environment=parts[0]["environment"],
        numbers=numbers,
    )


def write(options: argparse.Namespace, numbers: Mapping[str, Any], **environment: Any) -> None:
    """Write what was measured to `options.output`; do nothing if that is not given.

    Args:
        options: with `output` and `commit`, from `add_arguments`.
        numbers: the measurement.
        environment: what else the numbers depend on.
    """
    if options.output is None:
        return
    write_result(
        options.output,
        command=" ".join(["python", "-m", _module(), *sys.argv[1:]]),
        commit=options.commit,
        environment=describe() | environment,
        numbers=numbers,
    )


def current_overrides(recorded: Iterable[str]) -> tuple[str, ...]:
    """Recorded overrides with the keys and values of this version: `graphs.capture=passes` becomes `=full`."""
    pairs = [override.partition("=")[::2] for override in recorded]
    return tuple(f"{new_path(path) or path}={_NEW_VALUES.get((path, value), value)}" for path, value in pairs)


def _module() -> str:
    """Name of the benchmark that runs, `benchmarks.one_gpu`."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")


def describe() -> dict[str, Any]:
    """The machine and the versions that decide speed."""
    on_gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return facts


def busy_seconds() -> float:
    """Seconds that all processors together have worked for anybody."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def used_seconds() -> float:
    """Seconds of the processor of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
