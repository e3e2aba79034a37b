"""The error of projections: what is comparable, and ranges that cover four of five runs that they have not seen."""

import json
from pathlib import Path

import pytest

from penstock.config.load import load_run
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.projection import COVERED, RunKind, known_errors, memory_margin, published_range, speed_range

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PUBLISHED = known_errors().published


def test_the_package_has_the_runs_of_the_records() -> None:
    rows = json.loads((RESULTS / "plan-published.json").read_text())["numbers"]["rows"]
    assert [speed for _, speed in PUBLISHED] == [round(1 / row["ratio"], 4) for row in rows]
    errors = json.loads((RESULTS / "projection-h200.json").read_text())["numbers"]["errors"]["all"]
    assert len(known_errors().speeds) == errors["runs"]
    assert memory_margin(parse_cluster("1xH200")) == pytest.approx(errors["memory_largest"], abs=1e-4)
    assert memory_margin(parse_cluster("16xH200")) == 0.05


def test_ranges_cover_four_of_five_runs_that_are_left_out_in_turn() -> None:
    inside = 0
    for at, (kind, speed) in enumerate(PUBLISHED):
        found = published_range(kind, PUBLISHED[:at] + PUBLISHED[at + 1 :])
        inside += found.low <= speed <= found.high
    assert inside / len(PUBLISHED) >= COVERED


def test_a_range_is_that_of_the_closest_kind_of_which_there_are_enough() -> None:
    few = RunKind(kernels="gfx950", is_8_bit=True, spans_nodes=True, is_dense=False)
    like, unlike = (few, 0.9), (RunKind(kernels="sm_90", is_8_bit=True, spans_nodes=True, is_dense=False), 0.5)
    assert published_range(few, [like] * 9 + [unlike] * 40).low == 0.9
    alone = published_range(few, [like] * 8 + [unlike] * 40)
    assert alone.low == 0.5 and not alone.is_comparable


@pytest.mark.parametrize(
    ("model", "on", "told"),
    [
        ("deepseek-v3", "256xH100", "as 80% of "),
        ("deepseek-v2-lite", "1xH200", "runs that were measured on H200"),
        ("llama3.1-8b", "8xMI300X", "nothing comparable was measured; "),
    ],
)
def test_a_range_names_its_runs(model: str, on: str, told: str) -> None:
    found = speed_range(load_run(model), parse_cluster(on))
    assert found is not None and found.low <= 1 <= found.high
    assert told in found.text(1000.0, "tokens/s/GPU")
