"""`penstock config show`."""

import json
from functools import partial
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.presets.debug import debug
from penstock.models.count import count
from tests.cli import answers

shown = partial(answers.printed, "config show")


@pytest.mark.parametrize(
    ("name", "parameters", "rest"),
    [
        ("deepseek-v2-lite", "15.7 B", ["active      2.66 B parameters for each token", "training    16.4 GFLOP"]),
        ("deepseek-v3", "671.0 B", ["prediction  11.6 B more, for multi-token prediction", "active      37.6 B"]),
    ],
)
def test_a_preset_is_shown_with_what_it_weighs(
    capsys: pytest.CaptureFixture[str], name: str, parameters: str, rest: list[str]
) -> None:
    lines = [line for line in shown(capsys, name).splitlines() if line.startswith("#")]
    assert lines[0] == f"# parameters  {parameters}"
    for line, beginning in zip(lines[1:], rest, strict=False):
        assert line.startswith(f"# {beginning}")
    assert lines[-1].endswith("for each token, at sequence length 4096")


def test_the_output_is_a_file_that_gives_the_same_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(shown(capsys, "debug", "seed=30"), encoding="utf-8")
    assert load_run(str(path)) == load_run("debug", ["seed=30"])


def test_json_has_the_run_and_exact_counts(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "debug", "--json"))
    assert found["run"] == debug().model_dump(mode="json")
    assert found["count"]["parameters"] == count(debug().model, 256).parameters


def test_what_cannot_be_loaded_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "debug", "training.steps=0"]) == 2
    assert capsys.readouterr().err == (
        "error: training.steps is out of range; got 0; allowed: whole number >= 1 (steps)\n"
    )
