"""Clock and power of a step are those of its time; what the documents show of a recorded step adds up."""

import tarfile
from pathlib import Path

import pytest

from benchmarks.power import Answer, of_steps
from benchmarks.step_trace import distilled


def answers(clocks: list[float], powers: list[float]) -> list[Answer]:
    pairs = enumerate(zip(clocks, powers, strict=True))
    return [Answer(number / 10, clock, 1980, power, 700) for number, (clock, power) in pairs]  # ten a second


def test_a_step_has_the_median_of_what_was_told_during_it() -> None:
    idle, first, second, after = 5, 10, 20, 6
    clocks = [345.0] * idle + [1980.0] * first + [1500.0] * second + [1200.0] * after
    powers = [90.0] * idle + [600.0] * first + [690.0] * second + [120.0] * after
    assert of_steps(answers(clocks, powers), (1.0, 1.95)) == [(1980, 600), (1500, 690)]


def test_a_step_that_is_over_between_two_answers_takes_the_nearest() -> None:
    heard = answers([1000.0, 1100.0, 1200.0, 1300.0], [700.0] * 4)
    assert of_steps(heard, (0.02, 0.03, 0.01)) == [(1200, 700), (1300, 700), (1300, 700)]


RECORDED = Path(__file__).parent.parent / "tune" / "data" / "recorded" / "symmetric.tar.xz"


def test_phases_and_idle_time_make_up_the_step(tmp_path: Path) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    numbers = distilled(next(path for path in tmp_path.iterdir() if path.is_dir()))
    ranks, phases = numbers["ranks"], numbers["phases"]
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3]
    idle, total = (sum(one[name] for one in ranks) / len(ranks) for name in ("idle_us", "total_us"))
    assert sum(row["exposed_us"] for row in phases) + idle == pytest.approx(total, rel=0.01)
    assert phases[-1]["phase"].endswith("smaller")
    shares = [row["share"] for row in phases[:-1]]
    assert shares == sorted(shares, reverse=True)
    assert all(one["pure_us"] > 0 for one in ranks)
