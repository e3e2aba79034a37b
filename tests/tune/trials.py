"""Figures as a trial would have them, made up."""

from collections.abc import Sequence

from penstock.tune.trial import Figures


def figures(speed: float, losses: Sequence[float] = (6.0, 5.0, 4.0), **changes: object) -> Figures:
    """A trial of so many tokens per second for each device."""
    times = (0.1, 0.1, 0.125)
    fields: dict[str, object] = {
        "tokens_per_second_per_device": speed,
        "step_seconds": times,
        "step_seconds_median": 0.1,
        "step_seconds_p99": 0.12,
        "step_seconds_highest": 0.125,
        "model_flops_utilization": 0.25,
        "peak_memory_bytes": 3 * 2**30,
        "expert_load_max_over_mean": 1.5,
        "repeated_steps": 0,
        "losses": tuple(losses),
        "seconds": 2.0,
    }
    return Figures(**(fields | changes))  # type: ignore[arg-type]
