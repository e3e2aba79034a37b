"""Numbers and small pictures as people read them."""

import math

import pytest

from penstock.cli.figures import (
    BLOCKS,
    Trail,
    bytes_text,
    count_text,
    duration_text,
    load_bars,
    shortened,
    spark_line,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (512, "512"),
        (1000, "1.00 k"),
        (409_600, "409.6 k"),
        (999_999, "1.00 M"),
        (2_710_000, "2.71 M"),
        (15.7e9, "15.7 B"),
        (235.7e9, "235.7 B"),
        (1.036e12, "1.04 T"),
        (5e16, "50000.0 T"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("one two three", 11, "one two ..."),
        ("one two three", 13, "one two three"),
        ("(4096, 7168) (7168, 2048)", 20, "(4096, 7168) ..."),
        ("a_kernel_of_tiles_128x256", 24, "a_kernel_of_tiles_128..."),
        ("a_kernel_of_tiles_128x2567", 25, "a_kernel_of_tiles_128x..."),
    ],
)
def test_a_long_text_ends_between_words_and_never_in_a_number(text: str, most: int, shown: str) -> None:
    assert shortened(text, most) == shown
    assert len(shown) <= most


def test_bytes() -> None:
    assert [bytes_text(number) for number in (7, 9_996, 1.24e9, 141e9)] == ["7 B", "10.0 kB", "1.24 GB", "141.0 GB"]


def test_durations() -> None:
    seconds = (0, 41.6, 3727, 300_000)
    assert [duration_text(second) for second in seconds] == ["0:00", "0:42", "1:02:07", "3 d 11:20"]


def test_a_spark_line_goes_from_its_lowest_to_its_highest() -> None:
    assert spark_line([1, 2, 3], 10) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert spark_line([2, 2], 10) == BLOCKS[0] * 2
    assert spark_line([], 10) == ""


def test_a_spark_line_fits() -> None:
    for count in (1, 9, 10, 11, 25, 1000):
        line = spark_line([float(index) for index in range(count)], 10)
        assert len(line) == min(count, 10)
        assert list(line) == sorted(line)


def test_a_bar_is_half_high_at_the_mean_and_full_at_twice_it() -> None:
    assert load_bars([2, 2, 2, 2], 4) == BLOCKS[3] * 4
    assert load_bars([4, 0, 2, 2], 4) == BLOCKS[7] + BLOCKS[0] + BLOCKS[3] * 2
    assert load_bars([80, 0, 0, 0], 4) == BLOCKS[7] + BLOCKS[0] * 3
    assert load_bars([0, 0], 2) == BLOCKS[0] * 2


def test_few_experts_get_wide_bars() -> None:
    assert load_bars([1, 1], 6) == f"{BLOCKS[3] * 2} {BLOCKS[3] * 2}"


def test_many_experts_share_bars_and_the_fullest_is_seen() -> None:
    slots = [1] * 256
    slots[100] = 1000
    bars = load_bars(slots, 40)
    assert len(bars) <= 40
    assert bars.count(BLOCKS[7]) == 1


def test_a_trail_keeps_its_shape_in_bounded_memory() -> None:
    trail = Trail(capacity=8)
    for step in range(1000):
        trail.add(float(step))
    values = trail.values
    assert len(values) <= 9
    assert values == sorted(values)
    assert values[0] < 200
    assert values[-1] > 900


def test_a_short_trail_is_exact() -> None:
    trail = Trail(capacity=8)
    for step in range(5):
        trail.add(float(step))
    assert trail.values == [0, 1, 2, 3, 4]
    assert math.isclose(sum(trail.values), 10)
