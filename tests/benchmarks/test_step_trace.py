"""What the documents show of a recorded step."""

import tarfile
from pathlib import Path

import pytest

from benchmarks.step_trace import distilled

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
