"""`penstock doctor`: which wall stands before a run, by what evidence, and what each remedy would win.

    penstock doctor runs/first                 a run: its metrics, its traces, and what a plan says of it
    penstock doctor runs/first --on 8xH200     the same, where no trace says what it ran on
    penstock doctor best.toml --on 8xH200      a run that is only planned, by what the plan says of it
    penstock doctor traces/                    traces of any program; less is known

Same files, same verdict. The plan needs PyTorch, which takes seconds to import, so it is loaded by name and only for a
run; a trace is judged without it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import TraceError
from penstock.base.numbers import bytes_text
from penstock.cli.output import print_next, print_table
from penstock.cli.verbs import Json, Names, On, load_by_name
from penstock.config.load import RUN_FILE, load_run
from penstock.trace.analysis import analyse_files
from penstock.trace.recognize import PhaseNames, read_phase_names
from penstock.tune.doctor.diagnosis import (
    Diagnosis,
    diagnose,
    diagnosis_json,
    ms_text,
    spent_text,
)
from penstock.tune.doctor.evidence import Evidence, RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from penstock.tune.doctor.remedy import accepted
from penstock.tune.doctor.run_facts import (
    cluster_for,
    compared,
    facts_of,
    is_planned,
    is_run,
    recording_command,
)

Place = Annotated[list[Path], typer.Argument(metavar="PATH...", help="The folder of a run, its TOML file, or traces.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Judge only this step.")]


def doctor(paths: Place, on: On = None, step: Step = None, names: Names = None, as_json: Json = False) -> None:
    """Name the bottleneck (memory, communication, host, power, compute) and the gain of each remedy."""
    evidence = examine(paths, on=on, step=step, names=None if names is None else read_phase_names(names))
    try:
        verdict = diagnose(evidence)
    except TraceError as error:
        if len(paths) == 1 and is_run(paths[0]):
            fix = f"record one: {recording_command(paths[0])}; or say what the run is on: --on 8xH200"
            raise TraceError(error.what, fix=fix) from error
        raise
    if as_json:
        print(json.dumps(diagnosis_json(verdict), indent=2, allow_nan=False))
    else:
        print_verdict(verdict, evidence)
        if verdict.times.fits or any(remedy.fits for remedy in verdict.remedies):
            _print_next(paths, evidence, [remedy.change for remedy in verdict.remedies if remedy.fits])
        else:  # no change alone makes it fit; a search may find several
            path = paths[0] / RUN_FILE if is_run(paths[0]) else paths[0]
            print_next("plan", path, *([] if on is None else ["--on", on]))


def _print_next(paths: list[Path], evidence: Evidence, changes: list[str]) -> None:
    """Propose the run with the first change that its configuration accepts, or else a report."""
    path, run = paths[0], evidence.facts.run
    if run is not None and (is_run(path) or is_planned(path)):
        # Remedies come largest gain first; propose the first that the rules accept.
        fitting = (change for change in changes if accepted(run, change, evidence.facts.world) is not None)
        if (change := next(fitting, None)) is not None:
            print_next("train", path / RUN_FILE if is_run(path) else path, *change.split())
            return
    if is_run(path):
        print_next("report", path)
    elif not is_planned(path):
        print_next("report", path, "--html", "report.html")


def examine(
    paths: list[Path], *, on: str | None = None, step: int | None = None, names: PhaseNames | None = None
) -> Evidence:
    """Collect the evidence of a run's folder, a planned run's TOML file, or traces, which know their hardware."""
    path = paths[0]
    if len(paths) == 1 and is_run(path):
        evidence = _of_run(path, step, names)
    elif len(paths) == 1 and is_planned(path) and step is None:  # a file of a run has no steps
        facts = RunFacts(run=load_run(str(path.absolute())), has_steps=False)
        evidence = Evidence(
            source="none", ranks=(), facts=facts, missing=("the run is only planned: no step is recorded",)
        )
    elif on is None:
        return evidence_of(analyse_files(paths, step=step, names=names), RunFacts())
    else:
        raise TraceError(
            "--on is for the folder of a run, of which it makes a plan",
            got=", ".join(map(str, paths)),
            allowed=f"one folder with {RUN_FILE} in it, or one TOML file of a run (without --step)",
            fix="give one of these, or leave --on out for traces",
        )
    cluster = cluster_for(evidence.facts, on)
    if cluster is None:
        if evidence.is_cpu:
            return evidence
        note = "no plan: nothing says what the run is on; give --on 8xH200"
        return replace(evidence, missing=(*evidence.missing, note))
    evidence = replace(evidence, notes=(*evidence.notes, *compared(evidence.facts, cluster)))
    bare = evidence
    if evidence.is_cpu:  # a plan of a device, if there is one, replaces the times of the CPU
        missing = (*evidence.missing, "the recording is of a CPU, so nothing of it is in the times")
        bare = replace(evidence, source="none", ranks=(), steps=0, operators=(), is_cpu=False, missing=missing)
    planned: Evidence = load_by_name("penstock.tune.doctor.planned", "with_plan")(bare, cluster)
    return planned if planned.ranks else replace(evidence, missing=planned.missing[-1:])


def _of_run(folder: Path, step: int | None, names: PhaseNames | None) -> Evidence:
    facts, missing = facts_of(folder)
    try:
        return evidence_of(analyse_files([folder], step=step, names=names), facts, missing)
    except TraceError as error:
        if step is not None:  # the step was asked for, so a plan is no answer
            raise
        note = f"no trace: {error.what}; this records one: {recording_command(folder)}"
        return Evidence(source="none", ranks=(), facts=facts, missing=(*missing, note))


def print_verdict(verdict: Diagnosis, evidence: Evidence) -> None:
    print(verdict.sentence)
    for note in verdict.notes:
        print(f"note: {note}")
    if evidence.ranks:
        print(spent_text(verdict, evidence))
    per = "ms per step" if evidence.steps or not evidence.ranks else "ms"  # a trace without steps has sums only
    print()
    rows = [
        (
            fact.bottleneck,
            fact.what,
            "" if fact.time_us is None else ms_text(fact.time_us),
            "" if fact.share is None else f"{fact.share:.1%}",
            "" if fact.size is None else bytes_text(fact.size),
        )
        for fact in verdict.lines
    ]
    print_table(("wall", "evidence", per, "share", "bytes"), rows)
    print()
    if verdict.remedies:
        gains = []
        for remedy in verdict.remedies:
            gain = f"-{bytes_text(remedy.gain_bytes)}" if remedy.gain_bytes else ms_text(remedy.gain_us)
            gains.append((gain, f"{verdict.times.share(remedy.gain_us):.1%}", remedy.change, remedy.rule))
        print_table((f"gains {per}, at most", "of step", "change", "rule"), gains)
        print()
        for remedy in verdict.remedies:
            how = f"; gain: {remedy.how}" if remedy.how else ""
            print(f"{remedy.rule}: {remedy.what} [{remedy.source}{how}]")
        print("gains do not add up: several changes may take away the same time")
    else:
        print("no change that is known wins more than noise")
    for line in verdict.missing:
        print(f"missing: {line}")
