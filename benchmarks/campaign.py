"""Kills and faults at random moments, and whether each run that goes on equals one that had none (tests/campaign).

python -m benchmarks.campaign --seconds 1200 --output benchmarks/results/campaign.json
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import record
from tests.campaign.campaign import rounds, summary
from tests.campaign.faults import KILLS

SEED = 29


def main() -> int:
    """Run a campaign and record it; the exit code is 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--kinds", nargs="*", default=())
    record.add_arguments(parser)
    options = parser.parse_args()
    begin, done = time.monotonic(), []
    with TemporaryDirectory(prefix="penstock-campaign-") as folder:
        for one in rounds(Path(folder), options.seconds, options.seed, options.kinds):
            done.append(one)
            if one.why:
                print(f"{one.kind}, seed {one.seed}: {one.why}", flush=True)
            if len(done) % 20 == 0:
                print(f"{len(done)} runs, {time.monotonic() - begin:.0f} s", flush=True)
    wrong = [{"kind": one.kind, "seed": one.seed, "why": one.why} for one in done if one.why]
    numbers = {
        "runs": len(done),
        "kills": sum(one.happened for one in done if one.kind in KILLS),
        "seconds": round(time.monotonic() - begin),
        "seed": options.seed,
        "wrong": wrong,
        "kinds": summary(done),
    }
    print(numbers, flush=True)
    record.write(options, numbers)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
