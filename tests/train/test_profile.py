"""What a recorded run leaves behind can be read, says where each operator belongs, and changed nothing."""

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.spans import Span
from penstock.config.parallel import Recompute
from penstock.config.run import Profile
from penstock.train.loop import Progress, open_store, train_run
from penstock.train.profile import memory_lines
from penstock.train.run_folder import RunFolder
from penstock.train.setup import prepare
from penstock.train.step import StopRequest
from tests.distributed.one_loss import start_session
from tests.distributed.pool import Pool
from tests.train.test_loop import EndsAfter, lines_of, start
from tests.train.tiny_run import ENVIRONMENT, TRAINING, Recorder, tiny_run

Event = Mapping[str, Any]


def trace_of(folder: RunFolder, rank: int = 0) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress((folder.profile / f"rank-{rank}.json.gz").read_bytes()))
    return trace


def spans_in(trace: Mapping[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]


def names_in(trace: Mapping[str, Any]) -> list[str]:
    return [event["name"] for event in spans_in(trace)]


def path_at(trace: Mapping[str, Any], event: Event) -> list[str]:
    around = [
        one
        for one in spans_in(trace)
        if one["tid"] == event["tid"] and one["ts"] <= event["ts"] <= one["ts"] + one["dur"] and one is not event
    ]
    return [one["name"] for one in sorted(around, key=lambda one: (one["ts"], -one["dur"]))]


def test_steps_are_recorded_with_their_phases_layers_and_parts(tmp_path: Path) -> None:
    recorder = Recorder()
    _, folder = start(tiny_run(tmp_path, profile=Profile(start=2, steps=2)), [recorder])
    notices = {report.step: report.notices for report in recorder.reports if report.notices}
    assert list(notices) == [3] and str(folder.profile) in notices[3][0], "the user is told where the trace is"
    trace = trace_of(folder)
    assert [name for name in names_in(trace) if name.startswith("step ")] == ["step 2", "step 3"]
    counts = Counter(names_in(trace))
    experts = 2 * 2 * 2  # steps, micro-batches, layers with experts: one of the model, one of prediction
    held_out = 2 * 2  # batches of the evaluation behind step 2, and layers
    for name in ("route", "sort", "experts", "shared"):
        assert counts[name] == experts + held_out, name
    for name in ("dispatch", "combine"):
        assert counts[name] == 2 * (experts + held_out), f"{name} is begun and waited for"
    assert counts["micro-batch 0"] == counts["micro-batch 1"] == counts["reduce"] == counts["optimizer"] == 2
    assert counts["layer 2"] == counts["mtp"] == 2 * 2 + 2  # two steps of two micro-batches, and the evaluation
    assert (counts["evaluate"], counts["save"]) == (1, 1)
    layer = next(event for event in spans_in(trace) if event["name"] == "experts")
    assert path_at(trace, layer) == ["step 2", "micro-batch 0", "forward", "layer 1"]
    facts = trace["penstock"]
    assert (facts["run"], facts["rank"], facts["steps"], facts["micro_batches"]) == ("tiny", 0, [2, 3], 2)
    assert (facts["config"]["model"]["moe"]["experts"], facts["grid"]["world"]) == (4, 1)
    unused = {Span.STEP, Span.REPLAY, Span.RECOMPUTE}
    assert {str(one) for one in set(Span) - unused} <= set(counts)


@pytest.mark.slow
def test_a_recorded_run_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    training = TRAINING.model_copy(update={"steps": 2})
    for name, modules in (("plain", ()), ("again", ("norm", "moe"))):
        again = {"training": training, "recompute": Recompute(modules=modules)}
        _, plain = start(tiny_run(tmp_path / name, **again))
        _, recorded = start(tiny_run(tmp_path / f"{name}-recorded", **again, profile=Profile(start=1, steps=2)))
        assert lines_of(recorded) == lines_of(plain)
        names = set(names_in(trace_of(recorded)))
        assert ("recompute" in names) == bool(modules)


def test_operators_of_backward_lead_to_the_span_of_forward(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, profile=Profile(start=2, steps=1))
    trace = trace_of(start(run)[1])
    events = trace["traceEvents"]
    at = {(event["tid"], event["ts"]): event for event in events if event.get("cat") == "cpu_op"}
    ends: dict[int, dict[str, Event]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            ends.setdefault(event["id"], {})[event["ph"]] = at[event["tid"], event["ts"]]
    parts: Counter[str] = Counter()
    for pair in ends.values():
        forward, backward = pair["s"], pair["f"]
        assert forward["args"]["Sequence number"] == backward["args"]["Sequence number"]
        assert "backward" in path_at(trace, backward)
        parts.update(name for name in path_at(trace, forward) if not name.startswith(("step", "micro")))
    wanted = {"forward", "layer 0", "layer 1", "layer 2", "norm", "attention", "route", "experts", "combine", "loss"}
    assert wanted <= set(parts)
    # Every autograd operator belongs to a pair, ends in a parameter, or is inside of one that does.
    nodes = [e for e in at.values() if e["name"].endswith(("Backward0", "Backward")) and ":" not in e["name"]]
    linked = {(pair["f"]["tid"], pair["f"]["ts"]) for pair in ends.values()}
    assert sum((node["tid"], node["ts"]) in linked for node in nodes) >= 0.95 * len(nodes)


def test_a_rank_that_is_not_named_records_nothing(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, profile=Profile(start=2, steps=1, ranks=(1,)))
    loose = run.model_copy(update={"profile": Profile()})
    session = prepare(loose, ENVIRONMENT)
    folder = RunFolder(tmp_path / "tiny")
    folder.path.mkdir(parents=True)
    train_run(replace(session, run=run), folder, open_store(run, folder), Progress(), [], StopRequest())
    assert not folder.profile.exists()


def test_a_run_that_is_stopped_early_writes_what_it_has(tmp_path: Path) -> None:
    stop = StopRequest()
    _, folder = start(tiny_run(tmp_path, profile=Profile(start=2, steps=3)), [EndsAfter(3, stop)], stop)
    trace = trace_of(folder)
    assert [name for name in names_in(trace) if name.startswith("step ")] == ["step 2", "step 3"]
    assert trace["penstock"]["steps"] == [2, 3]
    assert not torch._C._autograd._profiler_enabled()


def test_phases_of_every_step_but_the_first_are_in_the_metrics(tmp_path: Path) -> None:
    _, folder = start(tiny_run(tmp_path))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[0]["phase_seconds"] is None
    for before, line in pairwise(lines):
        phases = line["phase_seconds"]
        assert set(phases) == {"data", "forward", "backward", "reduce", "optimizer"}
        assert sum(phases.values()) == pytest.approx(before["step_seconds"], rel=0.1, abs=2e-3)


def _span(name: str, begin: float, end: float, tid: int = 1) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "tid": tid, "ts": begin, "dur": end - begin, "args": {}}


def _block(at: float, allocated: int, device: int = 1) -> Event:
    args = {"Total Allocated": allocated, "Total Reserved": 2 * allocated, "Device Type": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": at, "args": args}


def test_memory_of_a_span_is_what_was_held_at_its_end_and_at_most() -> None:
    events = [
        _span("forward", 0.0, 1.0),
        _span("step 7", 10.0, 50.0),
        _span("layer 0", 20.0, 30.0),
        _span("layer 1", 30.0, 40.0),
        _span("layer 0", 20.0, 30.0, tid=2),
        _block(5.0, 100),
        _block(22.0, 300),
        _block(25.0, 900, device=0),  # of the host
        _block(26.0, 200),
        _block(45.0, 500),
    ]
    lines = [(line["span"], line["allocated_bytes"], line["peak_bytes"]) for line in memory_lines(events)]
    assert lines == [("step 7", 500, 500), ("step 7/layer 0", 200, 300), ("step 7/layer 1", 200, 200)]
    assert {line["step"] for line in memory_lines(events)} == {7}, "`forward` ended before the first block"
    assert all(line["reserved_bytes"] == 2 * line["allocated_bytes"] for line in memory_lines(events))


def _train_on_ranks(folder: str, layout: str) -> None:
    steps = ("training.steps=3", "profile.start=2", "profile.steps=2", "evaluation.rows=0", "training.micro_batch=2")
    session, home = start_session((*steps, layout)), RunFolder(Path(folder))
    train_run(session, home, open_store(session.run, home, session.axes.world), Progress(), [], StopRequest())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.expert=2", "parallel.pipeline=2"])
def test_two_ranks_leave_traces_that_name_what_they_did(layout: str, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, _train_on_ranks, str(tmp_path), layout)
    for rank in (0, 1):
        trace = trace_of(RunFolder(tmp_path), rank)
        names = set(names_in(trace))
        assert [name for name in names_in(trace) if name.startswith("step ")] == ["step 2", "step 3"]
        assert trace["penstock"]["rank"] == trace["distributedInfo"]["rank"] == rank
        assert {"route", "dispatch", "experts", "combine", "attention", "reduce", "optimizer"} <= names
        stage = f"of stage {rank}, micro-batch 3"
        is_piped = "pipeline" in layout
        assert ({f"forward {stage}", f"backward {stage}"} <= names) == is_piped
        assert ("micro-batch 1" in names) != is_piped
        if not is_piped:
            sent = [event for event in trace["traceEvents"] if event["name"] == "c10d::alltoall_base_"]
            inside = [path_at(trace, event) for event in sent]
            assert any("dispatch" in path for path in inside)
            assert any("combine" in path for path in inside)
