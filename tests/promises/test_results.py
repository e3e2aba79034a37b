"""Every measurement says how it was made, and every figure that a document quotes is one of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools import documents

RESULTS = sorted((documents.ROOT / documents.RESULTS).glob("*.json"))
COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")  # as git describe writes it


def numbers_in(value: Any) -> int:
    """How many numbers stand anywhere below a value."""
    if isinstance(value, dict | list):
        return sum(map(numbers_in, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))


def faults(result: Any) -> list[str]:
    """What a result lacks to be believed and repeated: command, commit, environment, numbers."""
    if not isinstance(result, dict):
        return ["is no JSON object"]
    found = [f"has no {key!r}" for key in ("command", "commit", "environment", "numbers") if not result.get(key)]
    if "commit" in result and not COMMIT.fullmatch(str(result["commit"])):
        found.append(f"commit {result['commit']!r} is no git hash (with -dirty if files were changed)")
    if isinstance(result.get("environment"), dict) and not {"torch", "device"} <= result["environment"].keys():
        found.append("environment names no 'torch' or no 'device'")
    if numbers_in(result.get("numbers")) == 0:
        found.append("holds no number")
    return found


def test_a_result_says_how_it_was_made() -> None:
    found = {path.name: faults(json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS}
    assert {name: lacking for name, lacking in found.items() if lacking} == {}


def test_every_quoted_figure_and_table_is_the_measured_one() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in documents.markdown_files()}
    old = [path.name for path, text in texts.items() if documents.with_measurements(text) != text]
    assert old == [], "they quote old measurements; run `make docs`"


def test_a_result_without_its_command_is_refused() -> None:
    whole = {
        "command": "python benchmarks/one_gpu.py",
        "commit": "0123abc",
        "environment": {"torch": "2.11.0", "device": "H200"},
        "numbers": {"ratio": 1.5},
    }
    assert faults(whole) == []
    assert faults({**whole, "command": ""}) == ["has no 'command'"]
    assert faults({**whole, "commit": "today"})
    assert faults({**whole, "environment": {"torch": "2.11.0"}})
    assert faults({**whole, "numbers": {"ratio": "fast"}}) == ["holds no number"]


@pytest.fixture
def speed(tmp_path: Path) -> Path:
    """A folder with one result."""
    file = tmp_path / documents.RESULTS / "speed.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"numbers": {"cases": [{"ratio": 1.849}], "ratio": 2}}')
    return tmp_path


FIGURE = '[9.9][a] and [][a]\n\n[a]: ../benchmarks/results/{} .2f"\n'


def test_a_quoted_figure_is_renewed_from_its_result_wherever_it_stands(speed: Path) -> None:
    text = FIGURE.format('speed.json "numbers.cases.0.ratio')
    assert documents.with_figures(text, speed) == text.replace("[9.9]", "[1.85]").replace("[]", "[1.85]")


@pytest.mark.parametrize(
    "figure", ['other.json "a', 'speed.json "numbers.absent', 'speed.json "numbers.ratio.deeper', 'speed.json "numbers']
)
def test_a_figure_that_no_result_holds_is_refused(speed: Path, figure: str) -> None:
    with pytest.raises(LookupError, match=re.escape(figure.split()[0])):
        documents.with_figures(FIGURE.format(figure), speed)


def test_a_definition_that_no_text_uses_is_refused(speed: Path) -> None:
    with pytest.raises(LookupError, match="not used"):
        documents.with_figures(FIGURE.format('speed.json "numbers.ratio').replace("][a]", "][b]"), speed)
