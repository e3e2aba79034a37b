"""The benchmark of whole networks in 8 bits runs without a GPU, and its tables say what it measured."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.float8_ffn import TINY, TOP_K, draw_rows, main, placed
from benchmarks.kernels.float8_networks import PLAIN
from tools.float8_tables import network_errors, networks, products, products_of_all

RECIPES = ["blockwise", "blockwise-square"]
FROM_8_BITS = [f"{recipe}, rows in 8 bits" for recipe in RECIPES]


def run(only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The result of the benchmark on its small networks."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["float8_ffn", "--tiny", "--only", only, "--output", str(file)])
    main()
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("only", ["tiny, gathered, skewed", "tiny, in place, skewed"])
def test_small_experts_are_checked_and_timed_on_a_cpu(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = run(only, tmp_path, monkeypatch)["numbers"]
    (row,), (copies,) = numbers["rows"], numbers["copies"]
    assert row["network"] == only and copies["ms"] > 0
    assert set(row["speed"]) == {PLAIN, *RECIPES, *FROM_8_BITS}
    for recipe, came in zip(RECIPES, FROM_8_BITS, strict=True):
        assert set(row["decibels"][recipe]) == {"y", "dx", "gate-up", "down"}
        assert row["decibels"][came] == pytest.approx(row["decibels"][recipe]), "the same rows, quantized elsewhere"


def test_a_small_product_behind_a_norm_is_checked_and_timed_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("norm, product", tmp_path, monkeypatch)
    (row,) = result["numbers"]["rows"]
    assert set(row["both_ms"]) == {PLAIN, *RECIPES} and not row["not_captured"]
    assert row["backward_ms"] == {way: row["both_ms"][way] - row["forward_ms"][way] for way in row["both_ms"]}
    assert min(row["decibels"]["blockwise"].values()) > 25, "no product reads what another gave"
    assert row["network"] in networks(result) and "| 16 bits | blockwise | blockwise-square |" in network_errors(result)


@pytest.mark.parametrize("skewed", [False, True])
def test_rows_come_as_a_dispatcher_brings_them(skewed: bool) -> None:
    rows = draw_rows(TINY, torch.Generator().manual_seed(0), skewed)
    assert rows.index_R is not None and rows.places_NK is not None
    used = int(rows.counts_e.sum())
    assert used < len(rows.index_R), "the last place is unused"
    assert rows.places_NK.shape == (TINY.tokens, TOP_K["tiny"])
    for place in range(used):
        assert place in rows.places_NK[rows.index_R[place]], "the inverse of the index"
    assert rows.places_NK.max() == len(rows.index_R) - 1, "slots of other ranks' experts"
    here = placed(rows)
    assert torch.equal(here.x_ND, rows.x_ND[rows.index_R[:used]]) and here.weights_R.is_leaf


def test_a_table_of_networks_says_what_each_way_takes() -> None:
    times = {"16 bits": 4.0, "blockwise": 2.0, "blockwise, rows in 8 bits": 1.0}
    row = {
        "network": "some experts",
        "forward_ms": dict.fromkeys(times, 0.5),
        "backward_ms": {way: ms - 0.5 for way, ms in times.items()},
        "both_ms": times,
        "tflops": {way: 1000 / ms for way, ms in times.items()},
        "speed": {way: 4 / ms for way, ms in times.items()},
        "not_captured": {"blockwise": "it waits"},
    }
    dense = {
        name: {"16 bits": value["16 bits"]} for name, value in row.items() if isinstance(value, dict) and name[0] != "n"
    }
    numbers = {"rows": [row, row | dense | {"network": "dense", "not_captured": {}}], "copies": []}
    table = networks({"environment": {"device": "a chip"}, "commit": "c", "numbers": numbers})
    assert "| network | 16 bits | `blockwise` | `blockwise`, rows in 8 bits |" in table
    assert "| some experts | 0.50 + 3.50, 250 | 0.50 + 1.50, 500, **2.00** | 0.50 + 0.50, 1000, **4.00** |" in table
    assert "| dense | 0.50 + 3.50, 250 | - | - |" in table
    assert table.endswith("Launched from Python and not replayed by a graph: blockwise.")


def test_products_that_no_graph_holds_are_named_below_their_table() -> None:
    rows = [
        {"layer": "a", "pass": name, "tflops": {"bf16": 1.0, "torchao": 2.0}, "not_captured": {"torchao": "it waits"}}
        for name in ("forward", "input gradient", "weight gradient")
    ]
    numbers = {"rows": rows, "summary": {"a": {"bare": 1.0, "quantized": 1.0}}}
    result = {"environment": {"device": "a chip"}, "commit": "c", "numbers": numbers}
    table = products_of_all(result)
    assert "| a | 1, 1, 1 | 1.00" in products(result)
    assert "| a | 1, 1, 1 | 2, 2, 2 |" in table and table.endswith("not replayed by a graph: torchao, bare.")
