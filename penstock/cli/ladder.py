"""`penstock ladder`: what each optimization is worth, on this machine, for one model.

    penstock ladder deepseek-v2-lite parallel.expert=4 training.global_batch=64 --processes 4 --json ladder.json
    penstock ladder debug training.micro_batch=1 parallel.expert=2 --processes 2       on a laptop
    penstock ladder debug --rungs mine.toml --only baseline,mine                       rungs of one's own
    penstock ladder ... --json ladder.json --resume                                    go on where a ladder was ended

A ladder trains one configuration after another, each the one below and a change, for some steps on the same rows with
the same seed, and puts their speed, memory and losses into one table. Every rung is `penstock train` in processes of
its own. What a rung is stands in penstock/tune/rungs.py, how to read the table in docs/ladder.md.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from penstock.base.errors import FAILED, ConfigError, DeviceError
from penstock.cli.next import print_next
from penstock.cli.outputs import Force, check_output
from penstock.cli.table import print_table
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.models.count import count
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.local import processes_to_start
from penstock.train.run_folder import free_name
from penstock.tune import evidence
from penstock.tune.ladder import Gain, Ground, Measure, Outcome, balancing, climb, gains
from penstock.tune.ladder_file import NOTHING_KEPT, Kept, read_kept, recalling, rungs_as_json
from penstock.tune.rungs import LADDER, LadderStep, chosen, load_rungs
from penstock.tune.trial import first_steps, run_trial

_LEAST = ("x size", "x optimization", "gap", "TFLOP/s", "p99/p50", "changed", "loss", "peak GiB", "MFU", "x before")
"""Columns that a narrow terminal misses least."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A ladder and all that is said about it.

    Attributes:
        rungs: all of them.
        wanted: names of those that are measured.
        ground: below them.
        own: the user's overrides.
        steps: of each rung.
        routing: how tokens find their experts.
        flops_per_token: of the model.
        output: JSON file to write, or None.
        commit: of the code; empty finds out.
        resumes: take from the file what it has.
    """

    rungs: tuple[LadderStep, ...]
    wanted: frozenset[str]
    ground: Ground
    own: tuple[str, ...]
    steps: int
    routing: str
    flops_per_token: float
    output: Path | None
    commit: str
    resumes: bool


def ladder(  # noqa: PLR0913 - one argument for each option
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Ranks of each rung; without it, one for each GPU.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each rung.")] = 30,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="First steps that are not timed.")] = 10,
    rungs: Annotated[Path | None, typer.Option("--rungs", help="TOML file with a ladder of one's own.")] = None,
    only: Annotated[str, typer.Option("--only", help="Names of the rungs to measure: baseline,grouped.")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="File to write everything to.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Keep what the file of --json has measured.")] = False,
    most_seconds: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds after which a rung is ended; 0 never.")
    ] = 0.0,
    force: Force = False,
    commit: Annotated[str, typer.Option("--commit", help="Commit to write down, where there is no repository.")] = "",
) -> int:
    """Measure what each optimization is worth: one configuration after another, each in processes of its own.

    Exit codes: 0 a rung ran, 1 none did, 2 something is wrong that you can mend.
    """
    environment = read_environment()
    if environment.started_by:
        raise DeviceError(
            "a ladder starts its own processes", got=f"one of {environment.started_by}'s", fix="start one command"
        )
    if not isfinite(most_seconds):
        raise ConfigError("--timeout is no number of seconds", got=most_seconds, allowed="0 (never) or more")
    if warm_up >= steps:
        raise ConfigError("--warm-up leaves no step to time", got=f"{warm_up} of {steps}", allowed=f"0 to {steps - 1}")
    if resumes and output is None:
        raise ConfigError("--resume needs the file that it goes on with", fix="--json FILE")
    if output is not None:
        check_output(output, "--json", force=force or resumes)
    whole, own = load_run(target, overrides or ()), tuple(overrides or ())
    table = LADDER if rungs is None else load_rungs(rungs)
    parent = Path(whole.record.folder)
    ground = Ground(
        target=target,
        overrides=(*own, *first_steps(whole, steps)),
        processes=processes_to_start(whole, environment, processes),
        warm_up=warm_up,
        folder=parent / free_name(parent, f"ladder-{whole.name}"),
        most_seconds=most_seconds,
        has_gpu=whole.device != "cpu" and torch.cuda.device_count() > 0,
    )
    grid_of(load_run(target, ground.overrides), ground.processes)
    plan = Plan(
        rungs=table,
        wanted=chosen(table, [name.strip() for name in only.split(",") if name.strip()]),
        ground=ground,
        own=own,
        steps=steps,
        routing=balancing(whole),
        flops_per_token=count(whole.model, whole.training.sequence_length).flops_per_token,
        output=output,
        commit=commit,
        resumes=resumes,
    )
    outcomes = climb_and_print(plan, run_trial)
    print_next("train", target, *own)
    return 0 if any(outcome.state == "ran" for outcome in outcomes) else FAILED


def climb_and_print(plan: Plan, measure: Measure) -> list[Outcome]:
    """Measure every rung, print a line as each ends and the table last, and keep the file up to date.

    Args:
        plan: the ladder.
        measure: runs a trial.
    """
    ground = plan.ground
    run = load_run(ground.target, ground.overrides)
    tokens = f"{run.training.global_batch} x {run.training.sequence_length} tokens"
    where = f"{ground.processes} GPU(s)" if ground.has_gpu else f"{ground.processes} CPU process(es)"
    print(f"ladder of {run.name}: {len(plan.wanted)} rungs on {where}, {plan.steps} steps of {tokens} each")
    print(f"routing: {plan.routing}")
    print(f"runs and what they print: {ground.folder}", flush=True)
    kept = NOTHING_KEPT
    if plan.resumes and plan.output is not None:
        kept = read_kept(plan.output, _environment(plan), plan.commit or evidence.commit_of_code())
    outcomes: list[Outcome] = []
    for outcome in climb(plan.rungs, plan.wanted, ground, recalling(kept, measure)):
        outcomes.append(outcome)
        print("\n".join(_lines(outcome, gains(outcomes)[-1], plan)), flush=True)
        if plan.output is not None:
            _write(plan, plan.output, outcomes, kept)
    print()
    print_table(*_table(outcomes, plan), _LEAST)
    timed = f"medians after {ground.warm_up} of {plan.steps} steps"
    print(f"\n{plan.routing}; {timed}; gap: largest relative difference of a step's loss from the first rung's")
    return outcomes


def _noun(plan: Plan) -> str:
    return "GPU" if plan.ground.has_gpu else "process"


def _environment(plan: Plan) -> dict[str, Any]:
    return evidence.describe_machine(on_gpu=plan.ground.has_gpu) | {
        "ranks": plan.ground.processes,
        "steps": plan.steps,
        "warm_up_steps": plan.ground.warm_up,
    }


def _write(plan: Plan, path: Path, outcomes: Sequence[Outcome], kept: Kept) -> None:
    evidence.write(
        path,
        command=shlex.join(["penstock", *sys.argv[1:]]),
        commit=plan.commit,
        environment=_environment(plan),
        numbers={
            "target": plan.ground.target,
            "overrides": list(plan.own),
            "routing": plan.routing,
            "flops_per_token": plan.flops_per_token,
            "rungs": rungs_as_json(outcomes, plan.flops_per_token),
            "still_ahead": kept.still_ahead(outcomes),
        },
    )


def _lines(outcome: Outcome, gain: Gain | None, plan: Plan) -> list[str]:
    """What is said as soon as a rung has ended: how it went, and below it what else was tried."""
    others = [f"{'':<16}not with {' '.join(one.change)}: {one.reason}" for one in outcome.others]
    return [_line(outcome, gain, plan), *others]


def _line(outcome: Outcome, gain: Gain | None, plan: Plan) -> str:
    if outcome.figures is None or gain is None:
        return f"{outcome.rung.name:<16}{outcome.state}: {outcome.reason}"
    notes = [f"  with {' '.join(outcome.fallback)}"] if outcome.fallback else []
    notes += [f"  {outcome.reason}"] if outcome.reason else []
    return (
        f"{outcome.rung.name:<16}{outcome.figures.tokens_per_second_per_device:>9,.0f} tokens/s/{_noun(plan)}  "
        f"{gain.before:.2f} x the rung before, {gain.first:.2f} x the first  ({outcome.seconds:.0f} s){''.join(notes)}"
    )


def _table(outcomes: Sequence[Outcome], plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows."""
    measured = (f"tokens/s/{_noun(plan)}", "step ms", "p99/p50", "MFU", "TFLOP/s", "peak GiB", "loss", "gap")
    columns = ("rung", *measured, "x before", "x optimization", "x size", "x first", "changed")
    rows = [_row(outcome, gain, plan) for outcome, gain in zip(outcomes, gains(outcomes), strict=True)]
    return columns, [(*row, *("" for _ in range(len(columns) - len(row) - 1)), last) for *row, last in rows]


def _row(outcome: Outcome, gain: Gain | None, plan: Plan) -> tuple[str, ...]:
    """Cells of a rung; of one that did not run, its name, how that is called, and why."""
    name = f"{outcome.rung.name} (size)" if outcome.rung.is_size else outcome.rung.name
    figures = outcome.figures
    if figures is None or gain is None:
        return name, outcome.state, " ".join([outcome.reason, *_others(outcome)])
    notes = list(outcome.changed)
    if outcome.reason:
        notes.append(f"({outcome.reason})")
    elif figures.repeated_steps:
        notes.append(f"({figures.repeated_steps} steps made twice)")
    utilization = figures.model_flops_utilization
    return (
        name,
        f"{figures.tokens_per_second_per_device:,.0f}",
        f"{figures.step_seconds_median * 1e3:.1f}",
        f"{figures.jitter:.2f}",
        "-" if utilization is None else f"{utilization:.1%}",
        f"{figures.flops_per_second(plan.flops_per_token) / 1e12:.3g}",
        f"{figures.peak_memory_bytes / 2**30:.1f}",
        f"{figures.losses[0]:.4f} -> {figures.losses[-1]:.4f}",
        f"{gain.loss_gap:.1e}",
        f"{gain.before:.2f}",
        f"{gain.by_optimization:.2f}",
        f"{gain.by_size:.2f}",
        f"{gain.first:.2f}",
        " ".join([*notes, *_others(outcome)]),
    )


def _others(outcome: Outcome) -> list[str]:
    """What else was tried, and in a few words why it did not do."""
    return [f"(not with {' '.join(one.change)}: {one.reason.partition('; ')[0]})" for one in outcome.others]
