"""`penstock ladder` from the outside, with trials that are made up; and once, slowly, with real ones."""

import json
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import ladder as verb
from penstock.cli.main import main
from penstock.tune.trial import Failure, Figures, Trial, run_trial
from tests.cli import answers
from tests.tune.test_ladder import figures

SHORT = ("--steps", "3", "--warm-up", "1", "--processes", "1")  # the second and third step are timed

MINE = """
[[step]]
name = "ground"
change = ["kernels.norm=reference"]
[[step]]
name = "faster"
what = "torch's norm"
change = ["kernels.norm=torch"]
[[step]]
name = "broken"
change = ["kernels.rope=reference"]
[[step]]
name = "later"
change = ["oven.heat=3"]
[[step]]
name = "larger"
micro_batch_times = 2
"""

SPEEDS = {"ground": 1000.0, "faster": 2000.0, "larger": 3000.0}  # tokens per second; other steps fail


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes a ladder to mine.toml; names of the trials that were asked for."""
    names: list[str] = []

    def measure(trial: Trial) -> Figures | Failure:
        names.append(trial.name)
        if trial.name not in SPEEDS:
            return Failure(kind="failed", reason="no memory", seconds=1.0)
        return figures(SPEEDS[trial.name], repeated_steps=2 if trial.name == "faster" else 0)

    monkeypatch.setattr(verb, "run_trial", measure)
    Path("mine.toml").write_text(MINE, encoding="utf-8")
    return names


climb = partial(answers.printed, "ladder debug training.micro_batch=1 device=cpu", *SHORT, "--ladder", "mine.toml")
refused = partial(answers.refused, "ladder", starts=True)


def table(text: str) -> dict[str, dict[str, str]]:
    """Cells by step and column. A column begins where its name does."""
    lines = text.splitlines()
    top = next(place for place, line in enumerate(lines) if line.startswith("ladder step "))  # the head of the table
    names = [name.strip() for name in lines[top].split("  ") if name.strip()]
    edges = [*(lines[top].index(name) for name in names), None]  # columns are aligned
    rows = {}
    for line in lines[top + 1 :]:
        if not line:
            break
        cells = [line[low:high].strip() for low, high in pairwise(edges)]
        rows[cells[0]] = dict(zip(names, cells, strict=True))
    return rows


def test_the_table_has_a_row_for_every_step_also_if_it_did_not_run(asked: list[str]) -> None:
    rows = table(climb())
    assert list(rows) == ["ground", "faster", "broken", "later", "larger (size)"]
    assert asked == ["ground", "faster", "broken", "larger"]  # `later` names a field that there is not
    assert (rows["broken"]["tokens/s/process"], rows["broken"]["changed"]) == ("failed", "no memory")
    assert (rows["later"]["tokens/s/process"], rows["later"]["changed"]) == ("skipped", "this version has no oven.heat")
    assert rows["faster"]["changed"] == "kernels.norm=torch (2 steps repeated)"
    top = rows["larger (size)"]
    assert top["tokens/s/process"] == "3,000"
    # 3000 over 2000, 2000 over 1000, and their product.
    assert (top["x before"], top["x optimization"], top["x size"], top["x first"]) == ("1.50", "2.00", "1.50", "3.00")
    assert (top["step ms"], top["p99/p50"], top["MFU"], top["peak GiB"]) == ("100.0", "1.20", "25.0%", "3.0")
    assert (top["loss"], top["gap"], top["changed"]) == ("6.0000 -> 4.0000", "0.0e+00", "training.micro_batch=2")


def test_a_line_comes_as_soon_as_a_step_has_ended_and_routing_is_told(asked: list[str]) -> None:
    head = climb().partition("\n\n")[0].splitlines()
    assert head[0] == "ladder of debug: 5 ladder steps on 1 CPU process(es), 3 steps of 4 x 128 tokens each"
    assert head[1] == "routing: natural routing, auxiliary loss 0.0001 by sequence, expert bias"
    assert head[2] == "runs and what they print: runs/ladder-debug"
    assert [line.split()[0] for line in head[3:]] == ["ground", "faster", "broken", "later", "larger"]
    assert "2.00 x the step before, 2.00 x the first  (2 s)" in head[4]


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def test_everything_is_written_down(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "ladder", "debug", "--json", "l.json"])
    climb("--json", "l.json", "--commit", "0123abc")
    found = read("l.json")
    assert (found["command"], found["commit"]) == ("penstock ladder debug --json l.json", "0123abc")
    assert {"device", "torch", "python", "ranks", "steps", "warm_up_steps"} <= found["environment"].keys()
    steps = {step["name"]: step for step in found["numbers"]["ladder_steps"]}
    assert steps["larger"]["kind"] == "size"
    assert steps["larger"]["gain"]["by_size"] == 1.5
    assert steps["larger"]["figures"]["jitter"] == pytest.approx(1.2)
    assert steps["larger"]["figures"]["flops_per_second_per_device"] == 3000.0 * found["numbers"]["flops_per_token"]
    assert (steps["broken"]["state"], steps["broken"]["figures"]) == ("failed", None)


def test_a_ladder_that_was_ended_goes_on_and_measures_nothing_twice(asked: list[str]) -> None:
    climb("--json", "l.json", "--only", "ground,faster")
    asked.clear()
    climb("--json", "l.json", "--resume")
    assert asked == ["broken", "larger"]  # what ran is taken from the file
    asked.clear()
    climb("--json", "l.json", "--resume")
    assert asked == ["broken"], "what broke may not break again"
    names = [step["name"] for step in read("l.json")["numbers"]["ladder_steps"]]
    assert names == ["ground", "faster", "broken", "later", "larger"]


@pytest.fixture
def tight(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As `asked`, but `larger` runs out of memory and nothing breaks."""

    def measure(trial: Trial) -> Figures | Failure:
        asked.append(trial.name)
        if trial.name == "larger":
            return Failure(kind="failed", reason="CUDA out of memory", seconds=3.0)
        return figures({"ground": 1000.0, "faster": 1200.0}.get(trial.name, 1500.0))

    monkeypatch.setattr(verb, "run_trial", measure)
    return asked


def test_a_ladder_that_goes_on_does_not_try_again_what_found_no_memory(tight: list[str]) -> None:
    first = climb("--json", "l.json")
    assert tight == ["ground", "faster", "broken", "larger"]
    assert table(first)["larger (size)"]["changed"] == "CUDA out of memory"
    before = read("l.json")["numbers"]
    tight.clear()
    assert table(climb("--json", "l.json", "--resume")) == table(first)
    assert tight == []
    assert read("l.json")["numbers"] == before


def test_what_a_ladder_that_goes_on_has_not_come_to_stays_in_the_file(tight: list[str]) -> None:
    climb("--json", "l.json")
    climb("--json", "l.json", "--resume", "--only", "ground")
    numbers = read("l.json")["numbers"]
    assert [step["name"] for step in numbers["ladder_steps"]] == ["ground"]
    assert [step["name"] for step in numbers["still_ahead"]] == ["faster", "broken", "later", "larger"]
    tight.clear()
    climb("--json", "l.json", "--resume")
    assert tight == []
    assert read("l.json")["numbers"]["still_ahead"] == []


def test_a_ladder_of_other_steps_is_not_gone_on_with(asked: list[str]) -> None:
    climb("--json", "l.json", "--only", "ground")  # with 3 steps
    told = refused(
        "debug", "device=cpu", "--processes", "1", "--steps", "4", "--warm-up", "1", "--json", "l.json", "--resume"
    )
    assert "another environment; got steps 3" in told
    Path("l.json").write_text("{}")
    assert "is no ladder to go on with" in refused("debug", "device=cpu", *SHORT, "--json", "l.json", "--resume")


def test_a_ladder_of_which_nothing_ran_ends_with_one(asked: list[str]) -> None:
    assert "failed" in climb("--only", "broken", code=1)


def test_a_rank_cannot_climb(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "a ladder starts its own processes" in refused("debug")


@pytest.mark.slow
def test_two_real_steps_on_two_ranks_have_one_loss(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "run_trial", run_trial)
    own = ("debug-2l", "training.micro_batch=1", "parallel.expert=2", "device=cpu", "--processes", "2")
    words = ["ladder", *own, "--steps", "3", "--warm-up", "1", "--only", "baseline,sync-free-2", "--json", "l.json"]
    assert main(words) == 0
    steps = read("l.json")["numbers"]["ladder_steps"]
    # On a busy machine the second may be slower by more than noise is taken to be; that it ran is what is asked.
    assert steps[0]["state"] == "ran" and steps[1]["state"] in ("ran", "slower")
    assert steps[1]["gain"]["loss_gap"] < 1e-4
