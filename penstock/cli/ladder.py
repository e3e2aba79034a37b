"""`penstock ladder`: what each optimization is worth, on this machine, for one model.

    penstock ladder deepseek-v2-lite parallel.expert=4 training.global_batch=64 --processes 4 --json ladder.json
    penstock ladder debug training.micro_batch=1 parallel.expert=2 --processes 2       on a laptop
    penstock ladder debug --ladder mine.toml --only baseline,mine                      a ladder of one's own
    penstock ladder ... --json ladder.json --resume                                    go on where a ladder was ended

A ladder trains one configuration after another, each the one before with one change, for some training steps on the
same rows with the same seed, and compares speed, memory and losses in one table. Every ladder step is `penstock
train` in its own processes. The steps are in penstock/tune/ladder.toml; docs/ladder.md explains the table.
"""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from penstock.base.errors import FAILED, ConfigError, DeviceError
from penstock.base.origin import command_text, commit_of_code
from penstock.cli.output import check_output, print_next, print_table
from penstock.cli.verbs import Force, Overrides, Processes, Target
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.size import size_of
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.local import processes_to_start
from penstock.train.run_folder import new_folder
from penstock.tune.kernels import describe_machine, write_result
from penstock.tune.ladder import (
    LadderGain,
    LadderStep,
    Measure,
    Outcome,
    SavedSteps,
    balancing,
    chosen,
    climb,
    gains,
    load_ladder_steps,
    our_ladder,
    read_saved_steps,
    steps_as_json,
)
from penstock.tune.trial import Trial, first_steps, run_trial

# Columns that a narrow terminal misses least.
_LEAST = ("x size", "x optimization", "gap", "TFLOP/s", "p99/p50", "changed", "loss", "peak GiB", "MFU", "x before")


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A ladder and its options."""

    steps: tuple[LadderStep, ...]
    wanted: frozenset[str]  # names of the steps to measure
    options: Trial  # what all steps have in common
    has_gpu: bool
    overrides: tuple[str, ...]  # of the user
    training_steps: int  # of each ladder step
    run: Run  # the user's
    flops_per_token: float

    @property
    def noun(self) -> str:
        return "GPU" if self.has_gpu else "process"

    @property
    def environment(self) -> dict[str, Any]:
        """For the file; a ladder goes on only in the same one."""
        sizes = {"ranks": self.options.processes, "steps": self.training_steps, "warm_up_steps": self.options.warm_up}
        return describe_machine(on_gpu=self.has_gpu) | sizes


def ladder(  # noqa: PLR0913 - one argument for each option
    target: Target,
    overrides: Overrides = None,
    processes: Processes = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of each ladder step.")] = 30,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="First training steps, which are not timed.")] = 10,
    file: Annotated[Path | None, typer.Option("--ladder", help="TOML file with a ladder of one's own.")] = None,
    only: Annotated[str, typer.Option("--only", help="Names of the ladder steps to measure: baseline,grouped.")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="File to write everything to.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Keep what the file of --json has measured.")] = False,
    most_seconds: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds after which a ladder step is ended; 0 never.")
    ] = 0.0,
    force: Force = False,
    commit: Annotated[str, typer.Option("--commit", help="Commit to write down, where there is no repository.")] = "",
) -> int:
    """Measure what each optimization is worth: one configuration after another, each in processes of its own.

    Exit codes: 0 a ladder step ran, 1 none did, 2 something is wrong that you can mend.
    """
    environment = read_environment()
    if environment.started_by:
        raise DeviceError(
            "a ladder starts its own processes", got=f"one of {environment.started_by}'s", fix="start one command"
        )
    if not isfinite(most_seconds):  # typer takes nan and inf
        raise ConfigError("--timeout is no number of seconds", got=most_seconds, allowed="0 (never) or more")
    if warm_up >= steps:
        raise ConfigError("--warm-up leaves no step to time", got=f"{warm_up} of {steps}", allowed=f"0 to {steps - 1}")
    if resumes and output is None:
        raise ConfigError("--resume needs the file that it goes on with", fix="--json FILE")
    check_output(output, "--json", force=force or resumes)  # a resumed ladder writes over its own file
    run, changes = load_run(target, overrides or ()), tuple(overrides or ())
    table = our_ladder() if file is None else load_ladder_steps(file)
    every = (*changes, *first_steps(run, steps))  # without evaluation, checkpoints and other output
    ranks = processes_to_start(run, environment, processes)
    grid_of(load_run(target, every), ranks)  # refuses what no step could run
    plan = LadderPlan(
        steps=table,
        wanted=chosen(table, [*filter(None, map(str.strip, only.split(",")))]),
        options=Trial(
            name="",
            target=target,
            overrides=every,
            processes=ranks,
            warm_up=warm_up,
            folder=new_folder(Path(run.record.folder), f"ladder-{run.name}"),  # never that of another ladder
            most_seconds=most_seconds,
        ),
        has_gpu=run.device != "cpu" and torch.cuda.device_count() > 0,
        overrides=changes,
        training_steps=steps,
        run=run,
        flops_per_token=size_of(run.model, run.training.sequence_length).flops_per_token,
    )
    saved = SavedSteps()
    if output is not None and resumes:
        saved = read_saved_steps(output, plan.environment, commit or commit_of_code())
    outcomes = climb_and_print(plan, saved, run_trial, output, commit)
    print_next("train", target, *changes)
    return 0 if any(outcome.state == "ran" for outcome in outcomes) else FAILED


def climb_and_print(
    plan: LadderPlan, saved: SavedSteps, measure: Measure, output: Path | None, commit: str
) -> list[Outcome]:
    """Measure every ladder step, print a line after each and the table last, and keep the file up to date."""
    options, training = plan.options, plan.run.training
    routing = balancing(plan.run)
    where = f"{options.processes} {'GPU(s)' if plan.has_gpu else 'CPU process(es)'}"
    length = f"{plan.training_steps} steps of {training.global_batch} x {training.sequence_length} tokens each"
    print(f"ladder of {plan.run.name}: {len(plan.wanted)} ladder steps on {where}, {length}")
    print(f"routing: {routing}")
    print(f"runs and what they print: {options.folder}", flush=True)
    outcomes: list[Outcome] = []
    # The file is written after every step, so an ended ladder can go on.
    for outcome in climb(plan.steps, plan.wanted, options, saved.or_measured(measure), has_gpu=plan.has_gpu):
        outcomes.append(outcome)
        print(_line(outcome, gains(outcomes)[-1], plan), flush=True)
        if output is not None:
            numbers = {
                "target": options.target,
                "overrides": list(plan.overrides),
                "routing": routing,
                "flops_per_token": plan.flops_per_token,
                "ladder_steps": steps_as_json(outcomes, plan.flops_per_token),
                "still_ahead": saved.still_ahead(outcomes),
            }
            write_result(output, command=command_text(), commit=commit, environment=plan.environment, numbers=numbers)
    print()
    measured = (f"tokens/s/{plan.noun}", "step ms", "p99/p50", "MFU", "TFLOP/s", "peak GiB", "loss", "gap")
    columns = ("ladder step", *measured, "x before", "x optimization", "x size", "x first", "changed")
    rows = [_row(outcome, gain, plan) for outcome, gain in zip(outcomes, gains(outcomes), strict=True)]
    # A row without figures is a name and a state, blanks, and a reason in the last column.
    print_table(columns, [(*row, *[""] * (len(columns) - len(row) - 1), last) for *row, last in rows], _LEAST)
    timed = f"medians after {options.warm_up} of {plan.training_steps} steps"
    print(f"\n{routing}; {timed}; gap: largest relative difference of a step's loss from the first ladder step's")
    return outcomes


def _line(outcome: Outcome, gain: LadderGain | None, plan: LadderPlan) -> str:
    if outcome.figures is None or gain is None:
        return f"{outcome.step.name:<16}{outcome.state}: {outcome.reason}"
    note = f"  {outcome.reason}" if outcome.reason else ""
    return (
        f"{outcome.step.name:<16}{outcome.figures.tokens_per_second_per_device:>9,.0f} tokens/s/{plan.noun}  "
        f"{gain.before:.2f} x the step before, {gain.first:.2f} x the first  ({outcome.seconds:.0f} s){note}"
    )


def _row(outcome: Outcome, gain: LadderGain | None, plan: LadderPlan) -> tuple[str, ...]:
    """Cells of a ladder step; if it did not run, its name, state and reason."""
    name = f"{outcome.step.name} (size)" if outcome.step.is_size else outcome.step.name
    figures = outcome.figures
    if figures is None or gain is None:  # the step did not run
        return name, outcome.state, outcome.reason
    notes = list(outcome.changed)
    if outcome.reason:
        notes.append(f"({outcome.reason})")
    elif figures.repeated_steps:
        notes.append(f"({figures.repeated_steps} steps repeated)")
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
        " ".join(notes),
    )
