"""The cases of benchmarks.search_all begin with all presets, chips and sizes, and go on behind known ones."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import search_all
from penstock.config.presets.registry import PRESETS
from penstock.plan.hardware_file import known_hardware


def asked_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[search_all.Case]:
    """Cases of a call; each is answered at once by nothing."""
    asked = list[search_all.Case]()

    def rows_of(waiting: list[search_all.Case]) -> list[search_all.Row]:
        asked.extend(waiting)
        return [{**case, "seconds": 0.0} for case in waiting]

    monkeypatch.setattr(search_all, "rows_of", rows_of)
    monkeypatch.setattr(sys, "argv", ["search_all", "--commit", "x", *options])
    search_all.main()
    return asked


def test_a_few_dozen_cases_have_every_preset_chip_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = asked_of(monkeypatch)
    assert len(cases) == len({json.dumps(case) for case in cases}) == len(PRESETS) * 13 * 11
    for first in (0, 1000, 5000):
        some = cases[first : first + len(PRESETS)]
        sizes, chips = zip(*(case["on"].split("x") for case in some), strict=True)
        assert {case["model"] for case in some} == set(PRESETS)
        assert (set(chips), set(map(int, sizes))) == (set(known_hardware()), set(search_all.DEVICES))


def test_a_call_asks_what_it_and_the_known_files_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = ("--models", "debug", "qwen3-0.6b", "--chips", "H100", "--devices", "8", "16")
    known, own = tmp_path / "known.json", tmp_path / "own.json"
    first = asked_of(monkeypatch, *few, "--part", "0/2", "--output", f"{known}")
    rest = asked_of(monkeypatch, *few, "--known", f"{known}", "--output", f"{own}")
    assert len(first) == len(rest) == 2 and all(case not in first for case in rest)
    assert asked_of(monkeypatch, *few, "--known", f"{known}", "--output", f"{own}") == []
    asked_of(monkeypatch, "--join", f"{known}", f"{own}", "--output", f"{own}")
    assert len(json.loads(own.read_text())["numbers"]["searches"]) == 4
