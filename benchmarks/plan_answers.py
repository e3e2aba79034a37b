"""What `penstock plan` answers to questions that the documents quote.

    python -m benchmarks.plan_answers --output benchmarks/results/plan-answers.json

Projections, not measurements; minutes on a laptop. `worlds` are the fastest layouts of DeepSeek-V3 on parts of 1,000
H100, `optimizers` steps of eight layers of DeepSeek-V2-Lite on one H200 with 65,536 tokens, by optimizer.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks import record

WORLDS = ("deepseek-v3", "--on", "1000xH100", "--worlds", "auto")
ONE_GPU = ("deepseek-v2-lite-8l", "training.global_batch=16", "training.micro_batch=4")


def answer(*words: str) -> Any:
    """What a plan says as JSON."""
    command = [sys.executable, "-m", "penstock", "plan", *words, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def worlds() -> list[dict[str, Any]]:
    """Devices, layout and speed of each answer, and its share of the fastest."""
    found = []
    for point in answer(*WORLDS)["worlds"]:
        devices, one = int(point["asked"]["devices"]), point["candidate"]
        speed = one["tokens_per_second_per_device"] * devices
        found.append({"devices": devices, "layout": one["layout"], "tokens_per_second": speed})
    most = max(one["tokens_per_second"] for one in found)
    return [one | {"share": one["tokens_per_second"] / most} for one in found]


def optimizers() -> dict[str, float]:
    """Seconds of a step by optimizer, and their ratio."""
    seconds = {}
    for method in ("adamw", "muon"):
        (one,) = answer(*ONE_GPU, f"optimizer.method={method}", "--on", "1xH200", "--layout", "own")["candidates"]
        seconds[method] = one["step_seconds"]
    return seconds | {"muon_over_adamw": seconds["muon"] / seconds["adamw"]}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers = {"optimizers": optimizers(), "worlds": worlds()}
    print(json.dumps(numbers, indent=2))
    record.write(options, numbers)


if __name__ == "__main__":
    main()
