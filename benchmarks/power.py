"""What steady work does to the clock of a GPU: tokens per second, clock and power, step by step.

    python -m benchmarks.power deepseek-v2-lite-9l training.micro_batch=4 --case "16 bits" \
        --case "8 bits" float8.dense=blockwise-square float8.experts=blockwise-square --output power.json

A GPU that would draw more than its board may have lowers its clock. Cases are `penstock train` on one GPU. Beside each
`nvidia-smi` is asked for clock and power; a step's are medians of what it said during the step. Which answers these are
is reckoned back from the end of the work, after which power falls.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks import record
from penstock.config.load import load_run
from penstock.tune.trial import Failure, Trial, first_steps, run_trial

ASKED = ("clocks.sm", "clocks.max.sm", "power.draw.instant", "power.limit")
QUERY = ("nvidia-smi", "-i", "0", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits", "-lms", "100")

AT_WORK = 0.6
"""Of the highest power: a step draws more, and a host that starts or ends draws less."""


@dataclass(frozen=True)
class Answer:
    """Of `nvidia-smi`, in MHz and watts.

    Attributes:
        seconds: when it came, on the host's clock.
    """

    seconds: float
    clock: float
    most_clock: float
    power: float
    most_power: float


def main() -> None:
    """Train each case, print its steps, and write all so far."""
    options = parse_arguments()
    cases: list[dict[str, Any]] = []
    for name, *overrides in options.case:
        cases.append({"case": name, "overrides": overrides} | measure(options, overrides))
        print_case(cases[-1])
        numbers = {"target": options.target, "overrides": options.overrides, "cases": cases}
        record.write(options, numbers, steps=options.steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("overrides", nargs="*", default=[], help="of all cases")
    parser.add_argument("--case", nargs="+", action="append", required=True, metavar="NAME FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds after which a case is ended; 0 never")
    record.add_arguments(parser)
    return parser.parse_intermixed_args()


def measure(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Steps of a case, all but the first, which compiles; where it did not run, the reason."""
    every = (*options.overrides, *overrides)
    every = (*every, *first_steps(load_run(options.target, every), options.steps))
    with tempfile.TemporaryDirectory() as folder, answers() as heard:
        found = run_trial(
            Trial(
                name="power",
                target=options.target,
                overrides=every,
                processes=1,
                warm_up=1,
                folder=Path(folder),
                most_seconds=options.timeout,
            )
        )
    if isinstance(found, Failure):
        return {"reason": found.reason, "steps": []}
    rate = found.tokens_per_second_per_device * found.step_seconds_median
    return {
        "reason": "",
        "most_clock_mhz": heard[0].most_clock,
        "most_power_watts": heard[0].most_power,
        "steps": [
            {"tokens_per_second": rate / seconds, "clock_mhz": clock, "power_watts": power}
            for seconds, (clock, power) in zip(found.step_seconds, of_steps(heard, found.step_seconds), strict=True)
        ],
    }


@contextmanager
def answers() -> Iterator[list[Answer]]:
    """What `nvidia-smi` says while the block runs."""
    heard: list[Answer] = []
    with subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True) as process:

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                heard.append(Answer(time.monotonic(), *map(float, line.split(","))))

        thread = Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield heard
        finally:
            process.terminate()
            thread.join()


def of_steps(heard: Sequence[Answer], step_seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Clock and power of each step: medians of the answers that came during it.

    Args:
        heard: until after the last step.
        step_seconds: of steps without a pause between them.
    """
    least = AT_WORK * max(one.power for one in heard)
    end = max(one.seconds for one in heard if one.power >= least)
    lasting = list(accumulate(reversed(step_seconds)))
    spans = zip(lasting, [0.0, *lasting], strict=False)
    found = []
    for start, stop in reversed(list(spans)):
        during = [one for one in heard if end - start <= one.seconds <= end - stop] or [
            min(heard, key=lambda one, middle=end - (start + stop) / 2: abs(one.seconds - middle))  # type: ignore[misc]
        ]
        found.append((statistics.median(one.clock for one in during), statistics.median(one.power for one in during)))
    return found


def print_case(case: dict[str, Any]) -> None:
    if case["reason"]:
        print(f"{case['case']:<12}{case['reason']}", flush=True)
        return
    print(f"{case['case']:<12}at most {case['most_clock_mhz']:.0f} MHz, {case['most_power_watts']:.0f} W")
    for number, step in enumerate(case["steps"], start=2):
        print(
            f"  step {number:3}  {step['tokens_per_second']:9,.0f} tokens/s  {step['clock_mhz']:5.0f} MHz  "
            f"{step['power_watts']:5.0f} W",
            flush=True,
        )


if __name__ == "__main__":
    main()
