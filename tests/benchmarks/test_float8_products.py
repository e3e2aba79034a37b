"""The benchmark of float8 products runs without a GPU, and what it sums up is what it measured."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.float8_products import main, summarize


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise-square"])
def test_two_small_layers_are_checked_and_timed_on_a_cpu(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["float8_products", "--tiny", "--recipe", recipe, "--output", str(file)])
    main()
    numbers = json.loads(file.read_text())["numbers"]
    rows = numbers["rows"]
    assert numbers["recipe"] == recipe
    assert len(rows) == 6 and all(set(row["milliseconds"]) == {"bf16", "bare", "quantized"} for row in rows)


def test_a_layers_speed_is_that_of_its_three_products_together() -> None:
    rows = [
        {"layer": "V2-Lite EP4, down", "milliseconds": {"bf16": bf16, "bare": 1.0, "quantized": 2.0}}
        for bf16 in (1.0, 2.0, 6.0)
    ]
    found = summarize(rows)
    assert found["V2-Lite EP4, down"] == {"bare": 3.0, "quantized": 1.5} and "all of V2-Lite" in found
