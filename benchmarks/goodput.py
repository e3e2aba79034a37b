"""How far the goodput ledger is from the wall clock of a job that is killed and started again.

    python -m benchmarks.goodput --minutes 10 --output benchmarks/results/goodput.json

A run on this CPU is killed `--kills` times at equal intervals; it stays down for `DOWN_SECONDS`, and goes on from its
newest checkpoint. The clock beside it runs from the start of the first process to the end of the last one. The steps
that a killed process made after its newest checkpoint are in its metrics, and their time must be in `lost`.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record, runs
from penstock.train.goodput import wall_seconds

DOWN_SECONDS = 15.0
EVERY = 20  # steps between checkpoints
RUN = ("debug-2l", f"checkpoint.every={EVERY}", "evaluation.every=50", "training.steps=100000")


def played(folder: Path, seconds: float, kills: int) -> tuple[float, float, float]:
    """Seconds of the whole job, in which no process ran, and of steps that were made again."""
    down = lost = 0.0
    begin = time.monotonic()
    words = ["train", *RUN, f"record.folder={folder.parent}", "--name", folder.name]
    for attempt in range(1, kills + 2):
        process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL)
        time.sleep(max(0.0, begin + seconds * attempt / (kills + 1) - time.monotonic()))
        if attempt > kills:
            process.terminate()
            process.wait()
            break
        process.kill()
        process.wait()
        killed = time.monotonic()
        saved = max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoints/step-*")), default=0)
        lost += sum(line["step_seconds"] for line in runs.lines_of(folder) if line["step"] > saved)
        time.sleep(DOWN_SECONDS)
        down += time.monotonic() - killed
        words = ["train", str(folder), "--resume"]
    return time.monotonic() - begin, down, lost


def main() -> None:
    options = record.parser(__doc__, minutes=10.0, kills=3).parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "run")
        wall, down, lost = played(folder, 60 * options.minutes, options.kills)
        seconds = wall_seconds(folder / "goodput.jsonl")
    ledger = sum(seconds.values())
    numbers = {"wall_seconds": wall, "ledger_seconds": ledger, "difference": ledger / wall - 1, "kinds": seconds}
    numbers |= {"down_seconds": down, "lost_seconds_by_metrics": lost}
    record.show(numbers)
    record.write(options, numbers)


if __name__ == "__main__":
    main()
