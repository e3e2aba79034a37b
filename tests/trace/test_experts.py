"""Loads of experts, told by shapes, by sizes of messages and by times."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import TraceError
from penstock.trace.collectives import collectives_of
from penstock.trace.events import Trace
from penstock.trace.experts import ExpertLoad, expert_load, recorded_loads
from penstock.trace.load import decode_trace
from tests.trace.synthetic import Traces, make
from tests.trace.synthetic_job import Job


def load_of(traces: Traces, ranks: tuple[int, ...] | None = None) -> ExpertLoad:
    files: dict[int, Trace] = {
        rank: decode_trace(json.dumps(content).encode(), path=Path(f"rank{rank}"))
        for rank, content in enumerate(traces.files)
        if ranks is None or rank in ranks
    }
    return expert_load(files, collectives_of(files))


def with_rows(traces: Traces, rows: int | None) -> Traces:
    """The same traces with grouped products of so many rows on every rank, or without shapes."""

    def changed(event: dict[str, Any]) -> dict[str, Any]:
        if event["name"] != "aten::_grouped_mm":
            return event
        first, *others = event["args"]["Input Dims"]
        dims = {} if rows is None else {"Input Dims": [[rows, first[1]], *others]}
        return event | {"args": {"External id": event["args"]["External id"]} | dims}

    files = tuple(one | {"traceEvents": [changed(event) for event in one["traceEvents"]]} for one in traces.files)
    return Traces(files, traces.truth)


def true_rows(traces: Traces) -> np.ndarray:
    return np.array(traces.truth.rows).reshape(-1, len(traces.files))


def test_shapes_of_grouped_products_tell_the_rows_of_every_layer_and_step() -> None:
    traces = make(Job(hot_rank=2))
    load, true = load_of(traces), true_rows(traces)
    assert load.source == "grouped products" and load.unit == "rows"
    assert (load.loads == true).all()
    assert load.max_over_mean == pytest.approx((true.max(axis=1) / true.mean(axis=1)).mean())
    assert load.fullest_rank == 2


@pytest.mark.parametrize("rows", [None, 9000])
def test_without_shapes_or_with_padded_ones_sizes_of_all_to_alls_tell(rows: int | None) -> None:
    traces = with_rows(make(Job(hot_rank=1)), rows)
    load = load_of(traces)
    assert load.source == "all-to-all" and load.unit == "rows"
    assert (load.loads == true_rows(traces)).all()


@pytest.mark.parametrize("dispatch", ["symmetric", "deep_ep"])
def test_padding_does_not_hide_in_the_time_of_the_products(dispatch: Any) -> None:
    load = load_of(with_rows(make(Job(hot_rank=3, dispatch=dispatch)), 9000))
    assert load.max_over_mean == 1.0
    assert load.kernel_max_over_mean is not None and load.kernel_max_over_mean > 1.5
    assert load.fullest_rank == 3


def test_even_experts_have_no_fullest_rank() -> None:
    load = load_of(make(Job(is_even=True)))
    assert load.max_over_mean == pytest.approx(1.0)
    assert load.kernel_max_over_mean == pytest.approx(1.0)
    assert load.fullest_rank is None


def test_time_of_products_is_that_of_their_kernels() -> None:
    traces = make(Job(hot_rank=0))
    load = load_of(traces)
    for rank, content in enumerate(traces.files):
        kernels = [one["dur"] for one in content["traceEvents"] if "GroupedGemm" in one["name"]]
        assert load.kernel_us[rank] == pytest.approx(sum(kernels))


def test_one_rank_knows_its_rows_and_no_imbalance() -> None:
    traces = make(Job(hot_rank=2))
    load = load_of(traces, (2,))
    assert (load.loads[:, 0] == true_rows(traces)[:, 2]).all()
    assert load.max_over_mean is None and load.kernel_max_over_mean is None and load.fullest_rank is None


def test_json_has_null_for_what_is_not_known() -> None:
    traces = make(Job(is_even=True, dispatch="deep_ep"))
    found = load_of(with_rows(traces, None)).as_json()
    assert found["max_over_mean"] is None and found["tokens"] is None and found["source"] == "none"
    assert json.loads(json.dumps(load_of(traces).as_json()))["tokens"] == [[1536 * 4] * 4]


def test_metrics_of_a_run_tell_the_load_of_every_layer(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 9.5, "layers": [{"layer": 1, "max_over_mean": 1.75, "entropy": 0.9}]},
        {"step": 2, "layers": [], "expert_rank_load_max_over_mean": 1.25, "mtp_losses": []},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = recorded_loads(tmp_path)
    assert (first.step, first.layers, first.ranks) == (1, {1: 1.75}, None)
    assert (second.step, second.layers, second.ranks) == (2, {}, 1.25)


def test_a_run_without_metrics_has_no_loads_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    assert recorded_loads(tmp_path) == ()
    (tmp_path / "metrics.jsonl").write_text('{"step": "many"}\n')
    with pytest.raises(TraceError, match="as metrics"):
        recorded_loads(tmp_path)
