"""Numbers as text."""

from collections.abc import Callable

import pytest

from penstock.base.numbers import bytes_text, count_text, duration_text, flops_text, share_text, shortened, time_text


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


@pytest.mark.parametrize(
    ("text_of", "numbers", "texts"),
    [
        (bytes_text, (7, 9_996, 1.24e9, 141e9), "7 B, 10.0 kB, 1.24 GB, 141.0 GB"),
        (flops_text, (7, 16.41e9, 3e21), "7 FLOP, 16.4 GFLOP, 3.00 ZFLOP"),
        (duration_text, (0, 41.6, 3727, 300_000), "0:00, 0:42, 1:02:07, 3 d 11:20"),
        (time_text, (0, 11.24, 0.0382, 2e-5, 326.2), "0 s, 11.2 s, 38.2 ms, 20.0 \u00b5s, 326 s"),
        (share_text, (0.0, 0.0001, 0.2831), "0.0%, <0.1%, 28.3%"),
        (count_text, (0, 512, 1000, 409_600, 999_999, 2_710_000), "0, 512, 1.00 k, 409.6 k, 1.00 M, 2.71 M"),
        (count_text, (15.7e9, 235.7e9, 1.036e12, 5e16), "15.7 B, 235.7 B, 1.04 T, 50000.0 T"),
    ],
)
def test_a_number_has_its_unit(text_of: Callable[[float], str], numbers: tuple[float, ...], texts: str) -> None:
    assert ", ".join(map(text_of, numbers)) == texts
