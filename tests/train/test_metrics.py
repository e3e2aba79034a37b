"""What is written for machines: every field is documented, every line is whole, every step stands there once."""

import errno
import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.base.errors import RunFolderError
from penstock.train.metrics import FIELDS, LAYER_FIELDS, MetricsFile, drop_after, record, scalars
from penstock.train.observer import LayerReport, StepReport
from tests.train.tiny_run import HELD_OUT, run_start, step_report, tiny_run
from tools.pages import metrics_page


def write(path: Path, reports: list[StepReport], every: int = 1) -> None:
    metrics = MetricsFile(path, every)
    metrics.started(run_start(tiny_run(path.parent)))
    for report in reports:
        metrics.stepped(report)
        metrics.saved(report.step)
    metrics.closed()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_field_that_is_written_is_documented_in_its_order() -> None:
    line = record(step_report(3, evaluation=HELD_OUT))
    assert list(line) == list(FIELDS)
    assert list(line["layers"][0]) == list(LAYER_FIELDS)
    assert set(FIELDS) - set(record(step_report(3))) == {"evaluation_loss", "evaluation_bits_per_byte"}
    assert all(field.doc.endswith(".") for field in [*FIELDS.values(), *LAYER_FIELDS.values()])


def test_a_line_says_what_the_step_was() -> None:
    line = record(step_report(2, model_flops_utilization=0.41, forced_balance=True, phase_seconds={"forward": 0.1}))
    assert (line["step"], line["loss"], line["mtp_losses"], line["tokens_seen"]) == (2, 2.5, [3.0], 96)
    assert (line["model_flops_utilization"], line["forced_balance"]) == (0.41, True)
    assert line["phase_seconds"] == {"forward": 0.1}
    assert math.isclose(line["expert_load_max_over_mean"], 1.6)  # 40 of 100 slots on one of 4 experts
    assert line["dropped_slots"] == 3
    assert math.isclose(line["auxiliary_loss"], 0.03)


def test_a_line_says_how_uneven_ranks_were_that_share_experts() -> None:
    line = record(step_report(1, expert_ranks=2))
    assert math.isclose(line["expert_rank_load_max_over_mean"], 1.2)
    assert math.isclose(line["expert_rank_load_fullest"], 1.2)
    assert record(step_report(1))["expert_rank_load_fullest"] is None
    dense = record(step_report(1, layers=(), expert_ranks=2))
    assert (dense["expert_load_max_over_mean"], dense["expert_rank_load_max_over_mean"]) == (None, None)
    assert (dense["layers"], dense["dropped_slots"], dense["auxiliary_loss"]) == ([], 0, 0)


def test_steps_between_records_are_left_out_unless_they_evaluate(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step_report(step, evaluation=HELD_OUT if step == 5 else None) for step in range(1, 9)], every=4)
    assert steps_in(path) == [4, 5, 8]


def test_lines_after_the_checkpoint_and_one_that_a_killed_run_left_unfinished_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step_report(step) for step in (1, 2)])
    kept = path.read_bytes()
    write(path, [step_report(step) for step in (3, 4)])
    drop_after(path, 2)
    assert path.read_bytes() == kept
    write(path, [step_report(3)])
    assert steps_in(path) == [1, 2, 3]
    path.write_bytes(path.read_bytes()[:-7])
    drop_after(path, 5)
    assert path.read_bytes() == kept


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"step": null}\n', "\xff\n"])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RunFolderError, match="as metrics"):
        drop_after(path, 5)
    assert path.read_text(encoding="latin-1") == text


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", every=1)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunFolderError, match="No space left on device; fix: free space, --resume"):
        metrics.saving()


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, every=1)
    metrics.stepped(step_report(1))
    whole, real = path.read_bytes(), metrics._file

    def write_a_part(content: memoryview) -> int:
        if len(content) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real.write(content[:-10])  # the disk takes a part

    monkeypatch.setattr(metrics, "_file", Mock(write=write_a_part, fileno=real.fileno, truncate=real.truncate))
    with pytest.raises(RunFolderError, match="No space left on device"):
        metrics.stepped(step_report(2))
    assert path.read_bytes() == whole
    monkeypatch.undo()
    metrics.saving()  # the disk has space again
    write(tmp_path / "all.jsonl", [step_report(1), step_report(2)])
    assert path.read_bytes() == (tmp_path / "all.jsonl").read_bytes()


def test_lines_that_are_damaged_in_the_middle_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step_report(step) for step in range(1, 6)])
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], lines[1][:20], *lines[2:], lines[3]])  # half of a line, and a step twice
    path.write_bytes(damaged)
    (notice,) = drop_after(path, 4)
    assert notice == f"{path}: left out 2 lines that are damaged or repeated; metrics.jsonl.damaged has them"
    assert path.read_bytes() == lines[0] + lines[3]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert drop_after(path, 4) == ()


@pytest.mark.parametrize(("every", "step", "lost"), [(1, 4, "1 to 4"), (3, 4, "1 to 3"), (5, 4, None)])
def test_lines_that_are_lost_are_told(every: int, step: int, lost: str | None, tmp_path: Path) -> None:
    notices = drop_after(tmp_path / "metrics.jsonl", step, every)
    assert [*notices] == (
        [f"{tmp_path}/metrics.jsonl has no figures of steps {lost}: its lines are lost"] if lost else []
    )


def test_every_number_of_a_line_has_a_name_for_people() -> None:
    named = scalars(step_report(2, evaluation=HELD_OUT, phase_seconds={"forward": 0.1}, forced_balance=True))
    assert named["train/loss"] == 2.5
    assert named["train/mtp_loss_1"] == 3.0
    assert named["train/evaluation_loss"] == 2.0
    assert named["train/forced_balance"] == 1.0
    assert named["phase/forward"] == 0.1
    assert math.isclose(named["layer 01/max_over_mean"], 1.6)
    assert "train/model_flops_utilization" not in named
    assert {name.partition("/")[0] for name in named} == {"train", "phase", "layer 01", "layer 02"}


def test_the_reference_page_names_every_field() -> None:
    page = metrics_page()
    assert all(f"| `{name}` |" in page for name in [*FIELDS, *LAYER_FIELDS])
    assert page.isascii()


@pytest.mark.parametrize(
    ("slots", "max_over_mean", "entropy"),
    [
        ((5, 5, 5, 5), 1.0, 1.0),
        ((20, 0, 0, 0), 4.0, 0.0),
        ((10, 10, 0, 0), 2.0, 0.5),
        ((0, 0, 0, 0), 1.0, 1.0),
        ((7,), 1.0, 1.0),
    ],
)
def test_evenness_of_load(slots: tuple[int, ...], max_over_mean: float, entropy: float) -> None:
    layer = LayerReport(layer=0, slots=slots, dropped=0, auxiliary_loss=0.0)
    assert math.isclose(layer.max_over_mean, max_over_mean)
    assert math.isclose(layer.entropy, entropy, abs_tol=1e-12)


def test_loads_of_ranks_are_those_of_their_experts_together() -> None:
    layer = LayerReport(layer=0, slots=(30, 10, 5, 15, 0, 0), dropped=0, auxiliary_loss=0.0)
    assert layer.rank_loads(1) == (1.0,)
    assert layer.rank_loads(2) == (1.5, 0.5)
    assert layer.rank_loads(3) == (2.0, 1.0, 0.0)
    empty = LayerReport(layer=0, slots=(0, 0, 0, 0), dropped=0, auxiliary_loss=0.0)
    assert empty.rank_loads(2) == (1.0, 1.0)


def test_time_sees_the_fullest_rank_of_each_layer_and_memory_one_rank_over_all() -> None:
    layers = tuple(
        LayerReport(layer=number, slots=slots, dropped=0, auxiliary_loss=0.0)
        for number, slots in enumerate([(3, 3, 1, 1), (1, 1, 3, 3), (3, 3, 1, 1), (2, 2, 2, 2)])
    )
    report = step_report(1, layers=layers, expert_ranks=2)
    assert report.expert_rank_load_max_over_mean == (1.5 + 1.5 + 1.5 + 1.0) / 4
    assert report.expert_rank_load_fullest == (1.5 + 0.5 + 1.5 + 1.0) / 4
