"""What is written down with a measurement."""

import json
from pathlib import Path

import pytest

import penstock
from penstock.base.errors import ConfigError
from penstock.tune.result_file import UNKNOWN, commit_of_code, describe_machine, write_result
from tests.promises.test_results import faults


def test_a_measurement_says_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    machine = describe_machine(on_gpu=False)
    write_result(path, command="penstock ladder", commit="0123abc", environment=machine, numbers={"ratio": 1.5})
    assert faults(json.loads(path.read_text())) == []
    assert [found.name for found in path.parent.iterdir()] == ["speed.json"]


def test_files_without_a_history_have_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "__path__", [str(tmp_path / "penstock")])
    assert commit_of_code() == UNKNOWN


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_result(tmp_path / "taken" / "a.json", command="", commit="0123abc", environment={}, numbers={})
