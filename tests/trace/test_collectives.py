"""Collectives across ranks: on synthetic jobs every number is known; by hand, what the jobs do not have."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.calls import CollectiveCalls, ProcessGroup, SyncKind, calls_of
from penstock.trace.collectives import CollectiveTimes, bandwidths, collectives_of, exchange_imbalances, timed
from penstock.trace.events import NONE
from penstock.trace.matching import ClockOffsets, match_collectives
from tests.examples import examples
from tests.trace.synthetic import Traces, make
from tests.trace.synthetic_job import Job, Meeting
from tests.trace.tiny import decoded, event

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


def found_in(job: Job) -> tuple[CollectiveTimes, Traces]:
    traces = make(job)
    return collectives_of(traces.ranks()), traces


def waits(collectives: CollectiveTimes, meetings: tuple[Meeting, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pure time and waits, found and true, of the collectives that wait, in the order of their starts."""
    calls, met = collectives.calls, collectives.meetings.met
    waiting = calls.sync[met[:, 0]] != SyncKind.ALONE  # `push` and `return` kernels wait for no rank
    found = np.column_stack([collectives.pure_us, collectives.wait_us])[waiting]
    return found, np.array([(one.pure_us, *one.wait_us) for one in meetings])


@pytest.mark.parametrize("name", JOBS)
def test_every_collective_is_found_with_its_pure_time_each_ranks_wait_and_the_stragglers(name: str) -> None:
    collectives, traces = found_in(JOBS[name])
    found, true = waits(collectives, traces.truth.meetings)
    assert collectives.unmatched == ()
    assert len(found) == len(true)
    assert np.sort(found, axis=0) == pytest.approx(np.sort(true, axis=0), abs=1e-3)
    assert found.sum(axis=0) == pytest.approx(true.sum(axis=0), abs=1e-2)  # of each column
    late, cost = collectives.stragglers(), traces.truth.caused_wait_us()
    assert {one.rank: one.times_last for one in late} == traces.truth.times_last()
    assert {one.rank: one.caused_wait_us for one in late} == pytest.approx(cost, abs=1e-2)
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
    apart = tuple(one / 8 for one in offsets)  # up to 5 s; eighths of a microsecond are exact
    sizes = Job(ranks=3, layers=2, experts=12, seed=seed, slow_rank=1, slow=slow, hot_rank=2)
    collectives, traces = found_in(
        replace(sizes, offsets_us=apart, metadata=metadata, has_sequence=has_sequence)  # type: ignore[arg-type]
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
    ranks = traces.ranks()
    middle = ranks[1].gpu.start_us[len(ranks[1].gpu) // 2]
    late, early = ranks[1].gpu.start_us >= middle, ranks[2].gpu.start_us < middle
    for rank, kept, why in ((1, late, "begins later"), (2, early, "ends earlier")):
        cut = replace(ranks[rank], gpu=ranks[rank].gpu.take(kept))
        collectives = collectives_of({0: ranks[0], rank: cut})
        assert len(collectives.meetings) + len(collectives.unmatched) == len(traces.truth.meetings)
        assert {one.why for one in collectives.unmatched} == {f"the recording of rank {rank} {why}"}


@pytest.mark.parametrize("dispatch", ["symmetric", "deep_ep"])
def test_kernels_without_numbers_match_across_recordings_of_different_length(dispatch: str) -> None:
    traces = make(replace(Job(slow_rank=1, hot_rank=3, offsets_us=OFFSETS), dispatch=dispatch))
    whole, ranks = collectives_of(traces.ranks()), traces.ranks()
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
    collectives = collectives_of({1: traces.ranks()[1]})
    assert len(collectives.meetings) == len(traces.truth.meetings)
    assert np.isnan(collectives.pure_us).all() and np.isnan(collectives.wait_us).all()
    assert collectives.stragglers() == () and collectives.unmatched == ()


def test_kernels_without_numbers_match_only_where_their_ends_agree() -> None:
    first, second = [100.0, 900.0, 6_000.0, 8_000.0, 20_000.0], [110.0, 4_000.0, 5_990.0, 12_000.0, 20_004.0]
    found = match_collectives(table(*unnumbered(0, first), *unnumbered(1, second)))
    assert sorted(found.seq) == [0, 2, 4]
    assert [one.seq for one in found.unmatched] == [1, 3]
    assert {one.why for one in found.unmatched} == {"no number, and kernels of this place do not end together"}


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
    times = [(400.0, 440.0), (500.0, 530.0)]
    take = [Call(rank, *times[rank], name="take", sync=SyncKind.DEVICE) for rank in (0, 1)]
    push = [Call(rank, 300.0 + rank, 350.0, name="push", sync=SyncKind.ALONE) for rank in (0, 1)]
    collectives = timed(match_collectives(table(*shared, *take, *push)))
    assert collectives.wait_us[-1] == pytest.approx([10.0, 0.0])  # 40 us, 10 beyond the 30 of the other rank
    assert collectives.wait_us[-2] == pytest.approx([0.0, 0.0])
    assert collectives.last.tolist() == [NONE, NONE, NONE, NONE, 1]


def test_a_kernel_without_id_is_found_by_the_operator_around_its_launch() -> None:
    traces = make(Job(metadata="launch", slow_rank=1))
    for content in traces.files:
        calls = {
            one["args"].get("correlation"): one["ts"] for one in content["traceEvents"] if one["cat"] == "cuda_runtime"
        }
        for one in content["traceEvents"]:
            if one["cat"] != "cpu_op":
                one["args"].pop("External id", None)
            elif one["name"] == "record_param_comms":
                launch = one["args"].pop("External id") + 6960  # its correlation: both are counted by launches
                one["ts"], one["dur"] = calls[launch] - 0.5, 4.0
    collectives = collectives_of(traces.ranks())
    assert {one.times_last for one in collectives.stragglers()} == set(traces.truth.times_last().values())
    assert (collectives.calls.seq >= 300).all()


def test_a_shift_of_the_order_is_accepted_from_three_pairs_on() -> None:
    ends = [1000.0, 2300.0, 3900.0, 5100.0, 7700.0]
    once = match_collectives(table(*unnumbered(0, [1000.0, 2300.0]), *unnumbered(1, [2300.0, 5000.0])))
    assert len(once) == 0 and len(once.unmatched) == 2
    shifted = match_collectives(table(*unnumbered(0, ends), *unnumbered(1, ends[1:])))
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
    (all_gather,) = (one for one in bandwidths(found_in(job)[0]) if one.name == "_allgather_base")
    size = 2 * 3 * job.hidden * job.hidden * job.layers * job.ranks
    assert (all_gather.count, all_gather.ranks, all_gather.message_bytes) == (job.steps, job.ranks, size)
    assert all_gather.algorithm_gb_s == pytest.approx(size / all_gather.pure_us / 1e3)
    assert all_gather.bus_gb_s == pytest.approx(all_gather.algorithm_gb_s * 3 / 4)  # (ranks - 1) / ranks


def test_bytes_of_an_uneven_all_to_all_name_the_fullest_rank() -> None:
    collectives, traces = found_in(Job(hot_rank=2))
    (exchange,) = exchange_imbalances(collectives)
    rows = np.array(traces.truth.rows).reshape(-1, 4)
    at_experts = (rows.max(axis=1) / rows.mean(axis=1)).mean()
    assert exchange.fullest_rank == 2
    assert (exchange.received_max_over_mean + exchange.sent_max_over_mean) / 2 == pytest.approx((1 + at_experts) / 2)
    assert exchange_imbalances(found_in(Job(is_even=True))[0])[0].fullest_rank is None


def test_traces_without_communication_have_no_collectives() -> None:
    traces = make(Job()).ranks()
    silent = {rank: replace(trace, gpu=trace.gpu.take(trace.gpu.kind == 0)) for rank, trace in traces.items()}
    collectives = collectives_of(silent)
    assert len(collectives.meetings) == 0 and collectives.unmatched == ()
    assert bandwidths(collectives) == () and exchange_imbalances(collectives) == ()


COPIED = ("start_us", "end_us", "seq", "sync", "stream")


class Call(NamedTuple):
    """One kernel: `group` is a tuple of members, or None for a kernel that says nothing."""

    rank: int
    start_us: float
    end_us: float
    group: tuple[int, ...] | None = None
    seq: int = NONE
    name: str = "allreduce"
    sync: SyncKind = SyncKind.TOGETHER
    stream: int = 16


def unnumbered(rank: int, ends: list[float]) -> list[Call]:
    return [Call(rank, end - 80.0, end, name="SendRecv", sync=SyncKind.UNEVEN) for end in ends]


def table(*calls: Call) -> CollectiveCalls:
    """Columns of these kernels. All groups have one name, as groups of disjoint ranks may."""
    rows = sorted(calls, key=lambda one: (one.rank, one.start_us))
    ranks, names = tuple(sorted({one.rank for one in rows})), sorted({one.name for one in rows})
    groups = sorted({one.group for one in rows if one.group is not None})
    unknown, none = np.full(len(rows), np.nan), np.full(len(rows), NONE)
    columns = {field: np.array([getattr(one, field) for one in rows]) for field in COPIED}
    return CollectiveCalls(
        ranks=ranks,
        groups=tuple(ProcessGroup(name="g", members=members, size=len(members)) for members in groups),
        names=tuple(names),
        clock=tuple(range(len(ranks))),
        rank=np.array([ranks.index(one.rank) for one in rows]),
        group=np.array([NONE if one.group is None else groups.index(one.group) for one in rows]),
        name_id=np.array([names.index(one.name) for one in rows]),
        **columns,
        **dict.fromkeys(("sent_bytes", "received_bytes", "item_bytes"), unknown),
        **dict.fromkeys(("sent_rows", "received_rows"), none),
        gpu_row=np.arange(len(rows)),
    )


def clocks_after(groups: list[tuple[int, ...]], ahead_us: list[float], *, meetings: int = 3) -> ClockOffsets:
    """Clocks of ranks that are so far ahead, after some collectives in each of these groups."""
    calls = []
    for number, group in enumerate(groups):
        for seq in range(meetings):
            end = 1000.0 * (seq * len(groups) + number) + 500.0
            calls += [Call(r, end - 100.0 - r + ahead_us[r], end + ahead_us[r], group, seq) for r in group]
    return match_collectives(table(*calls)).clocks


@given(st.lists(st.integers(-(10**9), 10**9), min_size=4, max_size=4))
def test_groups_that_share_ranks_tell_the_clocks_of_all(apart: list[int]) -> None:
    ahead_us = [one / 16 for one in apart]  # exact in floating point
    clocks = clocks_after([(0, 1), (2, 3), (1, 3)], ahead_us)
    assert len(set(clocks.island)) == 1
    assert clocks.ahead_us - clocks.ahead_us[0] == pytest.approx(np.array(ahead_us) - ahead_us[0], abs=1e-4)


def test_ranks_that_nothing_joins_stay_apart() -> None:
    clocks = clocks_after([(0, 1), (2, 3)], [0.0, 9.0, 5000.0, 5004.0])
    assert clocks.island[0] == clocks.island[1] != clocks.island[2] == clocks.island[3]
    assert clocks.ahead_us == pytest.approx([-4.5, 4.5, -2.0, 2.0])  # around the middle of each island
    both = np.array([[True, True, False, False], [True, False, True, False]])
    assert clocks.is_joined(both).tolist() == [True, False]


def test_a_few_uneven_ends_move_no_clock() -> None:
    calls = [Call(rank, 1000.0 * i, 1000.0 * i + 90.0, (0, 1, 2), i) for i in range(9) for rank in range(3)]
    odd = [Call(rank, 20_000.0, 20_090.0 + 33.0 * rank, (0, 1, 2), 9) for rank in range(3)]
    clocks = match_collectives(table(*calls, *odd)).clocks
    assert clocks.ahead_us == pytest.approx([0.0, 0.0, 0.0])
    assert clocks.spread_us == pytest.approx([0.0, 0.0, 0.0])
    assert clocks.shared.tolist() == [10, 10, 10]


def test_ends_that_scatter_more_than_clocks_differ_move_no_clock() -> None:
    late_us = [40.0, -300.0, 12.0, 200.0]
    calls = [
        Call(rank, 1000.0 * i, 1000.0 * i + 600.0 + rank * late, (0, 1), i)
        for i, late in enumerate(late_us)
        for rank in (0, 1)
    ]
    clocks = match_collectives(table(*calls)).clocks
    assert clocks.ahead_us.tolist() == [0.0, 0.0]
    assert (clocks.spread_us > 10.0).all()


def test_strict_collectives_are_believed_before_uneven_ones() -> None:
    strict = [Call(rank, 10.0, 100.0 + 7.0 * rank, (0, 1), 0) for rank in (0, 1)]
    uneven = [
        Call(rank, 200.0 * i, 200.0 * i + 99.0 + 30.0 * rank, (0, 1), i, "all_to_allv", SyncKind.UNEVEN)
        for i in range(1, 8)
        for rank in (0, 1)
    ]
    ahead_us = match_collectives(table(*strict, *uneven)).clocks.ahead_us
    assert ahead_us[1] - ahead_us[0] == pytest.approx(7.0)


@pytest.mark.parametrize("sync", [SyncKind.DEVICE, SyncKind.ALONE, SyncKind.ROOTED])
def test_kernels_whose_ends_mean_nothing_tell_no_clock(sync: SyncKind) -> None:
    calls = [Call(rank, 5.0, 100.0 + rank, (0, 1), 0, "kernel", sync) for rank in (0, 1)]
    clocks = match_collectives(table(*calls)).clocks
    assert clocks.shared.tolist() == [0, 0]
    assert clocks.island[0] != clocks.island[1]


def test_a_meeting_of_one_rank_alone_tells_no_clock() -> None:
    meetings = match_collectives(table(Call(0, 0.0, 5.0, (0,), 0), Call(1, 0.0, 9.0, (1,), 0)))
    assert (meetings.met != NONE).sum(axis=1).tolist() == [1, 1]
    assert meetings.clocks.ahead_us.tolist() == [0.0, 0.0]


SAID = {
    "Collective name": "all_to_allv",
    "Process Group Name": "3",
    "Process Group Ranks": "[0, 2, 4]",
    "Group size": 3,
    "Seq": 17,
    "In msg nelems": 600,
    "Out msg nelems": 900,
    "dtype": "BFloat16",
    "In split size": "[1, 2, 3]",
    "Out split size": "[4, 0, 5]",
}


def calls_with(args: dict[str, Any], kernel: str = "ncclDevKernel_SendRecv(ncclDevKernelArgs)") -> CollectiveCalls:
    return calls_of({0: decoded(event("kernel", kernel, 10, 5, stream=7, **args))})


def test_group_number_sizes_and_rows_are_read() -> None:
    calls = calls_with(SAID)
    assert (calls.name(0), calls.seq[0], calls.sync[0]) == ("all_to_allv", 17, SyncKind.UNEVEN)
    assert (calls.groups[0].name, calls.groups[0].members, calls.groups[0].size) == ("3", (0, 2, 4), 3)
    assert (calls.sent_bytes[0], calls.received_bytes[0]) == (1200.0, 1800.0)  # elements of 2 bytes
    assert (calls.sent_rows[0], calls.received_rows[0]) == (6, 9)  # sums of the splits


def test_parts_that_are_counted_in_elements_are_no_rows() -> None:
    calls = calls_with(SAID | {"In split size": "[100, 200, 300]", "Out split size": "[]"})
    assert (calls.sent_rows[0], calls.received_rows[0]) == (NONE, NONE)


def test_members_of_a_large_group_are_told_by_first_and_stride_where_the_list_is_cut_short() -> None:
    cut = {"Process Group Ranks": "[0, 8, 16, ...]", "Global rank start": 0, "Global rank stride": 8, "Group size": 64}
    assert calls_with(SAID | cut).groups[0].members == tuple(range(0, 512, 8))
    assert calls_with(SAID | cut | {"Global rank stride": -1}).groups[0].members == ()


@pytest.mark.parametrize(("dtype", "width"), [("Float", 4), ("Float8_e4m3fn", 1), ("Long", 8), ("c10::Half", 2)])
def test_bytes_follow_the_type(dtype: str, width: int) -> None:
    assert calls_with(SAID | {"dtype": dtype}).sent_bytes[0] == 600 * width


@pytest.mark.parametrize("damage", [{"dtype": "Quaternion"}, {"In msg nelems": -1, "Out msg nelems": -1}])
def test_unknown_bytes_are_nan(damage: dict[str, Any]) -> None:
    assert np.isnan(calls_with(SAID | damage).sent_bytes[0])


@pytest.mark.parametrize("damage", [{"Seq": "x"}, {"Seq": 10**30}, {"Group size": None}, {"Process Group Name": []}])
def test_args_of_other_types_are_ignored(damage: dict[str, Any]) -> None:
    calls = calls_with(SAID | damage)
    assert (calls.group[0], calls.seq[0], calls.name(0)) == (NONE, NONE, "ncclDevKernel_SendRecv")


KERNELS = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)": SyncKind.TOGETHER,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)": SyncKind.TOGETHER,
    "ncclDevKernel_SendRecv(ncclDevKernelArgs)": SyncKind.UNEVEN,
    "ncclDevKernel_Generic(ncclDevKernelArgs)": SyncKind.UNEVEN,
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgs)": SyncKind.ROOTED,
    "push_rows_kernel": SyncKind.ALONE,
    "sum_ranks_kernel": SyncKind.DEVICE,
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(void*)": SyncKind.DEVICE,
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": SyncKind.DEVICE,
}
COLLECTIVES = {
    **dict.fromkeys(("allreduce_coalesced", "all_to_all"), SyncKind.TOGETHER),
    "all_to_allv": SyncKind.UNEVEN,
    **dict.fromkeys(("broadcast", "reduce"), SyncKind.ROOTED),
    **dict.fromkeys(("send", "recv"), SyncKind.PAIR),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_without_metadata_is_known_by_its_name(kernel: str) -> None:
    calls = calls_with({}, kernel)
    assert (calls.sync[0], calls.group[0]) == (KERNELS[kernel], NONE)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_name_of_a_collective_gives_its_kind_of_synchronization(name: str) -> None:
    assert calls_with(SAID | {"Collective name": name}).sync[0] == COLLECTIVES[name]
