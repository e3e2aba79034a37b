"""Benchmarks of kernels run without a GPU, keep what they have measured, and their tables say it."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import float8_products, float8_quantize, float8_swiglu
from benchmarks.kernels.float8_ffn import TINY, TOP_K, draw_rows, main, placed
from benchmarks.kernels.float8_layers import TINY as TINY_LAYERS
from benchmarks.kernels.float8_layers import Layer
from benchmarks.kernels.float8_networks import PLAIN
from benchmarks.kernels.float8_products import parse_arguments, summarize
from benchmarks.kernels.measure import replay_in_turns
from tools import documents

RECIPES = ["blockwise", "blockwise-square"]
FROM_8_BITS = [f"{recipe}, rows in 8 bits" for recipe in RECIPES]


def run(only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
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
    assert row["network"] in documents.TABLES["float8-ffn"](result)
    assert "| 16 bits | blockwise | blockwise-square |" in documents.TABLES["float8-ffn-errors"](result)


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
    figures = {
        "forward_ms": dict.fromkeys(times, 0.5),
        "backward_ms": {way: ms - 0.5 for way, ms in times.items()},
        "both_ms": times,
        "tflops": {way: 1000 / ms for way, ms in times.items()},
        "speed": {way: 4 / ms for way, ms in times.items()},
    }
    row = {"network": "some experts", "not_captured": {"blockwise": "it waits"}} | figures
    dense = {name: {"16 bits": value["16 bits"]} for name, value in figures.items()}
    numbers = {"rows": [row, {"network": "dense", "not_captured": {}} | dense], "copies": []}
    table = documents.TABLES["float8-ffn"]({"environment": {"device": "a chip"}, "commit": "c", "numbers": numbers})
    assert "| network | 16 bits | `blockwise` | `blockwise`, rows in 8 bits |" in table
    assert "| some experts | 0.50 + 3.50, 250 | 0.50 + 1.50, 500, **2.00** | 0.50 + 0.50, 1000, **4.00** |" in table
    assert "| dense | 0.50 + 3.50, 250 | - | - |" in table
    assert table.endswith("Launched from Python and not replayed by a graph: blockwise.")


def test_products_that_no_graph_holds_are_named_below_their_table() -> None:
    rows = [
        {"layer": "a", "pass": name, "tflops": {"bf16": 1.0, "torch": 2.0}, "not_captured": {"torch": "it waits"}}
        for name in ("forward", "input gradient", "weight gradient")
    ]
    numbers = {"rows": rows, "summary": {"a": {"bare": 1.0, "quantized": 1.0}}}
    result = {"environment": {"device": "a chip"}, "commit": "c", "numbers": numbers}
    table = documents.TABLES["float8-products"](result)
    assert "| a | 1, 1, 1 | 2, 2, 2 |" in table and table.endswith("not replayed by a graph: torch, bare.")


def test_an_ended_sweep_has_written_every_case_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(layer: Layer, which: str, *rest: object) -> dict:
        if which == "weight gradient":
            raise KeyboardInterrupt
        times = {"bare": 2.0, "fast": 1.0}
        row = {"layer": "one", "grouped": False, "pass": which, "decibels": 30.0}
        return row | {"milliseconds": times, "tflops": times}

    monkeypatch.setattr(float8_products, "Layer", lambda shape, recipe: None)
    monkeypatch.setattr(float8_products, "measure", measure)
    file = tmp_path / "found.json"
    options = argparse.Namespace(output=file, commit="c", launches=True, recipe="blockwise-square")
    with pytest.raises(KeyboardInterrupt):
        float8_products.run(options, TINY_LAYERS)
    found = json.loads(file.read_text())["numbers"]
    assert found["recipe"] == "blockwise-square"
    assert [row["pass"] for row in found["rows"]] == ["forward", "input gradient"]
    assert found["summary"]["dense, forward"] == {"bare": 1.0, "fast": 2.0}


def test_unknown_candidates_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["float8_products", "--launches", "--candidates", "bare,gloun"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "gloun is none of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise-square"])
def test_two_small_layers_are_checked_and_timed_on_a_cpu(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["float8_products", "--tiny", "--recipe", recipe, "--output", str(file)])
    float8_products.main()
    numbers = json.loads(file.read_text())["numbers"]
    rows = numbers["rows"]
    assert numbers["recipe"] == recipe
    assert len(rows) == 6 and all(set(row["milliseconds"]) == {"bf16", "bare", "quantized"} for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("module", [float8_quantize, float8_swiglu])
def test_small_shapes_equal_the_definition_on_a_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--tiny"])
    module.main()


def test_a_layers_speed_is_that_of_its_three_products_together() -> None:
    rows = [
        {"layer": "V2-Lite EP4, down", "milliseconds": {"bf16": bf16, "bare": 1.0, "quantized": 2.0}}
        for bf16 in (1.0, 2.0, 6.0)
    ]
    found = summarize(rows)
    assert found["V2-Lite EP4, down"] == {"bare": 3.0, "quantized": 1.5} and "all of V2-Lite" in found


def test_on_a_cpu_each_way_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran: list[str] = []

    def way(name: str) -> Tensor:
        ran.append(name)
        return torch.zeros(1)

    times, not_captured = replay_in_turns({"one": lambda: way("one"), "other": lambda: way("other")}, rounds=3)
    assert ran == ["one", "other"] and set(times) == set(ran) and min(times.values()) >= 0 and not not_captured


@pytest.mark.gpu
def test_a_graph_runs_as_many_calls_as_are_captured_and_what_waits_is_launched() -> None:
    total, rounds, calls = torch.zeros(1, device="cuda"), 2, 3

    def waits() -> Tensor:
        return torch.zeros(1, device="cuda") + total.item()

    before = torch.cuda.current_stream()
    times, not_captured = replay_in_turns({"waits": waits, "adds": lambda: total.add_(1)}, rounds, calls)
    assert list(not_captured) == ["waits"] and min(times.values()) > 0
    assert torch.cuda.current_stream() == before, "a failed capture leaves its stream"
    # once to compile, and in each turn one replay that is not counted and two that are
    assert total.item() == 1 + rounds * 3 * calls
