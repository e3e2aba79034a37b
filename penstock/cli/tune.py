"""`penstock tune`: the fastest configuration of a run on this machine, found by short trials, with a proof.

    penstock tune debug --processes 2                  two processes on a laptop
    penstock tune run.toml --budget 20m                every GPU here, at most 20 minutes
    penstock tune run.toml --keep parallel.expert=4    a choice that stays
    penstock tune run.toml --resume                    go on where a search was ended; nothing is measured twice
    torchrun --nnodes=2 ... -m penstock tune run.toml  on many machines; srun starts it as well (penstock launch --tune)

    look      check the machine, and calibrate it unless its chip is known or it was calibrated before
    fit       project the run, or its best layout if it cannot start here as it is
    measure   short trials in processes of their own; each corrects the projections of all candidates
    diagnose  the doctor proposes changes of the leader, from a recorded step
    tell      tuned.toml, a page, JSON, and what would win next

It changes nothing that is learned, unless `--free` names it. docs/tune.md explains the output.
"""

import json
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from penstock.base.errors import FAILED, ConfigError, PicturesError, did_you_mean
from penstock.base.files import parse_toml, write_whole
from penstock.base.interrupts import INTERRUPTED
from penstock.base.numbers import bytes_text, counted, duration_text, time_text
from penstock.base.origin import command_text, commit_of_code
from penstock.cli.output import budget_seconds, check_output, print_next, print_table, warn
from penstock.cli.verbs import Json, Overrides, Processes, Target
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Run
from penstock.parallel.launch.environment import Environment, host_bytes, read_environment
from penstock.parallel.launch.local import processes_to_start
from penstock.parallel.launch.rendezvous import Rendezvous
from penstock.plan.candidates import fixed_by
from penstock.report.tune_page import write_tune_page
from penstock.train.run_folder import new_folder, temporary_folder
from penstock.tune.belief import TrialCandidate
from penstock.tune.kernels import describe_machine
from penstock.tune.look import Ground, cluster_here, faults
from penstock.tune.search_loop import Objective, Search, SearchSettings, TrialRecord, median_error
from penstock.tune.trial import FIRST_LIMIT, HANG, OVERRUN, RealTrials, Trial, first_steps, run_trial
from penstock.tune.trial_ranks import HERE, Director, StartRanks, follow
from penstock.tune.tune_candidates import FREE, CandidateSource
from penstock.tune.tune_files import (
    EVERYTHING,
    PAGE,
    TUNED,
    clear_begun,
    fatal_trials,
    gain_of,
    read_journal,
    search_json,
    short_source,
    short_steps_text,
    write_begun,
    write_journal,
    write_tuned,
)

WARM_UP, RECORDED = 4, 2  # first steps of a trial, which are not timed; and steps that are recorded for the doctor

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-3}
"""Relative difference of losses of a step that is no rounding any more, by the precision of the run."""

FLOAT8_TOLERANCE = 3e-2  # the same, where 8-bit recipes are allowed

REFERENCE, LAUNCH = "reference.toml", "launched-by"
"""Files of a search: the run as it is, and the name of the launch that began it, empty without one."""


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
    launch: str = ""
    faults: tuple[str, ...] = ()
    spent: dict[str, float] = field(default_factory=dict)

    def say(self, line: str) -> None:
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
        write_tuned(self.output, self.own, self.source.run, search, command_text())

    def tell(self, record: TrialRecord, search: Search) -> None:
        self.save(search)
        leader = search.leader
        best = "none yet" if leader is None else time_text(leader.even_step)
        self.say(f"{_trial_line(len(search.records), record)}; best {best}, {duration_text(search.left)} left")

    def around(self, leader: TrialRecord) -> Sequence[TrialCandidate]:
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
                limit = FIRST_LIMIT + HANG * leader.result.step * steps
                run_trial(replace(base, overrides=overrides, most_seconds=min(limit, OVERRUN * left)))
            changes = self.source.doctor(leader.candidate, folder, leader.result.step)
        self.say(f"    the doctor proposes {len(changes)} changes of the leader")
        return changes


def tune(  # noqa: PLR0913 - one argument for each option
    target: Target,
    overrides: Overrides = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="Time of the search: 90s, 20m, 2h.")] = "20m",
    processes: Processes = None,
    keep: Annotated[str, typer.Option("--keep", metavar="A.B=C,...", help="Fields that stay.")] = "",
    objective: Annotated[Objective, typer.Option("--objective", help="What is to be best.")] = "tokens",
    free: Annotated[
        str, typer.Option("--free", help="What else may change: float8, global_batch, micro_batch, loss.")
    ] = "",
    steps: Annotated[int, typer.Option("--steps", min=6, help="Training steps of a trial.")] = 14,
    most_trials: Annotated[int, typer.Option("--trials", min=1, help="Trials at most.")] = 12,
    hardware: Annotated[str | None, typer.Option("--on", metavar="CHIP", help="Hardware file, not calibrated.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="File of the tuned run.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Go on with the last search of this run.")] = False,
    as_json: Json = False,
) -> int:
    """Find the fastest configuration of a run on this machine by short trials, and write it.

    Exit codes: 0 a configuration ran, 1 none did, 2 something is wrong that you can mend.
    """
    kept = _assignments(keep)
    run, freed = load_run(target, (*(overrides or ()), *kept)), _free(free)
    if objective == "energy":
        _check_power(run)
    usual = FLOAT8_TOLERANCE if "float8" in freed else LOSS_TOLERANCE[run.training.precision]
    settings = SearchSettings(
        budget_seconds=budget_seconds(budget),
        most_trials=most_trials,
        objective=objective,
        loss_tolerance=None if {"loss", "global_batch"} & set(freed) else usual,
    )
    asked = _Asked(run, kept, freed, settings, steps, hardware, output, as_json)
    check_output(output, "--output", force=resumes)
    environment = read_environment()
    ranks = environment.world_size * processes_to_start(run, environment, processes)
    with Rendezvous(environment) as meeting:
        meeting.open(run.host.timeout_minutes)
        if environment.rank > 0:
            with temporary_folder("tune") as folder:
                return follow(meeting, folder)
        with Director(meeting) as director, _folder(run, environment.launch, resumes=resumes) as folder:
            code = _tuned(asked, environment, ranks, director if environment.started_by else HERE, folder)
            director.dismiss(code)
    return code


def _on_gpu(run: Run) -> bool:
    return run.device != "cpu" and torch.cuda.device_count() > 0


def _check_power(run: Run) -> None:
    """Refuse `--objective energy` before any work where trials could not read their power."""
    module, package = ("amdsmi", "amdsmi") if torch.version.hip else ("pynvml", "nvidia-ml-py")
    if not _on_gpu(run):
        got, fix = "a CPU", "leave --objective at tokens"
    elif find_spec(module) is None:
        got, fix = f"no package {package}", f"pip install {package}"
    else:
        return
    raise ConfigError("--objective energy reads the power of a GPU", got=got, fix=fix)


class _Asked(NamedTuple):
    run: Run
    kept: tuple[str, ...]
    free: tuple[str, ...]
    settings: SearchSettings
    steps: int
    hardware: str | None
    output: Path | None
    as_json: bool


def _tuned(asked: _Asked, environment: Environment, ranks: int, starter: StartRanks, folder: Path) -> int:
    run, begin = asked.run, time.monotonic()
    on_gpu = _on_gpu(run)
    local = environment.local_world_size if environment.started_by else ranks
    ground = Ground(
        starter=starter,
        cache=folder.parent / "cache",
        ranks=ranks,
        local_ranks=local,
        on_gpu=on_gpu,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else 0,
        host_bytes=host_bytes() or 0,
    )
    problems = faults(ground)
    cluster = cluster_here(ground, asked.hardware)
    session = _Session(
        own=run,
        folder=folder,
        output=asked.output or folder / TUNED,
        identity=_identity(run, ranks, asked.steps, on_gpu=on_gpu),
        source=CandidateSource(
            run=run,
            cluster=cluster,
            fixed=fixed_by(run, asked.kept, {}),
            kept=frozenset(assignment.partition("=")[0].strip() for assignment in asked.kept),
            free=tuple(name for name in asked.free if name in FREE),
        ),
        trials=RealTrials(
            Trial(
                name="",
                target=f"{folder / REFERENCE}",
                overrides=first_steps(run, asked.steps),
                processes=ranks,
                warm_up=WARM_UP,
                folder=folder / "trials",
                starter=starter,
            )
        ),
        quiet=asked.as_json,
        launch=environment.launch,
        faults=problems,
        spent={"look": time.monotonic() - begin},
    )
    for line in problems:
        session.say(f"preflight: {line}")
    capacity = float(cluster.hardware.memory.capacity_bytes)
    search = _searched(session, replace(asked.settings, capacity_bytes=capacity), asked.steps)
    return _end(session, search, as_json=asked.as_json)


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
    recorded = {**fatal_trials(session.folder), **({} if journal is None else journal.results)}
    write_whole(session.folder / LAUNCH, session.launch)
    write_whole(session.folder / REFERENCE, dump_toml(source.run))
    session.trials.count = len(recorded)
    search = Search(
        [reference],
        session.trials,
        settings,
        begin=partial(write_begun, session.folder),
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
    except SystemExit:  # SIGTERM in a trial, which is not to blame
        clear_begun(session.folder)
        raise
    clear_begun(session.folder)
    return search


def _prove(session: _Session, search: Search) -> None:
    """Measure the leader without each of its changes, as far as trials and budget are left."""
    leader, ending = search.leader, search.ending
    if leader is None or len(leader.candidate.overrides) < 2:
        return
    for _, candidate in session.source.without_each(leader.candidate):
        search.ending = ""
        tried = {record.candidate.key for record in search.records}
        if candidate.key not in tried and not search.is_spent():
            search.add([candidate])
            search.try_one(candidate)
    search.ending = ending


def _end(session: _Session, search: Search, *, as_json: bool) -> int:
    session.save(search)
    rows = session.own.training.global_batch
    spent = {**session.spent, "trials": search.trial_seconds}
    facts = {**search_json(search, spent, session.source.next_wins, rows), "preflight": [*session.faults]}
    write_whole(session.folder / EVERYTHING, json.dumps(facts, indent=1) + "\n")
    try:
        page = session.folder / PAGE
        write_tune_page(page, session.own.name, search, spent, session.source.next_wins, rows)
    except PicturesError as error:
        warn(f"no page: {error}")
    if as_json:
        print(json.dumps(facts, indent=1))
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
        (f"{number}", record.candidate.source, record.candidate.key or "the run as it is", time_text(record.projected),
         time_text(record.expected),
         f"{time_text(record.step)}{short_source(record)}" if record.result.kind == "ran" else record.result.kind,
         bytes_text(record.peak_memory_bytes))
        for number, record in enumerate(search.records, 1)
    ]  # fmt: skip
    print_table(("trial", "from", "change", "projected", "expected", "measured", "memory"), rows, ("from", "memory"))
    before, after = median_error(search.records, corrected=False), median_error(search.records, corrected=True)
    if before is not None and after is not None:
        print(f"\nmedian error of the plan {before:.1%}, corrected by earlier trials {after:.1%}")
    if text := short_steps_text(search, session.own.training.global_batch):
        print(text)
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


@contextmanager
def _folder(run: Run, launch: str, *, resumes: bool) -> Iterator[Path]:
    """The folder of the search, which goes if the search is refused before it writes anything.

    A new one, that of the last search, or that of the one which this launch began before a restart.
    """
    parent = Path(run.record.folder)
    folder = _launched(parent, launch)
    if folder is None:
        folder = _last(parent, run.name) if resumes else new_folder(parent, f"tune-{run.name}")
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def _launched(parent: Path, launch: str) -> Path | None:
    """The folder of the search that a launch of this name began."""
    for file in sorted(parent.glob(f"tune-*/{LAUNCH}")):
        if launch and file.read_text(encoding="utf-8") == launch:
            return file.parent
    return None


def _last(parent: Path, run: str) -> Path:
    """The folder of the last search of a run, by the name in its reference: `tune-X-2` may be of a run called X-2."""
    folders = [file.parent for file in parent.glob(f"tune-*/{REFERENCE}") if _name_in(file) == run]
    if not folders:
        raise ConfigError("there is no search to go on with", got=f"{parent}/tune-{run}", fix="leave out --resume")
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def _name_in(reference: Path) -> object:
    with suppress(OSError, ValueError):
        return parse_toml(reference.read_text(encoding="utf-8")).get("name")
    return None


def _identity(run: Run, ranks: int, steps: int, *, on_gpu: bool) -> dict[str, Any]:
    """What a journal must share with a search that goes on with it."""
    machine = {**describe_machine(on_gpu=on_gpu), "ranks": ranks, "steps": steps, "commit": commit_of_code()}
    return {**machine, "run": f"{zlib.crc32(dump_toml(run).encode()):08x}"}


def _free(text: str) -> tuple[str, ...]:
    """What may change what is learned; `loss` switches off the check of losses."""
    names, allowed = tuple(part.strip() for part in text.split(",") if part.strip()), (*FREE, "loss")
    for word in names:
        if word not in allowed:
            hint = did_you_mean(word, allowed)
            raise ConfigError("--free names something else", got=word, allowed=", ".join(allowed), fix=hint)
    return names


def _assignments(text: str) -> tuple[str, ...]:
    """Overrides between commas; a comma that no field follows belongs to a list."""
    parts = re.split(r",(?=\s*[a-z_][\w.]*\s*=)", text)
    return tuple(part.strip(" ,") for part in parts if part.strip(" ,"))
