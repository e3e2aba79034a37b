"""The learning rate rises to its peak, falls to its final ratio, and never jumps."""

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.run import LearningRateSchedule
from penstock.train.optimizer import learning_rate

DECAYS = get_args(LearningRateSchedule.model_fields["decay"].annotation)
PEAK = 3e-4


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, LearningRateSchedule]:
    """A number of steps, and a schedule whose warm-up ends before the last step."""
    steps = draw(st.integers(2, 300))
    return steps, LearningRateSchedule(
        warmup_steps=draw(st.integers(0, steps - 1)),
        decay=draw(st.sampled_from(DECAYS)),
        decay_steps=draw(st.integers(0, steps)),
        final_ratio=draw(st.floats(0.0, 1.0)),
    )


def _rates(steps: int, schedule: LearningRateSchedule) -> list[float]:
    return [learning_rate(step, steps, PEAK, schedule) for step in range(steps)]


@given(runs())
def test_warm_up_is_a_line_from_zero_whose_end_is_the_peak(run: tuple[int, LearningRateSchedule]) -> None:
    steps, schedule = run
    warm = schedule.warmup_steps
    assert _rates(steps, schedule)[:warm] == pytest.approx([PEAK * (step + 1) / warm for step in range(warm)])
    assert _rates(steps, schedule)[max(warm - 1, 0)] == PEAK


@given(runs())
def test_the_last_step_and_all_after_it_run_at_the_final_ratio(run: tuple[int, LearningRateSchedule]) -> None:
    steps, schedule = run
    final = PEAK
    if schedule.decay != "constant" and steps > max(schedule.warmup_steps, 1):
        final = PEAK * schedule.final_ratio
    assert learning_rate(steps - 1, steps, PEAK, schedule) == final
    assert learning_rate(steps + 7, steps, PEAK, schedule) == final


@given(runs())
def test_after_warm_up_the_rate_only_falls_and_no_step_jumps(run: tuple[int, LearningRateSchedule]) -> None:
    steps, schedule = run
    top = max(schedule.warmup_steps - 1, 0)
    falling = _rates(steps, schedule)[top:]
    assert falling == sorted(falling, reverse=True)
    fall = 1.0 - schedule.final_ratio
    length = len(falling) - 1  # steps of the decay
    if schedule.decay == "wsd":
        length = min(schedule.decay_steps or max(1, steps // 10), length)
    steepest = fall / max(length, 1) * (math.pi / 2 if schedule.decay == "cosine" else 1.0)
    for before, after in pairwise(falling):
        assert before - after <= PEAK * steepest * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("decay", "tenths"),
    [
        ("constant", [2.5, 5, 7.5, 10, 10, 10, 10, 10, 10, 10, 10, 10]),
        ("linear", [2.5, 5, 7.5, 10, 9, 8, 7, 6, 5, 4, 3, 2]),
        ("wsd", [2.5, 5, 7.5, 10, 10, 10, 10, 10, 10, 10 - 8 / 3, 10 - 16 / 3, 2]),
        ("cosine", [2.5, 5, 7.5] + [6 + 4 * math.cos(math.pi * step / 8) for step in range(9)]),
    ],
)
def test_each_shape_is_the_one_that_its_name_says(decay: str, tenths: list[float]) -> None:
    fields = {"warmup_steps": 4, "decay": decay, "decay_steps": 3, "final_ratio": 0.2}
    schedule = LearningRateSchedule.model_validate(fields)
    assert [learning_rate(step, 12, 10.0, schedule) for step in range(12)] == pytest.approx(tenths)


def test_wsd_falls_over_the_last_tenth_if_nothing_else_is_said() -> None:
    schedule = LearningRateSchedule(decay="wsd", final_ratio=0.0)
    rates = [learning_rate(step, 100, 1.0, schedule) for step in range(100)]
    assert rates[:90] == [1.0] * 90
    assert rates[90:] == pytest.approx([step / 10 for step in range(9, -1, -1)])


def test_a_run_that_ends_within_its_warm_up_never_decays() -> None:
    schedule = LearningRateSchedule(warmup_steps=10)
    assert learning_rate(0, 1, 1.0, LearningRateSchedule()) == 1.0
    assert learning_rate(0, 4, 1.0, schedule) == pytest.approx(0.1)
    assert learning_rate(3, 4, 1.0, schedule) == pytest.approx(0.4)
