"""How many rows a step of the trials has: those of the run, or fewer if trials of whole steps exceed the budget.

Presets have steps of hundreds or thousands of rows, which take minutes on a few devices. A trial then makes steps of
fewer rows, the same for all candidates, so that their losses stay comparable. The number is a multiple of all
micro-batches of a search on all data-parallel ranks, as long as the budget permits; it leaves the reference at least
`FEWEST_MICRO_BATCHES` and two for each stage, so that a pipeline keeps its shape.
"""

import math
from collections.abc import Callable, Iterator

from penstock.base.errors import ConfigError
from penstock.base.numbers import counted, duration_text, time_text
from penstock.config.fit import grid_of, stage_count
from penstock.config.run import Run
from penstock.plan.candidates import MOST_MICRO_BATCH

START_SECONDS = 20.0  # time that a trial needs beside its steps, about: on an H200 from 13 s to 32 s
USUAL_TRIALS, FEWEST_TRIALS = 8, 3  # trials that a budget shall be enough for, and without which there is no search
FEWEST_MICRO_BATCHES = 4  # of each data-parallel rank in a short step of the reference
MOST_UNITS = 4  # a short step has at most this many of the largest micro-batches on each rank


def rows_of_trials(
    run: Run, ranks: int, seconds_of: Callable[[int], float], *, steps: int, budget_seconds: float, most_trials: int
) -> int:
    """Rows of a step of all trials, by the projected seconds of a step with so many rows.

    Raises a ConfigError if the budget is not enough for the shortest step.
    """
    fewest = min(most_trials, FEWEST_TRIALS)
    each = budget_seconds / min(most_trials, USUAL_TRIALS) - START_SECONDS
    # Shorter steps than half a start would save little.
    allowed = min(max(each, START_SECONDS / 2), budget_seconds / fewest)
    rows, seconds = 0, 0.0
    for rows in (run.training.global_batch, *shorter(run, ranks)):
        seconds = steps * seconds_of(rows)
        if seconds <= allowed:
            return rows
    if fewest * seconds <= budget_seconds:
        return rows
    raise ConfigError(
        f"the budget is too short for {counted(fewest, 'trial')}: each makes {steps} steps, and the shortest possible "
        f"step, of {counted(rows, 'row')}, is projected at {time_text(seconds / steps)}",
        got=duration_text(budget_seconds),
        fix=f"--budget {math.ceil(fewest * (START_SECONDS + seconds) / 60)}m",
    )


def shorter(run: Run, ranks: int) -> Iterator[int]:
    """Rows that a short step may have, the most first."""
    data, rows = grid_of(run, ranks).data, run.training.global_batch
    pass_rows = run.training.micro_batch * data
    fewest = max(FEWEST_MICRO_BATCHES, 2 * stage_count(run))
    count = MOST_UNITS * math.lcm(MOST_MICRO_BATCH, run.training.micro_batch) * ranks
    while count % pass_rows == 0 and count // pass_rows >= fewest:
        if count < rows:
            yield count
        count //= 2


def with_rows(run: Run, rows: int) -> Run:
    """The run with another number of rows in a step."""
    return run.model_copy(update={"training": run.training.model_copy(update={"global_batch": rows})})
