"""`penstock sample` prints a text and what the run adds to it, or in one line why not."""

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.data import Data
from penstock.train.run_folder import RunFolder
from tests.train.saved_run import byte_run, random_model, save_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = byte_run(tmp_path_factory.mktemp("runs"))
    return save_run(run, random_model(run))


def _outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["sample", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_goes_on_and_is_the_same_each_time(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _outcome(capsys, run_folder, "def ", "--tokens", 20)
    assert (code, err) == (0, "")
    assert out.startswith("def ") and out.endswith("\n") and len(out) > len("def \n")
    assert _outcome(capsys, run_folder, "def ", "--tokens", 20)[1] == out
    assert _outcome(capsys, run_folder, "def ", "--tokens", 20, "--temperature", 2, "--seed", 3)[1] != out


def test_a_text_of_nothing_begins_a_document_and_a_long_one_fills_the_context(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _outcome(capsys, run_folder, "", "--tokens", 3)[0] == 0
    code, out, _ = _outcome(capsys, run_folder, "a" * 31, "--tokens", 9)
    assert code == 0
    assert len(out) <= 31 + 2  # one token more, and the end of the line


def test_what_cannot_be_sampled_is_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").write_config(byte_run(tmp_path))
    synthetic = byte_run(tmp_path, data=Data(source="synthetic-random"), name="synthetic")
    cases = {
        (tmp_path, "a"): f"error: {tmp_path} is not the folder of a run",
        (tmp_path / "empty", "a"): f"error: {tmp_path / 'empty'} has no checkpoint yet",
        (run_folder, "a", "--step", 7): "error: there is no checkpoint of step 7 in",
        (run_folder, "a" * 32): "error: the text leaves no room in the context of the run; got 32 tokens; allowed: at",
        (run_folder, "\udcff"): "error: the text is not UTF-8; got '\\udcff'",
        (save_run(synthetic, random_model(synthetic)), "a"): "error: the tokens of data.source=synthetic-random stand",
        (run_folder, "a", "--top-p", 2): "error: Invalid value for '--top-p'",
        (run_folder, "a", "--temperature", -1): "error: Invalid value for '--temperature'",
    }
    for arguments, line in cases.items():
        code, out, err = _outcome(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
        assert err.startswith(line), err
