"""Launches: short kernels, gaps and their cause, waits of the host, the queue."""

import pytest

from penstock.trace.launches import find_launches, idle_behind_waits
from tests.trace.test_tree import decoded, operator, span
from tests.trace.tiny import TIME_US, event, kernel


def call(start: float, number: int, lasts: float = 2.0) -> dict[str, object]:
    return event("cuda_runtime", "cudaLaunchKernel", start, lasts, correlation=number)


def test_kernels_below_ten_microseconds_are_counted_and_added() -> None:
    copy = event("gpu_memcpy", "Memcpy DtoD", 90, 3, stream=7, correlation=3)
    found = find_launches(decoded(kernel("a", 0, 9.5, correlation=1), kernel("b", 20, 10, correlation=2), copy))
    assert (found.short_count, found.short_us, found.kernel_count) == (1, pytest.approx(9.5), 2)


def test_a_gap_is_the_hosts_if_what_ends_it_was_launched_after_it_began() -> None:
    trace = decoded(
        call(0, 1),
        kernel("first", 10, 20, correlation=1),
        call(15, 2),
        kernel("launched_in_time", 50, 10, correlation=2),
        span("ProfilerStep#1", 100, 200),
        operator("aten::slow", 110, 60),
        call(160, 3),
        kernel("launched_late", 200, 10, correlation=3),
    )
    gaps = find_launches(trace).gaps
    assert (gaps.count, gaps.long_count, gaps.max_us) == (2, 1, pytest.approx(140))
    assert (gaps.hosts_us, gaps.devices_us, gaps.unknown_us) == (pytest.approx(140), pytest.approx(20), 0)
    assert [(one.before, one.after, one.is_hosts, one.host) for one in gaps.longest] == [
        ("launched_in_time", "launched_late", True, "aten::slow"),
        ("first", "launched_in_time", False, ""),
    ]


def test_a_gap_before_an_event_without_a_launch_has_no_cause() -> None:
    gaps = find_launches(decoded(kernel("a", 0, 10, correlation=1), kernel("b", 60, 10, correlation=2))).gaps
    assert (gaps.unknown_us, gaps.hosts_us, gaps.longest[0].is_hosts) == (pytest.approx(50), 0, None)


def test_a_wait_of_the_host_says_where_it_comes_from() -> None:
    waits = find_launches(
        decoded(
            kernel("a", 0, 10, correlation=1),
            span("clip", 20, 100),
            operator("aten::item", 30, 50),
            event("cuda_runtime", "cudaStreamSynchronize", 40, 30, correlation=5),
            event("cuda_runtime", "hipDeviceSynchronize", 200, 70, correlation=6),
        )
    ).waits
    assert [(one.call, one.where, one.count, one.total_us) for one in waits] == [
        ("hipDeviceSynchronize", (), 1, pytest.approx(70)),
        ("cudaStreamSynchronize", ("clip", "aten::item"), 1, pytest.approx(30)),
    ]


def read_of(start: float, lasts: float, number: int, kind: str = "Device -> Pageable") -> list[dict[str, object]]:
    """A number is read: the device copies it 3 us before the host goes on, or as the call begins."""
    call = event("cuda_runtime", "cudaMemcpyAsync", start, lasts, correlation=number)
    copy = event("gpu_memcpy", f"Memcpy DtoH ({kind})", start + lasts - 4, 1, stream=7, correlation=number)
    return [call, copy]


def test_a_copy_that_the_host_comes_back_behind_is_a_wait() -> None:
    pinned = event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 400, 1, stream=7, correlation=3)
    trace = decoded(
        kernel("a", 0, 60, correlation=1),
        span("dispatch", 20, 100),
        *read_of(30, 40, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 380, 5, correlation=3),
        pinned,
        event("cuda_runtime", "cudaMemcpyAsync", 410, 30, correlation=4),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 420, 5, stream=7, correlation=4),
    )
    (wait,) = find_launches(trace).waits
    assert (wait.call, wait.where, wait.total_us) == ("cudaMemcpyAsync", ("dispatch",), pytest.approx(40))


def test_only_waits_of_a_stretch_are_told_if_one_is_asked_for() -> None:
    trace = decoded(kernel("a", 0, 60, correlation=1), *read_of(30, 40, 2), *read_of(130, 40, 3))
    assert [one.count for one in find_launches(trace).waits] == [2]
    assert [one.count for one in find_launches(trace, (TIME_US + 100, TIME_US + 200)).waits] == [1]


def test_idle_time_behind_a_wait_is_what_the_host_could_have_launched_meanwhile() -> None:
    """The host waits 40 us, and is 90 us late with the next kernel: 40 of these would not be."""
    trace = decoded(
        call(0, 1),
        kernel("a", 5, 61, correlation=1),
        *read_of(30, 40, 2),
        call(150, 3),
        kernel("b", 157, 9, correlation=3),
    )
    assert idle_behind_waits(trace) == pytest.approx(40)


def test_a_long_wait_excuses_late_launches_until_they_have_used_it_up() -> None:
    late = [
        kernel("b", 120, 10, correlation=3),
        kernel("c", 160, 10, correlation=4),
        kernel("d", 200, 10, correlation=5),
    ]
    calls = [call(118, 3), call(158, 4), call(198, 5)]
    trace = decoded(call(0, 1), kernel("a", 5, 92, correlation=1), *read_of(10, 91, 2), *calls, *late)
    assert idle_behind_waits(trace) == pytest.approx(22 + 30 + 30)
    short = decoded(call(0, 1), kernel("a", 5, 92, correlation=1), *read_of(61, 40, 2), *calls, *late)
    assert idle_behind_waits(short) == pytest.approx(40)


def test_a_host_that_launches_slowly_and_never_waits_is_late_by_itself() -> None:
    trace = decoded(call(0, 1), kernel("a", 5, 10, correlation=1), call(90, 2), kernel("b", 95, 10, correlation=2))
    assert idle_behind_waits(trace) == 0
    assert idle_behind_waits(decoded(kernel("a", 0, 10, correlation=1))) == 0


def test_work_that_had_been_launched_waits_for_no_host() -> None:
    trace = decoded(
        call(0, 1),
        kernel("a", 5, 20, correlation=1),
        call(6, 2),
        *read_of(20, 60, 3),
        kernel("b", 40, 36, correlation=2),
    )
    assert idle_behind_waits(trace) == 0


def test_a_wait_that_stays_ends_what_others_excuse() -> None:
    """A wait in the dispatch is spared; the one for the step's figures is not, and all work is done by then."""
    trace = decoded(
        call(0, 1),
        kernel("a", 5, 92, correlation=1),
        span("dispatch", 9, 100),
        *read_of(10, 91, 2),
        call(118, 3),
        kernel("b", 120, 10, correlation=3),
        span("read", 131, 30),
        *read_of(132, 5, 4),
        call(190, 5),
        kernel("c", 195, 10, correlation=5),
    )
    assert idle_behind_waits(trace, frozenset({"dispatch"})) == pytest.approx(22 + 3)
    assert idle_behind_waits(trace) > 22 + 3


def test_the_queue_is_what_was_launched_and_has_not_begun() -> None:
    queue = find_launches(
        decoded(call(0, 1), call(10, 2), kernel("a", 30, 10, correlation=1), kernel("b", 50, 5, correlation=2))
    ).queue
    assert queue is not None
    assert (queue.max, queue.empty_share) == (2, 0)
    assert queue.mean == pytest.approx((1 * 10 + 2 * 20 + 1 * 20) / 50)
    assert queue.median_delay_us == pytest.approx((28 + 38) / 2)


def test_without_launches_there_is_no_queue() -> None:
    assert find_launches(decoded(kernel("a", 0, 10, correlation=1))).queue is None
