"""Damaged files of every reader, by a seed: how many are read, refused with one line, or a fault (tests/fuzz).

python -m benchmarks.fuzz --cases 10000 --output benchmarks/results/fuzz.json
python -m benchmarks.fuzz --weights --cases 1000 --output benchmarks/results/weights-fuzz.json

The exit code is 1 after a fault.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import record
from tests.fuzz.harness import MOST_SECONDS, cases, make_material, run, summary
from tests.fuzz.readers import READERS, WEIGHTS

SEED = 29


def main() -> int:
    weights = (False, "folders of Hugging Face weights alone")
    options = record.parser(__doc__, cases=10_000, seed=SEED, weights=weights).parse_args()
    ended, readers = [], WEIGHTS if options.weights else READERS
    with TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        make_material(readers, Path(folder))
        for case in run(readers, cases(readers, options.cases, options.seed), Path(folder)):
            ended.append(case)
            if case.is_fault:
                print(f"{case.reader}, seed {case.seed}: {case.how}", flush=True)
            if len(ended) % 500 == 0:
                print(f"{len(ended)} cases", flush=True)
    faults = [{"reader": case.reader, "seed": case.seed, "how": case.how} for case in ended if case.is_fault]
    most_bytes = max(reader.most_bytes for reader in readers.values())
    limits = {"seconds_of_the_processor": MOST_SECONDS, "bytes": most_bytes}
    numbers = {"cases": len(ended), "seed": options.seed, "faults": faults, "limits": limits, "readers": summary(ended)}
    record.write(options, numbers)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
