"""Random schedules, and the most that each may hold."""

from hypothesis import strategies as st

from penstock.layout.schedules import SCHEDULES, Schedule, schedule


def even(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """A schedule with the fewest stages that it takes, unless they are said."""
    stages_per_rank = stages_per_rank or SCHEDULES[name].fewest
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


@st.composite
def schedules(draw: st.DrawFn, largest: int = 9) -> Schedule:
    """Any schedule of sizes that it takes: few or many micro-batches, divisible or not."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    shape = SCHEDULES[name]
    ranks = draw(st.integers(1, largest))
    least = max(1, shape.micro_batches_per_rank * ranks)
    return even(
        name,
        ranks,
        draw(st.integers(least, least + 2 * largest)),
        draw(st.integers(shape.fewest, shape.most or 4)),
    )


def bound(one: Schedule) -> float:
    """The most that a rank holds at a time, in micro-batches of all its stages: the column of docs/schedules.md."""
    ranks, chunks, micro_batches = one.ranks, one.stages_per_rank, one.micro_batches
    group = -(-micro_batches // max(1, micro_batches // ranks))
    return {
        "gpipe": micro_batches,
        "1f1b": ranks,
        "interleaved": ((chunks - 1) * group + 2 * ranks - 1) / chunks,
        "zb-1f1b": ranks,
        "zb-v": ranks,
        "v-half": (ranks + 2) // 2,
        "v-min": (ranks + 4) // 3,
        "dualpipe-v": ranks + 1 / 2,
    }[one.name]
