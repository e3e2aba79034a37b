"""Launches: short kernels, gaps and whose they are, waits of the host, the queue."""

import pytest

from penstock.trace.launches import find_launches
from tests.trace.test_tree import decoded, operator, span
from tests.trace.tiny import event, kernel


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


def test_a_gap_before_an_event_without_a_launch_is_nobodys() -> None:
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
