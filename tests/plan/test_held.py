"""What a schedule holds comes down to a few standings, and to a step of few micro-batches."""

from collections.abc import Sequence
from operator import ge

from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import Kind
from penstock.layout.schedules import SCHEDULES, schedule
from penstock.plan.held import Shape, enough, standings

SIZES = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


def most_held(shape: Shape, rank: int, kept: Sequence[int], left: Sequence[int]) -> int:
    sizes = [*kept[: shape.stages_per_rank], *left[: shape.stages_per_rank]]
    return max(
        sum(count * size for count, size in zip((*one.kept, *one.left), sizes, strict=True))
        for one in standings(shape, rank)
    )


def walked(shape: Shape, rank: int, kept: Sequence[int], left: Sequence[int]) -> int:
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
    long = Shape(name, ranks, stages, rounds * ranks + extra)
    short = Shape(name, ranks, stages, enough(name, ranks, long.micro_batches))
    rank = data.draw(st.integers(0, ranks - 1))
    assert most_held(short, rank, kept, left) == walked(long, rank, kept, left)


def test_a_list_of_hundreds_of_actions_has_few_standings() -> None:
    assert len(standings(Shape("1f1b", 16, 1, enough("1f1b", 16, 512)), 0)) == 2


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(2, 6),
    data=st.data(),
)
def test_no_standing_is_left_beside_which_another_holds_as_much_everywhere(
    name: str, ranks: int, data: st.DataObject
) -> None:
    shape = Shape(name, ranks, SCHEDULES[name].fewest, 2 * ranks)
    found = standings(shape, data.draw(st.integers(0, ranks - 1)))
    for one in found:
        others = [other for other in found if other.work == one.work and other is not one]
        assert not any(all(map(ge, other.counts, one.counts)) for other in others)
