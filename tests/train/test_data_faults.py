"""Faults at random steps: what was trained is saved, and the printed command goes on."""

from pathlib import Path

import pytest

from benchmarks.data_faults import KINDS, SEED, play


@pytest.mark.often("null", "cut file", "removed file", "metrics closed", "output closed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_ends_with_all_steps_saved_and_a_command_that_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEED, SEED + 20):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        draw = play(kind, seed)
        if draw.is_reached:
            assert (draw.why, draw.lost) == ("", 0)
            return
    pytest.fail("no draw had its fault in a document that was read")
