"""`penstock data inspect`: what it shows of presets, files and run folders."""

import json
from functools import partial
from pathlib import Path

import pytest

from penstock.config.load import dump_toml
from tests.cli import answers
from tests.train.test_batch_contents import text_run
from tests.train.test_loop import start

outcome = partial(answers.outcome, "data", "inspect")
SHOWN = """\
step 1 of tiny: 4 rows of 12 tokens

counted              4 rows, 48 tokens
pieces of documents  8, 2.00 a row
attention sees       one document
text                 0.917 bytes a token
padding              0.00% of the tokens
labels not counted   8.33%

row 0: 2 pieces
  0..4, positions 0..4, label not counted at 4, [end of document]
    'a 1 '
  5..11, positions 0..6, [cut by the row]
    'a 2 a 2'
"""


@pytest.fixture
def described(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(text_run(tmp_path, document_mask=True)))
    return path


def test_rows_are_shown_with_borders_positions_and_labels_that_do_not_count(described: Path) -> None:
    words = ("data.shuffle=false", "data.validation_share=0", "evaluation.rows=0", "--rows", 1)
    assert outcome(described, *words) == (0, SHOWN, "")


def test_programs_get_the_same_as_json(described: Path) -> None:
    code, out, _ = outcome(described, "--rows", 3, "--step", 2, "--json")
    told = json.loads(out)
    assert (code, told["what"], told["counted_rows"], told["attention"]) == (0, "step 2 of tiny", 4, "document")
    assert len(told["shown"]) == 3
    ids = [token for piece in told["shown"][0]["pieces"] for token in piece["ids"]]
    assert len(ids) == 12  # positions of a row
    text = "".join(piece["text"] for piece in told["shown"][0]["pieces"])
    assert bytes(token for token in ids if token < 256).decode() == text  # 256 ends a document


def test_a_run_folder_is_read_with_its_own_settings(tmp_path: Path) -> None:
    _, folder = start(text_run(tmp_path))
    code, out, _ = outcome(folder.path, "--step", 4, "--rows", 1)
    assert code == 0
    assert out.startswith("step 4 of tiny: 4 rows of 12 tokens")
    assert "\n    'a " in out


def test_tokens_without_text_are_shown_as_they_are() -> None:
    code, out, _ = outcome("debug", "data.source=synthetic-random", "--rows", 1)
    assert code == 0
    assert "text                 unknown" in out
    assert "\n    ids " in out


def test_held_out_rows_show_their_padding(described: Path) -> None:
    words = ("data.validation_share=0.3", "evaluation.rows=400", "--held-out", "--rows", 400)
    code, out, _ = outcome(described, *words)
    assert code == 0
    assert out.startswith("held-out rows of tiny: ")
    assert "11: padding" in out


def test_long_texts_are_cut_unless_asked_for(described: Path) -> None:
    words = (described, "training.sequence_length=4000", "data.files=[]", "data.source=standard-library", "--rows", 1)
    short, full = outcome(*words)[1], outcome(*words, "--full")[1]
    assert " ... " in short
    assert max(map(len, short.splitlines())) < 200  # 160 characters, and the marks
    assert len(full) > len(short)


def test_parts_of_a_mixture_are_counted(tmp_path: Path) -> None:
    text_run(tmp_path)
    mixture = [
        f'data.mixture.{name}={{source="jsonl", files="{tmp_path}/{name}.jsonl", weight={weight}}}'
        for name, weight in (("a", 3), ("b", 1))
    ]
    code, out, _ = outcome("debug", *mixture, "evaluation.rows=0")
    assert code == 0
    assert "a     75.0%      75.0%" in out
    assert "row 0 of a: " in out
