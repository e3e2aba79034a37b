"""The generator of synthetic traces: its traces are possible, and its truth is right."""

from pathlib import Path
from typing import Any

import pytest

from penstock.trace.load import load_ranks
from penstock.trace.timeline import timelines
from tests.trace.synthetic import make
from tests.trace.synthetic_job import Job

JOBS = [
    Job(hot_rank=1),
    Job(is_even=True, slow_rank=2, offsets_us=(5.0, -70.5, 0.0, 900.125)),
    Job(dispatch="symmetric", stall_us=300.0),
    Job(dispatch="deep_ep", missing=((1, 2),)),
    Job(metadata="launch", missing=((0, 0), (3, 11))),
    Job(metadata="none", has_sequence=False),
]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def device_events(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["cat"] in DEVICE]


@pytest.mark.parametrize("job", JOBS)
def test_a_folder_is_read_as_one_trace_for_each_rank(job: Job, tmp_path: Path) -> None:
    traces = make(job)
    ranks = load_ranks(traces.write(tmp_path / "traces"))
    assert sorted(ranks) == list(range(job.ranks))
    for rank, trace in ranks.items():
        assert (trace.rank, trace.world, trace.notes) == (rank, job.ranks, ())
        assert len(trace.gpu) == len(device_events(traces.files[rank]))
        assert trace.gpu.is_linked.all()


@pytest.mark.parametrize("job", JOBS)
def test_a_stream_does_one_thing_at_a_time_and_nothing_before_its_launch(job: Job) -> None:
    for content in make(job).files:
        launches = {
            event["args"]["correlation"]: event["ts"]
            for event in content["traceEvents"]
            if event["cat"] == "cuda_runtime"
        }
        free: dict[int, float] = {}
        for event in device_events(content):
            stream = event["args"]["stream"]
            assert event["ts"] >= free.get(stream, 0.0) - 1e-3
            assert event["ts"] >= launches[event["args"]["correlation"]]
            free[stream] = event["ts"] + event["dur"]


@pytest.mark.parametrize("job", JOBS)
def test_the_timeline_that_is_swept_is_the_one_of_the_product(job: Job, tmp_path: Path) -> None:
    traces = make(job)
    for rank, trace in load_ranks(traces.write(tmp_path)).items():
        found, true = timelines(trace)["all"], traces.truth.timelines[rank]
        for name, us in true.items():
            assert getattr(found, f"{name}_us") == pytest.approx(us, abs=1e-2), name


def test_the_same_job_is_the_same_trace_and_another_seed_is_not() -> None:
    assert make(Job(seed=5)).files == make(Job(seed=5)).files
    assert make(Job(seed=5)).files != make(Job(seed=6)).files


def test_a_missing_event_is_missing_on_one_rank_and_its_launch_is_not() -> None:
    whole, short = make(Job()), make(Job(missing=((1, 4),)))
    for rank in range(4):
        lost = len(device_events(whole.files[rank])) - len(device_events(short.files[rank]))
        assert lost == (1 if rank == 1 else 0)
        host = [sum(e["cat"] not in DEVICE for e in one.files[rank]["traceEvents"]) for one in (whole, short)]
        assert host[0] == host[1]
