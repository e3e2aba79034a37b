"""Peak points of a schedule are few, and those of a short step are enough."""

from collections.abc import Sequence
from operator import ge

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import Kind
from penstock.layout.schedules import PAIRED_GRAMMARS, SCHEDULES, schedule
from penstock.plan.liveness import PipelineShape, enough, peak_points

SIZES = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


def most_held(shape: PipelineShape, rank: int, kept: Sequence[int], left: Sequence[int]) -> int:
    sizes = [*kept[: shape.stages_per_rank], *left[: shape.stages_per_rank]]
    return max(
        sum(count * size for count, size in zip((*one.kept, *one.left), sizes, strict=True))
        for one in peak_points(shape, rank)
    )


def walked(shape: PipelineShape, rank: int, kept: Sequence[int], left: Sequence[int]) -> int:
    """The same by the schedule's own list."""
    plan = schedule(
        shape.name, ranks=shape.ranks, stages_per_rank=shape.stages_per_rank, micro_batches=shape.micro_batches
    )
    place = {stage: number for number, stage in enumerate(plan.stages_of(rank))}
    now = most = 0
    for action in plan.actions[rank]:
        most = max(most, now)
        one, waits = kept[place[action.stage]], left[place[action.stage]]
        now += {Kind.FORWARD: one, Kind.BACKWARD: -one, Kind.INPUT: waits - one, Kind.WEIGHT: -waits}[action.kind]
    return most


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(2, 6),
    more=st.integers(0, 2),
    rounds=st.integers(2, 6),
    extra=st.integers(0, 5),
    kept=SIZES,
    left=SIZES,
    data=st.data(),
)
def test_a_short_step_holds_as_much_as_a_long_one(
    name: str, ranks: int, more: int, rounds: int, extra: int, kept: list[int], left: list[int], data: st.DataObject
) -> None:
    stages = SCHEDULES[name].fewest + (more if SCHEDULES[name].most is None else 0)
    long = PipelineShape(name, ranks, stages, rounds * ranks + extra)
    short = PipelineShape(name, ranks, stages, enough(name, ranks, long.micro_batches))
    rank = data.draw(st.integers(0, ranks - 1))
    assert most_held(short, rank, kept, left) == walked(long, rank, kept, left)


@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(2, 6), data=st.data())
def test_no_peak_point_is_covered_by_another(name: str, ranks: int, data: st.DataObject) -> None:
    shape = PipelineShape(name, ranks, SCHEDULES[name].fewest, 2 * ranks)
    found = peak_points(shape, data.draw(st.integers(0, ranks - 1)))
    for one in found:
        others = [other for other in found if other.work == one.work and other is not one]
        assert not any(all(map(ge, other.counts, one.counts)) for other in others)


def alike(shape: PipelineShape, rank: int) -> list[tuple[list[tuple[int, Kind]], tuple[int, ...]]]:
    """Peak points of a rank, its stages counted from 0."""
    place = {stage: number for number, stage in enumerate(shape.stages_of(rank))}
    return [([(place[stage], kind) for stage, kind in one.work], one.counts) for one in peak_points(shape, rank)]


def holds_as_much(shape: PipelineShape, rank: int, other: int) -> bool:
    """Whether a rank holds at least as much as another at each of that one's actions."""
    own = alike(shape, rank)
    return all(any(does == work and all(map(ge, has, held)) for does, has in own) for work, held in alike(shape, other))


@given(
    name=st.sampled_from(
        [name for name in SCHEDULES if PipelineShape(name, 2, SCHEDULES[name].fewest, 8).holds_most_first]
    ),
    ranks=st.integers(2, 6),
    more=st.integers(0, 2),
    micro_batches=st.integers(1, 20),
    data=st.data(),
)
def test_an_earlier_rank_holds_as_much_as_a_later_one_where_the_shape_says_so(
    name: str, ranks: int, more: int, micro_batches: int, data: st.DataObject
) -> None:
    stages = SCHEDULES[name].fewest + (more if SCHEDULES[name].most is None else 0)
    shape = PipelineShape(name, ranks, stages, enough(name, ranks, micro_batches))
    earlier = data.draw(st.integers(0, ranks - 2))
    assert holds_as_much(shape, earlier, data.draw(st.integers(earlier + 1, ranks - 1)))


@pytest.mark.parametrize(
    ("name", "pairs"), [*((name, False) for name in SCHEDULES), *((name, True) for name in PAIRED_GRAMMARS)]
)
def test_some_later_rank_holds_more_where_the_shape_does_not_say_so(name: str, pairs: bool) -> None:
    shape = PipelineShape(name, 4, SCHEDULES[name].fewest, 8, pairs=pairs)
    assert shape.holds_most_first == all(holds_as_much(shape, 0, weight_grads) for weight_grads in range(1, 4))
