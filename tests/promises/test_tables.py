"""Tables of measurements, of families and of ladders: they judge by the numbers alone, and say what is missing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.config.presets.registry import PRESETS
from penstock.models.huggingface.families import FAMILIES
from tests.tune.test_ladder import figures
from tools import documents, tables
from tools.models_page import models_page


def ratio(mean: float, least: float) -> dict[str, float]:
    return {"geometric mean": mean, "least": least}


def block(ms: float, kept: float, ours_ms: float, ours_kept: float) -> dict[str, float]:
    times = {"forward_ms": ms / 4, "backward_ms": ms * 3 / 4, "ms": ms, "ours_times_as_fast": ms / ours_ms}
    return times | {"kept_mib": kept, "peak_mib": 2 * kept, "ours_keeps": ours_kept / kept}


def blocks(skew: float) -> dict[str, Any]:
    ways = {"reference": (50.0, 1400.0), "torch, a": (9.0, 1000.0), "torch, b": (8.0, 1200.0), "ours": (5.0, 300.0)}
    return {"shape": {"skew": skew}, "blocks": {name: block(*way, 5.0, 300.0) for name, way in ways.items()}}


def loss(ms: float, gib: float) -> dict[str, float]:
    return {"ms": ms, "time_of_compiled": ms / 10, "peak_gib": gib, "loss": 12.0}  # the compiled one takes 10 ms


def moved(operator: str, share: float, eager: float | None) -> dict[str, Any]:
    row = {"model": "Small", "tokens": 8192, "pass": "forward", "bytes": 2_500_000, "us": 10.04, "share_of_neg": 0.9}
    return row | {"operator": operator, "share_of_copy": share, "eager_us": eager}


@pytest.fixture
def result() -> dict[str, Any]:
    """A small result of the shape that benchmarks.kernels.every writes."""
    even = {"case": "Small, down, balanced", "product": "forward", "balanced": True}
    even |= {"ours": 660.0, "grouped_mm": 600.0, "bmm": 650.0, "mm": 655.0}
    uneven = {"case": "Small, down, skewed", "product": "forward", "balanced": False}
    uneven |= {"ours": 630.0, "grouped_mm": 500.0, "mm": 640.0}
    fused = {"forward, gather": (0.98, 0.9), "weight gradient, gather": (0.9, 0.8)}
    return {
        "commit": "0123abc",
        "environment": {"device": "H200", "torch": "2.11", "triton": "3.6"},
        "numbers": {
            "grouped_gemm": {
                "tflops": [even, uneven],
                "summary": {
                    "balanced, over bmm": ratio(1.01, 0.98),
                    "balanced, over grouped_mm": ratio(1.04, 1.0),
                    "skewed, over grouped_mm": ratio(1.2, 0.92),
                    **{f"{name} fused over plain": ratio(*two) for name, two in fused.items()},
                    **{f"{name} fused over apart": ratio(1.0, 0.95) for name in fused},
                    "weight gradient, sum fused over apart": ratio(1.3, 1.1),
                    "by product": {"forward": {"bmm": ratio(0.99, 0.91)}},
                },
                "extras": [{"milliseconds": {"tile table": 0.004}}, {"milliseconds": {"tile table": 0.0051}}],
            },
            "pointwise": {"copy_bytes_per_s": 4.1e12, "rows": [moved("route", 0.2, None), moved("norm", 0.8, 1500.0)]},
            "linear_cross_entropy": {
                "candidates": {
                    "torch.compile, full logits": loss(10.0, 1.9),
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
    row = row_of(documents.TABLES["grouped_gemm_products"](result), "Small, down | forward")
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
    row = row_of(documents.TABLES["grouped_gemm_bars"](result), line)
    assert (row[2], row[4]) == (least, verdict)


def test_what_has_no_bar_gets_no_verdict(result: dict[str, Any]) -> None:
    text = documents.TABLES["grouped_gemm_bars"](result)
    assert row_of(text, "forward alone, balanced, over cuBLAS bmm")[1:] == ["0.990", "0.910", "", ""]
    assert text.endswith("making it takes 4.0 to 5.1 us.")


def test_the_block_is_compared_with_the_best_of_torch(result: dict[str, Any]) -> None:
    text, fastest = documents.TABLES["expert_block"](result), "times as fast as the fastest torch way (torch,"
    assert row_of(text, "balanced | ours")[2:] == ["1.25", "3.75", "5.00", "300", "600", "1.00", "1.00"]
    assert f"* Skewed: 1.60 {fastest} b), bar >= 1.5: met; 0.30 of the bytes" in text
    result["numbers"]["expert_block"]["blocks"]["torch, a"]["ms"] = 7.0
    assert f"* Balanced: 1.40 {fastest} a), bar >= 1.5: **missed**" in documents.TABLES["expert_block"](result)


def test_the_loss_is_compared_with_the_compiled_one_and_with_liger(result: dict[str, Any]) -> None:
    text = documents.TABLES["linear_cross_entropy"](result)
    assert row_of(text, "ours") == ["ours", "10.40", "1.040", "2.10", "12.000"]
    assert "1.040, bar <= 1.05: met" in text
    assert "2.10 GiB, bar <= 2.0 GiB: **missed**" in text
    assert "of any kind (chunks of 2): 9.90 ms and 0.80 GiB; ours takes 1.051 of its time" in text
    assert "as ours does (chunks of 2, float32 sum): 11.00 ms" in text


def test_operators_below_the_bandwidth_are_named(result: dict[str, Any]) -> None:
    text = documents.TABLES["pointwise"](result)
    assert row_of(text, "8,192 | Small | route")[3:] == ["forward", "2.5", "10.0", "0.20", "0.90", ""]
    assert "Met by 1 of 2 rows; **missed** by:" in text
    assert "* route forward (Small, 8,192: 0.200)" in text
    assert "* norm" not in text


def write_result(root: Path, name: str, text: str) -> None:
    file = root / documents.RESULTS / name
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_a_table_between_markers_is_renewed(tmp_path: Path) -> None:
    write_result(tmp_path, "speed.json", '{"commit": "0123abc", "environment": {"device": "H200", "torch": "2"}}')
    marked = "Before\n\n<!--table speed.json origin-->\n{}<!--/table-->\n\nAfter\n"
    fresh = marked.format("Measured on one H200 (torch 2), commit `0123abc`.\n")
    assert documents.with_measurements(marked.format(""), tmp_path) == fresh
    assert documents.with_measurements(fresh, tmp_path) == fresh


@pytest.mark.parametrize("marker", ["speed.json nothing", "speed.json pointwise", "absent.json origin"])
def test_a_table_that_cannot_be_made_is_refused(tmp_path: Path, marker: str) -> None:
    write_result(tmp_path, "speed.json", '{"numbers": {}}')
    with pytest.raises(LookupError):
        documents.with_measurements(f"<!--table {marker}-->\n<!--/table-->\n", tmp_path)


def test_every_table_stands_in_a_document() -> None:
    texts = [path.read_text(encoding="utf-8") for path in documents.markdown_files()]
    assert {match["name"] for text in texts for match in documents.TABLE.finditer(text)} == {*documents.TABLES}


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("{a.0:.1f}", "2.5"),
        ("{a.0:1e3*,.0f} ms", "2,500 ms"),
        ("{a.0 / a.1:.2f}x", "0.50x"),
        ("{b, c.0.2.3}", "d / e"),
        ("[{none:.1%}]", "[]"),
        ("`{a}`", "`2.5 5`"),
    ],
)
def test_a_field_is_a_way_a_quotient_and_a_format(field: str, text: str) -> None:
    assert tables.filled(field, {"a": [2.5, 5], "b, c": {"0.2": {"3": "d | e"}}, "none": None}) == text


@pytest.mark.parametrize("field", ["{a.2}", "{a.b}", "{c}", "{a.0.d}", "{b:.1f}"])
def test_a_field_that_is_not_there_is_refused(field: str) -> None:
    with pytest.raises(LookupError):
        tables.filled(field, {"a": [2.5, 5], "b": "d"})


ENVIRONMENT = {"device": "H200", "torch": "2.11", "ranks": 4, "steps": 30, "warm_up_steps": 10}  # of a ladder
GAIN = {"before": 1.5, "first": 3.0, "by_optimization": 2.0, "by_size": 1.5, "loss_gap": 0.001}


def ladder_result(**numbers: Any) -> dict[str, Any]:
    common = {"target": "small", "overrides": ["seed=1"], "routing": "natural routing"}
    return {"commit": "0123abc", "environment": ENVIRONMENT, "numbers": common | numbers}


def ladder_step(name: str, **changes: Any) -> dict[str, Any]:
    measured = asdict(figures(16_894.0)) | {"jitter": 1.2, "flops_per_second_per_device": 2.5e14}
    fields = {"name": name, "what": f"the {name}", "kind": "optimization", "state": "ran", "reason": ""}
    return fields | {"changed": ["seed=2"], "figures": measured, "gain": GAIN} | changes


def assert_is_table(text: str) -> None:
    """Every row has as many cells as the head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {rows[0].count("|")}


def test_a_ladder_tells_every_step_and_why_one_did_not_run() -> None:
    failed = ladder_step("graphs", state="failed", reason="a | b", figures=None, gain=None, changed=[])
    made = ladder_result(ladder_steps=[ladder_step("baseline"), failed, ladder_step("larger", kind="size")])
    text = documents.TABLES["ladder"](made)
    assert_is_table(text)
    assert "Measured on 4 x H200 (torch 2.11), commit `0123abc`; 30 training steps each, medians after 10." in text
    assert "`small seed=1`; natural routing" in text
    assert row_of(text, "graphs")[1] == "failed: a / b"
    figures_of_larger = "16,894 | 100.0 ms, 1.20 | 25.0%, 250 | 3.0 GiB | 6.0000 -> 4.0000, 1.0e-03"
    assert row_of(text, "larger (size)")[1:] == [*figures_of_larger.split(" | "), "1.50", "2.00", "1.50", "3.00"]
    changes = documents.TABLES["ladder-changes"](made)
    assert_is_table(changes)
    assert row_of(changes, "baseline")[1:] == ["the baseline", "`seed=2`"]
    assert row_of(changes, "graphs")[2] == "nothing: failed"


def test_scaling_is_told_over_one_rank_and_over_two() -> None:
    failed = {"expert_ranks": 4, "reason": "no memory", "figures": None, "over_1": None, "over_2": None}
    measured = {"reason": "", "figures": asdict(figures(9_000.0)), "over_1": 0.9}
    cases = [failed | measured | {"method": "symmetric"}, failed | {"method": "all-to-all"}]
    text = documents.TABLES["scaling"](ladder_result(rows_per_device=16, micro_batch=4, cases=cases))
    assert_is_table(text)
    assert row_of(text, "4 | symmetric")[2:] == ["9,000", "90.0%", "", "3.0 GiB"]
    assert row_of(text, "4 | all-to-all")[2] == "no memory"


def test_jitter_is_told_as_ratios_to_the_median() -> None:
    cases = [
        {"garbage": "between steps", "graphs": "none", "reason": "", "figures": asdict(figures(1.0))},
        {"garbage": "between steps", "graphs": "passes", "reason": "no GPU", "figures": None},
    ]
    text = documents.TABLES["jitter"](ladder_result(cases=cases))
    assert_is_table(text)
    assert row_of(text, "between steps | none")[2:] == ["100.0 ms", "120.0 ms", "125.0 ms", "1.200", "1.250"]
    assert row_of(text, "between steps | passes")[2] == "no GPU"


def test_a_table_that_may_be_missing_says_so_until_it_is_measured(tmp_path: Path) -> None:
    marked = "<!--table? later.json jitter-->\n{}\n<!--/table-->\n"
    waiting = marked.format("Not measured yet.")
    assert documents.with_measurements(marked.format("old"), tmp_path) == waiting
    write_result(tmp_path, "later.json", '{"numbers": {}}')
    with pytest.raises(LookupError):
        documents.with_measurements(waiting, tmp_path)


def _figures(gradient: float) -> dict[str, Any]:
    return {"logits": 1e-7, "loss": 0.0, "gradient": gradient, "weight": "blocks.12.attention.query.weight"}


def _result(gradient: float) -> dict[str, Any]:
    models = [
        {"model": "mixtral", "family": "mixtral", "plain": _figures(2e-6), "packed": _figures(gradient)},
        {"model": "mixtral, window", "family": "mixtral", "plain": _figures(1e-6), "packed": _figures(1e-6)},
    ]
    tolerances = {"logits": 2e-5, "loss": 1e-5, "gradient": 1e-4}
    return {"environment": {"transformers": "5.23.0"}, "numbers": {"tolerances": tolerances, "models": models}}


def test_a_model_passes_if_both_kinds_of_rows_do() -> None:
    assert documents.TABLES["parity-verdict"](_result(3e-6)).startswith(
        "2 of 2 models of 1 families pass, beside transformers 5.23.0."
    )
    failed = documents.TABLES["parity-verdict"](_result(3e-4))
    assert failed.startswith("1 of 2 models")
    assert failed.endswith("The largest differences: logits 1.0e-07, loss 0.0e+00, gradient 3.0e-04.")


def test_weights_are_named_within_their_layer() -> None:
    weight = "`attention.query.weight`"
    assert row_of(documents.TABLES["parity"](_result(3e-6)), "mixtral")[1:] == [
        "1.0e-07",
        "2.0e-06",
        weight,
        "1.0e-07",
        "3.0e-06",
        weight,
    ]


def test_the_page_names_every_preset_and_family() -> None:
    page = models_page()
    assert all(f"| `{name}` |" in page for name in PRESETS)
    assert all(f"| {name} |" in page for name in FAMILIES)
