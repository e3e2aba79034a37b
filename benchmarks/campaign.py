"""Kills and faults at random moments, and whether each run that goes on equals one that had none (tests/campaign).

python -m benchmarks.campaign --seconds 1200 --log campaign.jsonl --output benchmarks/results/campaign.json

Each run is a line of the log; a campaign that finds a log goes on behind it, and the record counts all runs of the log
(--seconds 0 only counts). The exit code is 1 if a run was wrong.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import record
from tests.campaign.campaign import Round, rounds, summary
from tests.campaign.faults import KILLS

SEED = 29


def main() -> int:
    options = record.parser(__doc__, seconds=1200.0, seed=SEED, kinds=[str], log=Path("campaign.jsonl")).parse_args()
    options.log.touch()
    first, last = len(options.log.read_text().splitlines()), time.monotonic()
    with TemporaryDirectory(prefix="penstock-campaign-") as folder, options.log.open("a", buffering=1) as log:
        more = rounds(Path(folder), options.seconds, options.seed, options.kinds, first) if options.seconds else ()
        for ended in more:
            log.write(json.dumps({**asdict(ended), "seconds": round(time.monotonic() - last, 1)}) + "\n")
            last = time.monotonic()
            if ended.why:
                print(f"{ended.kind}, seed {ended.seed}: {ended.why}", flush=True)
    lines = [json.loads(line) for line in options.log.read_text().splitlines()]
    seconds = sum(line.pop("seconds") for line in lines)
    done = [Round(**line) for line in lines]
    numbers = {
        "runs": len(done),
        "kills": sum(ended.happened for ended in done if ended.kind in KILLS),
        "seconds": round(seconds),
        "wrong": [{"kind": ended.kind, "seed": ended.seed, "why": ended.why} for ended in done if ended.why],
        "kinds": summary(done),
    }
    print(numbers, flush=True)
    record.write(options, numbers)
    return 1 if numbers["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
