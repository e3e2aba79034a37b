"""What benchmarks share: their options, a line for each row, and the file of command, commit, environment and numbers.

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
from penstock.tune.kernels import write_result

Item = TypeVar("Item")

_NEW_VALUES = {("graphs.capture", "passes"): "full", ("graphs.capture", "parts"): "partial"}  # of recorded overrides
_PARTS = {
    "part": ("0/1", "K/N: only every N-th case, from case K on"),
    "join": ([Path], "run nothing, join these files"),
}


def parser(doc: str | None, *, parts: bool = False, **options: Any) -> argparse.ArgumentParser:
    """The parser of a benchmark.

    Args:
        doc: docstring of its module.
        parts: its cases can be divided among processes, and joined behind them: `part_of`, `parts_of`.
        options: by name, a default or a default with its help. False is a switch, a type an option without default, a
            list takes several values of the type of its first item, which may be a type.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options |= {"output": (Path, "JSON file to write"), "commit": ("", "of these files, where there is no repository")}
    for name, given in {**(_PARTS if parts else {}), **options}.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        how: dict[str, Any] = {"type": type(default), "default": default}
        if isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, type):
            how = {"type": default}
        elif isinstance(default, list):
            values = [value for value in default if not isinstance(value, type)]
            first = default[0] if default else str
            how = {"type": first if isinstance(first, type) else type(first), "default": values, "nargs": "*"}
        made.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    return made


def part_of(options: argparse.Namespace, cases: Sequence[Item]) -> Sequence[Item]:
    """Those of the cases that `--part` asks for."""
    first, every = map(int, options.part.split("/"))
    return cases[first::every]


def parts_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results that `--join` names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in options.join]


def numbers_in(path: Path | None) -> dict[str, Any]:
    """Numbers that a file has; a benchmark that was ended goes on behind them."""
    if path is None or not path.exists():
        return {}
    numbers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"]
    return numbers


def show(row: Mapping[str, Any], *, keys: bool = True) -> None:
    """Print a row on a line: texts as they are, numbers behind their names, tables as `name.key number`."""
    print("  ".join(_cells(row, keys)), flush=True)


def _cells(row: Mapping[str, Any], keys: bool, prefix: str = "") -> Iterable[str]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, keys, f"{prefix}{key}.")
        elif isinstance(value, str | bool) or value is None or not keys:
            yield f"{value}"
        elif isinstance(value, int | float):
            yield f"{prefix}{key} {value:,.4g}"


def write_joined(options: argparse.Namespace, parts: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
    """Write the numbers of several results, with the environment of the first, and the commit of the last one.

    Which part each was, is left out.
    """
    commands = dict.fromkeys(part["command"] for part in parts)
    local = re.compile(r" --(part|output|commit) \S+| --known( (?!--)\S+)+")
    write_result(
        options.output,
        command=" && ".join(dict.fromkeys(local.sub("", command) for command in commands)),
        commit=parts[-1]["commit"],
        environment=parts[0]["environment"],
        numbers=numbers,
    )


def write(options: argparse.Namespace, numbers: Mapping[str, Any], **environment: Any) -> None:
    """Write what was measured to `options.output`; do nothing if that is not given.

    Args:
        options: with `output` and `commit`, of `parser`.
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
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def busy_seconds() -> float:
    """Seconds that all processors together have worked for all programs."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def used_seconds() -> float:
    """Seconds of the processor of this process and of those that it has waited for."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
