"""Answers of `penstock` in this process: its output, or the one line of its refusal."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from penstock.cli.main import main


def written(call: Callable[..., object], *arguments: object) -> str:
    """Standard output of a function."""
    with redirect_stdout(io.StringIO()) as out:
        call(*arguments)
    return out.getvalue()


class Printed(io.StringIO):
    """Standard output of a command line, whose `write` a test may replace."""


def outcome(*words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    with redirect_stdout(Printed()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])  # paths and numbers too
    return code, out.getvalue(), err.getvalue()


def printed(verb: str, *words: object, code: int = 0) -> str:
    """Standard output of a verb that writes nothing to standard error."""
    found, out, err = outcome(*verb.split(), *words)
    assert (found, err) == (code, "")
    return out


def told_as_json(verb: str, *words: object, code: int = 0) -> Any:
    """The parsed answer to --json."""
    return json.loads(printed(verb, *words, "--json", code=code))


def refused(verb: str, *words: object, starts: bool = False) -> str:
    """The error of a verb without its beginning; one that starts its work may print before, and its next command."""
    code, out, err = outcome(*verb.split(), *words)
    assert code == 2
    assert starts or not out  # nothing was done yet
    line, *notes = err.splitlines()
    assert line.startswith("error: "), err
    assert not notes or (starts and notes[-1].startswith("next:  penstock train ")), err
    return line.removeprefix("error: ")
