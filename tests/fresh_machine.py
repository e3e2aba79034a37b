"""The first hour: clone, `make train`, then every command of README.md and docs/start.md, unchanged and in order.

    python -m tests.fresh_machine                     into a temporary folder, which is removed
    python -m tests.fresh_machine --folder /tmp/new   which stays
    python -m tests.fresh_machine --run 'debug-2l'    trains something shorter in `make train`

The clone is that of the last commit. Nothing of the environment that this runs in is used but its Python: no virtual
environment, no module path. The commands of each document start in a folder that holds only the files that it shows.
What is executed are the lines of blocks marked `bash run`; a preset that another block trains is described
(`--dry-run`); other lines are listed, because they need devices, weights or text that a newcomer lacks, or set up more.

It needs nothing but Python, git, make and pip, and takes ten minutes; `make test-all` runs it.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.shown_commands import Command, commands_in, write_files

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/start.md")
LIMIT_SECONDS = 1800
"""Of a command."""

TOO_LONG = 124
"""Exit code of a command that was killed at the limit, as of the program `timeout`."""


@dataclass(frozen=True)
class Tried:
    """A command and what came of it."""

    line: str  # as it was executed
    code: int | None  # exit code; None if it was not executed
    seconds: float
    text: str  # what it printed, or why it was not executed

    def __str__(self) -> str:
        took = f"{self.code:>4}  {self.seconds:7.1f}" if self.code is not None else f"{'-':>4}  {'-':>7}"
        return f"{took}  {self.line}" + (f"   [{self.text}]" if self.code is None else "")


def execute(line: str, folder: Path, environment: dict[str, str]) -> Tried:
    """A line in a shell; without a terminal, and nothing to answer questions with."""
    begin = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own, which is killed as a whole
    )
    try:
        text, code = process.communicate(timeout=LIMIT_SECONDS)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, code = process.communicate()[0], TOO_LONG
    tried = Tried(line, code, time.monotonic() - begin, text)
    print(tried, flush=True)
    if tried.code:
        print(tried.text, flush=True)
    return tried


def bare_environment() -> dict[str, str]:
    """The variables of this process without those of a virtual environment; `make` takes the Python below it."""
    inside = {str(Path(prefix) / "bin") for prefix in (sys.prefix, os.environ.get("VIRTUAL_ENV", sys.prefix))}
    inside -= {str(Path(sys.base_prefix) / "bin")}
    ours = ("VIRTUAL_ENV", "MAKE", "MFLAGS", "OMP_NUM_THREADS", "TRITON_", "PYTHON", "PYTEST", "HF_", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder not in inside]
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return kept | {"PATH": os.pathsep.join(folders), "PYTHON": str(python)}


def outcome_of(command: Command, folder: Path, environment: dict[str, str]) -> Tried:
    """Execute a command of a document as far as a newcomer's machine can."""
    if command.runs:
        return execute(command.line, folder, environment)
    if command.starts_a_run:
        return execute(f"{command.line.split('#')[0].rstrip()} --dry-run", folder, environment)
    known = {"make": "sets up more", "source": "PATH has it here"}
    why = known.get(command.words[0], "needs devices, weights or files of the user's own")
    tried = Tried(command.line, None, 0.0, why)
    print(tried, flush=True)
    return tried


def first_hour(folder: Path, run: str) -> list[Tried]:
    """Everything, in an empty folder. `make train` trains `run`, or what the Makefile says if that is empty."""
    clone, environment = folder / "penstock", bare_environment()
    print("exit  seconds  command", flush=True)
    tried = [execute(f"git clone --quiet '{ROOT}' '{clone}'", folder, environment)]
    if not tried[-1].code:
        tried.append(execute(f"make train RUN='{run}'" if run else "make train", clone, environment))
    if tried[-1].code:
        return tried
    environment["PATH"] = f"{clone / '.venv/bin'}{os.pathsep}{environment['PATH']}"
    for document in DOCUMENTS:
        place = folder / Path(document).stem
        place.mkdir()
        print(f"{document}:", flush=True)
        text = (clone / document).read_text(encoding="utf-8")
        write_files(text, place)
        for command in commands_in(text, document):
            if command.words != ["make", "train"]:
                tried.append(outcome_of(command, place, environment))
    return tried


def main(arguments: Sequence[str] | None = None) -> int:
    """Try everything; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to clone to; stays")
    parser.add_argument("--run", default="", help="what `make train` trains, instead of the debug preset")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        place = Path(folder) if options.folder is None else options.folder
        place.mkdir(parents=True, exist_ok=True)
        tried = first_hour(place.resolve(), options.run)
    failed = [one.line for one in tried if one.code]
    executed = sum(one.code is not None for one in tried)
    print(f"{executed} commands executed, {len(failed)} failed, {len(tried) - executed} listed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
