"""Loads of experts and rows that held tokens: from shapes, message sizes, times, splits, configuration and metrics."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import TraceError
from penstock.base.spans import Span
from penstock.trace.analysis import analyse_traces, analysis_json
from penstock.trace.calls import calls_of
from penstock.trace.collectives import collectives_of
from penstock.trace.events import Trace
from penstock.trace.experts import ExpertLoad, UsedRows, expert_load, grouped_products, recorded_loads, used_rows
from penstock.trace.load import load_ranks
from penstock.trace.phases import find_phases
from tests.trace.synthetic import Traces, make
from tests.trace.synthetic_job import Job
from tests.trace.test_replay import BF16, LONG, shapes
from tests.trace.tiny import decoded, event, kernel, launch, span
from tools.small_recording import unpack


def load_of(traces: Traces, ranks: tuple[int, ...] | None = None) -> ExpertLoad:
    files = {rank: trace for rank, trace in traces.ranks().items() if ranks is None or rank in ranks}
    return expert_load(files, collectives_of(files))


def with_rows(traces: Traces, rows: int | None) -> Traces:
    """The same traces with grouped products of so many rows on every rank, or without shapes."""

    files = copy.deepcopy(traces.files)
    for args in [one["args"] for file in files for one in file["traceEvents"] if one["name"] == "aten::_grouped_mm"]:
        if rows is None:
            del args["Input Dims"]
        else:
            args["Input Dims"][0][0] = rows
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


# ----------------------------------------------------------------------------------------------------- test expert rows

RECORDED = Path(__file__).parent.parent / "tune" / "data" / "recorded" / "hot-experts.tar.xz"
FLOAT = "float"


def used(traces: dict[int, Trace], rank: int) -> UsedRows | None:
    return used_rows(traces[rank], calls_of(traces), rank, find_phases(traces[rank]))


def recording(**changed: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "training": {"micro_batch": 3, "sequence_length": 512},
        "parallel": {"tensor": 1, "expert_tensor": 1, "context": 1},
        "dispatch": {"method": "all-to-all"},
        "model": {"moe": {"top_k": 4, "balance": {"capacity_factor": 0.0, "pad_to_capacity": False}}},
    }
    return {"config": config | changed}


@pytest.mark.parametrize("rank", [0, 2])
def test_exchanges_say_how_full_the_buffers_of_experts_were(rank: int) -> None:
    traces = make(Job(hot_rank=2, bound=2.0))
    share = true_rows(traces)[:, rank].mean() / (2 * 1536 * 4)
    assert used(traces.ranks(), rank) == UsedRows(share=pytest.approx(share), source="all-to-all")


def test_counts_that_travel_before_the_rows_are_not_taken_for_rows() -> None:
    counts = {"Collective name": "all_to_all", "dtype": "Int", "In msg nelems": 6, "Out msg nelems": 6}
    sent = event("kernel", "ncclDevKernel_SendRecv(x)", 15, 9, stream=20, correlation=49, **counts)
    before = [span(Span.DISPATCH, 0, 80), launch(10, correlation=49), sent, *exchange(50, [3, 4])]
    assert used({0: grouped_trace(*before)}, 0) == UsedRows(share=pytest.approx(7 / 12), source="all-to-all")


@pytest.mark.parametrize(("dtype", "operand"), [("BFloat16", BF16), ("Float", FLOAT)])
@pytest.mark.parametrize("parts", [[8, 8], [9, 2], [0, 0]])
def test_weights_of_routing_that_travel_behind_the_rows_are_not_taken_for_rows(
    dtype: str, operand: str, parts: list[int]
) -> None:
    sent = [*exchange(50, parts, dtype=dtype), *exchange(60, parts, dtype="Float", width=1, correlation=60)]
    trace = grouped_trace(span(Span.DISPATCH, 0, 80), *sent, rows=32, dtype=operand)
    assert used({0: trace}, 0) == UsedRows(share=pytest.approx(sum(parts) / 32), source="all-to-all")


@pytest.mark.parametrize("dtype", ["Byte", "Float8_e4m3fn"])
def test_rows_may_travel_in_8_bits_to_products_in_16(dtype: str) -> None:
    sent = [*exchange(50, [8, 8], dtype=dtype), *exchange(60, [8, 8], dtype="Float", width=1, correlation=60)]
    trace = grouped_trace(span(Span.DISPATCH, 0, 80), *sent, rows=32)
    assert used({0: trace}, 0) == UsedRows(share=pytest.approx(0.5), source="all-to-all")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_dispatcher_that_waits_for_the_host_gives_experts_no_row_too_many(stage: int) -> None:
    """Exchanges and products of a part of a trace need not be of the same layers, and the mean rank is not this one."""
    told = recording(dispatch={"method": "all-to-all", "sync_free": stage})
    told["config"]["training"] = {"micro_batch": 1, "sequence_length": 2}
    sent = [span(Span.DISPATCH, 0, 80), *exchange(50, [3, 4])]
    assert used({0: grouped_trace(*sent, penstock=told)}, 0) == UsedRows(share=1.0, source="all-to-all")
    assert used({0: grouped_trace(penstock=told)}, 0) is not None


@pytest.mark.parametrize("rank", range(4))
def test_recorded_steps_of_an_exchange_without_room_have_no_empty_rows(rank: int, tmp_path: Path) -> None:
    traces = load_ranks([unpack(RECORDED, tmp_path)])
    assert used(traces, rank) == UsedRows(share=1.0, source="all-to-all")
    # And by the exchanges alone, as in a recording that says nothing of its configuration.
    alone = {one: replace(trace, header={}) for one, trace in traces.items()}
    assert used(alone, rank) == UsedRows(share=1.0, source="all-to-all")


def test_even_exchanges_count_bytes_and_say_it_as_well() -> None:
    found = used(make(Job(is_even=True, bound=1.6)).ranks(), 3)
    assert found == UsedRows(share=pytest.approx(1 / 1.6, rel=1e-3), source="all-to-all")


@pytest.mark.parametrize("dispatch", ["symmetric", "deep_ep"])
def test_where_rows_do_not_travel_by_exchange_the_configuration_tells_the_mean(dispatch: Any) -> None:
    traces = make(Job(dispatch=dispatch, bound=2.0))
    assert used(traces.ranks(), 1) == UsedRows(share=1.0, source="shapes")
    assert used(traces.ranks(penstock=recording()), 1) == UsedRows(share=pytest.approx(0.5), source="configuration")


def test_what_travels_once_for_several_experts_is_not_taken_for_rows() -> None:
    traces = make(Job(bound=4.0, hot_rank=1)).ranks(penstock=recording(dispatch={"method": "hierarchical"}))
    assert used(traces, 1) == UsedRows(share=pytest.approx(0.25), source="configuration")


def test_dropped_rows_and_damaged_configurations_tell_nothing() -> None:
    balance = {"capacity_factor": 1.5, "pad_to_capacity": True}
    traces = make(Job(dispatch="deep_ep", bound=2.0))
    for told in (recording(model={"moe": {"top_k": 4, "balance": balance}}), {"config": {"model": 7}}, 3):
        assert used(traces.ranks(penstock=told), 0) == UsedRows(share=1.0, source="shapes")


def test_a_trace_without_grouped_products_has_none() -> None:
    assert used({0: decoded(kernel("a", 0, 10, correlation=1))}, 0) is None


def test_the_roofline_counts_rows_that_held_tokens() -> None:
    job = Job(bound=2.0, is_even=True)
    told = analysis_json(analyse_traces(make(job).ranks()))["ranks"]["1"]
    assert told["grouped_rows"] == {"share": pytest.approx(0.5), "source": "all-to-all"}
    grouped = [row for row in told["roofline"] if row["operator"] == "aten::_grouped_mm"]
    slots = 1536 * 4
    assert {row["flops"] for row in grouped} == {2.0 * slots * 1024 * 1536, 2.0 * slots * 768 * 1024}


def test_our_own_products_count_the_rows_that_they_pick() -> None:
    args = shapes([BF16, BF16, BF16, "int", "float", LONG], [[6, 8], [3, 16, 8], [3, 8, 8], [3], [12], [12]])
    trace = decoded(event("cpu_op", "_ExpertFfn", 0, 9, **args), kernel("a", 0, 9, correlation=1))
    assert grouped_products(trace).rows.tolist() == [12]


# ------------------------------------------------------------------------------------------------------------- replay


def grouped_trace(*before: dict[str, Any], rows: int = 12, dtype: str = BF16, **more: Any) -> Trace:
    """A grouped product of three experts at 100 us, and what was before it."""
    return decoded(*before, *product(rows, dtype), **more)


def product(rows: int = 12, dtype: str = BF16) -> list[dict[str, Any]]:
    args = shapes([dtype, dtype, "int"], [[rows, 16], [3, 16, 32], [3]])
    return [
        event("cpu_op", "aten::_grouped_mm", 100, 20, **args),
        launch(105, correlation=1),
        kernel("some_grouped_mm_kernel", 130, 10, correlation=1),
    ]


def grouped_events() -> list[dict[str, Any]]:
    return [*exchange(50, [3, 4]), *product()]


def exchange(
    at: float, parts: list[int], *, dtype: str = "BFloat16", width: int = 16, correlation: int = 50
) -> list[dict[str, Any]]:
    """An all-to-all that brought so many rows from each of two ranks."""
    args = {
        "Collective name": "all_to_allv",
        "dtype": dtype,
        "In msg nelems": width * 9,
        "Out msg nelems": width * sum(parts),
        "In split size": "[4, 5]",
        "Out split size": str(parts),
        "Group size": 2,
        "Process Group Name": "5",
        "Process Group Ranks": "[0, 1]",
    }
    return [
        launch(at, correlation=correlation),
        event("kernel", "ncclDevKernel_SendRecv(x)", at + 5, 9, stream=20, correlation=correlation, **args),
    ]
