"""A host and a device wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.costs import HOST_LINK, OpCost
from penstock.plan.op_recorder import (
    ARRIVE,
    END,
    FORK,
    FROM_HOST,
    JOIN,
    SLOT_FROM_HOST,
    SLOT_TO_HOST,
    TO_HOST,
    WAIT,
    RecordedOp,
    RecordedOps,
)
from penstock.plan.streams import OVERLAP_GAIN, HostCopies, Streams, Timing, steady_state


def compute(seconds: float) -> RecordedOp:
    return RecordedOp("compute", switches=(str(seconds),))


def send(seconds: float) -> RecordedOp:
    return RecordedOp("send", switches=(str(seconds),))


def out(number: int, bytes_: int) -> RecordedOp:
    return RecordedOp(TO_HOST, sizes=(bytes_,), switches=(str(number),))


def back(number: int, bytes_: int) -> RecordedOp:
    return RecordedOp(FROM_HOST, sizes=(bytes_,), switches=(str(number),))


def opened(number: int) -> RecordedOp:
    return RecordedOp(ARRIVE, switches=(str(number),))


def cost_of(operator: RecordedOp) -> OpCost:
    """A byte of a copy takes a second."""
    seconds = float(operator.switches[0]) if operator.name in ("compute", "send") else operator.sizes[0]
    return OpCost(seconds, operator.name, is_communication=operator.name == "send")


def played(*work: RecordedOp, launch: float = 0.0, gap: float = 0.0, room: int = 0) -> Timing:
    streams = Streams(cost_of, launch, gap, copies=HostCopies(room))
    streams.play(work)
    return streams.timing


def again(*work: RecordedOp, launch: float = 0.0, room: int = 0) -> Timing:
    (timing,) = steady_state([[work]], Streams(cost_of, launch, copies=HostCopies(room)))
    return timing


def test_a_device_that_is_behind_takes_the_sum_of_its_operators_and_one_that_is_ahead_the_hosts_time() -> None:
    timing = again(compute(3), send(2), compute(1), launch=0.5)
    assert (timing.seconds, timing.compute, timing.communication, timing.exposed) == (6, 4, 2, 2)
    assert timing.idle == 0 and timing.terms["host"] == 0
    timing = again(compute(1), compute(1), launch=4)
    assert (timing.seconds, timing.idle) == (8, 6)
    assert again(compute(5), *[compute(0)] * 4, launch=1).seconds == 5, "the host is ahead for the later operators"


def test_a_host_that_waits_loses_its_lead() -> None:
    # Five seconds of the device, then the host launches four operators without device time.
    waited = again(compute(5), RecordedOp(WAIT), *[compute(0)] * 4, launch=1).seconds
    assert waited == pytest.approx(1 + 5 + 4 - 1, abs=1)
    assert again(compute(5), *[compute(0)] * 4, launch=1).seconds < waited


def test_between_two_operators_there_is_a_gap() -> None:
    assert played(compute(1), compute(1), gap=0.25).seconds == 2.5


def flight(travel: float, *during_transfers: RecordedOp) -> RecordedOps:
    return (
        RecordedOp(FORK, switches=("1",)),
        send(travel),
        RecordedOp(END, switches=("1",)),
        *during_transfers,
        RecordedOp(JOIN, switches=("1",)),
    )


def test_a_hidden_transfer_gains_a_part_of_its_time_and_a_longer_one_is_waited_for() -> None:
    assert played(*flight(2)).seconds == 2
    timing = played(*flight(2, compute(5)))
    assert timing.seconds == pytest.approx(5 + (1 - OVERLAP_GAIN) * 2)
    assert timing.exposed == pytest.approx((1 - OVERLAP_GAIN) * 2)
    assert played(*flight(8, compute(5))).seconds == pytest.approx(5 + 3 + (1 - OVERLAP_GAIN) * 5)


works = st.lists(
    st.one_of(st.floats(0, 4).map(compute), st.floats(0, 4).map(send), st.just(RecordedOp(WAIT))), max_size=12
)


@given(works, st.floats(0, 2), st.floats(0, 0.1))
def test_times_add_up_and_are_no_shorter_than_those_of_the_device_or_the_host(
    work: list[RecordedOp], launch: float, gap: float
) -> None:
    timing = played(*work, launch=launch, gap=gap)
    launched = [one for one in work if one.name != WAIT]
    assert timing.seconds == pytest.approx(sum(timing.terms.values()))
    assert timing.seconds == pytest.approx(timing.compute + timing.exposed + timing.idle)
    assert timing.seconds >= max(len(launched) * launch, timing.compute + timing.communication) - 1e-9


@given(works, st.floats(0, 2))
def test_a_wait_makes_nothing_faster(work: list[RecordedOp], launch: float) -> None:
    without = [one for one in work if one.name != WAIT]
    assert played(*work, launch=launch).seconds >= played(*without, launch=launch).seconds - 1e-9


def test_copies_beside_compute_cost_nothing() -> None:
    timing = played(out(1, 3), compute(4), out(2, 1), compute(4), back(1, 3), compute(5), opened(1), room=3)
    assert (timing.seconds, timing.compute, timing.host_link) == (13, 13, 0)


def test_compute_waits_for_room_and_for_a_storage_that_is_not_back() -> None:
    leaving = played(out(1, 5), compute(2), out(2, 5), compute(2), room=5)
    assert (leaving.seconds, leaving.host_link, leaving.terms[HOST_LINK]) == (5 + 2, 3, 3)
    coming = played(out(1, 5), compute(5), out(2, 5), back(1, 5), compute(2), opened(1), compute(1), room=5)
    assert (coming.seconds, coming.host_link) == (5 + 5 + 1, 3)


def test_copies_of_two_directions_run_at_once_and_of_one_direction_one_at_a_time() -> None:
    work = (out(1, 4), compute(4), out(2, 4), back(1, 4), opened(1))
    assert played(*work, room=4).seconds == 8
    one_way = (out(1, 4), out(2, 4), compute(8), out(3, 5), back(1, 4), back(2, 4), opened(2))
    assert played(*one_way, room=8).seconds == 8 + 8


def test_a_storage_that_has_not_left_is_still_there() -> None:
    work = (out(1, 4), compute(1), back(1, 4), opened(1), compute(1))
    assert played(*work, room=4).seconds == 2


def test_a_slot_comes_back_after_it_has_left_and_needs_no_room() -> None:
    leaves = RecordedOp(SLOT_TO_HOST, sizes=(4,), switches=("-1",))
    returns = RecordedOp(SLOT_FROM_HOST, sizes=(4,), switches=("-1",))
    timing = played(leaves, compute(1), returns, opened(-1), compute(1))
    assert (timing.seconds, timing.host_link) == (4 + 4 + 1, 7)
    assert played(leaves, compute(9), returns, compute(4), opened(-1)).host_link == 0
    # Three layers share a slot, and a link that takes longer than compute decides.
    layers = [one for _ in range(3) for one in (opened(-1), compute(1), leaves, returns)]
    assert played(*layers, opened(-1)).seconds == 3 * (1 + 4 + 4)


def test_a_micro_batch_after_another_takes_as_long() -> None:
    work = (out(1, 5), compute(6), out(2, 5), compute(6), back(1, 5), compute(2), opened(1), compute(2))
    timing = again(*work, room=5)
    assert (timing.seconds, timing.host_link) == (16 + 3, 3)


def test_a_copy_takes_a_launch_of_the_host() -> None:
    assert played(out(1, 0), compute(0), launch=2.0).idle == 4
