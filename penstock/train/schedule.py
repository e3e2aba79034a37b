"""The learning rate of a step.

The rate rises linearly from 0 to the peak, then falls by the shape of the decay to `final_ratio` of the peak. Four
steps of warm-up out of twelve, in tenths of the peak, final ratio 0.2:

    step       0    1    2    3    4    5    6    7    8    9   10   11
    linear   2.5    5  7.5   10    9    8    7    6    5    4    3    2
    wsd      2.5    5  7.5   10   10   10   10   10   10 7.33 4.67    2    (decay_steps 3)

Step 0 already has a rate above 0, step `warmup_steps - 1` has the peak, and the last step the final ratio. wsd:
warm-up, stable, decay (MiniCPM, arXiv 2404.06395).
"""

import math

from penstock.config.training import LearningRateSchedule


def learning_rate(step: int, steps: int, peak: float, schedule: LearningRateSchedule) -> float:
    """Learning rate of one optimizer step, counted from 0. Steps past the end have the rate of the last one."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    height = _height(step, steps, schedule)
    # At heights 1 and 0 this is exactly `peak` and `peak * final_ratio`.
    return peak * (height + schedule.final_ratio * (1.0 - height))


def _height(step: int, steps: int, schedule: LearningRateSchedule) -> float:
    """Height of the decay: 1 at the peak, 0 at the last step."""
    last = steps - 1
    top = max(schedule.warmup_steps - 1, 0)  # the step that has the peak
    match schedule.decay:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - _progress(step, top, last)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * _progress(step, top, last)))
        case "wsd":
            decay_steps = schedule.decay_steps or max(1, steps // 10)
            return 1.0 - _progress(step, max(top, last - decay_steps), last)


def _progress(step: int, first: int, last: int) -> float:
    """Share of the way from step `first` to step `last`, from 0 to 1; 0 for an empty way."""
    if last <= first:
        return 0.0
    return min(max(step - first, 0) / (last - first), 1.0)
