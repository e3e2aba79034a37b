"""The records of random compositions: their counts fit together, and every tie has a cause."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.composition import cause

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "name", ["composition.json", "composition-wide.json", "composition-gpu.json", "composition-wide-gpu.json"]
)
def test_every_draw_of_a_record_is_explained_and_every_tie_has_a_cause(name: str) -> None:
    numbers = json.loads((RESULTS / name).read_text())["numbers"]
    assert len(numbers["ties"]) == numbers["tie"]
    assert Counter(map(cause, numbers["ties"])) == numbers["causes"]
    counted = sum(numbers[kind] for kind in ("equal", "tie", "refused")) + len(numbers["faults"])
    assert counted == numbers["draws"]
