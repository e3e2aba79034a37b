"""Tables: plain where a program reads, drawn where a person does."""

import sys

import pytest

from penstock.cli.table import print_table

ROWS = [("steps", "10"), ("a-long-name", "")]


def test_a_plain_table_is_aligned_and_has_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("field", "value"), ROWS)
    assert capsys.readouterr().out == "field        value\nsteps        10\na-long-name\n"


def test_a_table_on_a_terminal_is_drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("field", "value"), [*ROWS, ("[bold]", "x")])
    text = capsys.readouterr().out
    assert "\u2502" in text
    assert "[bold]" in text, "brackets are text, not markup"


def test_a_table_may_have_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("field", "value"), [])
    assert capsys.readouterr().out == "field  value\n"
