"""What `penstock trace` costs: CPU seconds, seconds and peak memory, from the start of Python to the last line.

    python -m benchmarks.trace_speed TRACE --output benchmarks/results/trace-speed.json
    python -m benchmarks.trace_speed TRACE --more PATH... --hta PYTHON ...

The files are made from one trace, repeated one after the other in time, with numbers of its own for every repetition:

    small    under 10 MB: a part of it
    large    at least 287 MB and 1.06 million events in one file
    ranks    files of 22 MB each, of 8, 16, 32 and 64 ranks (the same file under other names)
    diff     `penstock trace diff` of two files of 132,000 events, the kernels of one 5 % longer

TRACE should be recorded with stacks, as most large traces are; those after `--more` are read as they are. `load` is the
same without the analysis: reading, columns and timeline. Every command runs in a process of its own; the middle of
`--times` runs is kept. Needs no GPU.

With `--hta`, a Python that has HolisticTraceAnalysis (PyPI) in an environment of its own, the same files are given to
that: it reads them and makes its breakdowns of time, of kernels, of idle time and of overlap, which is less than the
table of `penstock trace` has. Peak memory is that of its largest process. Cases of more than 8 ranks are left out.
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
DIFF_EVENTS = 132_000
HTA_RANKS = 8
NUMBERS = ("correlation", "External id", "Sequence number", "Ev Idx", "Python id", "Python parent id")
LOAD = """
import sys
from pathlib import Path
from penstock.trace.load import load_ranks
from penstock.trace.timeline import timelines
print({rank: timelines(trace)["all"].busy_us for rank, trace in load_ranks(Path(sys.argv[1])).items()})
"""
HTA = """
import sys
from pathlib import Path
from hta.trace_analysis import TraceAnalysis

path = Path(sys.argv[1])
files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
files = [file for file in files if file.name.endswith((".json", ".json.gz")) and file.name != "truth.json"]
analysis = TraceAnalysis(
    trace_files={rank: str(file) for rank, file in enumerate(files)}, include_last_profiler_step=True
)
failed = []
for name in ("temporal_breakdown", "gpu_kernel_breakdown", "idle_time_breakdown", "comm_comp_overlap"):
    try:
        getattr(analysis, "get_" + name)(visualize=False)
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}")
print("failed:", "; ".join(failed), file=sys.stderr)
"""
WATCH = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "cpu_seconds": used.ru_utime + used.ru_stime,
    "seconds": time.perf_counter() - begin,
    "peak_bytes": used.ru_maxrss * 1024,
    "status": done.returncode,
    "said": done.stderr[-2000:],
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


def _moved(event: dict[str, Any], weight_grads: float, higher: int, round_: int) -> dict[str, Any]:
    """The same event later, with numbers of its own and, if it is a step, another number."""
    moved = copy.copy(event)
    moved["ts"] = event["ts"] + weight_grads if "ts" in event else 0
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


def measured(command: Sequence[str]) -> dict[str, Any]:
    """What a command costs; its exit status and what it said to stderr."""
    done = subprocess.run([sys.executable, "-c", WATCH, *command], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def middle(command: Sequence[str], times: int) -> dict[str, float]:
    """The middle of several runs of a command that must succeed, each figure by itself."""
    runs = [measured(command) for _ in range(times)]
    failed = next((run["said"] for run in runs if run["status"]), None)
    if failed is not None:
        raise SystemExit(f"{' '.join(command)}: {failed}")
    return {key: statistics.median(run[key] for run in runs) for key in ("cpu_seconds", "seconds", "peak_bytes")}


def of_hta(python: str, path: Path) -> dict[str, Any]:
    """One run of HTA: what it costs, and what of it failed."""
    run = measured([python, "-c", HTA, str(path.resolve())])
    failed = [line.removeprefix("failed: ") for line in run["said"].splitlines() if line.startswith("failed: ")]
    last = run["said"].strip().splitlines()[-1:] if run["status"] else failed
    costs = {key: run[key] for key in ("cpu_seconds", "seconds", "peak_bytes")}
    return costs | {"crashed": bool(run["status"]), "failed": last[0][:200] if last and last[0] else None}


def hta_version(python: str | None) -> str:
    """Version of HTA, or why it is not beside ours."""
    if python is None:
        return "absent: no --hta"
    ask = "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"absent: {python} does not have it"


def slower(trace: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same trace with longer kernels."""
    events = [
        event | {"dur": event["dur"] * factor} if event.get("cat") == "kernel" else event
        for event in trace["traceEvents"]
    ]
    return trace | {"traceEvents": events}


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


def case(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What reading and analysing cost, by us and by others."""
    names = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    texts = [read_text(file) for file in names if file.name != "truth.json"]
    found: dict[str, Any] = {
        "case": name,
        "files": len(texts),
        "bytes": sum(map(len, texts)),
        "events": sum(text.count(b'"ph":') for text in texts),
        "load": middle([sys.executable, "-c", LOAD, str(path)], options.times),
        "trace": middle([sys.executable, "-m", "penstock", "trace", str(path), "--json"], options.times),
    }
    if options.hta is not None and len(texts) <= HTA_RANKS:
        found["hta"] = of_hta(options.hta, path)
    print(json.dumps(found), flush=True)
    return found


def diff(trace: dict[str, Any], folder: Path, times: int) -> dict[str, Any]:
    """What a comparison costs."""
    paths = [folder / "before.json", folder / "after.json"]
    for path, factor in zip(paths, (1.0, 1.05), strict=True):
        path.write_bytes(repeated(slower(trace, factor), 0, DIFF_EVENTS))
    command = [sys.executable, "-m", "penstock", "trace", "diff", *map(str, paths), "--json"]
    found = {"events": DIFF_EVENTS, "bytes": [path.stat().st_size for path in paths]} | middle(command, times)
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """See the top of the file."""
    parser = record.parser(
        __doc__,
        more=([Path], "other traces, or folders of ranks"),
        hta=(str, "a Python that has HolisticTraceAnalysis"),
        times=3,
    )
    parser.add_argument("trace", type=Path, help="a trace (.json, .json.gz)")
    options = parser.parse_args()
    trace = json.loads(read_text(options.trace))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [case(name, path, options) for name, path in files(trace, folder)]
        found += [case(path.name, path, options) for path in options.more]
        compared = diff(trace, folder, options.times)
    others = {
        "HolisticTraceAnalysis": hta_version(options.hta),
        "TraceLens": "absent: AMD's is not on PyPI, where another program has this name",
    }
    record.write(options, {"cases": found, "diff": compared, "others": others}, cpus=os.cpu_count())


if __name__ == "__main__":
    main()
