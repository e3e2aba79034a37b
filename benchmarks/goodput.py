"""How far the goodput ledger is from the wall clock of a job that is killed and started again.

    python -m benchmarks.goodput --minutes 10 --output benchmarks/results/goodput.json

A run on this CPU is killed `--kills` times at equal intervals; it stays down for `DOWN_SECONDS`, and goes on from its
newest checkpoint. The clock beside it runs from the start of the first process to the end of the last one. The steps
that a killed process made after its newest checkpoint are in its metrics, and their time must be in `lost`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.train.goodput import wall_seconds

DOWN_SECONDS = 15.0
EVERY = 20  # steps between checkpoints
RUN = ("debug-2l", f"checkpoint.every={EVERY}", "evaluation.every=50", "training.steps=100000")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of the metrics; the last may be incomplete."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def played(folder: Path, seconds: float, kills: int) -> tuple[float, float, float]:
    """Seconds of the whole job, in which no process ran, and of steps that were made again."""
    down = lost = 0.0
    begin = time.monotonic()
    words = ["train", *RUN, f"record.folder={folder.parent}", "--name", folder.name]
    for stretch in range(1, kills + 2):
        process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL)
        time.sleep(max(0.0, begin + seconds * stretch / (kills + 1) - time.monotonic()))
        if stretch <= kills:
            process.kill()
            process.wait()
            killed, saved = time.monotonic(), newest(folder)
            lost += sum(line["step_seconds"] for line in steps_of(folder) if line["step"] > saved)
            time.sleep(DOWN_SECONDS)
            down += time.monotonic() - killed
        else:
            process.terminate()
            process.wait()
        words = ["train", str(folder), "--resume"]
    return time.monotonic() - begin, down, lost


def newest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    saved = (folder / "checkpoints").glob("step-*")
    return max((int(path.name.partition("-")[2]) for path in saved), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput ledger against the wall clock")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=3)
    record.add_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "run")
        wall, down, lost = played(folder, 60 * options.minutes, options.kills)
        seconds = wall_seconds(folder / "goodput.jsonl")
    told = sum(seconds.values())
    numbers = {
        "wall_seconds": wall,
        "ledger_seconds": told,
        "difference": told / wall - 1,
        "kinds": seconds,
        "down_seconds": down,
        "lost_seconds_by_metrics": lost,
    }
    print(json.dumps(numbers, indent=2))
    record.write(options, numbers)


if __name__ == "__main__":
    main()
