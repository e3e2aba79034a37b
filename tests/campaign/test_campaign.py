"""Runs that were killed and disturbed equal those that were not; benchmarks/campaign.py goes on for longer."""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import warm
from tests.campaign import campaign
from tests.campaign.campaign import Round, rounds
from tests.campaign.faults import ALONE, TOGETHER
from tests.campaign.runs import Reference, finish

OFTEN = ("killed",)  # one process; tests/distributed kill ranks and launchers, tests/train damage checkpoints
CHANGED = "changed"
SEED = 7


def done_in(folder: Path, seconds: float, kinds: Sequence[str]) -> list[Round]:
    """Rounds by a process without threads, which may fork."""
    done = warm.run(print_rounds, folder, seconds, kinds, folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return [Round(*json.loads(line)) for line in done.stdout.splitlines()]


def print_rounds(folder: Path, seconds: float, kinds: Sequence[str]) -> int:
    """Print how rounds ended, a line each."""
    vars(campaign)["ALONE"] = {**ALONE, CHANGED: _changed}
    for one in rounds(folder, seconds, SEED, kinds):
        sys.stdout.write(json.dumps([one.kind, one.seed, one.happened, one.why]) + "\n")
        sys.stdout.flush()
    return 0


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
    done = done_in(tmp_path, seconds, (*kinds, CHANGED))
    assert {one.kind for one in done} == {*kinds, CHANGED}
    assert [one for one in done if one.why and one.kind != CHANGED] == []
    assert sum(one.happened for one in done if one.kind != CHANGED) > 0
    changed = [one.why for one in done if one.kind == CHANGED]
    assert all(why.startswith("AssertionError: figures differ in ") for why in changed), "a learning rate is seen"
