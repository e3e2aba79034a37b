"""Answers of `penstock` in this process: its output, or the one line of its refusal."""

from pathlib import Path

import pytest

from penstock.cli.main import main


def printed(verb: str, capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    """Standard output of a verb that writes nothing to standard error."""
    found = main([*verb.split(), *map(str, words)])
    captured = capsys.readouterr()
    assert (found, captured.err) == (code, "")
    return captured.out


def refused(verb: str, capsys: pytest.CaptureFixture[str], *words: str | Path, starts: bool = False) -> str:
    """The error of a verb without its beginning; a verb that starts its work may print before."""
    code = main([*verb.split(), *map(str, words)])
    captured = capsys.readouterr()
    assert code == 2
    assert starts or not captured.out
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")
