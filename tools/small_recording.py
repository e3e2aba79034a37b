"""A small version of the folder of a run with traces: what the doctor and `penstock trace` judge by, and no more.

    python -m tools.small_recording runs/first tests/tune/data/recorded/first.tar.xz

The archive holds a folder with the name of the run: its configuration and metrics as they are, and in `profile` a
trace of each rank with

    kept    events of the device; the calls of the runtime that started them, or waited; the operators, nodes of
            autograd and spans around those calls; of the `args` what some table reads
    cut     changes of memory, arrows, copies of spans on the device, stacks, operators that started nothing, other args
    moved   all times of all ranks by the same whole seconds; those of the host are rounded to microseconds

The same folder gives the same bytes. Traces are packed together, because those of different ranks are nearly the same
text. Then both versions are judged, and the verdicts compared; it fails if they say something else.
"""

import argparse
import io
import json
import lzma
import sys
import tarfile
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.config.load import RUN_FILE
from penstock.trace.analysis import analyse_files
from penstock.trace.events import NONE
from penstock.trace.launches import WAITS
from penstock.trace.load import PROFILE, read_text, trace_files
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import Evidence
from penstock.tune.doctor.from_trace import evidence_of
from penstock.tune.doctor.run_facts import METRICS, facts_of

Event = dict[str, Any]

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALLS = frozenset({"cuda_runtime", "cuda_driver"})
AROUND = frozenset({"cpu_op", "user_annotation"})

FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
HEADER = ("schemaVersion", "deviceProperties", "distributedInfo", "record_shapes", "penstock", "baseTimeNanoseconds")

JOINS = frozenset({"External id", "device", "stream", "correlation", "Sequence number"})
COLLECTIVE = frozenset({"Collective name", "Process Group Name", "Process Group Ranks", "Group size", "Seq", "dtype"})
COLLECTIVE |= {"Global rank start", "Global rank stride", "In msg nelems", "Out msg nelems", "In split size"}
COLLECTIVE |= {"Out split size"}
CALL = frozenset({"correlation"})
SHAPES = frozenset({"Input Dims", "Input type", "Concrete Inputs"})

SECOND_US = 1_000_000
ROUNDING = 2e-4
"""Of the step, by which times of both versions may differ."""

COMPRESSION = 9 | lzma.PRESET_EXTREME


def smaller(trace: dict[str, Any], moved_us: float = 0.0) -> dict[str, Any]:
    """A trace with what is judged by only.

    Args:
        trace: as torch.profiler wrote it.
        moved_us: what to take off every time.
    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    device = [one for one in events if one.get("cat") in DEVICE]
    started = {one["args"]["correlation"] for one in device}
    calls = [
        one
        for one in events
        if one.get("cat") in CALLS and (one["args"].get("correlation") in started or WAITS.match(one["name"]))
    ]
    around = [one for one in events if one.get("cat") in AROUND]
    said = {one["args"]["External id"] for one in device if "Collective name" in one["args"]}
    kept = [*device, *calls, *_holding(around, calls)]
    stripped = sorted((_stripped(one, said, moved_us) for one in kept), key=lambda one: one["ts"])
    return {name: trace[name] for name in HEADER if name in trace} | {"traceEvents": stripped}


def _holding(around: Sequence[Event], calls: Iterable[Event]) -> list[Event]:
    """Operators and spans of the thread of a call that were open when it was made."""
    moments: dict[object, list[float]] = {}
    for call in calls:
        moments.setdefault(call["tid"], []).append(call["ts"])
    for each in moments.values():
        each.sort()

    def holds(one: Event) -> bool:
        own = moments.get(one["tid"], [])
        first = bisect_left(own, one["ts"])
        return first < len(own) and own[first] <= one["ts"] + one["dur"]

    found = [one for one in around if holds(one)]
    paired = {one["args"].get("Sequence number", NONE) for one in found if one["cat"] == "cpu_op"} - {NONE}
    return [one for one in around if holds(one) or one.get("args", {}).get("Sequence number", NONE) in paired]


def _stripped(event: Event, said: set[int], moved_us: float) -> Event:
    """An event without unread arguments; a collective that its kernel describes is not described again."""
    args = event.get("args", {})
    wanted = JOINS | SHAPES
    if event["cat"] in CALLS:
        wanted = CALL
    elif event["cat"] in DEVICE or args.get("External id") not in said:
        wanted = wanted | COLLECTIVE
    digits = 3 if event["cat"] in DEVICE else 0
    start_us, end_us = (round(one - moved_us, digits) for one in (event["ts"], event["ts"] + event["dur"]))
    return {name: event[name] for name in FIELDS} | {
        "ts": start_us,
        "dur": round(end_us - start_us, digits),
        "args": {name: value for name, value in args.items() if name in wanted},
    }


def pack(folder: Path, archive: Path) -> None:
    """Write the small version of a run's folder.

    Args:
        folder: of the run, with traces.
        archive: .tar.xz, overwritten.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(lzma.compress(contents(folder), preset=COMPRESSION))


def contents(folder: Path) -> bytes:
    """What `pack` packs, as a tar archive without times and owners."""
    files = trace_files(folder)
    traces = [json.loads(read_text(file)) for file in files]
    firsts = [one["ts"] for trace in traces for one in trace["traceEvents"] if one.get("cat") in DEVICE]
    moved_us = (min(firsts) // SECOND_US) * SECOND_US
    texts = {name: (folder / name).read_bytes() for name in (RUN_FILE, METRICS)}
    for file, trace in zip(files, traces, strict=True):
        small = json.dumps(smaller(trace, moved_us), separators=(",", ":"))
        texts[f"{PROFILE}/{file.name.removesuffix('.gz')}"] = small.encode()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, text in sorted(texts.items()):
            member = tarfile.TarInfo(f"{folder.name}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return whole.getvalue()


def unpack(archive: Path, folder: Path) -> Path:
    """The folder of the run, in `folder`."""
    with tarfile.open(archive, mode="r:xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.xz")


def differences(whole: Path, small: Path) -> list[str]:
    """What the doctor says of one folder and not of the other, where it is more than rounding; empty if nothing."""
    (first, one), (second, two) = judged(whole), judged(small)
    pairs = {
        "wall": (one.bottleneck, two.bottleneck),
        "then": (one.others, two.others),
        "late": tuple([(late.rank, late.cause, late.times_last) for late in each.late] for each in (first, second)),
        "remedies": tuple([remedy.change for remedy in each.remedies] for each in (one, two)),
        "evidence": tuple([line.what.split("(")[0] for line in each.lines] for each in (one, two)),
        "launches": (first.launches, second.launches),
    }
    found = [f"{name}: {ours} and {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    times = zip(one.lines, two.lines, strict=False)
    far = [(ours, theirs) for ours, theirs in times if abs((ours.share or 0.0) - (theirs.share or 0.0)) > ROUNDING]
    return found + [f"{ours.what}: {ours.share:.5f} and {theirs.share:.5f} of the step" for ours, theirs in far]


def judged(folder: Path) -> tuple[Evidence, Diagnosis]:
    """What the doctor says of the folder of a run without a plan, which the traces do not change."""
    facts, missing = facts_of(folder)
    evidence = evidence_of(analyse_files([folder]), facts, missing)
    return evidence, diagnose(evidence)


def main(words: Sequence[str] | None = None) -> int:
    """Pack, and say what it came to; 1 if the verdicts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run, with traces")
    parser.add_argument("archive", type=Path, help="NAME.tar.xz, where NAME is that of the folder")
    options = parser.parse_args(words)
    pack(options.folder, options.archive)
    with tempfile.TemporaryDirectory() as place:
        found = differences(options.folder, unpack(options.archive, Path(place)))
    before = sum(file.stat().st_size for file in trace_files(options.folder))
    print(f"{options.folder.name}: {before:,} bytes of traces, {options.archive.stat().st_size:,} packed")
    for line in found:
        print(f"differs in {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
