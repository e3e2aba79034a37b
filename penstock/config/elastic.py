"""Layouts of a run on fewer ranks (`elastic.min`), for a run that goes on after it has lost some.

Data-parallel ranks and accumulation follow from the number of ranks: the global batch stays as it is. `parallel.expert`
becomes smaller where it must. Pipeline, tensor and context sizes never change, nor do micro-batches.

    parallel.expert=4, global_batch=8, micro_batch=1
    4 ranks    expert 4, data 4, 2 micro-batches each
    2 ranks    expert 2, data 2, 4 micro-batches each
"""

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.rules import problems
from penstock.config.run import Run


def on_ranks(run: Run, world: int) -> Run:
    """The run with the largest divisor of `parallel.expert` that `world` ranks can have.

    Without `elastic.min`, or if there is none, it is the run as it is, which `grid_of` judges.
    """
    expert = run.parallel.expert
    if not run.elastic.min or _fits(run, world):
        return run
    for smaller in (size for size in range(expert - 1, 0, -1) if expert % size == 0):
        parallel = run.parallel.model_copy(update={"expert": smaller})
        candidate = run.model_copy(update={"parallel": parallel})
        if _fits(candidate, world) and not problems(candidate):
            return candidate
    return run


def possible_ranks(run: Run, limit: int) -> tuple[int, ...]:
    """Numbers of ranks that the run fits, at most `limit`, the largest first. Below `elastic.min` there are none."""
    return tuple(ranks for ranks in range(limit, max(run.elastic.min, 1) - 1, -1) if _fits(on_ranks(run, ranks), ranks))


def _fits(run: Run, world: int) -> bool:
    try:
        grid_of(run, world)
    except ConfigError:
        return False
    return True
