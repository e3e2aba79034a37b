"""`penstock tune`: the fastest configuration of a run on this machine, found by short trials, with a proof.

    penstock tune debug --processes 2                  two processes on a laptop
    penstock tune run.toml --budget 20m                every GPU here, at most 20 minutes
    penstock tune run.toml --keep parallel.expert=4    a choice that stays
    penstock tune run.toml --resume                    go on where a search was ended; nothing is measured twice

    look      calibrate the machine, unless its chip is known or it was calibrated before
    fit       project the run, or its best layout if it cannot start here as it is
    measure   short trials in processes of their own; each corrects the projections of all candidates
    diagnose  the doctor proposes changes of the leader, from a recorded step
    tell      tuned.toml, a page, JSON, and what would win next

It changes nothing that is learned, unless `--free` names it. docs/tune.md explains the output.
"""

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from penstock.base.devices import chip_named
from penstock.base.errors import FAILED, ConfigError, DeviceError, PicturesError, did_you_mean
from penstock.base.files import write_whole
from penstock.base.interrupts import INTERRUPTED
from penstock.base.numbers import bytes_text, counted, duration_text, time_text
from penstock.cli.config import Overrides, Target
from penstock.cli.output import check_output, next_line, print_next, print_table, warn
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Run
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.local import processes_to_start
from penstock.parallel.launch.process import device_name
from penstock.plan.candidates import fixed_by
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware
from penstock.report.tune_page import write_tune_page
from penstock.train.run_folder import free_name
from penstock.tune.belief import TrialCandidate
from penstock.tune.real_trials import FIRST_LIMIT, HANG, OVERRUN, RealTrials
from penstock.tune.result_file import commit_of_code, describe_machine
from penstock.tune.search_loop import Objective, Search, SearchSettings, TrialRecord, median_error
from penstock.tune.trial import Trial, first_steps, run_trial
from penstock.tune.tune_candidates import FREE, CandidateSource
from penstock.tune.tune_files import (
    EVERYTHING,
    PAGE,
    TUNED,
    gain_of,
    read_journal,
    search_json,
    short_source,
    short_steps_text,
    write_journal,
    write_tuned,
)

WARM_UP, RECORDED = 4, 2
"""First steps of a trial, which are not timed; and steps that are recorded for the doctor."""

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-3}
"""Relative difference of losses of a step that is no rounding any more, by the precision of the run."""

FLOAT8_TOLERANCE = 3e-2
"""The same, where 8-bit recipes are allowed."""

REFERENCE = "reference.toml"


@dataclass(kw_only=True)
class _Session:
    """A search with its files; `spent` are seconds by part."""

    own: Run
    folder: Path
    output: Path
    identity: dict[str, Any]
    source: CandidateSource
    trials: RealTrials
    quiet: bool
    spent: dict[str, float] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Print a line of progress."""
        if not self.quiet:
            print(line, flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside to a part."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - begin

    def save(self, search: Search) -> None:
        """Write journal and tuned run, so that an ended search has its best so far."""
        write_journal(self.folder, self.identity, self.source.rows, search)
        write_tuned(self.output, self.own, self.source.run, search, " ".join(["penstock", *sys.argv[1:]]))

    def tell(self, record: TrialRecord, search: Search) -> None:
        """Save a trial, and print its line."""
        self.save(search)
        leader = search.leader
        best = "none yet" if leader is None else time_text(leader.even_step)
        self.say(f"{_trial_line(len(search.records), record)}; best {best}, {duration_text(search.left)} left")

    def around(self, leader: TrialRecord) -> Sequence[TrialCandidate]:
        """Single changes of the leader."""
        with self.part("plan"):
            return self.source.around(leader.candidate)

    def diagnose(self, leader: TrialRecord, left: float) -> Sequence[TrialCandidate]:
        """Record steps of the leader once, and ask the doctor."""
        name = f"profile-{zlib.crc32(leader.candidate.key.encode()):08x}"
        folder = self.trials.base.folder / name
        with self.part("diagnose"):
            if not folder.exists():
                steps = WARM_UP + RECORDED
                base = replace(self.trials.base, name=name, overrides=first_steps(self.source.run, steps))
                profile = (f"profile.start={WARM_UP + 1}", f"profile.steps={RECORDED}")
                overrides = (*RealTrials(base).overrides_of(leader.candidate), *profile)
                most = FIRST_LIMIT + HANG * leader.result.step * steps
                run_trial(replace(base, overrides=overrides, most_seconds=min(most, OVERRUN * left)))
            found = self.source.doctor(leader.candidate, folder, leader.result.step)
        self.say(f"    the doctor proposes {len(found)} changes of the leader")
        return found


def tune(  # noqa: PLR0913 - one argument for each option
    target: Target,
    overrides: Overrides = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="Time of the search: 90s, 20m, 2h.")] = "20m",
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Number of ranks; without it, one for each GPU.")
    ] = None,
    keep: Annotated[str, typer.Option("--keep", metavar="A.B=C,...", help="Fields that stay.")] = "",
    objective: Annotated[str, typer.Option("--objective", help="tokens, memory or time-to-loss.")] = "tokens",
    free: Annotated[
        str, typer.Option("--free", help="What may change learning: float8, global_batch, micro_batch, loss.")
    ] = "",
    steps: Annotated[int, typer.Option("--steps", min=6, help="Training steps of a trial.")] = 14,
    most_trials: Annotated[int, typer.Option("--trials", min=1, help="Trials at most.")] = 12,
    hardware: Annotated[str | None, typer.Option("--on", metavar="CHIP", help="Hardware file, not calibrated.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="File of the tuned run.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Go on with the last search of this run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Find the fastest configuration of a run on this machine by short trials, and write it.

    Exit codes: 0 a configuration ran, 1 none did, 2 something is wrong that you can mend.
    """
    environment = read_environment()
    if environment.started_by:
        raise DeviceError("tune starts its own processes", got=f"one of {environment.started_by}'s", fix="run it alone")
    if objective not in get_args(Objective):
        raise ConfigError("--objective is unknown", got=objective, allowed=", ".join(get_args(Objective)))
    seconds, freed = _seconds(budget), _free(free)
    check_output(output, "--output", force=resumes)
    kept = tuple(one.strip() for one in keep.split(",") if one.strip())
    own = load_run(target, (*(overrides or ()), *kept))
    ranks = processes_to_start(own, environment, processes)
    on_gpu = own.device != "cpu" and torch.cuda.device_count() > 0
    parent = Path(own.record.folder)
    folder = _folder(parent, f"tune-{own.name}", resumes=resumes)
    begin = time.monotonic()
    cluster = _cluster(parent / "cache", ranks, hardware, on_gpu=on_gpu)
    session = _Session(
        own=own,
        folder=folder,
        output=output or folder / TUNED,
        identity=_identity(own, ranks, steps, on_gpu=on_gpu),
        source=CandidateSource(
            run=own,
            cluster=cluster,
            fixed=fixed_by(own, kept, {}),
            kept=frozenset(one.partition("=")[0] for one in kept),
            free=tuple(one for one in freed if one in FREE),
        ),
        trials=RealTrials(_base(own, folder, ranks, steps)),
        quiet=as_json,
        spent={"look": time.monotonic() - begin},
    )
    tolerance = None if "loss" in freed else FLOAT8_TOLERANCE if "float8" in freed else LOSS_TOLERANCE[_precision(own)]
    settings = SearchSettings(
        budget_seconds=seconds,
        most_trials=most_trials,
        objective=_objective(objective),
        loss_tolerance=None if "global_batch" in freed else tolerance,
        capacity_bytes=float(cluster.hardware.memory.capacity_bytes),
    )
    search = _searched(session, settings, steps)
    return _end(session, search, as_json=as_json)


def _searched(session: _Session, settings: SearchSettings, steps: int) -> Search:
    """Measure the reference, plan, and search; Ctrl-C ends it with what it has."""
    source, journal = session.source, read_journal(session.folder, session.identity)
    with session.part("plan"):
        source.fit()
        if journal is None:
            source.shorten(steps, settings.budget_seconds, settings.most_trials)
        else:
            source.rows = journal.rows  # with another budget, too: nothing is measured twice
        reference = source.reference()
    if source.was_fitted:
        session.say(f"{session.own.name} does not fit here as it is: the best planned layout is the reference")
    if reference.short is not None:
        rows, each = session.own.training.global_batch, sum(reference.short.terms.values())
        session.say(
            f"a step of {rows:,} rows is projected at {time_text(reference.projected)}, too long for trials: "
            f"they make steps of {reference.short.rows:,} rows ({time_text(each)}), from which whole ones are computed"
        )
    recorded = {} if journal is None else journal.results
    session.folder.mkdir(parents=True, exist_ok=True)
    write_whole(session.folder / REFERENCE, dump_toml(source.run))
    session.trials.count = len(recorded)
    search = Search(
        [reference],
        session.trials,
        settings,
        tell=session.tell,
        around=session.around,
        diagnose=session.diagnose,
        elsewhere=lambda: sum(session.spent.values()),
        recorded=recorded,
    )
    session.say(
        f"tune {source.run.name} on {source.cluster.devices} x {source.cluster.hardware.name}: {session.folder}"
    )
    try:
        first = search.try_one(reference)
        with session.part("plan"):
            source.measured_load(first.result.expert_load)
            search.replan(source.planned())
        load = (
            f", with a measured load of {source.imbalance:.2f} on the fullest rank" if source.imbalance != 1.2 else ""
        )
        left = f"; {source.left_out} cannot have such short steps" if source.left_out else ""
        session.say(f"    {counted(len(search.candidates), 'candidate')}{load}{left}")
        search.run()
        _prove(session, search)
    except KeyboardInterrupt:
        search.ending = "interrupted"
    return search


def _prove(session: _Session, search: Search) -> None:
    """Measure the leader without each of its changes, as far as trials and budget are left."""
    leader, ending = search.leader, search.ending
    if leader is None or len(leader.candidate.overrides) < 2:
        return
    for _, candidate in session.source.without_each(leader.candidate):
        search.ending = ""
        tried = {one.candidate.key for one in search.records}
        if candidate.key not in tried and not search.is_spent():
            search.add([candidate])
            search.try_one(candidate)
    search.ending = ending


def _end(session: _Session, search: Search, *, as_json: bool) -> int:
    """Write everything, and tell the result."""
    session.save(search)
    rows = session.own.training.global_batch
    spent = {**session.spent, "trials": search.trial_seconds}
    found = search_json(search, spent, session.source.next_wins, rows)
    write_whole(session.folder / EVERYTHING, json.dumps(found, indent=1) + "\n")
    try:
        page = session.folder / PAGE
        write_tune_page(page, session.own.name, search, spent, session.source.next_wins, rows)
    except PicturesError as error:
        warn(f"no page: {error}")
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(session, search, spent)
    if search.ending == "interrupted":
        return INTERRUPTED
    return FAILED if search.leader is None else 0


def _print(session: _Session, search: Search, spent: Mapping[str, float]) -> None:
    leader, first = search.leader, search.reference
    print(f"\n{search.ending}")
    if leader is None or first is None:
        print("no configuration ran; the reasons are above")
        return
    rows = [
        (f"{number}", one.candidate.source, one.candidate.key or "the run as it is", time_text(one.projected),
         time_text(one.expected),
         f"{time_text(one.step)}{short_source(one)}" if one.result.kind == "ran" else one.result.kind,
         bytes_text(one.peak_memory_bytes))
        for number, one in enumerate(search.records, 1)
    ]  # fmt: skip
    print_table(("trial", "from", "change", "projected", "expected", "measured", "memory"), rows, ("from", "memory"))
    before, after = median_error(search.records, corrected=False), median_error(search.records, corrected=True)
    if before is not None and after is not None:
        print(f"\nmedian error of the plan {before:.1%}, corrected by earlier trials {after:.1%}")
    if words := short_steps_text(search, session.own.training.global_batch):
        print(words)
    change = leader.candidate.key or "the run as it is; no change is surely faster"
    print(f"best: {change}: {gain_of(leader, first):.3f} x {first.candidate.key or 'the run as it is'}")
    print(", ".join(f"{name} {duration_text(seconds)}" for name, seconds in spent.items()))
    for line in session.source.next_wins:
        print(f"next by the plan: {line}")
    print(f"written to {session.output}; page {session.folder / PAGE}")
    print_next("train", session.output)


def _trial_line(number: int, record: TrialRecord) -> str:
    result, change = record.result, record.candidate.key or "the run as it is"
    again = ", whole steps" if record.is_whole else ", again" if record.number > 1 else ""
    head = f"{number:>3}  {change}{again}: "
    if result.kind != "ran":
        return f"{head}{result.kind}: {result.reason} ({result.seconds:.0f} s)"
    early = ", stopped early" if result.was_stopped and not record.is_whole else ""
    step, expected = f"{time_text(record.step)} a step{short_source(record)}", time_text(record.expected)
    return f"{head}{step}, expected {expected}{early} ({result.seconds:.0f} s)"


def _base(own: Run, folder: Path, ranks: int, steps: int) -> Trial:
    return Trial(
        name="",
        target=f"{folder / REFERENCE}",
        overrides=first_steps(own, steps),
        processes=ranks,
        warm_up=WARM_UP,
        folder=folder / "trials",
    )


def _folder(parent: Path, name: str, *, resumes: bool) -> Path:
    """The folder of a new search, or of the last one."""
    if not resumes:
        return parent / free_name(parent, name)
    found = [
        one for one in parent.glob(f"{name}*") if one.is_dir() and one.name.removeprefix(name).strip("-").isdigit()
    ]
    found += [parent / name] if (parent / name).is_dir() else []
    if not found:
        raise ConfigError("there is no search to go on with", got=f"{parent / name}", fix="leave out --resume")
    return max(found, key=lambda one: one.stat().st_mtime)


def _cluster(cache: Path, ranks: int, asked: str | None, *, on_gpu: bool) -> Cluster:
    """This machine, calibrated unless the chip is known; the file stays in the cache."""
    if asked is not None:
        return cluster_of(ranks, load_hardware(asked))
    shown = device_name(torch.device("cuda" if on_gpu else "cpu"))
    chip = chip_named(shown) if on_gpu else None
    if chip is not None and chip.pattern in known_hardware():
        return cluster_of(ranks, load_hardware(chip.pattern))
    words = "-".join("".join(one if one.isalnum() else " " for one in shown).split()).lower()
    path = cache / f"hardware-{words}-{ranks}.toml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        device = "cuda" if on_gpu else "cpu"
        command = ["calibrate", "--output", f"{path}", "--processes", f"{ranks}", "--device", device]
        done = subprocess.run([sys.executable, "-m", "penstock", *command], capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise DeviceError(f"calibration failed: {done.stderr.strip()[-300:]}", fix=next_line(*command))
    return cluster_of(ranks, load_hardware(f"{path}"))


def _identity(own: Run, ranks: int, steps: int, *, on_gpu: bool) -> dict[str, Any]:
    """What a journal must share with a search that goes on with it."""
    machine = {**describe_machine(on_gpu=on_gpu), "ranks": ranks, "steps": steps, "commit": commit_of_code()}
    return {**machine, "run": f"{zlib.crc32(dump_toml(own).encode()):08x}"}


def _precision(run: Run) -> str:
    return run.training.precision


def _objective(text: str) -> Objective:
    known: dict[str, Literal["tokens", "memory", "time-to-loss"]] = {one: one for one in get_args(Objective)}
    return known[text]


def _free(text: str) -> tuple[str, ...]:
    """What may change what is learned; `loss` switches off the check of losses."""
    words, allowed = tuple(one.strip() for one in text.split(",") if one.strip()), (*FREE, "loss")
    for word in words:
        if word not in allowed:
            told = did_you_mean(word, allowed)
            raise ConfigError("--free names something else", got=word, allowed=", ".join(allowed), fix=told)
    return words


def _seconds(text: str) -> float:
    """Seconds of 90s, 20m or 2h."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ConfigError("--budget is no time", got=text, allowed="90s, 20m or 2h")
    return float(number) * units[unit]
