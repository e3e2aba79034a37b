"""Tables: plain where a program reads, drawn where a person does, and no number is cut in either."""

import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.base.numbers import bytes_text
from penstock.cli.output import print_table

ROWS = [("steps", "10"), ("a-long-name", "")]
WORDS = ("pipeline", "of", "every", "micro-batch", "model.moe.router.expert_bias", "rank", "gfx942", "the", "because")


Draw = Callable[..., str]


@pytest.fixture
def drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Draw:
    """`print_table` on a terminal of so many columns."""

    def draw(width: int, *table: Any) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", f"{width}")
        print_table(*table)
        return capsys.readouterr().out

    return draw


def a_cell(kind: str, dice: random.Random) -> str:
    """A cell of a column of numbers, of numbers with their unit, or of text that has numbers in it."""
    number = dice.uniform(0, 10 ** dice.randint(1, 12))  # of every size
    if kind == "number":
        return dice.choice((f"{number:,.3f}", f"{number:,.0f}", f"{number:.2e}", f"{dice.random():.1%}", "-", ""))
    if kind == "unit":
        return dice.choice((bytes_text(number), f"+{bytes_text(number)}", f"{number % 1000:.3g} ms"))
    words = [dice.choice((*WORDS, f"{number:,.1f}", bytes_text(number))) for _ in range(dice.randint(1, 12))]
    return " ".join(words)


def a_table(dice: random.Random) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns of all kinds under different names, the first of text or numbers."""
    kinds = [dice.choice(("number", "unit", "text")) for _ in range(dice.randint(1, 12))]
    columns = [f"{dice.choice(WORDS)}-{place}" for place in range(len(kinds))]
    return columns, [tuple(a_cell(kind, dice) for kind in kinds) for _ in range(dice.randint(0, 5))]


def test_a_plain_table_is_aligned_and_has_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("field", "value"), ROWS)
    assert capsys.readouterr().out == "field        value\nsteps        10\na-long-name\n"
    print_table(("field", "value"), [])
    assert capsys.readouterr().out == "field  value\n"


def test_a_plain_table_has_every_column_however_long_its_lines_are(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [f"column {number}" for number in range(50)]
    print_table(columns, [[f"{number:,} bytes of something" for number in range(50)]], least=columns)
    assert capsys.readouterr().out.count("bytes of something") == 50


def test_a_table_on_a_terminal_is_drawn(drawn: Draw) -> None:
    text = drawn(80, ("field", "value"), [*ROWS, ("[bold]", "x")])
    assert "\u2502" in text  # a line between cells
    assert "[bold]" in text, "brackets are text, not markup"


@pytest.mark.parametrize("width", range(40, 201, 4))
def test_no_number_is_cut_on_a_terminal_of_any_width(width: int, drawn: Draw) -> None:
    dice = random.Random(width)  # other tables at each width
    for _ in range(4):
        columns, rows = a_table(dice)
        text = drawn(width, columns, rows, dice.sample(columns, k=len(columns) // 2))
        framed, _, below = re.sub(r"\x1b\[\d*m", "", text).rpartition("\u2518\n")
        left_out = below.partition("(")[2].partition(")")[0].split(", ") if below else []  # names under the table
        assert below == "" or below.startswith(f"{len(left_out)} of {len(columns)} columns left out")
        assert "\u2026" not in framed  # rich's mark of a cut
        assert max(len(line) for line in framed.splitlines()) <= width
        shown = set(re.split(r"[\s\u2502]+", framed))  # words between lines
        kept = [place for place, name in enumerate(columns) if name not in left_out]
        assert 0 in kept  # the first column stays
        for row in rows:
            for number in (word for place in kept for word in row[place].split() if word[0] in "+0123456789"):
                assert number in shown


def test_the_columns_that_are_missed_least_go_first_and_are_named(drawn: Draw) -> None:
    columns, row = ("layout", "step", "MFU", "bubble", "memory"), ("PP16 EP64", "11.2 s", "38.1%", "6.2%", "191.2 GB")
    text = drawn(40, columns, [row], ("bubble", "MFU"))
    assert "191.2 GB" in text
    assert "6.2%" not in text
    assert "2 of 5 columns left out (MFU, bubble): a wider terminal shows them, and so does `| cat`" in text


def test_text_is_wrapped_before_a_column_is_left_out(drawn: Draw) -> None:
    text = drawn(60, ("rule", "layouts", "because"), [("fits", "1,234,567", "of 26.8 GB more than there is " * 5)])
    assert "left out" not in text
    assert "1,234,567" in text
    assert text.count("26.8") == 5  # no word is lost


def test_one_column_that_is_wider_than_the_terminal_is_whole_all_the_same(drawn: Draw) -> None:
    assert "1" * 60 in drawn(40, ("number", "more"), [("1" * 60, "2")])
