"""Runs that were killed and disturbed equal those that were not; benchmarks/campaign.py goes on for longer."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaign import campaign
from tests.campaign.campaign import Round, rounds
from tests.campaign.faults import ALONE, TOGETHER
from tests.campaign.runs import Reference, finish

ROOT = Path(__file__).resolve().parents[2]
OFTEN = ("killed", "launcher killed", "checkpoint damaged")
CHANGED = "changed"
SEED = 7


def done_in(folder: Path, seconds: float, kinds: Sequence[str]) -> list[Round]:
    """Rounds by a process without threads, which may fork."""
    code = f"from tests.campaign.test_campaign import print_rounds; print_rounds({str(folder)!r}, {seconds}, {kinds!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Round(*json.loads(line)) for line in done.stdout.splitlines()]


def print_rounds(folder: str, seconds: float, kinds: Sequence[str]) -> None:
    """Print how rounds ended, a line each."""
    vars(campaign)["ALONE"] = {**ALONE, CHANGED: _changed}
    places = Path(folder, "faults"), Path(folder, "changed")
    for place in places:
        place.mkdir()
    *others, last = kinds
    for one in (*rounds(places[0], seconds, SEED, others), *rounds(places[1], 0.0, SEED, [last])):
        sys.stdout.write(json.dumps([one.kind, one.seed, one.happened, one.why]) + "\n")
        sys.stdout.flush()


def _changed(folder: Path, draw: random.Random, wanted: Reference) -> int:
    """No fault of the system: another learning rate, which the comparison must see."""
    text = (folder / "tiny.toml").read_text()
    (folder / "tiny.toml").write_text(text.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    finish(folder, wanted)
    return 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seconds", "kinds"), [(0.0, OFTEN), pytest.param(1200.0, (*ALONE, *TOGETHER), marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_equals_one_that_had_no_fault(seconds: float, kinds: Sequence[str], tmp_path: Path) -> None:
    *done, changed = done_in(tmp_path, seconds, (*kinds, CHANGED))
    assert {one.kind for one in done} == set(kinds)
    assert [one for one in done if one.why] == []
    assert sum(one.happened for one in done) > 0
    assert changed.why.startswith("AssertionError: figures differ in "), "another learning rate is seen"
