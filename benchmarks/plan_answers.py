"""What `penstock plan` answers to questions that the documents quote.

    python -m benchmarks.plan_answers --output benchmarks/results/plan-answers.json

Projections, not measurements; minutes on a laptop. `worlds` are the fastest layouts of DeepSeek-V3 on parts of 1,000
H100, `optimizers` steps of eight layers of DeepSeek-V2-Lite on one H200 with 65,536 tokens, by optimizer.
"""

import json
from typing import Any

from benchmarks import record, runs

WORLDS = ("deepseek-v3", "--on", "1000xH100", "--worlds", "auto")
ONE_GPU = ("deepseek-v2-lite-8l", "training.global_batch=16", "training.micro_batch=4")


def worlds() -> list[dict[str, Any]]:
    """Devices, layout and speed of each answer, and its share of the fastest."""
    rows = []
    for point in json.loads(runs.penstock("plan", *WORLDS, "--json"))["worlds"]:
        devices, candidate = int(point["asked"]["devices"]), point["candidate"]
        speed = candidate["tokens_per_second_per_device"] * devices
        rows.append({"devices": devices, "layout": candidate["layout"], "tokens_per_second": speed})
    fastest = max(row["tokens_per_second"] for row in rows)
    return [row | {"share": row["tokens_per_second"] / fastest} for row in rows]


def optimizers() -> dict[str, float]:
    """Seconds of a step by optimizer, and their ratio."""
    own = ("--on", "1xH200", "--layout", "own")
    methods = ("adamw", "muon")
    seconds = {name: runs.planned(*ONE_GPU, f"optimizer.method={name}", *own)["step_seconds"] for name in methods}
    return seconds | {"muon_over_adamw": seconds["muon"] / seconds["adamw"]}


def main() -> None:
    options = record.parser(__doc__).parse_args()
    numbers = {"optimizers": optimizers(), "worlds": worlds()}
    print(json.dumps(numbers, indent=2))
    record.write(options, numbers)


if __name__ == "__main__":
    main()
