"""Help fits a screen, every verb's too, and has no colors in a pipe."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from penstock.cli import signatures
from penstock.cli.main import VERBS
from penstock.cli.preflight import print_checks
from penstock.parallel.launch.environment import read_environment
from penstock.tune.preflight.host import PreflightCheck
from tests.cli import answers
from tools.commands_page import commands_page

COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7])[;m]")


def verbs_below(words: list[str], command: Any) -> Iterator[list[str]]:
    yield words
    for name, inner in vars(command).get("commands", {}).items():
        if not inner.hidden:
            yield from verbs_below([*words, name], inner.load() if hasattr(inner, "load") else inner)


def all_verbs() -> list[list[str]]:
    return [words for verb in VERBS for words in verbs_below([verb.name], verb.load())]


def lines_of(words: list[str]) -> list[str]:
    return answers.printed(" ".join(words), "--help").splitlines()


@pytest.fixture(autouse=True)
def a_screen_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_first_screen_is_no_larger_than_a_terminal() -> None:
    lines = lines_of([])
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not any("..." in line for line in lines[1:]), "no summary is cut"
    assert lines[-1] == "Options: --version, --install-completion, --show-completion, --help."
    for verb in VERBS:
        assert f"  {verb.name} " in "\n".join(lines)


def test_the_help_of_every_verb_fits_a_screen_or_little_more() -> None:
    sizes = {" ".join(words): lines_of(words) for words in all_verbs()}
    assert {verb: len(lines) for verb, lines in sizes.items() if len(lines) > 45} == {}  # plan has most options
    assert [verb for verb, lines in sizes.items() if max(map(len, lines)) > 80] == []
    assert [verb for verb, lines in sizes.items() if not lines[0].startswith(f"Usage: penstock {verb}")] == []


def test_every_verb_and_option_says_what_it_is() -> None:
    page = commands_page()
    assert [" ".join(words) for words in all_verbs() if f"## penstock {' '.join(words)}\n" not in page] == []
    assert [line for line in page.splitlines() if re.fullmatch(r"\| `[^`]+` \|\s*\|", line)] == []


@pytest.mark.parametrize(("no_color", "is_colored"), [("1", False), ("", True)])
def test_colors_are_for_who_wants_them(no_color: str, is_colored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": no_color, "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)  # The first makes rich believe in a terminal.
    bad = PreflightCheck(area="disk", name="room", status="failed", got="none")  # printed in red
    out = answers.written(partial(print_checks, as_json=False), [bad], read_environment())
    assert "failed" in out
    assert bool(COLOR.search(out)) is is_colored


@pytest.mark.parametrize("columns", ["80", "60"])
def test_help_of_a_description_is_that_of_the_verb(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    verbs = all_verbs()
    described = {" ".join(words): lines_of(words) for words in verbs}
    monkeypatch.setattr(signatures, "check_arguments", lambda verb, words, parent: None)
    assert {" ".join(words): lines_of(words) for words in verbs} == described


def test_help_of_every_verb_and_config_show_import_no_pytorch() -> None:
    program = (
        "import sys; from penstock.cli.main import main\n"
        f"assert all(main([*words, '--help']) == 0 for words in {all_verbs()})\n"
        "assert main(['config', 'show', 'debug-2l', 'model.moe.experts=4']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
