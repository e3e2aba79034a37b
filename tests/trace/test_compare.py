"""Comparisons of two traces are exact and complete, and find the known change."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.compare import (
    IDLE,
    OVERLAP,
    UNEVEN,
    ChangeKind,
    ComparedRow,
    EventKey,
    NamedEvents,
    TraceComparison,
    compare,
    named_events,
    shape_text,
)
from penstock.trace.events import NONE, Trace
from tests.trace.synthetic import Job, make

Event = tuple[EventKey, float, float, int]

EXPERTS = EventKey("experts forward", "aten::_grouped_mm", "96x64 4x64x32")
NORM = EventKey("norm forward", "aten::rms_norm", "128x64")


def work(events: Sequence[Event], steps: int = 0) -> NamedEvents:
    keys = sorted({event[0] for event in events})
    return NamedEvents(
        keys=keys,
        key_of=np.array([keys.index(event[0]) for event in events], dtype=np.int64),
        start_us=np.array([event[1] for event in events], dtype=np.float64),
        duration_us=np.array([event[2] for event in events], dtype=np.float64),
        step_of=np.array([event[3] for event in events], dtype=np.int64),
        steps=steps,
    )


def row_of(found: TraceComparison, key: EventKey) -> ComparedRow:
    return next(row for row in found.rows if row.key == key)


def assert_closes(found: TraceComparison) -> None:
    """Rows add up to the total exactly, in any order."""
    assert sum(Fraction(row.change_us) for row in found.rows) == Fraction(found.change_us)
    assert sum(row.change_us for row in reversed(found.rows)) == found.change_us
    assert sum(Fraction(row.a.time_us) for row in found.rows) == Fraction(found.a_us)
    assert sum(Fraction(row.b.time_us) for row in found.rows) == Fraction(found.b_us)


keys = st.builds(
    EventKey, st.sampled_from(["", "experts", "norm"]), st.sampled_from("fgh"), st.sampled_from(["", "8", "9"])
)
events = st.lists(st.tuples(keys, st.floats(0, 1e6), st.floats(0, 1e4), st.integers(NONE, 3)), max_size=40)


@given(events, events, st.booleans())
def test_changes_of_rows_add_up_to_the_change_of_the_total_exactly(
    a: list[Event], b: list[Event], has_steps: bool
) -> None:
    assert_closes(compare(work(a, 4 * has_steps), work(b, 4 * has_steps)))


@given(events, st.booleans())
def test_a_trace_against_itself_is_exactly_zero(a: list[Event], has_steps: bool) -> None:
    found = compare(work(a, 4 * has_steps), work(a, 4 * has_steps))
    assert found.change_us == 0
    assert {row.verdict for row in found.rows} == {ChangeKind.SAME}
    assert all(row.a == row.b for row in found.rows)


def test_rows_are_faster_slower_new_and_gone() -> None:
    new, gone = EventKey("clip", "aten::norm", "5"), EventKey("loss forward", "aten::exp", "")
    a = work([(EXPERTS, 0, 30, NONE), (NORM, 30, 10, NONE), (gone, 40, 5, NONE)])
    b = work([(EXPERTS, 100, 20, NONE), (NORM, 120, 14, NONE), (new, 134, 7, NONE)])
    found = compare(a, b)
    verdicts = {row.key: (row.verdict, row.change_us) for row in found.rows}
    assert verdicts[EXPERTS] == (ChangeKind.FASTER, -10)
    assert verdicts[NORM] == (ChangeKind.SLOWER, 4)
    assert verdicts[new] == (ChangeKind.NEW, 7)
    assert verdicts[gone] == (ChangeKind.GONE, -5)
    assert [row.key for row in found.rows[:4]] == [EXPERTS, new, gone, NORM]


def test_idle_time_and_overlap_have_rows_of_their_own() -> None:
    a = work([(EXPERTS, 0, 30, NONE), (NORM, 10, 30, NONE), (NORM, 50, 10, NONE)])
    b = work([(EXPERTS, 0, 30, NONE), (NORM, 30, 30, NONE), (NORM, 65, 10, NONE)])
    found = compare(a, b)
    assert (found.a_us, found.b_us) == (60, 75)  # from the first start to the last end
    assert (row_of(found, OVERLAP).a.time_us, row_of(found, OVERLAP).b.time_us) == (-20, 0)
    assert (row_of(found, IDLE).a.time_us, row_of(found, IDLE).b.time_us) == (10, 5)
    assert row_of(found, NORM).verdict is ChangeKind.SAME


def test_a_row_is_the_median_over_steps_and_the_rest_is_named() -> None:
    slow_once = [(EXPERTS, 100.0 * step, 90.0 if step == 1 else 10.0, step) for step in range(5)]
    steady = [(EXPERTS, 100.0 * step, 12.0, step) for step in range(3)]
    found = compare(work(slow_once, 5), work(steady, 3))
    row = row_of(found, EXPERTS)
    assert (row.a.time_us, row.a.most_us, row.b.time_us, row.change_us) == (10, 90, 12, 2)
    assert not row.is_clear
    assert (found.a_steps, found.b_steps) == (5, 3)
    assert row_of(found, UNEVEN).key == UNEVEN
    assert_closes(found)


def test_time_between_steps_belongs_to_the_later_step() -> None:
    found = compare(
        work([(NORM, 0, 10, 0), (NORM, 10, 10, 1), (NORM, 20, 10, 2)], 3),
        work([(NORM, 0, 10, 0), (NORM, 50, 10, 1), (NORM, 100, 10, 2)], 3),
    )
    assert (found.a_us, found.b_us) == (10, 50)  # the median step, gaps before it included
    assert not row_of(found, NORM).is_clear
    assert row_of(found, IDLE).change_us == 40


def test_events_of_no_step_are_left_out_and_counted() -> None:
    found = compare(work([(NORM, 0, 7, NONE), (NORM, 10, 10, 0)], 1), work([(NORM, 10, 10, 0)], 1))
    assert (found.a_outside_us, found.b_outside_us, found.change_us) == (7, 0, 0)


def test_whole_traces_are_compared_if_one_has_no_steps() -> None:
    found = compare(work([(NORM, 0, 10, 0), (NORM, 10, 10, 1)], 2), work([(NORM, 0, 10, NONE)]))
    assert (found.a_steps, found.b_steps, found.change_us) == (0, 0, -10)


def test_shapes_of_one_operator_that_have_no_partner_are_one_row() -> None:
    a_shape, b_shape = EXPERTS._replace(shape="90x64"), EXPERTS._replace(shape="99x64")
    found = compare(work([(EXPERTS, 0, 5, 0), (a_shape, 5, 10, 0)]), work([(EXPERTS, 0, 5, 0), (b_shape, 5, 12, 0)]))
    assert row_of(found, EXPERTS).verdict is ChangeKind.SAME
    assert row_of(found, EXPERTS._replace(shape="90x64 -> 99x64")).change_us == 2


def test_shapes_that_come_and_go_between_steps_are_one_row() -> None:
    def steps(time: float) -> NamedEvents:
        return work([(EXPERTS._replace(shape=f"{90 + step}x64"), 50.0 * step, time, step) for step in range(4)], 4)

    found = compare(steps(10), steps(11))
    row = row_of(found, EXPERTS._replace(shape="4 shapes"))
    assert (row.a.time_us, row.b.time_us, row.is_clear) == (10, 11, True)


def test_a_shape_without_partner_is_new_if_the_other_trace_has_none_to_spare() -> None:
    more = EXPERTS._replace(shape="7x64")
    found = compare(work([(EXPERTS, 0, 5, NONE)]), work([(EXPERTS, 0, 5, NONE), (more, 5, 3, NONE)]))
    assert row_of(found, more).verdict is ChangeKind.NEW


def test_spans_are_not_compared_if_the_traces_share_none() -> None:
    bare = NORM._replace(span="")
    found = compare(work([(NORM, 0, 10, NONE)]), work([(bare, 0, 12, NONE)]))
    assert not found.by_span and row_of(found, bare).change_us == 2


def test_shapes_are_written_like_sizes() -> None:
    assert shape_text(((888, 2880), (), ((4, 8), (3,)), (2,))) == "888x2880 [4x8 3] 2"


Jobs = tuple[dict[int, Trace], dict[int, Trace]]


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """Two runs that differ in rank 1's attention only."""
    job = Job(ranks=2, steps=3, layers=2, is_even=True)
    return make(job).ranks(), make(replace(job, slow_rank=1, slow=1.5)).ranks()


def test_slower_attention_is_found_in_a_training_step(jobs: Jobs) -> None:
    found = compare(*(named_events(ranks[1]) for ranks in jobs))
    assert_closes(found)
    assert (found.a_steps, found.b_steps) == (3, 3)
    row = max(found.rows, key=lambda row: row.change_us)
    assert row.key.operator == "aten::_scaled_dot_product_flash_attention"
    assert row.key.span == "attention backward", "which takes longer than forward"
    assert row.b.time_us / row.a.time_us == pytest.approx(1.5, rel=1e-3)
    assert row.is_clear


def test_a_rank_that_waits_for_a_slow_rank_spends_more_in_collectives(jobs: Jobs) -> None:
    found = compare(*(named_events(ranks[0]) for ranks in jobs))
    assert_closes(found)
    worst = max(found.rows, key=lambda row: row.change_us)
    assert worst.key.operator == "record_param_comms"
