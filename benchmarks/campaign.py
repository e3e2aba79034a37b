"""Kills and faults at random moments, and whether each run that goes on equals one that had none (tests/campaign).

python -m benchmarks.campaign --seconds 1200 --log campaign.jsonl --output benchmarks/results/campaign.json

Each run is a line of the log; a campaign that finds a log goes on behind it, and the record counts all runs of the log
(--seconds 0 only counts).
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import record
from tests.campaign.campaign import Round, rounds, summary
from tests.campaign.faults import KILLS

SEED = 29


def main() -> int:
    """Run a campaign and record it; the exit code is 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--kinds", nargs="*", default=())
    parser.add_argument("--log", type=Path, required=True)
    record.add_arguments(parser)
    options = parser.parse_args()
    options.log.touch()
    first = len(options.log.read_text().splitlines())
    last = time.monotonic()
    with TemporaryDirectory(prefix="penstock-campaign-") as folder, options.log.open("a", buffering=1) as log:
        more = rounds(Path(folder), options.seconds, options.seed, options.kinds, first) if options.seconds else ()
        for one in more:
            now = time.monotonic()
            log.write(json.dumps({**asdict(one), "seconds": round(now - last, 1)}) + "\n")
            last = now
            if one.why:
                print(f"{one.kind}, seed {one.seed}: {one.why}", flush=True)
    numbers = total(options.log)
    print(numbers, flush=True)
    record.write(options, numbers)
    return 1 if numbers["wrong"] else 0


def total(log: Path) -> dict[str, Any]:
    """Counts of all runs of a log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seconds = sum(line.pop("seconds") for line in lines)
    done = [Round(**line) for line in lines]
    return {
        "runs": len(done),
        "kills": sum(one.happened for one in done if one.kind in KILLS),
        "seconds": round(seconds),
        "wrong": [{"kind": one.kind, "seed": one.seed, "why": one.why} for one in done if one.why],
        "kinds": summary(done),
    }


if __name__ == "__main__":
    sys.exit(main())
