"""Damaged files of every reader, by a seed: how many are read, refused with one line, or a fault (tests/fuzz).

python -m benchmarks.fuzz --cases 10000 --output benchmarks/results/fuzz.json
python -m benchmarks.fuzz --weights --cases 1000 --output benchmarks/results/weights-fuzz.json
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import record
from tests.fuzz.harness import MOST_SECONDS, cases, make_material, run, summary
from tests.fuzz.readers import READERS, WEIGHTS

SEED = 29


def main() -> int:
    """Run the cases and record how they ended; the exit code is 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--weights", action="store_true", help="Folders of Hugging Face weights alone.")
    record.add_arguments(parser)
    options = parser.parse_args()
    begin = time.monotonic()
    ended, readers = [], WEIGHTS if options.weights else READERS
    with TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        make_material(readers, Path(folder))
        for one in run(readers, cases(readers, options.cases, options.seed), Path(folder)):
            ended.append(one)
            if one.is_fault:
                print(f"{one.reader}, seed {one.seed}: {one.how}", flush=True)
            if len(ended) % 500 == 0:
                print(f"{len(ended)} cases, {time.monotonic() - begin:.0f} s", flush=True)
    faults = [{"reader": one.reader, "seed": one.seed, "how": one.how} for one in ended if one.is_fault]
    most_bytes = max(reader.most_bytes for reader in readers.values())
    limits = {"seconds_of_the_processor": MOST_SECONDS, "bytes": most_bytes}
    numbers = {"cases": len(ended), "seed": options.seed, "faults": faults, "limits": limits, "readers": summary(ended)}
    print(f"{len(ended)} cases, {time.monotonic() - begin:.0f} s, {len(faults)} faults", flush=True)
    record.write(options, numbers)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
