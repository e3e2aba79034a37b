"""TensorBoard events: the same figures as the lines, and none of steps that are made again."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.train.sinks import TensorBoard
from tests.train.tiny_run import HELD_OUT, run_start, step_report, tiny_run


def test_tensorboard_holds_the_same_figures(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, every=2, steps_done=0)
    board.started(run_start(tiny_run(tmp_path)))
    for step in (1, 2, 3, 4):
        board.stepped(step_report(step, evaluation=HELD_OUT if step == 3 else None))
    board.saved(4)
    board.closed()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(5.0 / step)) for step in (2, 3, 4)
    ]
    assert [event.step for event in events.Scalars("train/evaluation_bits_per_byte")] == [3]
    assert events.Scalars("layer 01/max_over_mean")[0].value == pytest.approx(1.6)
    assert events.Scalars("train/mtp_loss_1")[0].value == pytest.approx(3.0)


def test_tensorboard_hides_points_after_the_checkpoint(tmp_path: Path) -> None:
    for steps_done, steps in ((0, (1, 2, 3)), (1, (2,))):
        board = TensorBoard(tmp_path, every=1, steps_done=steps_done)
        for step in steps:
            board.stepped(step_report(step, loss=float(steps_done)))
        board.closed()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.0), (2, 1.0)]
