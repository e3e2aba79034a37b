"""What `penstock trace` costs: CPU seconds, seconds and peak memory, from the start of Python to the last line.

    python -m benchmarks.trace_speed TRACE --output benchmarks/results/trace-speed.json

The files are made from one trace, repeated one after the other in time, with numbers of its own for every repetition:

    small    under 10 MB: a part of it
    large    at least 287 MB and 1.06 million events in one file
    ranks    files of 22 MB each, of 8, 16, 32 and 64 ranks (the same file under other names)

TRACE should be recorded with stacks, as most large traces are. `load` is the same without the analysis: reading,
columns and timeline. Every command runs in a process of its own; the middle of `--times` runs is kept. Needs no GPU.
"""

import argparse
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import record
from penstock.trace.load import read_text

LARGE_BYTES, LARGE_EVENTS = 287_000_000, 1_060_000
SMALL_BYTES = 9_500_000
RANK_BYTES = 175_000_000 // 8
RANKS = (8, 16, 32, 64)
NUMBERS = ("correlation", "External id", "Sequence number", "Ev Idx", "Python id", "Python parent id")
LOAD = """
import sys
from pathlib import Path
from penstock.trace.load import load_ranks
from penstock.trace.timeline import timelines
print({rank: timelines(trace)["all"].busy_us for rank, trace in load_ranks(Path(sys.argv[1])).items()})
"""
WATCH = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "cpu_seconds": used.ru_utime + used.ru_stime,
    "seconds": time.perf_counter() - begin,
    "peak_bytes": used.ru_maxrss * 1024,
}))
"""
"""Starts a command from a small process, because the memory of the one that it is forked from counts as its own."""


def repeated(trace: dict[str, Any], size: int, events: int = 0) -> bytes:
    """A trace that is so large, made of repetitions; the last one is cut so that it is not larger than it must be."""
    parts: list[bytes] = []
    length = 0
    for event in _repetitions(trace["traceEvents"]):
        if length >= size and len(parts) >= events:
            break
        parts.append(msgspec.json.encode(event))
        length += len(parts[-1]) + 1
    beside = {key: value for key, value in trace.items() if key != "traceEvents"}
    return msgspec.json.encode(beside)[:-1] + b',"traceEvents":[' + b",\n".join(parts) + b"]}"


def _repetitions(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    times = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in events if event.get("ph") == "X"]
    span = max(end for _, end in times) - min(start for start, _ in times)
    highest = max(event.get("args", {}).get(key) or 0 for event in events for key in NUMBERS)
    in_order = sorted(events, key=lambda event: event.get("ts", 0))
    round_ = 0
    while True:
        for event in in_order:
            yield _moved(event, round_ * (span + 100.0), round_ * (highest + 1), round_)
        round_ += 1


def _moved(event: dict[str, Any], later: float, higher: int, round_: int) -> dict[str, Any]:
    """The same event later, with numbers of its own and, if it is a step, another number."""
    moved = copy.copy(event)
    moved["ts"] = event["ts"] + later if "ts" in event else 0
    if isinstance(event.get("id"), int):
        moved["id"] = event["id"] + higher
    moved["name"] = re.sub(
        r"^ProfilerStep#(\d+)$", lambda found: f"ProfilerStep#{int(found[1]) + 100 * round_}", event["name"]
    )
    if "args" in event:
        moved["args"] = {
            key: value + higher if key in NUMBERS and value is not None else value
            for key, value in event["args"].items()
        }
    return moved


def measured(command: Sequence[str]) -> dict[str, float]:
    """What a command costs that must succeed."""
    done = subprocess.run([sys.executable, "-c", WATCH, *command], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def middle(command: Sequence[str], times: int) -> dict[str, float]:
    """The middle of several runs, each figure by itself."""
    runs = [measured(command) for _ in range(times)]
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def files(trace: dict[str, Any], folder: Path) -> Iterator[tuple[str, Path]]:
    """Every case: its name and its path."""
    for name, text in (
        ("small", repeated(trace, SMALL_BYTES)),
        ("large", repeated(trace, LARGE_BYTES, LARGE_EVENTS)),
        ("rank", repeated(trace, RANK_BYTES)),
    ):
        (folder / f"{name}.json").write_bytes(text)
    yield "small", folder / "small.json"
    yield "large", folder / "large.json"
    for count in RANKS:
        several = folder / f"ranks-{count}"
        several.mkdir()
        for rank in range(count):
            os.link(folder / "rank.json", several / f"rank-{rank}.json")
        yield f"{count} ranks", several


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description="Cost of penstock trace")
    parser.add_argument("trace", type=Path, help="a trace (.json, .json.gz)")
    parser.add_argument("--times", type=int, default=3)
    record.add_arguments(parser)
    options = parser.parse_args()
    trace = json.loads(read_text(options.trace))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files(trace, Path(folder)):
            texts = [file.read_bytes() for file in (path.iterdir() if path.is_dir() else (path,))]
            found.append(
                {
                    "case": name,
                    "bytes": sum(map(len, texts)),
                    "events": sum(text.count(b'"ph":') for text in texts),
                    "load": middle([sys.executable, "-c", LOAD, str(path)], options.times),
                    "trace": middle([sys.executable, "-m", "penstock", "trace", str(path), "--json"], options.times),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    record.write(options, {"cases": found}, cpus=os.cpu_count())


if __name__ == "__main__":
    main()
