"""`penstock train`: start a run, or go on with one.

    penstock train debug                         a new run in runs/debug, or runs/debug-2 if that exists
    penstock train my.toml training.steps=500    a file, with an override
    penstock train debug --name first            a new run in runs/first, which must not exist
    penstock train runs/first --resume           go on with it; steps, learning rate and the like may be overridden
    penstock train debug --resume                go on with the newest of runs/debug, runs/debug-2, ...
    penstock train --from runs/first seed=1      a new run with the weights of another, and its configuration
    penstock train my.toml --from runs/first     the same with the configuration of a file
    penstock train debug --dry-run               check everything, say what it would be, write nothing
    penstock train my.toml --fake-world 1024 --rank 517    what one rank of many would hold; needs none of them
    penstock train debug --processes 4           four ranks on this machine; without it, one for each of its GPUs

A run that goes on (--resume) has the optimizer state, the place in the schedule and in the data that it had; it is
described by the config.toml in its folder, and the target only finds it. A run that begins with the weights of another
(--from) has nothing else of it: the optimizer is new, and the schedule and the data begin. Exit codes: 0 when the last
step is done, 2 for what the user can mend, 75 if another rank was lost, 129, 130 and 143 for a run that was stopped on
request (penstock/train/step.py).

The same command is a launcher, which starts itself once for each rank (penstock/parallel/launch/local.py), or a rank:
one that the launcher, torchrun or srun has started, or the only one. Ranks that are started again, by any of them, find
the folder that their launch has made and go on there; rank 0 looks and tells the others.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from penstock.base.errors import ConfigError, DeviceError, LostRankError, PenstockError, RunFolderError
from penstock.base.interrupts import INTERRUPTED, STOPPED
from penstock.base.numbers import bytes_text, count_text, duration_text, flops_text
from penstock.cli.config import warn_of_unfilled
from penstock.cli.main import main
from penstock.cli.output import next_line, warn
from penstock.cli.verbs import Overrides, Processes
from penstock.cli.view import DOT, FORCED_BALANCE, LiveView, PlainView, RunConsole
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.presets.registry import is_preset
from penstock.config.run import Run
from penstock.config.schema import as_toml
from penstock.config.size import size_of
from penstock.data.documents import read_sample
from penstock.layout import actions
from penstock.layout.grid import DENSE_AXES, EXPERT_AXES, Grid
from penstock.layout.stages import stages_text
from penstock.parallel.axes import Axes, Axis
from penstock.parallel.collectives import lost_ranks
from penstock.parallel.launch.environment import (
    Environment,
    environment_line,
    facts_of_machine,
    prepare_environment,
    read_environment,
)
from penstock.parallel.launch.local import (
    LocalLaunch,
    facts_of_ranks,
    facts_of_run,
    on_ranks,
    possible_ranks,
    processes_to_start,
    run_processes,
)
from penstock.parallel.launch.process import bind_near, choose_device, device_name
from penstock.parallel.launch.rendezvous import Rendezvous, start_process_group, stop_process_group
from penstock.plan.assumptions import device_of
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.memory import memory_of
from penstock.plan.meta_rank import Target
from penstock.plan.project import settled_on
from penstock.train.checkpoint import CheckpointStore
from penstock.train.goodput import GoodputLedger, goodput
from penstock.train.loop import Progress, RunHooks, open_store, resume, train_run
from penstock.train.observer import RunEnd
from penstock.train.optimizer import learning_rate
from penstock.train.run_folder import (
    RunFolder,
    check_is_free,
    check_name,
    check_nothing_is_lost,
    check_same_run,
    create_run_folder,
    find_launched,
    find_run_folder,
    training_in,
)
from penstock.train.saved_weights import check_initial_weights, config_of
from penstock.train.setup import (
    Rehearsal,
    RunData,
    Session,
    find_shortage,
    open_split,
    open_texts,
    prepare,
    rehearse,
    state_bytes,
)
from penstock.train.sinks import check_sinks, open_sinks
from penstock.train.step import StopRequest

TEXT = "The "  # prompt of a proposed `sample` command
NOTICED_RISE = 1.05  # of the learning rate where a run goes on; a few more steps stretch a schedule by less


@dataclass(frozen=True)
class Launch:
    """A run to start, or to resume."""

    run: Run
    folder: RunFolder | None  # None for a new run
    is_named: bool  # the user chose the name, so the folder of a new run must be free
    notice: str = ""  # what the changes of a run that goes on do beside what they say


def train(  # noqa: PLR0913 - one argument for each option
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder; with --from its own."),
    ] = None,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run and its folder.")] = None,
    resumes: Annotated[bool, typer.Option("--resume", help="Go on with the run from its newest checkpoint.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Begin a new run with the weights of another one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")] = False,
    processes: Processes = None,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Start all again after a rank died.")] = 0,
    fake_world: Annotated[
        int | None, typer.Option("--fake-world", min=1, help="Build one rank of so many without memory, and show it.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Which rank --fake-world builds.")] = None,
) -> int:
    """Train a model: a preset, a TOML file, or (with --resume) a run folder.

    Ctrl-C or SIGTERM stops after the current step with a checkpoint; a second Ctrl-C stops at once.

    Exit codes: 0 all steps are done, 2 something is wrong that you can mend, 75 another rank was lost; 130 (Ctrl-C),
    143 (SIGTERM) or 129 (SIGHUP) stopped.
    """
    if resumes and source is not None:
        raise ConfigError("--resume goes on with a run, and --from begins a new one", fix="leave one of them out")
    given = [*([target] if target is not None else []), *(overrides or [])]
    target, overrides = _target_of(given, source)
    environment = read_environment()
    console = RunConsole(no_color=not environment.color, highlight=False, quiet=environment.rank > 0)
    with Rendezvous(environment) as meeting:
        # Everything that a user can mend is refused before a process or a folder is made.
        launch = (_find_run if resumes else _new_run)(target, overrides, name)
        if fake_world is not None:
            print_rehearsal(launch.run, world=fake_world, rank=rank or 0)
            return 0
        if rank is not None:
            raise DeviceError("--rank says which rank --fake-world builds", fix="add --fake-world N")
        started = processes_to_start(launch.run, environment, processes)  # 1: this process is the rank
        grid = _grid(launch.run, environment.world_size * started)
        _check_surroundings(launch, environment)
        command = ["train", *given, *_options(name, source, resumes=resumes)]
        if dry_run:
            _print_plan(console, launch, grid, started)
            _say(console, next_line(*command))
            return 0
        # On a GPU each rank checks the memory of its own device.
        if launch.run.device == "cpu" or not torch.cuda.is_available():
            _check_memory(
                on_ranks(launch.run, grid.world), grid, torch.device("cpu"), max(started, environment.local_world_size)
            )
        if started > 1 or restarts:
            return _start_ranks(console, environment, launch, command, started, restarts)
        meeting.open(launch.run.host.timeout_minutes)
        return _be_a_rank(console, environment, meeting, _launch_of_all(environment, meeting, launch, overrides))


def _options(name: str | None, source: Path | None, *, resumes: bool) -> list[str]:
    options = [*(["--name", name] if name is not None else []), *(["--resume"] if resumes else [])]
    return [*options, "--from", str(source)] if source is not None else options


def _check_surroundings(launch: Launch, environment: Environment) -> None:
    """Refuse sinks, initial weights and a folder for runs that cannot be used."""
    if not environment.started_by:  # ranks of torchrun ask rank 0 for it, later
        check_sinks(launch.run)
        if launch.folder is None:
            check_initial_weights(launch.run)
    parent = Path(launch.run.record.folder)
    if parent.exists() and not parent.is_dir():
        raise RunFolderError(f"record.folder {parent} is no folder", fix="name another folder for runs")


def _start_ranks(
    console: Console, environment: Environment, launch: Launch, command: list[str], started: int, restarts: int
) -> int:
    """Start the ranks, and wait for them: this process is none of them."""
    if launch.is_named and launch.folder is None:
        check_is_free(Path(launch.run.record.folder), launch.run.name)
    facts = facts_of_run(launch.run, facts_of_ranks(environment, started))
    fewer, say = _fewer(launch.run, started), partial(_say, console)
    plan = LocalLaunch(processes=started, restarts=restarts, fewer=fewer, facts=facts, say=say)
    return run_processes(main, command, plan)


def _target_of(given: Sequence[str], source: Path | None) -> tuple[str, list[str]]:
    """Target and overrides of a command line; with --from the target may be left out."""
    is_target = bool(given) and ("=" not in given[0] or Path(given[0]).exists())
    if source is None:
        if not given:
            raise ConfigError("Missing argument 'TARGET'", allowed="a preset, a TOML file, a run folder, or --from RUN")
        return given[0], list(given[1:])
    config = config_of(source)
    target, overrides = (given[0], given[1:]) if is_target else (str(config), given)
    return target, [f"training.initial_weights={as_toml(str(source))}", *overrides]


def _grid(run: Run, world: int) -> Grid:
    return grid_of(on_ranks(run, world), world)


def _fewer(run: Run, started: int) -> tuple[int, ...]:
    """Numbers of ranks with which a run on this machine goes on after losses; on GPUs each rank checks its memory."""
    if not run.elastic.min:
        return ()
    on_cpu = run.device == "cpu" or not torch.cuda.is_available()
    return tuple(
        ranks
        for ranks in possible_ranks(run, started - 1)
        if not on_cpu or find_shortage(on_ranks(run, ranks), _grid(run, ranks), torch.device("cpu"), ranks) is None
    )


def _say(console: Console, *lines: str) -> None:
    """Print lines as they are: brackets are text, and the terminal breaks long ones."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _be_a_rank(console: Console, environment: Environment, meeting: Rendezvous, launch: Launch) -> int:
    run = on_ranks(launch.run, environment.world_size)
    if meeting.agree(lambda: _is_finished(launch)):
        assert launch.folder is not None, "a new run is not finished"
        folder, steps = launch.folder.path, run.training.steps
        console.print(f"{folder} is finished: all {steps} steps are done")
        longer = next_line("train", folder, "--resume", f"training.steps={2 * steps}")
        _say(console, next_line("sample", folder, TEXT), longer)
        return 0
    facts = facts_of_run(run, facts_of_machine(environment))
    prepare_environment(facts)  # before the first use of the device
    device = choose_device(run.device, environment)
    if device.type == "cuda":
        _check_memory(run, grid_of(run, environment.world_size), device, environment.local_world_size)
    binding = bind_near(device, environment) if run.host.numa else None  # before threads are started
    start_process_group(meeting, device)
    machine = {"env": environment_line(facts)}
    if binding is not None:
        machine["cores"] = f"rank {environment.rank} keeps to {binding}"
    is_live = console.is_terminal and not console.is_dumb_terminal
    view = LiveView(console) if is_live else PlainView(console, machine)
    try:
        with ExitStack() as held, lost_ranks():  # errors of collectives become the loss of a rank
            if launch.folder is not None:
                meeting.agree(partial(_hold, console, launch.folder, held))
            with console.status("preparing data and model"):
                session = prepare(run, environment, is_new=launch.folder is None)
            if environment.rank == 0:
                warn_of_unfilled(run)
            code = _run(console, view, launch, session, environment, meeting, held)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "the GPU is out of memory", got=str(error).partition(". ")[0], fix="a smaller training.micro_batch or model"
        ) from error
    stop_process_group()
    return code


def _launch_of_all(environment: Environment, meeting: Rendezvous, launch: Launch, overrides: list[str]) -> Launch:
    """The launch that all ranks agree on: the command line's, or the folder that they made before a restart."""

    def folder_of_first() -> str | None:
        if environment.started_by:
            check_sinks(launch.run)
        if launch.folder is not None:
            return str(launch.folder.path)
        parent = Path(launch.run.record.folder)
        folder = find_launched(parent, environment.launch) if environment.launch else None
        if folder is None and environment.restarts and not environment.launch:
            raise RunFolderError(
                "a restart does not know with which run it goes on", got="a launch without a name", fix="--rdzv-id NAME"
            )
        if folder is None and launch.is_named:
            check_is_free(parent, launch.run.name)
        return None if folder is None else str(folder.path)

    # All ranks take the folder of rank 0: a network file system may show a rank other folders than the first rank's.
    path = meeting.agree(folder_of_first)
    own_path = None if launch.folder is None else str(launch.folder.path)
    return launch if path == own_path else _find_run(str(path), overrides, None)


def _new_run(target: str, overrides: list[str], name: str | None) -> Launch:
    if _is_run_folder(target):
        raise RunFolderError(
            f"{target} is the folder of a run",
            fix=f"add --resume to go on with it, or begin a new run with its weights: penstock train --from {target}",
        )
    run = load_run(target, overrides)
    if name is not None:
        check_name(name)
        run = run.model_copy(update={"name": name})
    return Launch(run, None, is_named=name is not None)


def _find_run(target: str, overrides: list[str], name: str | None) -> Launch:
    if _is_run_folder(target):
        folder = RunFolder(Path(target))
        if name is not None:
            raise RunFolderError("a run folder and --name both say which run goes on", fix="leave one of them out")
    else:
        run = load_run(target, overrides)
        folder = find_run_folder(Path(run.record.folder), name or run.name, newest=name is None)
    saved = load_run(str(folder.config), follows=False)  # as the run was; the target only found it
    wanted = load_run(str(folder.config), overrides, follows=False)
    check_same_run(saved, wanted, folder)
    return Launch(wanted, folder, is_named=True, notice=_rise(saved, wanted, folder))


def _rise(saved: Run, wanted: Run, folder: RunFolder) -> str:
    """A line for a run that goes on at a higher learning rate, because its schedule is another one; else empty."""
    step, peak = open_store(saved, folder).latest(), wanted.optimizer.learning_rate
    if step is None or (saved.training.steps, saved.schedule) == (wanted.training.steps, wanted.schedule):
        return ""
    before, after = (
        learning_rate(step, run.training.steps, run.optimizer.learning_rate, run.schedule) for run in (saved, wanted)
    )
    if after <= NOTICED_RISE * before:
        return ""
    return (
        f"the learning rate rises from {before:.3g} to {after:.3g} ({before / peak:.2f} to {after / peak:.2f} of its "
        f"peak), because the schedule now ends at step {wanted.training.steps}; schedule.decay=constant "
        f"optimizer.learning_rate={before:.3g} keeps it, penstock train --from {folder.path} begins a schedule anew"
    )


def _is_run_folder(target: str) -> bool:
    return not is_preset(target) and RunFolder(Path(target)).exists


def _is_finished(launch: Launch) -> bool:
    if launch.folder is None:
        return False
    latest = open_store(launch.run, launch.folder).latest()  # newest step on disk
    if latest is None:
        check_nothing_is_lost(launch.folder)  # metrics without a checkpoint are no new run
    is_finished = latest is not None and latest >= launch.run.training.steps
    if is_finished:  # a process that was killed behind its last checkpoint has left old ones under hidden names
        with suppress(RunFolderError), training_in(launch.folder):
            pass
    return is_finished


def _hold(console: Console, folder: RunFolder, held: ExitStack) -> None:
    """Lock a run folder until `held` ends. The first rank does it for all."""
    if notice := held.enter_context(training_in(folder)):
        _say(console, notice)


def _run(
    console: Console,
    view: LiveView | PlainView,
    launch: Launch,
    session: Session,
    environment: Environment,
    meeting: Rendezvous,
    held: ExitStack,
) -> int:
    """Find or make the folder, then train; `held` keeps its lock."""
    if launch.folder is None:
        begin = Progress()

        def make_folder() -> list[str]:
            run, folder = create_run_folder(launch.run, number_if_taken=not launch.is_named, launch=environment.launch)
            _hold(console, folder, held)
            return [run.name, str(folder.path)]

        name, path = meeting.agree(make_folder)  # rank 0 makes it, all take its name
        session = replace(session, run=session.run.model_copy(update={"name": name}))
        folder = RunFolder(Path(path))
        store = open_store(session.run, folder, session.axes.world)
    else:
        folder = launch.folder
        store = open_store(session.run, folder, session.axes.world)
        begin = resume(session, folder, store, launch.run)
        _say(console, *_resumed_text(launch.notice, folder, begin))
    kept_in = folder.goodput if environment.rank == 0 else None
    ledger = GoodputLedger(kept_in, begin.steps, environment.job_begin)
    sinks = open_sinks(session.run, folder, begin.steps, view.note) if environment.rank == 0 else []
    try:
        with StopRequest(view.stopping) as stop:
            hooks = RunHooks(mark=meeting.mark, host_of=meeting.host_of, ledger=ledger)
            end = train_run(session, folder, store, begin, [*sinks, view], stop, hooks)
    except KeyboardInterrupt:
        newest = store.latest()
        if environment.rank == 0:
            newest_text = "none" if newest is None else f"step {newest}"
            print(f"stopped at once; newest checkpoint: {newest_text}", file=sys.stderr)
        sys.stdout.flush()  # os._exit flushes nothing
        # Python would wait for the thread that writes a checkpoint. Half-written files have hidden names.
        os._exit(INTERRUPTED)
    except (PenstockError, OSError, RuntimeError, MemoryError) as error:
        if environment.rank > 0 and isinstance(error, PenstockError) and error.is_of_all_ranks:
            return error.exit_code  # the first rank prints it
        if environment.rank == 0 and not isinstance(error, LostRankError | BrokenPipeError):
            _note_next(error, folder, store, session.run.training.steps)
        raise
    _print_end(console, session.run, folder, end, ledger.seconds())
    # A rank that stops because another one was asked to ends as that one does.
    return (stop.exit_code or STOPPED) if end.stopped_by else 0


def _resumed_text(notice: str, folder: RunFolder, begin: Progress) -> list[str]:
    from_first = [f"{folder.path} has no checkpoint: it begins at its first step"] if begin.steps == 0 else []
    return [*filter(None, [notice]), *from_first, *begin.notices]


def _note_next(error: Exception, folder: RunFolder, store: CheckpointStore, steps: int) -> None:
    """Add to an error which steps are saved, and the command that goes on from there."""
    newest = store.latest()
    saved = "none" if newest is None else f"step {newest} of {steps}, {store.path(newest)}"
    error.add_note(f"newest checkpoint: {saved}")
    options = error.resume_with if isinstance(error, PenstockError) else ()
    error.add_note(next_line("train", folder.path, "--resume", *options))


def _print_end(console: Console, run: Run, folder: RunFolder, end: RunEnd, wall: Mapping[str, float]) -> None:
    saved = f"saved in {end.checkpoint}" if end.checkpoint else "nothing is saved"
    if end.stopped_by:
        lines = [f"stopped by {end.stopped_by} after step {end.step} of {end.steps}, {saved}"]
    else:
        lines = [f"done: {end.steps} steps in {duration_text(end.seconds)}, {saved}"]
    if end.last is not None:
        figures = [f"loss {end.last.loss:.4f} nats/token"]
        if end.last.evaluation is not None:
            figures.append(f"held out {end.last.evaluation.bits_per_byte:.3f} bits/byte")
        if end.last.forced_balance:
            figures.append(FORCED_BALANCE)
        lines.append("  ".join(figures))
    lost = sorted(((seconds, kind) for kind, seconds in wall.items() if kind != "training"), reverse=True)
    losses = ", ".join(f"{kind} {duration_text(seconds)}" for seconds, kind in lost[:3])
    lines.append(
        f"goodput {goodput(wall) or 0:.1%} of {duration_text(sum(wall.values()))} since the first start; {losses}"
    )
    if end.stopped_by and end.checkpoint:
        lines.append(next_line("train", folder.path, "--resume"))
    elif not end.stopped_by:
        if end.checkpoint and not run.data.source.startswith("synthetic"):
            lines.append(next_line("sample", folder.path, TEXT))
        if run.profile.start and folder.profile.is_dir():
            lines.append(next_line("trace", folder.path))
        lines.append(next_line("report", folder.path))
    _say(console, *lines)


def _check_memory(run: Run, grid: Grid, device: torch.device, local_ranks: int) -> None:
    shortage = find_shortage(run, grid, device, local_ranks)
    if shortage is not None:
        raise shortage


def _print_plan(console: Console, launch: Launch, grid: Grid, local_ranks: int) -> None:
    run, ranks = launch.run, grid.world
    device = choose_device(run.device)
    shortage = find_shortage(run, grid, device, local_ranks)
    warn_of_unfilled(run)
    # A file for a cluster can be checked on a laptop: where it does not fit, its rows are not cut.
    if shortage is not None:
        warn(str(shortage))
    texts = open_texts(run) if shortage is None else RunData(train=open_split(run, "train"), held_out=None)
    size = size_of(run.model, run.training.sequence_length)
    parameters, active = count_text(size.parameters + size.mtp_parameters), count_text(size.active_parameters)
    tokens = run.tokens_per_step * run.training.steps
    flops = size.flops_per_token  # forward and backward
    held_out = "nothing" if texts.held_out is None else f"{texts.held_out.tokens:,} tokens"
    held_out = held_out if shortage is None else "rows not cut,"
    skipped = read_sample(part.documents for part in texts.train.parts)
    facts = {
        "model": f"{parameters} parameters, {active} active for a token {DOT} {run.training.precision}",
        "compute": f"{flops_text(flops)} a token, {flops_text(flops * tokens)} in all",
        "memory": f"{bytes_text(state_bytes(run))} for weights, gradients and optimizer, before activations",
        "data": f"{texts.train}, {held_out} held out" + (f"; {skipped}" if skipped else ""),
        "batch": f"{run.tokens_per_step:,} tokens a step, {count_text(tokens)} in {run.training.steps:,} steps",
        "device": f"{device_name(device)} ({device})" + (f", {ranks} ranks" if ranks > 1 else ""),
    }
    where = f"goes on in {launch.folder.path}" if launch.folder else f"is new, in {run.record.folder}"
    _say(console, f"run {run.name} {where}; nothing was written", *filter(None, [launch.notice]))
    _say(console, *(f"  {label:<8} {text}" for label, text in facts.items()))


REHEARSED_CHIP = "H100"
"""The chip whose kernels decide what a rehearsed rank keeps for its backward passes."""

_LABEL_WIDTH = 12
_SHOWN_ACTIONS = 24  # of a rank's schedule
_GROUPS = ("tensor", "context", "dense_data", "pipeline", "expert", "expert_data", "embedding")


def print_rehearsal(run: Run, *, world: int, rank: int) -> None:
    """Build one rank without memory and print its contents. Raises a ConfigError if the layout does not fit."""
    chip = load_hardware(REHEARSED_CHIP)
    run = settled_on(run, cluster_of(world, chip))
    rehearsal = rehearse(run, world=world, rank=rank)
    memory = memory_of(run, world=world, rank=rank, target=Target(device=device_of(chip, run), world=world))
    held = bytes_text(memory.activations + memory.logits + memory.gathered)
    lines = [
        *_lines(run, rehearsal),
        ("passes", f"{held} at the fullest moment, with the kernels of an {chip.name}"),
        ("total", f"{bytes_text(memory.allocated)}, without the driver's memory"),
    ]
    for label, line in lines:
        print(f"{label:<{_LABEL_WIDTH}}{line}")


def _lines(run: Run, rehearsal: Rehearsal) -> list[tuple[str, str]]:
    model = rehearsal.model
    axes = model.axes
    lines = [
        ("run", f"{run.name}, rank {axes.rank} of {axes.grid.world}, nothing allocated"),
        ("dense", _place(axes, DENSE_AXES)),
        ("experts", _place(axes, EXPERT_AXES)),
    ]
    for name in _GROUPS:
        axis: Axis = getattr(axes, name)
        if axis.size > 1:  # other groups are the rank alone
            lines.append((name, f"place {axis.rank} of {axis.size}, ranks {_ranks(axis.ranks)}"))
    for number, stage in rehearsal.stages.items():
        lines.append((f"stage {number}", stages_text((stage,))))
    if model.positions is not None:
        positions_text = f"{len(model.positions)} of {run.training.sequence_length}, {_ranks(model.positions)}"
        lines.append(("positions", positions_text))
    lines += [
        ("parameters", f"{count_text(rehearsal.dense)} dense, {count_text(rehearsal.expert)} in experts"),
        ("weights", bytes_text(rehearsal.memory.weights)),
        ("gradients", bytes_text(rehearsal.memory.gradients)),
        ("optimizer", bytes_text(rehearsal.memory.optimizer)),
    ]
    if rehearsal.memory.host:
        lines.append(("on the host", bytes_text(rehearsal.memory.host)))
    if model.pipeline is not None:
        schedule = model.pipeline.schedule
        steps = actions.text(schedule, axes.pipeline.rank).split()  # such as 0F0 0B0
        more = f" ... ({len(steps)} actions)" if len(steps) > _SHOWN_ACTIONS else ""
        lines.append((schedule.name, " ".join(steps[:_SHOWN_ACTIONS]) + more))
    return lines


def _place(axes: Axes, view: tuple[str, ...]) -> str:
    coordinates = axes.grid.place(axes.rank, view)
    return ", ".join(
        f"{axis} {coordinates[axis]} of {size}" for axis, size in zip(view, axes.grid.shape(view), strict=True)
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ranks if len(ranks) <= 8 else (*ranks[:6], "...", ranks[-1])  # many: the first and the last
    return " ".join(map(str, shown))
