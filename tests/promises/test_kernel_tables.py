"""Tables of measurements say what was measured, and judge it by the numbers alone."""

from pathlib import Path
from typing import Any

import pytest

from tools import documents, kernel_tables


def ratio(mean: float, least: float) -> dict[str, float]:
    return {"geometric mean": mean, "least": least}


def block(ms: float, kept: float, ours_ms: float, ours_kept: float) -> dict[str, float]:
    return {
        "forward_ms": ms / 4,
        "backward_ms": ms * 3 / 4,
        "ms": ms,
        "kept_mib": kept,
        "peak_mib": 2 * kept,
        "ours_times_as_fast": ms / ours_ms,
        "ours_keeps": ours_kept / kept,
    }


def blocks(skew: float) -> dict[str, Any]:
    ways = {"reference": (50.0, 1400.0), "torch, a": (9.0, 1000.0), "torch, b": (8.0, 1200.0), "ours": (5.0, 300.0)}
    return {"shape": {"skew": skew}, "blocks": {name: block(*way, 5.0, 300.0) for name, way in ways.items()}}


def loss(ms: float, gib: float) -> dict[str, float]:
    return {"ms": ms, "time_of_compiled": ms / 10, "peak_gib": gib, "loss": 12.0}


def moved(operator: str, share: float, eager: float | None) -> dict[str, Any]:
    return {
        "model": "Small",
        "tokens": 8192,
        "operator": operator,
        "pass": "forward",
        "bytes": 2_500_000,
        "us": 10.04,
        "share_of_copy": share,
        "share_of_neg": 0.9,
        "eager_us": eager,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    """A small result of the shape that benchmarks.kernels.every writes."""
    even = {"case": "Small, down, balanced", "product": "forward", "balanced": True}
    uneven = {"case": "Small, down, skewed", "product": "forward", "balanced": False}
    return {
        "commit": "0123abc",
        "environment": {"device": "H200", "torch": "2.11", "triton": "3.6"},
        "numbers": {
            "grouped_gemm": {
                "tflops": [
                    even | {"ours": 660.0, "grouped_mm": 600.0, "bmm": 650.0, "mm": 655.0},
                    uneven | {"ours": 630.0, "grouped_mm": 500.0, "mm": 640.0},
                ],
                "summary": {
                    "balanced, over bmm": ratio(1.01, 0.98),
                    "balanced, over grouped_mm": ratio(1.04, 1.0),
                    "skewed, over grouped_mm": ratio(1.2, 0.92),
                    "forward, gather fused over plain": ratio(0.98, 0.9),
                    "weight gradient, gather fused over plain": ratio(0.9, 0.8),
                    "forward, gather fused over apart": ratio(1.0, 0.95),
                    "weight gradient, gather fused over apart": ratio(1.0, 0.95),
                    "weight gradient, sum fused over apart": ratio(1.3, 1.1),
                    "by product": {"forward": {"bmm": ratio(0.99, 0.91)}},
                },
                "extras": [{"milliseconds": {"tile table": 0.004}}, {"milliseconds": {"tile table": 0.0051}}],
            },
            "pointwise": {"copy_bytes_per_s": 4.1e12, "rows": [moved("route", 0.2, None), moved("norm", 0.8, 1500.0)]},
            "linear_cross_entropy": {
                "candidates": {
                    kernel_tables.COMPILED: loss(10.0, 1.9),
                    "ours": loss(10.4, 2.1),
                    "Liger, chunks of 2": loss(9.9, 0.8),
                    "Liger, chunks of 2, float32 sum": loss(11.0, 1.2),
                }
            },
            "expert_block": blocks(0.0),
            "expert_block_skewed": blocks(0.6),
        },
    }


def row_of(table: str, start: str) -> list[str]:
    """Cells of the one row whose first cells are `start`."""
    found = [line for line in table.splitlines() if line.startswith(f"| {start} |")]
    assert len(found) == 1, f"{len(found)} rows start with {start!r}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_the_products_stand_side_by_side(result: dict[str, Any]) -> None:
    row = row_of(kernel_tables.grouped_gemm_products(result), "Small, down | forward")
    assert row[2:] == ["660", "600", "650", "655", "1.02", "1.10", "630", "500", "640", "1.26"]


@pytest.mark.parametrize(
    ("line", "least", "verdict"),
    [
        ("balanced, over cuBLAS bmm", "0.980", "met"),
        ("balanced, over `grouped_mm`", "1.000", "**missed**"),
        ("skewed, over `grouped_mm`", "0.920", "met"),
        ("any single case, over `grouped_mm`", "0.920", "**missed**"),
        ("forward with row gather, over the product without", "0.900", "met in the mean, **missed** by the least case"),
        ("weight gradient with row gather, over the product without", "0.800", "**missed**"),
    ],
)
def test_a_bar_of_the_products_is_judged_by_its_ratio(
    result: dict[str, Any], line: str, least: str, verdict: str
) -> None:
    row = row_of(kernel_tables.grouped_gemm_bars(result), line)
    assert (row[2], row[4]) == (least, verdict)


def test_what_has_no_bar_gets_no_verdict(result: dict[str, Any]) -> None:
    text = kernel_tables.grouped_gemm_bars(result)
    assert row_of(text, "forward alone, balanced, over cuBLAS bmm")[1:] == ["0.990", "0.910", "", ""]
    assert text.endswith("making it takes 4.0 to 5.1 us.")


def test_the_block_is_compared_with_the_best_of_torch(result: dict[str, Any]) -> None:
    text = kernel_tables.expert_block(result)
    assert row_of(text, "balanced | ours")[2:] == ["1.25", "3.75", "5.00", "300", "600", "1.00", "1.00"]
    assert (
        "* Skewed: 1.60 times as fast as the fastest torch way (torch, b), bar >= 1.5: met; 0.30 of the bytes" in text
    )
    result["numbers"]["expert_block"]["blocks"]["torch, a"]["ms"] = 7.0
    assert "* Balanced: 1.40 times as fast as the fastest torch way (torch, a), bar >= 1.5: **missed**" in (
        kernel_tables.expert_block(result)
    )


def test_the_loss_is_compared_with_the_compiled_one_and_with_liger(result: dict[str, Any]) -> None:
    text = kernel_tables.linear_cross_entropy(result)
    assert row_of(text, "ours") == ["ours", "10.40", "1.040", "2.10", "12.000"]
    assert "1.040, bar <= 1.05: met" in text
    assert "2.10 GiB, bar <= 2.0 GiB: **missed**" in text
    assert "of any kind (chunks of 2): 9.90 ms and 0.80 GiB; ours takes 1.051 of its time" in text
    assert "as ours does (chunks of 2, float32 sum): 11.00 ms" in text


def test_operators_below_the_bandwidth_are_named(result: dict[str, Any]) -> None:
    text = kernel_tables.pointwise(result)
    assert row_of(text, "8,192 | Small | route")[3:] == ["forward", "2.5", "10.0", "0.20", "0.90", ""]
    assert "Met by 1 of 2 rows; **missed** by:" in text
    assert "* route forward (Small, 8,192: 0.200)" in text
    assert "* norm" not in text


def test_a_table_between_markers_is_renewed(tmp_path: Path) -> None:
    folder = tmp_path / documents.RESULTS
    folder.mkdir(parents=True)
    (folder / "speed.json").write_text('{"commit": "0123abc", "environment": {"device": "H200", "torch": "2"}}')
    marked = "Before\n\n<!--table speed.json origin-->\n{}<!--/table-->\n\nAfter\n"
    fresh = marked.format("Measured on one H200 (torch 2), commit `0123abc`.\n")
    assert documents.with_measurements(marked.format(""), tmp_path) == fresh
    assert documents.with_measurements(fresh, tmp_path) == fresh


@pytest.mark.parametrize("marker", ["speed.json nothing", "speed.json pointwise", "absent.json origin"])
def test_a_table_that_cannot_be_made_is_refused(tmp_path: Path, marker: str) -> None:
    folder = tmp_path / documents.RESULTS
    folder.mkdir(parents=True)
    (folder / "speed.json").write_text('{"numbers": {}}')
    with pytest.raises(LookupError):
        documents.with_measurements(f"<!--table {marker}-->\n<!--/table-->\n", tmp_path)
