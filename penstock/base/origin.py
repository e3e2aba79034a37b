"""What made a file: the command of this process, the date, and Penstock's version and commit."""

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import penstock

UNKNOWN = "unknown"  # commit, outside of a repository


def command_text() -> str:
    """The command line of this process as a shell reads it, with the program's name instead of its path."""
    program, *arguments = sys.argv
    name = Path(program).name
    return shlex.join(["penstock" if name == "__main__.py" else name, *arguments])


def commit_of_code() -> str:
    """Commit of the repository of this package, with -dirty if files were changed; `unknown` outside of one."""
    root = Path(penstock.__path__[0]).parent
    if not (root / ".git").exists():
        return UNKNOWN
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        described = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return UNKNOWN
    return described.stdout.strip() or UNKNOWN


def version_of(package: str) -> str | None:
    """Version of an installed package, by its name in the registry."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_text(version: str, commit: str) -> str:
    return f"Penstock {version}" + (f", commit {commit}" if commit != UNKNOWN else "")


def origin_text() -> str:
    """Command, date, version and commit of this process, in one line."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{command_text()} | {now} | {version_text(penstock.__version__, commit_of_code())}"
