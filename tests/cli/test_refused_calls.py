"""A call that cannot be answered ends with one line and exit code 2, and leaves the folder as it was."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.base.errors import did_you_mean, did_you_mean_path
from penstock.config.load import dump_toml
from tests.cli import answers
from tests.train.tiny_run import tiny_run

CALLS = re.findall(r"^(?!#)(\S.*)\n    (.*)", Path(__file__).with_name("refused_calls.txt").read_text(), re.M)
MEANINGS = {
    "LITE": "deepseek-v2-lite parallel.expert=8",
    "POD": "deepseek-v2-lite parallel.expert=8 --nodes 2 --gpus-per-node 8",
}
FILES = {
    "my-run.toml": "",
    "mine.toml": "",
    "book.txt": "",
    "latin.txt": "caf\xe9",  # no UTF-8
    "key.toml": 'preset = "debug"\ntraining.stpes = 3\n',
    "experts.toml": 'preset = "deepseek-v3"\nmodel.moe.top_k = 999\n',
    "damaged.toml": "[training",
    "corpus.jsonl": '{"text": "the penstock feeds a turbine"}\n' * 30,
    "short.jsonl": '{"text": "a"}',
}


@pytest.mark.parametrize(("call", "told"), CALLS, ids=[call for call, _ in CALLS])
def test_a_refused_call_is_one_line_and_leaves_nothing(call: str, told: str) -> None:
    tiny = dump_toml(tiny_run(Path("runs"))).replace("vocab_size = 17", "vocab_size = 257")  # room for bytes
    for name, text in {**FILES, "tiny.toml": tiny}.items():
        Path(name).write_text(text, encoding="latin-1")
    Path("runs/first").mkdir(parents=True)
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    verb, *words = (word.replace("\\n", "\n") for word in shlex.split(call))
    meant = [part for word in words for part in (MEANINGS[word].split() if word in MEANINGS else [word])]
    # Only these verbs may print before they know that they cannot go on.
    message = answers.refused(verb, *meant, starts=verb in ("train", "ladder", "init"))
    assert re.fullmatch(".*".join(map(re.escape, told.split("..."))), message), message
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


def test_what_resembles_nothing_gets_no_proposal() -> None:
    assert did_you_mean("xyzzy", ("steps", "seed")) is None


def test_letters_case_does_not_count_and_the_name_is_given_as_it_is_written() -> None:
    assert did_you_mean("h20o", ("H100", "H200")) == "did you mean H200?"


def test_a_path_in_a_folder_that_is_not_there_gets_no_proposal() -> None:
    assert did_you_mean_path(Path("gone/file")) is None
    Path("metrics.jsonl").touch()
    assert did_you_mean_path(Path("metric.jsonl")) == "did you mean metrics.jsonl?"
