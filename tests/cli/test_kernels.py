"""`penstock kernels`: what will run and why, and measuring, with a clock that does not run anything."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.cli.kernels import tune_on
from penstock.config.load import load_run
from penstock.kernels.choose import load
from penstock.kernels.tuning import DeviceFacts
from penstock.tune.kernels import Call
from tests.cli import answers

FACTS = DeviceFacts(kind="cuda", name="NVIDIA H200", target="sm_90", packages=frozenset({"triton"}), dtype="bf16")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = ["model.hidden_size=32", "model.moe.moe_intermediate_size=16", "training.sequence_length=16"]


class RisingClock:
    """Says 1, 2, 3, ... microseconds and runs nothing."""

    rotation = 1  # copies of the arguments

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, calls: Sequence[Call]) -> float:
        self._told += 1
        return float(self._told)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


printed = partial(answers.printed, "kernels")
refused = partial(answers.refused, "kernels")


def table(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(runs, why) by (operator, direction)."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[2:]]
    return {(row[0], row[1]): (row[2], row[3]) for row in rows}


def test_list_says_what_runs_on_this_cpu() -> None:
    assert "list" in printed() and "tune" in printed()
    text = printed("list", "--device", "cpu")
    assert text.splitlines()[0] == "debug on CPU: fp32, 512 tokens in a micro-batch"
    assert table(text)["experts", "weight gradient"] == ("torch", "no GPU")
    assert table(text)["route", "both"] == ("reference", "no GPU")


def test_list_says_what_would_run_on_a_gpu_that_is_not_here() -> None:
    text = printed("list", "deepseek-v3", "--device", "MI355X")
    assert text.startswith("deepseek-v3 on AMD Instinct MI355X: bf16, 4096 tokens in a micro-batch\n")
    assert table(text)["experts", "forward"] == ("triton", "no measurement for this chip: Triton by default")
    assert table(text)["attention", "both"][0] == "flash first"
    text = printed("list", "debug", "kernels.norm=reference", "--device", "h200")
    assert table(text)["norm", "both"] == ("reference", "kernels.norm=reference")


def test_list_as_json() -> None:
    found = json.loads(printed("list", "deepseek-v2-lite", "--device", "H100", "--json"))
    assert (found["run"], found["device"]["target"], found["shapes"]["experts"]) == ("deepseek-v2-lite", "sm_90", 64)
    loss = {"op": "loss", "direction": "both", "backend": "triton", "reason": "its only form on a GPU"}
    assert loss in found["choices"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_gpu_is_refused(tmp_path: Path) -> None:
    message = refused("tune", "debug", "--output", str(tmp_path / "m.json"))
    assert message.startswith("kernels are measured on a GPU, and there is none; got PyTorch")
    assert not (tmp_path / "m.json").exists()


def test_a_measured_winner_is_what_list_shows_then(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, path = load_run("debug", [*TINY, "training.precision=bf16"]), tmp_path / "m.json"
    tune_on(run, FACTS, DEVICE, RisingClock(), path)
    out = capsys.readouterr().out
    # Times only rise, so what is timed first wins.
    assert out.splitlines()[0].split()[:3] == ["operator", "direction", "skew"]
    assert out.splitlines()[1].split() == ["route", "forward", "0", "1.0", "2.0", "-", "triton"]
    assert f"it takes effect with kernels.measured={path}" in out
    assert len(load(path).entries) == 28

    again = printed("list", "debug", *TINY, "training.precision=bf16", f"kernels.measured={path}", "--device", "H200")
    assert table(again)["norm", "both"][1].endswith("x faster than torch on NVIDIA H200 at 64 tokens")


def test_tuning_another_shape_adds_to_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, facts = tmp_path / "m.json", replace(FACTS, packages=frozenset())
    for length in (16, 32, 32):  # the last replaces the second
        run = load_run("debug", [*TINY, "training.precision=bf16", f"training.sequence_length={length}"])
        tune_on(run, facts, DEVICE, RisingClock(), path)
    assert "16 entries of 32 in" in capsys.readouterr().out
    assert {one.shape["tokens"] for one in load(path).entries} == {64, 128}
