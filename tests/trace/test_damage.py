"""Strange values in arguments and in the configuration: what reads them leaves them out, or refuses in a line."""

import copy
import json
import random
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.cli.trace_print import print_answer
from penstock.trace.analysis import analyse_traces, analysis_json
from penstock.trace.load import decode_trace
from penstock.trace.replay import replay_script
from penstock.trace.timeline import timelines
from tests.trace.synthetic_graph import Recording
from tests.trace.test_experts import grouped_events, recording
from tests.trace.test_memory import a_step
from tests.trace.test_replay import split
from tests.trace.tiny import STRANGE, decoded, event, kernel, launch, places, read, text_of, tiny, trace_of

MORE = (*STRANGE, 3, 12, "[3, 4]", [7, 8], [[1]])


BASES = {
    "memory": trace_of(kernel("a", 0, 10, correlation=1), *a_step()),
    "graphs": Recording(layers=3).replay().content(),
    "counts": trace_of(split(80, [7, 0, 5]), *grouped_events()) | {"penstock": recording()},
}


def damaged(content: dict[str, Any], seed: int) -> bytes:
    changed, chance = copy.deepcopy(content), random.Random(seed)
    found = [place for event in changed["traceEvents"] for place in places(event.get("args", {}))]
    found += places(changed.get("penstock", {}))
    for holder, key in chance.sample(found, chance.randint(1, 3)):
        holder[key] = chance.choice(MORE)
    return text_of(changed)


@pytest.mark.parametrize("name", BASES)
def test_damaged_arguments_never_end_in_a_traceback(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    readable = 0
    for seed in range(60):
        refusal = ""
        try:
            trace = decode_trace(damaged(BASES[name], seed))
            answer = analyse_traces({0: trace})
            json.dumps(analysis_json(answer), allow_nan=False)
            print_answer(answer, by_layer=True)
            readable += 1
            if name == "counts":
                replay_script(trace, "aten::_grouped_mm")
        except TraceError as error:
            refusal = str(error)
        assert "\n" not in refusal, seed
    assert readable > 10
    assert "time on the device" in capsys.readouterr().out


def work(category: str, name: str, start: float, lasts: float, number: int) -> dict[str, Any]:
    return event(category, name, start, lasts, stream=7, correlation=number)


@pytest.mark.parametrize(
    ("device", "host"),
    [("kernel", "xpu_runtime"), ("mtia_ccp_events", "mtia_runtime"), ("kernel", "privateuse1_runtime")],
)
def test_work_of_any_device_is_read_and_linked_whatever_its_category_is_called(device: str, host: str) -> None:
    trace = decoded(
        event(host, "launch", 1, 2, correlation=1),
        work(device, "fc", 10, 20, 1),
        work("mtia_ccp_events", "event_wait", 40, 500, 2),
        event("acme_marks", "mark", 5, 5),
    )
    assert (trace.is_host, trace.gpu.duration_us.tolist(), trace.gpu.is_linked.tolist()) == (False, [20], [True])
    assert trace.notes == ("events of categories that are not read: 1 of 'mtia_ccp_events', 1 of 'acme_marks'",)


def test_times_as_text_and_events_in_two_parts_are_read_as_others_are() -> None:
    whole = tiny()
    texts, parts = copy.deepcopy(whole), copy.deepcopy(whole)
    for one in texts["traceEvents"]:
        one |= {key: str(one[key]) for key in ("ts", "dur") if key in one}
    for one in list(parts["traceEvents"]):
        if one.get("cat") == "kernel":
            one["ph"] = "B"
            end = {"ph": "E", "pid": one["pid"], "tid": one["tid"], "ts": one["ts"] + one.pop("dur")}
            parts["traceEvents"].insert(parts["traceEvents"].index(one) + 1, end)
    for other in (texts, parts):
        assert timelines(read(other)) == timelines(read(whole))


def test_a_kernel_that_overruns_its_stream_is_cut_at_the_next_and_told() -> None:
    calls = [launch(10 * number, correlation=number) for number in (1, 2)]
    trace = decoded(*calls, kernel("bad", 50, 7.4e15, correlation=1), kernel("good", 90, 10, correlation=2))
    assert trace.gpu.duration_us.tolist() == [40, 10]
    (note,) = trace.notes
    assert note.startswith("1 events last beyond the next of their stream and are cut there, the longest 'bad'")
    # Within 100 us it may be the early start of a dependent kernel, and kernels of one graph run side by side.
    beside = decoded(*calls, kernel("a", 50, 100, correlation=1), kernel("b", 90, 10, correlation=2))
    graph = decoded(*calls, kernel("a", 50, 500, correlation=1), kernel("b", 90, 10, correlation=1))
    assert beside.notes == graph.notes == ()


def test_a_last_kernel_that_outlasts_all_else_is_left_out_and_told() -> None:
    calls = [launch(10 * number, correlation=number) for number in (1, 2)]
    trace = decoded(*calls, kernel("good", 50, 10, correlation=1), kernel("bad", 90, 7.4e15, correlation=2))
    assert trace.gpu.duration_us.tolist() == [10]
    assert "left out: 'bad'" in trace.notes[0]


@pytest.mark.parametrize(("process", "tool"), [("/device:GPU:0 NVIDIA H100", "JAX"), ("Ascend Hardware", "torch_npu")])
def test_a_recording_of_another_tool_is_refused_by_the_name_of_the_tool(process: str, tool: str) -> None:
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": process}}
    bare = {"ph": "X", "name": "fusion", "pid": 1, "tid": 2, "ts": 5, "dur": 7, "args": {}}
    with pytest.raises(TraceError, match=tool):
        read({"traceEvents": [named, bare]})
