"""Collectives across ranks: on synthetic jobs every number is known; by hand, what the jobs do not have."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.calls import SyncKind
from penstock.trace.collectives import CollectiveTimes, bandwidths, collectives_of, exchange_imbalances, timed
from penstock.trace.events import NONE, Trace
from penstock.trace.load import decode_trace
from penstock.trace.matching import match_collectives
from tests.examples import examples
from tests.trace.made_calls import Call, table
from tests.trace.synthetic import Traces, make
from tests.trace.synthetic_job import Job
from tests.trace.synthetic_truth import Meeting

OFFSETS = (0.0, 812.5, -1450.25, 96.125)
JOBS = {
    "even": Job(is_even=True),
    "slow rank": Job(slow_rank=1, is_even=True),
    "hot experts": Job(hot_rank=2),
    "both, clocks apart": Job(hot_rank=3, slow_rank=0, offsets_us=OFFSETS),
    "said at the launch": Job(hot_rank=2, metadata="launch", offsets_us=OFFSETS),
    "no numbers": Job(hot_rank=1, slow_rank=2, has_sequence=False, offsets_us=OFFSETS),
    "nothing said": Job(hot_rank=1, metadata="none", offsets_us=OFFSETS),
    "our kernels": Job(dispatch="symmetric", hot_rank=1, slow_rank=3, offsets_us=OFFSETS),
    "DeepEP": Job(dispatch="deep_ep", hot_rank=1, slow_rank=3, offsets_us=OFFSETS),
    "stalls": Job(slow_rank=2, stall_us=900.0),
}


def loaded(traces: Traces) -> dict[int, Trace]:
    texts = [json.dumps(content).encode() for content in traces.files]
    return {rank: decode_trace(text, path=Path(f"rank{rank}")) for rank, text in enumerate(texts)}


def found_in(job: Job) -> tuple[CollectiveTimes, Traces]:
    traces = make(job)
    return collectives_of(loaded(traces)), traces


def waits(collectives: CollectiveTimes, meetings: tuple[Meeting, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pure time and waits, found and true, of the collectives that wait, in the order of their starts."""
    calls, met = collectives.calls, collectives.meetings.met
    waiting = calls.sync[met[:, 0]] != SyncKind.ALONE
    found = np.column_stack([collectives.pure_us, collectives.wait_us])[waiting]
    return found, np.array([(one.pure_us, *one.wait_us) for one in meetings])


@pytest.mark.parametrize("name", JOBS)
def test_every_collective_is_found_with_its_pure_time_and_each_ranks_wait(name: str) -> None:
    collectives, traces = found_in(JOBS[name])
    found, true = waits(collectives, traces.truth.meetings)
    assert collectives.unmatched == ()
    assert len(found) == len(true)
    assert np.sort(found, axis=0) == pytest.approx(np.sort(true, axis=0), abs=1e-3)
    assert found.sum(axis=0) == pytest.approx(true.sum(axis=0), abs=1e-2)


@pytest.mark.parametrize("name", JOBS)
def test_stragglers_are_counted_with_the_waiting_that_they_caused(name: str) -> None:
    collectives, traces = found_in(JOBS[name])
    late = {one.rank: one for one in collectives.stragglers()}
    cost = traces.truth.caused_wait_us()
    assert {rank: one.times_last for rank, one in late.items()} == traces.truth.times_last()
    assert {rank: one.caused_wait_us for rank, one in late.items()} == pytest.approx(cost, abs=1e-2)
    assert collectives.cost_us.sum() == pytest.approx(sum(cost.values()), abs=1e-2)


@examples(15, deadline=None)
@given(
    offsets=st.lists(st.integers(-40_000_000, 40_000_000), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    slow=st.sampled_from([1.0, 1.04, 1.5]),
    metadata=st.sampled_from(["kernel", "launch", "none"]),
    has_sequence=st.booleans(),
)
def test_clocks_however_far_apart_change_no_wait(
    offsets: list[int], seed: int, slow: float, metadata: str, has_sequence: bool
) -> None:
    apart = tuple(one / 8 for one in offsets)
    collectives, traces = found_in(
        Job(
            ranks=3,
            layers=2,
            experts=12,
            offsets_us=apart,
            seed=seed,
            slow_rank=1,
            slow=slow,
            hot_rank=2,
            metadata=metadata,
            has_sequence=has_sequence,
        )
    )
    ahead_us = collectives.meetings.clocks.ahead_us
    assert ahead_us - ahead_us[0] == pytest.approx(np.array(apart) - apart[0], abs=1e-3)
    found, true = waits(collectives, traces.truth.meetings)
    assert found.sum(axis=0) == pytest.approx(true.sum(axis=0), abs=1e-2)


@pytest.mark.parametrize("metadata", ["kernel", "launch", "none"])
@pytest.mark.parametrize("has_sequence", [True, False])
@pytest.mark.parametrize("place", [0, 7, 20])
def test_an_event_that_one_rank_lacks_is_named_and_all_others_stay_right(
    metadata: str, has_sequence: bool, place: int
) -> None:
    job = Job(slow_rank=1, hot_rank=3, offsets_us=OFFSETS, missing=((2, place),))
    collectives, traces = found_in(replace(job, metadata=metadata, has_sequence=has_sequence))
    (lost,) = collectives.unmatched
    calls = collectives.calls
    assert lost.missing == (2,)
    assert sorted(calls.ranks[calls.rank[row]] for row in lost.rows) == [0, 1, 3]
    assert not np.isin(lost.rows, collectives.meetings.met).any()
    left = tuple(one for number, one in enumerate(traces.truth.meetings) if number != place)
    found, true = waits(collectives, left)
    assert found.sum(axis=0) == pytest.approx(true.sum(axis=0), abs=1e-2)


def test_a_shorter_recording_lacks_only_the_collectives_outside_of_it() -> None:
    traces = make(Job())
    ranks = loaded(traces)
    middle = ranks[1].gpu.start_us[len(ranks[1].gpu) // 2]
    late, early = ranks[1].gpu.start_us >= middle, ranks[2].gpu.start_us < middle
    for rank, kept in ((1, late), (2, early)):
        gpu = ranks[rank].gpu.take(kept)
        ranks[rank] = replace(ranks[rank], gpu=gpu)
    collectives = collectives_of({rank: ranks[rank] for rank in (0, 1)})
    assert len(collectives.meetings) + len(collectives.unmatched) == len(traces.truth.meetings)
    assert {one.why for one in collectives.unmatched} == {"the recording of rank 1 begins later"}
    collectives = collectives_of({rank: ranks[rank] for rank in (0, 2)})
    assert {one.why for one in collectives.unmatched} == {"the recording of rank 2 ends earlier"}


@pytest.mark.parametrize("dispatch", ["symmetric", "deep_ep"])
def test_kernels_without_numbers_match_across_recordings_of_different_length(dispatch: str) -> None:
    traces = make(replace(Job(slow_rank=1, hot_rank=3, offsets_us=OFFSETS), dispatch=dispatch))
    whole, ranks = collectives_of(loaded(traces)), loaded(traces)
    for rank, kept in ((1, slice(9, None)), (2, slice(0, -40))):
        ranks[rank] = replace(ranks[rank], gpu=ranks[rank].gpu.take(kept))
    collectives = collectives_of(ranks)
    assert 0 < len(collectives.unmatched) < len(collectives.meetings)
    kernels = whole.calls.gpu_row[whole.meetings.met[:, 0]]
    for meeting, wait_us in zip(collectives.meetings.met, collectives.wait_us, strict=True):
        (same,) = np.flatnonzero(kernels == collectives.calls.gpu_row[meeting[0]])
        assert wait_us == pytest.approx(whole.wait_us[same], abs=1e-3)


def test_one_rank_alone_cannot_tell_waiting_from_transfer() -> None:
    traces = make(Job(slow_rank=0))
    collectives = collectives_of({1: loaded(traces)[1]})
    assert len(collectives.meetings) == len(traces.truth.meetings)
    assert np.isnan(collectives.pure_us).all() and np.isnan(collectives.wait_us).all()
    assert collectives.stragglers() == () and collectives.unmatched == ()


def test_kernels_without_numbers_match_only_where_their_ends_agree() -> None:
    ends = [(100.0, 110.0), (900.0, 4_000.0), (6_000.0, 5_990.0), (8_000.0, 12_000.0), (20_000.0, 20_004.0)]
    calls = [
        Call(rank, end - 80.0, end, name="SendRecv", sync=SyncKind.UNEVEN)
        for both in ends
        for rank, end in enumerate(both)
    ]
    collectives = timed(match_collectives(table(*calls)))
    assert sorted(collectives.meetings.seq) == [0, 2, 4]
    assert [one.seq for one in collectives.unmatched] == [1, 3]
    assert {one.why for one in collectives.unmatched} == {"no number, and kernels of this place do not end together"}


def test_a_group_in_step_needs_no_common_ends_but_a_common_moment() -> None:
    """All-to-alls of unequal parts: a rank with less to send leaves up to 240 us earlier."""

    def call(rank: int, place: int, late: float = 0.0) -> Call:
        start, lasts = 1000.0 * place + 5.0 * rank, 400.0 + 30.0 * ((7 * place + 5 * rank) % 9)
        return Call(rank, start + late, start + max(lasts, late + 10.0), (0, 1), NONE, "all_to_allv", SyncKind.UNEVEN)

    even = match_collectives(table(*(call(rank, place) for place in range(20) for rank in (0, 1))))
    assert len(even) == 20 and even.unmatched == ()
    late = match_collectives(
        table(*(call(rank, place, 900.0 * (rank + place == 10)) for place in range(20) for rank in (0, 1)))
    )
    assert [(one.seq, one.why) for one in late.unmatched] == [
        (place, "its ranks were not inside at one moment") for place in (9, 10)
    ]


def test_waiting_for_flags_is_at_most_the_time_beyond_the_shortest_kernel() -> None:
    shared = [Call(rank, 100.0 * i, 100.0 * i + 50.0, (0, 1), i) for i in range(3) for rank in (0, 1)]
    take = [
        Call(0, 400.0, 440.0, None, NONE, "take", SyncKind.DEVICE),
        Call(1, 500.0, 530.0, None, NONE, "take", SyncKind.DEVICE),
    ]
    push = [Call(rank, 300.0 + rank, 350.0, None, NONE, "push", SyncKind.ALONE) for rank in (0, 1)]
    collectives = timed(match_collectives(table(*shared, *take, *push)))
    assert collectives.wait_us[-1] == pytest.approx([10.0, 0.0])
    assert collectives.wait_us[-2] == pytest.approx([0.0, 0.0])
    assert collectives.last.tolist() == [NONE, NONE, NONE, NONE, 1]


def test_a_kernel_without_id_is_found_by_the_operator_around_its_launch() -> None:
    traces = make(Job(metadata="launch", slow_rank=1))
    for content in traces.files:
        for event in content["traceEvents"]:
            if event["cat"] != "cpu_op":
                event["args"].pop("External id", None)
            elif event["name"] == "record_param_comms":
                launch = event["args"].pop("External id") + 6960
                called = next(
                    one
                    for one in content["traceEvents"]
                    if one["cat"] == "cuda_runtime" and one["args"].get("correlation") == launch
                )
                event["ts"], event["dur"] = called["ts"] - 0.5, 4.0
    collectives = collectives_of(loaded(traces))
    assert {one.times_last for one in collectives.stragglers()} == set(traces.truth.times_last().values())
    assert (collectives.calls.seq >= 300).all()


def test_a_shift_of_the_order_is_accepted_from_three_pairs_on() -> None:
    def kernels(rank: int, ends: list[float]) -> list[Call]:
        return [Call(rank, end - 90.0, end, name="SendRecv", sync=SyncKind.UNEVEN) for end in ends]

    ends = [1000.0, 2300.0, 3900.0, 5100.0, 7700.0]
    once = match_collectives(table(*kernels(0, [1000.0, 2300.0]), *kernels(1, [2300.0, 5000.0])))
    assert len(once) == 0 and len(once.unmatched) == 2
    shifted = match_collectives(table(*kernels(0, ends), *kernels(1, ends[1:])))
    assert len(shifted) == 4
    assert [(one.seq, one.missing) for one in shifted.unmatched] == [(0, (1,))]


def test_groups_of_one_name_with_other_ranks_are_different() -> None:
    calls = [Call(rank, 10.0 * rank, 100.0, group, 5) for group in ((0, 1), (2, 3)) for rank in group]
    meetings = match_collectives(table(*calls))
    assert len(meetings) == 2 and meetings.unmatched == ()
    assert ((meetings.met != NONE).sum(axis=1) == 2).all()


def test_equal_numbers_do_not_match_without_a_common_moment() -> None:
    right = [Call(rank, 1000.0 * i, 1000.0 * i + 50.0, (0, 1), i) for i in range(1, 6) for rank in (0, 1)]
    wrong = [Call(0, 7000.0, 7050.0, (0, 1), 9), Call(1, 8000.0, 8050.0, (0, 1), 9)]
    meetings = match_collectives(table(*right, *wrong))
    assert len(meetings) == 5
    assert [(one.seq, one.why) for one in meetings.unmatched] == [(9, "its ranks were not inside at one moment")]


def test_a_number_under_two_names_is_not_one_collective() -> None:
    meetings = match_collectives(
        table(Call(0, 0.0, 9.0, (0, 1), 3, "allreduce"), Call(1, 0.0, 9.0, (0, 1), 3, "barrier"))
    )
    assert len(meetings) == 0
    assert [one.why for one in meetings.unmatched] == ["its ranks call it by different names"]


def test_a_broadcast_has_no_wait_and_a_send_is_not_matched() -> None:
    calls = [Call(rank, 5.0 * rank, 60.0, (0, 1), 1, "broadcast", SyncKind.ROOTED) for rank in (0, 1)]
    pair = [Call(rank, 70.0, 80.0, (0, 1), 2, name, SyncKind.PAIR) for rank, name in ((0, "send"), (1, "recv"))]
    collectives = timed(match_collectives(table(*calls, *pair)))
    assert len(collectives.meetings) == 1 and collectives.unmatched == ()
    assert np.isnan(collectives.wait_us).all() and collectives.stragglers() == ()


def test_bandwidth_counts_transfer_and_no_waiting() -> None:
    job = Job(slow_rank=1, slow=3.0)
    collectives, _ = found_in(job)
    gathers = {one.name: one for one in bandwidths(collectives)}
    all_gather = gathers["_allgather_base"]
    size = 2 * 3 * job.hidden * job.hidden * job.layers * job.ranks
    assert (all_gather.count, all_gather.ranks, all_gather.message_bytes) == (job.steps, job.ranks, size)
    assert all_gather.algorithm_gb_s == pytest.approx(size / all_gather.pure_us / 1e3)
    assert all_gather.bus_gb_s == pytest.approx(all_gather.algorithm_gb_s * 3 / 4)


def test_bytes_of_an_uneven_all_to_all_name_the_fullest_rank() -> None:
    collectives, traces = found_in(Job(hot_rank=2))
    (exchange,) = exchange_imbalances(collectives)
    rows = np.array(traces.truth.rows).reshape(-1, 4)
    at_experts = (rows.max(axis=1) / rows.mean(axis=1)).mean()
    assert exchange.fullest_rank == 2
    assert (exchange.received_max_over_mean + exchange.sent_max_over_mean) / 2 == pytest.approx((1 + at_experts) / 2)
    assert exchange_imbalances(found_in(Job(is_even=True))[0])[0].fullest_rank is None


def test_traces_without_communication_have_no_collectives() -> None:
    traces = loaded(make(Job()))
    silent = {rank: replace(trace, gpu=trace.gpu.take(trace.gpu.kind == 0)) for rank, trace in traces.items()}
    collectives = collectives_of(silent)
    assert len(collectives.meetings) == 0 and collectives.unmatched == ()
    assert bandwidths(collectives) == () and exchange_imbalances(collectives) == ()
