"""`penstock prove`: whether random compositions of models, layouts and options compute what one process computes.

    penstock prove                                    a minute of draws, on up to 8 processes of this machine's CPU
    penstock prove --seconds 1200 --seed 7            longer, and other draws
    penstock prove --processes 4 parallel.expert=4    one composition: four ranks, with these overrides of a small model
    penstock prove --device cuda                      on the GPUs of this machine, beside the definitions of all kernels
    penstock prove --device cuda --graphs             captured graphs beside eager passes for 1,000 steps, bit for bit
    penstock prove --json                             for programs

Each draw trains two to five steps in float32 or bfloat16 beside one process, and losses, gradient norms, weights and
moments are compared. Some begin with exported and imported weights, or go on from a checkpoint in another layout
(penstock/prove/composition.py has these settings). A draw that differs because scores of a router tie, by the printed
margin, equals one process that makes the same choices. One that does not is a fault: it is made smaller, and the
command that repeats it is printed.

Exit codes: 0 without a fault, 1 with one. docs/numerics.md says what was found so far.
"""

import json
import time
from collections import Counter
from math import isfinite
from typing import Annotated, Any

import typer

from penstock.base.errors import FAILED, ConfigError, DeviceError
from penstock.cli.verbs import Json, Overrides
from penstock.parallel.launch.process import count_gpus
from penstock.prove.composition import Device, composition_of
from penstock.prove.proof import REPLAYS, Prover, Verdict, outcomes
from penstock.prove.ranks import MOST_RANKS, Children
from penstock.train.run_folder import temporary_folder

KINDS = ("equal", "tie", "refused", "fault")
TELL_SECONDS = 10.0
"""How often the counts are printed."""


def prove(
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, max=MOST_RANKS, help="Ranks of the one composition to play.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long to draw.")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    device: Annotated[Device, typer.Option("--device", help="cuda takes each GPU of this machine for a rank.")] = "cpu",
    graphs: Annotated[bool, typer.Option("--graphs", help=f"{REPLAYS:,} steps of graphs beside eager ones.")] = False,
    as_json: Json = False,
) -> int:
    """Train random compositions on CPU ranks or GPUs beside one process, and shrink what differs."""
    if overrides and processes is None:
        raise ConfigError("overrides are of one composition, whose ranks are not given", fix="--processes 4")
    if graphs and device == "cpu":
        raise ConfigError("a CPU has no graphs", fix="--device cuda")
    gpus = count_gpus("--device cpu") if device == "cuda" else 0
    if gpus and (processes or 0) > gpus:
        raise DeviceError("more processes than GPUs on this machine", got=processes, allowed=gpus, fix="--device cpu")
    ranks = Children(device)
    try:
        with temporary_folder("prove") as folder:
            prover = Prover(ranks, folder, gpus, REPLAYS if graphs else 0)
            if processes is None:
                return _draws(prover, seconds, seed, as_json=as_json)
            outcome = prover.judge(composition_of(processes, overrides or (), device))
            print(json.dumps(as_facts(outcome)) if as_json else "\n".join(_lines(outcome)))
            return FAILED if outcome.kind == "fault" else 0
    finally:
        ranks.close()


def _draws(prover: Prover, seconds: float, seed: int, *, as_json: bool) -> int:
    begin = last_report = time.monotonic()
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    faults = []
    for number, outcome in outcomes(prover, seed):
        counts[outcome.kind] += 1
        if outcome.kind == "fault":
            smallest = prover.smallest(outcome)
            faults.append(as_facts(smallest) | {"seed": seed, "number": number})
        if not as_json and outcome.kind in ("tie", "fault"):
            print(f"draw {number}: {outcome.kind}: {outcome.text}", flush=True)
            if outcome.kind == "fault":
                print(f"  smallest: {smallest.text}\n  {smallest.composition.command}", flush=True)
        now = time.monotonic()
        if not as_json and (now - last_report > TELL_SECONDS or now - begin > seconds):
            last_report = now
            print(f"{now - begin:5.0f} s: {_counted(counts)}", flush=True)
        if now - begin > seconds:
            break
    if as_json:
        print(json.dumps({"seed": seed, "counts": counts, "faults": faults}))
    return FAILED if faults else 0


def _counted(counts: Counter[str]) -> str:
    return f"{counts.total()} draws: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def _lines(outcome: Verdict) -> list[str]:
    lines = [outcome.kind if not outcome.text else f"{outcome.kind}: {outcome.text}"]
    lines += [f"{figure:<14} differs by {value:.1e}" for figure, value in outcome.figures.items()]
    if isfinite(outcome.margin):
        lines.append(f"the nearest choice of an expert has a margin of {outcome.margin:.1e}")
    return lines


def as_facts(outcome: Verdict) -> dict[str, Any]:
    return {
        "kind": outcome.kind,
        "command": outcome.composition.command,
        "text": outcome.text,
        "figures": outcome.figures,
        "margin": outcome.margin if outcome.margin < float("inf") else None,
    }
