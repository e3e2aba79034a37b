"""Recordings of CPUs: the work of operators and the transfers of gloo, beside a calculator of its own."""

from typing import Any

from penstock.trace.analysis import TraceAnalysis, analyse_traces
from penstock.trace.compare import compare, named_events
from penstock.trace.events import GpuKind, Trace
from tests.report.made_runs import host_trace
from tests.trace.tiny import TIME_US, kernel, launch, operator, read, span, trace_of

POOL = {"tid": 99}
GROUP = {"pg_config": [{"pg_name": name, "pg_size": 2, "ranks": [0, 1]} for name in "01"]}


def of_host(*events: dict[str, Any], rank: int = 0, **more: Any) -> Trace:
    return read(trace_of(*events, rank=rank) | {"deviceProperties": []} | more)


def pieces(trace: Trace) -> list[tuple[str, float, float]]:
    gpu = trace.gpu
    return [(gpu.name(row), gpu.start_us[row] - TIME_US, gpu.end_us[row] - TIME_US) for row in range(len(gpu))]


def transfer(name: str, start: float, lasts: float, elements: int = 8, thread: int = 99) -> dict[str, Any]:
    sizes = {"Input Dims": [[elements]], "Input type": ["float"]}
    return span(f"gloo:{name}", start, lasts) | {"tid": thread, "args": sizes}


def test_an_operator_has_what_those_inside_leave_and_messages_of_gloo_are_communication() -> None:
    trace = of_host(*host_trace()["traceEvents"])
    assert trace.is_host
    assert pieces(trace) == [
        ("aten::linear", 30, 50),
        ("aten::addmm", 50, 170),
        ("aten::linear", 170, 230),
        ("gloo:all_reduce", 760, 790),
        ("aten::_fused_adamw_", 810, 910),
    ]
    kinds = [GpuKind.COMPUTE] * 3 + [GpuKind.COMMUNICATION, GpuKind.COMPUTE]
    assert trace.gpu.kind.tolist() == kinds


def test_phases_and_steps_are_found_as_on_a_device() -> None:
    (one,) = analyse_traces({0: of_host(*host_trace()["traceEvents"])}).ranks
    rows = {(row.name, row.layer, row.pass_): row.kernel_us for row in one.phases.rows()}
    assert rows["attention", 1, "forward"] == 200
    assert rows["optimizer", None, "update"] == 100
    (step,) = one.steps
    assert (step.number, step.timeline.compute_us, step.timeline.total_us) == (3, 300, 1000)


def test_an_operator_that_outlasts_the_one_around_it_is_cut() -> None:
    trace = of_host(operator("aten::a", 0, 100), operator("aten::b", 50, 50.001), operator("aten::c", 100, 10))
    assert pieces(trace) == [("aten::a", 0, 50), ("aten::b", 50, 100), ("aten::c", 100, 110)]  # b ends with a


def test_threads_work_at_the_same_time() -> None:
    trace = of_host(operator("aten::a", 0, 100), operator("aten::b", 20, 30) | {"tid": 5})
    assert pieces(trace) == [("aten::a", 0, 100), ("aten::b", 20, 50)]
    assert analyse_traces({0: trace}).ranks[0].timelines["all"].busy_us == 100  # not 130


def test_launches_without_any_event_of_a_device_are_told() -> None:
    """Such as a recording of counters only, or one without the activity of the device."""
    assert of_host(operator("aten::mm", 0, 50), launch(10, correlation=1)).notes == (
        "1 calls launched work on a device, of which there is no event: operators count instead",
    )


def test_a_trace_with_a_device_is_not_of_a_cpu() -> None:
    assert not of_host(kernel("gemm", 0, 10, correlation=1), operator("aten::mm", 0, 5)).is_host


def test_transfers_of_two_threads_at_once_are_at_most_the_step() -> None:
    sums = [transfer("all_reduce", 10, 900), transfer("all_reduce", 20, 950, thread=98)]
    (one,) = analyse_traces({0: of_host(span("step 1", 0, 1000), *sums, operator("aten::mm", 100, 300))}).ranks
    (row,) = [row for row in one.operators if row.name == "gloo:all_reduce"]
    moments = set(range(10, 910)) | set(range(20, 970))
    assert (row.own_us, row.exposed_us, row.count) == (len(moments), len(moments - set(range(100, 400))), 2)
    assert sum(row.exposed_us for row in one.operators) + one.spent.idle_us == one.spent.total_us == 1000


def test_a_transfer_belongs_to_the_span_of_the_operator_that_started_it_and_takes_its_copies() -> None:
    trace = of_host(
        span("clip", 0, 30),
        operator("c10d::allreduce_", 10, 5),
        span("optimizer", 40, 60),
        operator("c10d::_allgather_base_", 45, 10),
        transfer("all_reduce", 50, 20),
        transfer("all_gather", 80, 15),
        operator("aten::copy_", 85, 5) | POOL,
    )
    (one,) = analyse_traces({0: trace}).ranks
    assert {(trace.gpu.name(row), trace.host.name(trace.gpu.launch[row])) for row in range(len(trace.gpu))} == {
        ("c10d::allreduce_", "c10d::allreduce_"),
        ("c10d::_allgather_base_", "c10d::_allgather_base_"),
        ("gloo:all_reduce", "c10d::allreduce_"),
        ("gloo:all_gather", "c10d::_allgather_base_"),
    }
    phases = {(row.name, row.pass_): row.kernel_us for row in one.phases.rows()}
    assert phases == {("all-reduce", "update"): 25, ("all-gather", "update"): 25}


def test_a_function_of_autograd_waits_for_its_transfer_and_a_node_does_not() -> None:
    trace = of_host(
        operator("_Exchange", 0, 100),
        operator("c10d::alltoall_base_", 10, 10),
        transfer("all_to_all", 25, 50),
        operator("aten::mul", 60, 5),
        operator("MulBackward0", 110, 20),
    )
    assert [piece for piece in pieces(trace) if piece[0] in ("_Exchange", "MulBackward0")] == [
        ("_Exchange", 0, 10), ("_Exchange", 20, 25), ("_Exchange", 75, 100), ("MulBackward0", 110, 130)
    ]  # fmt: skip
    spent = analyse_traces({0: trace}).ranks[0].spent
    assert (spent.compute_us, spent.exposed_communication_us) == (10 + 5 + 25 + 5 + 20, 10 + 50 - 5)


def test_a_send_that_is_waited_for_late_hides_no_work_and_a_receive_is_what_a_rank_waits_for() -> None:
    trace = of_host(
        span("step 1", 0, 1000),
        operator("c10d::send", 10, 10),
        span("gloo:send", 15, 900),
        span("backward of stage 0, micro-batch 0", 20, 500),
        operator("c10d::recv_", 30, 10),
        span("gloo:recv", 35, 265),
        operator("aten::mm", 300, 200),
        operator("aten::mm", 600, 100),
    )
    (one,) = analyse_traces({0: trace}).ranks
    assert (one.spent.compute_us, one.spent.exposed_communication_us) == (300, 10 + 270)
    assert {row.pass_ for row in one.phases.rows() if row.name == "matrix products"} == {"forward", "backward"}


def two_ranks(late_us: float, machine: str = "laptop", **groups: Any) -> TraceAnalysis:
    """Rank 1 comes `late_us` later to the sum of 100 us, whose ends are 3 us apart."""

    def rank(number: int) -> Trace:
        late = late_us * number
        return of_host(
            span("step 1", 0, 1000),
            operator("aten::mm", 10, 100 + late),
            operator("c10d::allreduce_", 120 + late, 10),
            transfer("all_reduce", 140 + late, 100 + late_us - late + 3 * number, elements=1000),
            operator("aten::mm", 700, 100),
            rank=number,
            distributedInfo={"backend": "gloo", "rank": number, "world_size": 2} | groups,
            host_name=machine if machine else f"host-{number}",
            baseTimeNanoseconds=7,
        )

    return analyse_traces({number: rank(number) for number in range(2)})


def test_waiting_and_transfer_of_gloo_are_known_across_the_ranks_of_a_machine() -> None:
    found = two_ranks(250.0, **GROUP).collectives
    assert found.wait_us.tolist() == [[250.0, 0.0]]
    assert found.pure_us.tolist() == [103.0]
    (late,) = found.stragglers()
    assert (late.rank, late.caused_wait_us) == (1, 250.0)
    (size,) = found.calls.sent_bytes[:1].tolist()
    assert size == 4000


def test_clocks_of_two_machines_are_aligned_by_the_ends_of_transfers() -> None:
    clocks = two_ranks(250.0, machine="", **GROUP).collectives.meetings.clocks
    assert clocks.ahead_us.tolist() == [-1.5, 1.5]
    assert two_ranks(250.0, **GROUP).collectives.meetings.clocks.ahead_us.tolist() == [0.0, 0.0]


def test_a_diff_of_two_recordings_finds_the_operator_that_became_slower() -> None:
    a, b = (named_events(two_ranks(late, **GROUP).ranks[1].trace) for late in (0.0, 40.0))
    found = compare(a, b)
    worst = max(found.rows, key=lambda row: row.change_us)
    assert (worst.key.operator, worst.change_us) == ("aten::mm", 40)
    assert sum(row.change_us for row in found.rows) == found.change_us


def _step(number: int, begin: float, product_us: float) -> list[dict[str, Any]]:
    """One step: a linear under the span of attention, which calls one product; then AdamW."""
    return [
        span(f"step {number}", begin, 100),
        span("attention", begin, 60),
        operator("aten::linear", begin + 5, 10 + product_us),
        operator("aten::addmm", begin + 10, product_us),
        span("optimizer", begin + 70, 20),
        operator("aten::_fused_adamw_", begin + 70, 20),
    ]


def test_operators_have_their_own_time_and_with_what_is_outside_of_them_are_the_steps() -> None:
    (one,) = analyse_traces({0: of_host(*_step(3, 0, 20), *_step(4, 100, 40))}).ranks
    assert {row.name: (row.count, row.own_us) for row in one.operators} == {
        "aten::addmm": (2, 60), "aten::linear": (2, 20), "aten::_fused_adamw_": (2, 40)
    }  # fmt: skip
    assert [row.name for row in one.operators] == ["aten::addmm", "aten::_fused_adamw_", "aten::linear"]
    assert sum(row.exposed_us for row in one.operators) + one.spent.idle_us == one.spent.total_us == 200
