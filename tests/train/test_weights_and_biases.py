"""Weights & Biases: the same run after a resume, no step twice; with a stand-in, and offline with the real library."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.config.run import Record, Run
from penstock.train.run_folder import RunFolder
from penstock.train.sinks import WeightsAndBiases
from tests.train.test_metrics import write
from tests.train.tiny_run import HELD_OUT, run_start, step_report, tiny_run


class StandIn:
    """The module of W&B as far as Penstock uses it; records each run that was opened."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.logged: list[list[tuple[int, dict[str, float]]]] = []
        self.codes: list[int] = []
        self.starting_step = 0  # after the last step that the server has

    def init(self, **options: Any) -> Any:
        self.opened.append(options)
        self.logged.append([])
        return self

    def log(self, values: dict[str, float], *, step: int, commit: bool) -> None:
        assert commit, "a step that waits for more is lost when the process is killed"
        self.logged[-1].append((step, values))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made, module = StandIn(), ModuleType("wandb")
    vars(module).update(init=made.init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def run_in(folder: Path, **changes: Any) -> Run:
    record = Record(folder=str(folder.parent), **({"wandb": "offline"} | changes))
    return tiny_run(folder.parent, name=folder.name, record=record)


def train(folder: Path, steps: range, run: Run | None = None, *, evaluates: int = 0, is_killed: bool = False) -> None:
    """Tell of these steps, in a process that begins before the first of them."""
    sink = WeightsAndBiases(RunFolder(folder))
    sink.started(run_start(run or run_in(folder), steps_done=steps.start - 1))
    for step in steps:
        sink.stepped(step_report(step, evaluation=HELD_OUT if step == evaluates else None))
        sink.saved(step)
    if not is_killed:
        sink.closed()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    return path


def test_a_run_is_opened_under_its_name_with_its_configuration(stand_in: StandIn, folder: Path) -> None:
    train(folder, range(1, 2), run_in(folder, wandb="online", wandb_project="moe"))
    (options,) = stand_in.opened
    assert (options["project"], options["name"], options["mode"]) == ("moe", "tiny", "online")
    assert (options["dir"], options["resume"]) == (str(folder), "allow")
    assert options["config"]["model"]["moe"]["experts"] == 4
    assert options["config"]["parameters"] == 1_240_000
    json.dumps(options["config"])


def test_steps_are_sent_when_they_are_recorded_or_evaluate(stand_in: StandIn, folder: Path) -> None:
    WeightsAndBiases(RunFolder(folder)).closed()  # it was never opened
    train(folder, range(1, 9), run_in(folder, every=4), evaluates=5)
    assert [step for step, _ in stand_in.logged[0]] == [4, 5, 8]
    assert stand_in.logged[0][0][1]["train/loss"] == 5 / 4
    assert stand_in.logged[0][0][1]["layer 02/entropy"] == pytest.approx(1.0)


@pytest.mark.parametrize("server_has", [0, 2])
def test_a_run_that_was_killed_sends_what_w_and_b_may_not_have_got(
    server_has: int, stand_in: StandIn, folder: Path
) -> None:
    train(folder, range(1, 6), is_killed=True)  # of whose steps the library has sent two, or none
    write(folder / "metrics.jsonl", [step_report(step) for step in range(1, 5)])  # its checkpoint is of step 4
    stand_in.starting_step = server_has + 1
    train(folder, range(5, 7))
    assert [step for step, _ in stand_in.logged[1]] == list(range(server_has + 1, 7))
    assert stand_in.logged[1][:3] == stand_in.logged[0][server_has : server_has + 3], "with the same figures"
    stand_in.starting_step = 0  # as offline
    train(folder, range(7, 9))
    assert [step for step, _ in stand_in.logged[2]] == [7, 8]


def test_a_run_that_goes_on_is_the_same_and_no_step_is_sent_twice(stand_in: StandIn, folder: Path) -> None:
    train(folder, range(1, 4))  # stopped after step 3, with a checkpoint of step 1
    train(folder, range(2, 5))
    assert stand_in.opened[0]["id"] == stand_in.opened[1]["id"]
    assert [[step for step, _ in steps] for steps in stand_in.logged] == [[1, 2, 3], [4]]
    assert stand_in.codes == [1, 0], "a run that stops early is no success"


@pytest.mark.parametrize("project", ["penstock", "other"])
def test_another_project_and_a_crash_while_a_step_is_written_down_cost_no_more_than_a_repeat(
    project: str, stand_in: StandIn, folder: Path
) -> None:
    train(folder, range(1, 3))
    if project == "penstock":
        (folder / "wandb" / "step").write_text("")
    train(folder, range(2, 4), run_in(folder, wandb_project=project))
    assert (stand_in.opened[0]["id"] == stand_in.opened[1]["id"]) == (project == "penstock")
    assert [step for step, _ in stand_in.logged[1]] == [2, 3]


HEADER, BLOCK, RECORD = 7, 32768, 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Complete records of a file in LevelDB's log format that W&B's own library may still be writing."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), HEADER, b""
    while place + RECORD <= len(data):
        if BLOCK - place % BLOCK < RECORD:  # The rest of a block that no record's head fits in.
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + RECORD + length > len(data):
            return
        parts += data[place + RECORD : place + RECORD + length]
        place += RECORD + length
        if kind in (WHOLE, LAST):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_offline_the_library_writes_every_step_once_under_one_id(folder: Path) -> None:
    train(folder, range(1, 3))
    (first,) = (folder / "wandb").glob("offline-run-*")
    first.rename(folder / "wandb" / "offline-run-0")  # Names tell seconds apart, and this test is quicker.
    train(folder, range(2, 5), evaluates=4)
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    while True:  # The library's own process writes, on a busy machine after `finish` has returned.
        found = [record for path in files for record in records(path)]
        if sum(record.WhichOneof("record_type") == "history" for record in found) >= 4:
            break
        time.sleep(0.1)
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    history = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    steps = [{(*item.nested_key, item.key)[0]: json.loads(item.value_json) for item in one.item} for one in history]
    assert len(files) == 2
    assert {f"{run.project}/{run.run_id}" for run in runs} == {(folder / "wandb" / "id").read_text().strip()}
    assert [values["_step"] for values in steps] == [1, 2, 3, 4]
    assert [values["train/loss"] for values in steps] == [5, 2.5, pytest.approx(5 / 3), 1.25]
    assert steps[-1]["train/evaluation_loss"] == 2.0
