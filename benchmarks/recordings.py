"""Recordings of other programs: are our totals those of an independent reading, and what does the doctor say?

    python -m benchmarks.recordings FILE... --output benchmarks/results/recordings.json

The independent reading is `totals` below: plain JSON, unions of intervals, and nothing of penstock/. The first folder
below `--root` says where a file is from. `recordings_by_hand.toml` has a judgement of each by its events alone.
"""

import gzip
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import record

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
BY_HAND = tomllib.loads(Path(__file__).with_name("recordings_by_hand.toml").read_text(encoding="utf-8"))
COMMUNICATION = ("nccl", "rccl", "allreduce", "cross_device_reduce")  # in a name without `_`


def main() -> None:
    """Read each file in both ways; nothing is left out."""
    parser = record.parser(__doc__, root=(Path(), "folder of the NAMEs"))
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    rows = [compared(path, path.relative_to(options.root)) for path in options.files]
    for row in rows:
        print(json.dumps(row))
    read = [row for row in rows if row["refused"] is None]
    largest = max((row["largest_difference_us"] or 0.0 for row in read), default=0.0)
    judged = [row for row in read if row["by_hand"]]
    walls = [[re.split("[:,]", row[key])[0] for row in judged] for key in ("by_hand", "verdict")]
    counts = {"recordings": len(rows), "read": len(read), "largest_difference_us": largest}
    counts |= {"judged": len(judged), "agrees": sum(map(str.__eq__, *walls))}
    record.write(options, counts | {"rows": rows})


def compared(path: Path, name: Path) -> dict[str, Any]:
    """The row of a file."""
    ours, doctor = (penstock(verb, path) for verb in (["trace", "--json"], ["doctor"]))
    file = "/".join(name.parts[1:]).replace(",", "/")
    by_hand = BY_HAND.get(name.parts[0], {}).get(file)
    row = {"from": name.parts[0], "file": file, "refused": None, "by_hand": by_hand}
    if ours.returncode:
        return row | {"refused": ours.stderr.strip().removeprefix("error: ").replace(f"{path} ", "")}
    timeline = json.loads(ours.stdout)["timeline"]["all"]
    figures = {"total_ms": timeline["total_us"] / 1e3, "verdict": doctor.stdout.partition("\n")[0]}
    truth = totals(path)
    difference = None if truth is None else max(abs(timeline[key] - value) for key, value in truth.items())
    return row | figures | {"events": timeline["events"], "largest_difference_us": difference}


def penstock(words: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    """`penstock WORDS PATH`."""
    verb, *options = words
    command = [sys.executable, "-m", "penstock", verb, str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def totals(path: Path) -> dict[str, float] | None:
    """Unions of the events of a device in microseconds, by the keys of `trace --json`; None without such events."""
    content = path.read_bytes()
    tree = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    events = [
        event
        for event in (tree["traceEvents"] if isinstance(tree, dict) else tree)
        if event.get("ph") == "X" and str(event.get("cat", "")).lower() in DEVICE
    ]
    if not events:
        return None
    starts = np.array([float(event["ts"]) for event in events])
    ends = starts + [float(event.get("dur", 0)) for event in events]
    is_copy = np.array(["memcpy" in event["cat"].lower() for event in events])
    names = [event["name"].lower().replace("_", "") for event in events]
    communicates = np.array([any(part.replace("_", "") in name for part in COMMUNICATION) for name in names]) & ~is_copy
    computes = ~is_copy & ~communicates
    busy, kernels, computing = (covered(starts, ends, rows) for rows in (computes | True, ~is_copy, computes))
    total = float(ends.max() - starts.min())
    return {
        "total_us": total,
        "busy_us": busy,
        "idle_us": total - busy,
        "compute_us": computing,
        "exposed_communication_us": kernels - computing,
        "exposed_memcpy_us": busy - kernels,
    }


def covered(starts: NDArray[Any], ends: NDArray[Any], rows: NDArray[Any]) -> float:
    """Length of the union of some intervals."""
    order = np.argsort(starts[rows], kind="stable")
    first, last = starts[rows][order], np.maximum.accumulate(ends[rows][order]) if rows.any() else ends[rows]
    begins = np.flatnonzero(np.r_[True, first[1:] > last[:-1]]) if len(first) else np.array([], dtype=int)
    finals = np.r_[begins[1:] - 1, len(first) - 1] if len(first) else begins
    return float((last[finals] - first[begins]).sum())


if __name__ == "__main__":
    main()
