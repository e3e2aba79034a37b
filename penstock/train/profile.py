"""Records some steps (`profile` of a run): one trace for each recording rank.

    step start - 1    the profiler is set up, which takes long the first time; its events are discarded
    step start        after a wait for the device, operators, kernels, shapes and spans are recorded
    last step         after a wait for the device, files are written; the other ranks wait in the next step

    runs/NAME/profile/rank-0.json.gz     Chrome's format, for `penstock trace`, chrome://tracing or Perfetto
                      memory-0.jsonl     on a GPU, allocator figures of each span, see `memory_lines`

The trace has the run's configuration under the key `penstock`. Recording changes neither the computation nor its order,
so the losses are the same. Torch's memory snapshots are pickles, which can execute code; the trace has the same blocks
as events. A run that resumes after `profile.start` records nothing; one that ends early writes what it has.
"""

import gzip
import json
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.base.errors import RunFolderError, system_errors
from penstock.base.files import write_whole
from penstock.base.spans import NUMBERED_STEP
from penstock.config.fit import micro_batches
from penstock.config.run import Run
from penstock.layout.grid import Grid

GZIP_LEVEL = 3
"""A third larger than level 9 and eight times as fast (17.6 MB of a trace): the other ranks wait."""


class Recorder:
    """The recording of one rank; inactive outside of its steps. The folder of the files is created when needed."""

    def __init__(self, run: Run, folder: Path, device: torch.device, grid: Grid, rank: int) -> None:
        wanted = run.profile
        is_ours = wanted.start > 0 and (not wanted.ranks or rank in wanted.ranks)
        self._steps = range(wanted.start, wanted.start + wanted.steps) if is_ours else range(0)
        self._is_gpu = device.type == "cuda"
        self._with_memory = wanted.memory and self._is_gpu
        self._folder = folder
        self._rank = rank
        self._facts = {
            "run": run.name,
            "rank": rank,
            "device": torch.cuda.get_device_name(device) if self._is_gpu else "cpu",
            "micro_batches": micro_batches(run, grid),
            "grid": asdict(grid),
            "config": run.model_dump(mode="json"),
        }
        self._profiler: profile | None = None
        self._recorded: list[int] = []  # steps
        self._notices: list[str] = []

    def begin(self, step: int) -> None:
        """Call before a step."""
        if not self._steps:
            return
        if self._profiler is None and step in (self._steps.start - 1, self._steps.start):
            self._profiler = self._prepared()
        if self._profiler is not None and step == self._steps.start:
            self._settle()
            self._profiler.start_trace()
        if self._profiler is not None and step in self._steps:
            self._recorded.append(step)

    def end(self, step: int) -> None:
        """Call after a step. Raises a RunFolderError if the files cannot be written."""
        if self._recorded and step == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write an unfinished recording. Call when the run ends. Errors as of `end`."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or not self._recorded:
            return
        self._settle()
        profiler.add_metadata_json("penstock", json.dumps(self._facts | {"steps": self._recorded}))
        profiler.stop_trace()
        with system_errors(RunFolderError, f"cannot write {self._folder}", "free space"):
            size = self._write(profiler)
        first, last = self._recorded[0], self._recorded[-1]
        self._notices.append(f"profile: steps {first} to {last} of this rank in {self._folder}, {size / 1e6:.1f} MB")

    def take_notices(self) -> tuple[str, ...]:
        notices, self._notices = tuple(self._notices), []
        return notices

    def _prepared(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        profiler = profile(activities=activities, record_shapes=True, profile_memory=self._with_memory)
        with warnings.catch_warnings():
            # Otherwise events are also kept as Python objects, which takes seconds.
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
            profiler.prepare_trace()
        return profiler

    def _settle(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def _write(self, profiler: profile) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".rank-{self._rank}.json"
        try:
            profiler.export_chrome_trace(str(draft))
            text = draft.read_bytes()
        finally:
            draft.unlink(missing_ok=True)
        packed = gzip.compress(text, GZIP_LEVEL)
        write_whole(self._folder / f"rank-{self._rank}.json.gz", packed)
        if self._with_memory:
            lines = memory_lines(json.loads(text)["traceEvents"])
            written = "".join(json.dumps(line) + "\n" for line in lines)
            write_whole(self._folder / f"memory-{self._rank}.jsonl", written.encode())
        return len(packed)


def memory_lines(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Memory of a GPU's allocator by span, from the events of one rank's trace.

    Yields for each span of each step, in the order of their begins: `step`; `span`, a path from the step's span
    downwards; `begin_us` and `end_us`, times of the trace; `allocated_bytes` and `reserved_bytes` at its end;
    `peak_bytes`, the maximum allocated. Spans before the allocator's first event are left out.
    """
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] != 0]
    blocks = sorted(changes, key=lambda event: float(event["ts"]))
    times = [float(event["ts"]) for event in blocks]
    allocated = [int(event["args"]["Total Allocated"]) for event in blocks]
    reserved = [int(event["args"]["Total Reserved"]) for event in blocks]
    for path, begin, end in _paths(events):
        # The last events before the begin and the end of the span: figures hold until the next event.
        first, last = bisect_right(times, begin) - 1, bisect_right(times, end) - 1
        if last < 0:
            continue
        yield {
            "step": int(path[0].removeprefix(NUMBERED_STEP.format(""))),
            "span": "/".join(path),
            "begin_us": begin,
            "end_us": end,
            "allocated_bytes": allocated[last],
            "reserved_bytes": reserved[last],
            "peak_bytes": max(allocated[max(first, 0) : last + 1]),
        }


def _paths(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Spans inside of steps, on their thread: names from the step downwards, begin, end."""
    prefix = NUMBERED_STEP.format("")
    spans = [event for event in events if event.get("cat") == "user_annotation" and event.get("ph") == "X"]
    threads = {event["tid"] for event in spans if event["name"].startswith(prefix)}
    step_spans = [event for event in spans if event["tid"] in threads]
    open_spans: list[tuple[str, float]] = []  # name and end, outermost first
    # Of spans that begin together, the longer one is outside.
    for event in sorted(step_spans, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        while open_spans and open_spans[-1][1] <= begin:
            open_spans.pop()
        if not open_spans and not event["name"].startswith(prefix):
            continue
        open_spans.append((event["name"], end))
        yield tuple(name for name, _ in open_spans), begin, end
