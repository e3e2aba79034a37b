"""The fastest layout of every published model on a small cluster of each of a few chips, for docs/families.md.

    nice python -m benchmarks.plan_families --output benchmarks/results/plan-families.json

A cluster has so many devices that state of `STATE_BYTES` for each parameter takes at most `STATE_SHARE` of the smallest
chip, in nodes of 8, rounded up to a power of two. The file is written after each search, and a later call continues
with the searches that it lacks. Needs no GPU.
"""

import math
from typing import Any

from benchmarks import record
from benchmarks.search_all import Case, answered
from penstock.config.presets.registry import PRESETS
from penstock.config.size import size_of
from penstock.tune.kernels import commit_of_code

CHIPS = ("H100", "MI300X", "B200")
OURS = ("debug", "moe-")  # presets with these beginnings are no published models

LONG = "deepseek-v3.2"
"""Not searched: its rows of 131,072 positions, which its indexer keeps on one rank, fit none of these clusters."""

STATE_BYTES = 14  # of a parameter: bf16 weight, float32 gradient, master weight and two bfloat16 moments
STATE_SHARE = 64e9  # of the 80 GB of an H100; the rest is for activations


def devices_for(parameters: int) -> int:
    """Devices that hold the state of a model."""
    least = max(8, parameters * STATE_BYTES / STATE_SHARE)
    return 1 << (math.ceil(least) - 1).bit_length()


def cases() -> list[Case]:
    """Every published preset on one cluster of each chip, small clusters first."""
    sizes = {
        name: devices_for(size_of(make().model, 4096).parameters)
        for name, make in PRESETS.items()
        if not name.startswith(OURS) and name != LONG
    }
    by_size = sorted(sizes.items(), key=lambda item: item[1])
    return [{"model": name, "on": f"{devices}x{chip}"} for name, devices in by_size for chip in CHIPS]


def main() -> None:
    options = record.parser(__doc__).parse_args()
    rows: dict[str, Any] = record.numbers_in(options.output).get("searches", {})
    for case in cases():
        key = f"{case['model']} on {case['on']}"
        if key not in rows:
            rows[key] = {**answered(case), "commit": options.commit or commit_of_code()}
            record.show(rows[key])
            record.write(options, {"searches": rows})


if __name__ == "__main__":
    main()
