"""A host and a device wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.costs import OpCost
from penstock.plan.op_recorder import END, FORK, JOIN, WAIT, RecordedOp, RecordedOps
from penstock.plan.streams import OVERLAP_GAIN, Streams, Timing, steady_state


def compute(seconds: float) -> RecordedOp:
    return RecordedOp("compute", switches=(str(seconds),))


def send(seconds: float) -> RecordedOp:
    return RecordedOp("send", switches=(str(seconds),))


def cost_of(operator: RecordedOp) -> OpCost:
    return OpCost(float(operator.switches[0]), operator.name, is_communication=operator.name == "send")


def played(*work: RecordedOp, launch: float = 0.0, gap: float = 0.0) -> Timing:
    streams = Streams(cost_of, launch, gap)
    streams.play(work)
    return streams.timing


def again(*work: RecordedOp, launch: float) -> Timing:
    (timing,) = steady_state([[work]], Streams(cost_of, launch))
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
