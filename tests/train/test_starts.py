"""Each start of a run is one line: what was typed, on what, with which versions."""

import json
from pathlib import Path

import pytest
import torch

from penstock.base.errors import RunFolderError
from penstock.config.load import load_run
from penstock.train.observer import RunStart
from penstock.train.sinks import StartsFile, start_record


def start(steps_done: int = 0) -> RunStart:
    return RunStart(
        run=load_run("debug"),
        folder=Path("runs/debug"),
        device_name="NVIDIA H200",
        kernels="reference",
        parameters=1000,
        active_parameters=300,
        steps_done=steps_done,
        ranks=4,
    )


def test_a_start_says_what_was_typed_and_on_what() -> None:
    line = start_record(start(), ["/usr/bin/penstock", "train", "debug", "seed=1", 'data.files=["a b"]'])
    assert line["command"] == "penstock train debug seed=1 'data.files=[\"a b\"]'"
    assert (line["device"], line["ranks"], line["torch"]) == ("NVIDIA H200", 4, torch.__version__)


def test_a_module_is_called_by_the_name_of_the_program() -> None:
    assert start_record(start(), ["/x/penstock/__main__.py", "train"])["command"] == "penstock train"


def test_every_start_adds_a_line(tmp_path: Path) -> None:
    for steps_done in (0, 20):
        file = StartsFile(tmp_path / "starts.jsonl")
        file.started(start(steps_done))
        file.closed()
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["steps_done"] for line in lines] == [0, 20]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write"):
        StartsFile(tmp_path / "gone" / "starts.jsonl").started(start())
