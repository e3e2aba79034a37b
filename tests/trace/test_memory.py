"""Memory of a device: the curve, the fullest moment, where it was, and what for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.memory import AllocatorHistory, find_memory, memory_json
from penstock.trace.timeline import steps_of
from tests.trace.tiny import TIME_US, decoded, kernel, operator, span

GB = 1_000_000_000


def change(at: float, size: int, held: int, *, address: int | None = 64, device: int = 0) -> dict[str, Any]:
    """What the profiler writes when a block is handed out (size above 0) or taken back."""
    args: dict[str, Any] = {"Device Id": device, "Device Type": 1, "Bytes": size}
    args |= {"Total Allocated": held, "Total Reserved": 900 * GB}
    if address is not None:
        args["Addr"] = address
    times = {"ts": TIME_US + at, "s": "t", "pid": 77, "tid": 77}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", **times, "args": args}


def memory_of(*events: dict[str, Any]) -> AllocatorHistory:
    (memory,) = find_memory(decoded(kernel("a", 0, 10, correlation=1), *events))
    return memory


def a_step() -> list[dict[str, Any]]:
    """Ten GB are there. Forward keeps 4 of attention and 2 of a scratch that it gives back, backward makes gradients
    of 3 and frees the 4; the update takes 1 for moments and gives back the gradients."""
    return [
        span("step 5", 0, 1000),
        span("forward", 10, 200),
        span("layer 2", 20, 150),
        span("attention", 30, 100),
        change(40, 4 * GB, 14 * GB, address=1),
        change(50, 2 * GB, 16 * GB, address=2),
        change(60, -2 * GB, 14 * GB, address=2),
        span("backward", 300, 300),
        operator("autograd::engine::evaluate_function: MmBackward0", 310, 200, sequence=7),
        change(320, 3 * GB, 17 * GB, address=2),
        change(330, 1 * GB, 18 * GB, address=3),
        change(340, -1 * GB, 17 * GB, address=3),
        change(350, -4 * GB, 13 * GB, address=1),
        span("optimizer", 700, 200),
        change(710, 1 * GB, 14 * GB, address=4),
        change(720, -3 * GB, 11 * GB, address=2),
    ]


def test_memory_is_what_the_allocator_of_a_gpu_held_after_each_change() -> None:
    memory = memory_of(change(5, 300, 300), change(9, 400, 700, address=65), change(7, 50, 50, device=-1))
    assert (memory.device, memory.allocated.tolist()) == (0, [300, 700])
    assert memory.time_us.tolist() == [TIME_US + 5, TIME_US + 9]


def test_each_block_is_what_its_life_says() -> None:
    memory = memory_of(*a_step())
    # After the second change, after the fifth, which is the peak, and at the end.
    assert memory.components(1) == {"before": 10 * GB, "activations": 4 * GB, "temporary": 2 * GB}
    assert memory.components(4) == {"before": 10 * GB, "activations": 4 * GB, "gradients": 3 * GB, "temporary": 1 * GB}
    assert memory.components(8) == {"before": 10 * GB, "optimizer": 1 * GB}


def test_the_peak_says_where_it_was() -> None:
    peak = memory_of(*a_step()).peak
    assert (peak.time_us, peak.allocated_bytes) == (TIME_US + 330, 18 * GB)
    assert (peak.pass_, peak.spans) == ("backward", ("step 5", "backward"))


def test_phases_say_what_they_hand_out_and_what_stays() -> None:
    rows = {(row.name, row.pass_): row for row in memory_of(*a_step()).rows()}
    attention, update = rows["attention", "forward"], rows["optimizer", "update"]
    assert (attention.handed_out_bytes, attention.kept_bytes) == (6 * GB, 4 * GB)
    assert (attention.most_bytes, attention.at_peak_bytes) == (16 * GB, 4 * GB)
    assert (update.handed_out_bytes, update.kept_bytes, update.at_peak_bytes) == (1 * GB, -2 * GB, 0)
    assert next(row.layer for row in memory_of(*a_step()).rows(by_layer=True)) == 2


def test_a_block_that_forward_hands_out_and_the_update_sees_is_kept() -> None:
    memory = memory_of(
        span("embed", 0, 20), change(5, 7, 7), span("optimizer", 100, 50), change(110, 9, 16, address=65)
    )
    assert memory.components(1) == {"optimizer": 9, "kept": 7}


def test_a_block_that_was_there_before_counts_as_before_until_it_is_taken_back() -> None:
    memory = memory_of(
        span("embed", 0, 90), change(5, 1, 101, address=1), change(6, -60, 41, address=9), change(7, 2, 43, address=9)
    )
    assert memory.components(0) == {"before": 100, "temporary": 1}
    assert memory.components(2) == {"before": 40, "temporary": 3}  # 60 bytes without a recorded allocation were freed


def test_without_addresses_there_are_no_components() -> None:
    memory = memory_of(change(5, 300, 300, address=None), change(9, 400, 700, address=None))
    assert memory.blocks is None and memory.peak.components == {}
    assert memory.peak.allocated_bytes == 700
    assert [row.at_peak_bytes for row in memory.rows()] == [None]
    assert memory_json(memory, ())["peak"]["components"] is None


@pytest.mark.parametrize("args", [{"Bytes": "x"}, {"Total Allocated": 2**80}, {"Addr": -1}, {"Device Id": []}])
def test_a_damaged_change_is_left_out(args: dict[str, Any]) -> None:
    bad = change(6, 1, 2)
    bad["args"] |= args
    assert memory_of(change(5, 300, 300), bad).allocated.tolist() == [300]


def test_json_has_each_step_with_its_own_peak() -> None:
    trace = decoded(kernel("a", 0, 10, correlation=1), *a_step())
    told = memory_json(memory_of(*a_step()), steps_of(trace))
    (step,) = told["steps"]
    assert (step["number"], step["begin_bytes"], step["end_bytes"]) == (5, 10 * GB, 11 * GB)
    assert step["peak"]["allocated_bytes"] == told["most_allocated_bytes"] == 18 * GB
    assert told["peak"]["pass"] == "backward"
    keys = "name pass layer handed_out_bytes kept_bytes most_bytes at_peak_bytes"
    assert {*keys.split()} == set(told["phases"][0])
    assert len(told["curve"]) == told["changes"] == 9


def test_a_curve_with_fewer_points_keeps_the_fullest_moment() -> None:
    changes = [change(one, 1, (one * 37) % 1009, address=one + 1) for one in range(2000)]
    memory = memory_of(*changes)
    curve = memory.curve(50)
    assert len(curve) <= 50
    assert max(held for _, held, _ in curve) == memory.allocated.max()
    assert [time for time, _, _ in curve] == sorted(time for time, _, _ in curve)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 99)), min_size=1, max_size=60), st.integers(0, 500))
def test_components_add_up_to_what_is_handed_out(steps: list[tuple[int, int]], before: int) -> None:
    held, blocks, events = before, {}, []
    for at, (address, size) in enumerate(steps):
        size = -blocks.pop(address) if address in blocks else size
        if size > 0:
            blocks[address] = size
        held += size
        events.append(change(at, size, held, address=address))
    memory = memory_of(*events)
    for row in range(len(events)):
        components = memory.components(row)
        assert sum(components.values()) == memory.allocated[row]
        assert components.get("before", 0) == before
