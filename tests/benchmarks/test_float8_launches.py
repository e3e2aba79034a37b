"""The sweep over launches keeps what it has measured, and says which launch does not end."""

import argparse
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.kernels import float8_launches
from benchmarks.kernels.float8_launches import ENDED_BY_WATCH, Watch, first_call, summarize
from benchmarks.kernels.float8_layers import TINY, Layer
from benchmarks.kernels.float8_products import parse_arguments


class EndedError(Exception):
    """Instead of the end of the process."""


def test_what_does_not_end_is_named_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    first_call({"slow": lambda: time.sleep(0.3)}, "slow", "a layer, forward", Watch(0.05))  # type: ignore[dict-item]
    assert ended == [ENDED_BY_WATCH]
    assert "a layer, forward, slow: compiling did not end within 0.05 s" in capsys.readouterr().err
    first_call({"fast": lambda: None}, "fast", "a layer, forward", Watch(0.05))  # type: ignore[dict-item,return-value]
    time.sleep(0.1)
    assert ended == [ENDED_BY_WATCH], "what ended in time is not waited for"


def test_an_ended_sweep_has_written_every_case_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(layer: Layer, which: str, *rest: object) -> dict:
        if which == "weight gradient":
            raise EndedError
        times = {"bare": 2.0, "fast": 1.0}
        return {"layer": "one", "grouped": False, "pass": which, "decibels": 30.0} | dict.fromkeys(
            ("milliseconds", "tflops"), times
        )

    monkeypatch.setattr(float8_launches, "draw", lambda shape, recipe: None)
    monkeypatch.setattr(float8_launches, "measure", measure)
    file = tmp_path / "found.json"
    options = argparse.Namespace(output=file, commit="c", compile=False, patience=1.0, recipe="blockwise-square")
    with pytest.raises(EndedError):
        float8_launches.run(options, TINY)
    found = json.loads(file.read_text())["numbers"]
    assert found["recipe"] == "blockwise-square"
    assert [row["pass"] for row in found["rows"]] == ["forward", "input gradient"]
    assert found["summary"]["dense, forward"] == {"bare": 1.0, "fast": 2.0}


def test_without_the_tables_launch_there_is_nothing_to_compare_with() -> None:
    row = {"layer": "one", "grouped": True, "pass": "forward", "milliseconds": {"gluon": 1.0}}
    assert summarize([row]) == {}


def test_candidates_that_nobody_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["float8_products", "--launches", "--candidates", "bare,gloun"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "gloun is none of" in capsys.readouterr().err
