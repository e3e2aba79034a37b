"""The training loop.

    for each step
        step       penstock/train/step.py; a step that is not finite ends the run, see below
        evaluate   if due: after the first step, every `evaluation.every`, after the last
        report     one frozen report to every observer
        save       if due: every `checkpoint.every`, after the last, and when a stop was requested
        garbage    collected every `training.collect_garbage_every` steps, never inside a step

Lines of metrics are synced to disk before the checkpoint that contains their steps is written. When a killed run
resumes, the lines after its last checkpoint are deleted, so metrics and state always agree.

A stop request reaches the other ranks with the figures of a step, so all stop after the same step. If it comes after
these figures were sent, several ranks stop one step later.

An error between the first step and the last ends the run with a checkpoint of the last complete step, unless the
parameters were being updated. If it is of one rank (a document, a full disk), this rank takes part in the next step
with an empty batch, its vote keeps all ranks from applying the step, and all of them save and raise the error.

A step that is not finite is not applied. The figure is written to nonfinite.json at once. Data and random state are
restored to those before the step and saved if the run saves at all. The search for the source of the NaN runs last,
because it needs memory. The run ends with the figure even if one of these fails.
"""

import gc
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from signal import SIGTERM
from types import TracebackType
from typing import Any

import numpy as np

from penstock.base.errors import (
    CheckpointError,
    DamagedError,
    LostRankError,
    NonFiniteError,
    PenstockError,
    RunFolderError,
    every_kind,
)
from penstock.base.spans import NUMBERED_STEP, Span
from penstock.config.fit import micro_batches
from penstock.config.run import Run
from penstock.data.loader import Batch, pack
from penstock.data.stream import LoaderState, Rows
from penstock.parallel.axes import ALONE, Axis
from penstock.parallel.collectives import all_gather_json
from penstock.parallel.launch.process import peak_host_memory_bytes
from penstock.parallel.spans import Stopwatch, span
from penstock.train.checkpoint import CheckpointStore
from penstock.train.diagnose import NonFiniteFinding, NonFiniteOrigin, find_held_out_origin, find_origin, report_figure
from penstock.train.goodput import GoodputLedger
from penstock.train.metrics import drop_after
from penstock.train.observer import HeldOutLoss, Observer, RunEnd, RunStart, StepReport, StepTotals
from penstock.train.optimizer import learning_rate
from penstock.train.power import PowerMeter
from penstock.train.profile import Recorder
from penstock.train.run_folder import RunFolder, changes_since
from penstock.train.saved_weights import load_initial_weights
from penstock.train.setup import Session
from penstock.train.state import random_state, restore_random_state, restore_state, save_state
from penstock.train.step import NO_PULSE, StepResult, StopRequest, evaluate, train_step
from penstock.train.stragglers import RankPulse, StragglerWatch


@dataclass(frozen=True, kw_only=True)
class RunHooks:
    """What a run needs of its surroundings."""

    # Is told what begins, and an empty text for work that may take any time, for a watch over hangs.
    mark: Callable[[str], None] = lambda phase: None
    host_of: Callable[[int], str] = lambda rank: socket.gethostname()  # of a rank, for the lines about late ranks
    ledger: GoodputLedger | None = None  # gets the time of this process, on the first rank


ALONE_HOOKS = RunHooks()


@dataclass(frozen=True)
class Progress:
    """Completed optimizer steps and their tokens."""

    steps: int = 0
    tokens: int = 0
    notices: tuple[str, ...] = ()  # lines for the user about what was found at the start


@dataclass(frozen=True)
class ResumePoint:
    """State of data and random generators between two steps."""

    data: LoaderState
    random: dict[str, Any]


def open_store(run: Run, folder: RunFolder, world: Axis = ALONE.world) -> CheckpointStore:
    """The checkpoints of a run. All ranks of `world` call this together; a single reader passes none."""
    asked = run.checkpoint
    return CheckpointStore(
        folder.checkpoints, asked.keep, asked.asynchronous, world, mark=folder.saved, keep_every=asked.keep_every
    )


def resume(session: Session, folder: RunFolder, store: CheckpointStore, wanted: Run | None = None) -> Progress:
    """Restore the newest checkpoint, or begin anew if the run was killed before its first.

    The session is one that `prepare` has made with `is_new` false. The folder keeps the run as `wanted`, without it the
    session's, which fewer ranks may have changed.

    Of damaged checkpoints the one before is restored, and they are renamed, unless `checkpoint.fall_back` is false. The
    folder does not change unless a checkpoint is valid. Raises a CheckpointError if none can be used, or if some rank
    does not see the newest, and a RunFolderError if the folder cannot be written.
    """
    steps = store.steps_of_all()
    if steps:
        progress = _restore_newest(session, store, steps)
    else:
        load_initial_weights(session.run.training.initial_weights, session.state, session.axes.world)
        progress = Progress()
    if session.axes.rank == 0:
        # Steps after the checkpoint are made again, and so are their lines.
        lost = drop_after(folder.metrics, progress.steps, session.run.record.every)
        progress = replace(progress, notices=(*progress.notices, *lost))
        folder.write_config(wanted or session.run)
    return progress


def _restore_newest(session: Session, store: CheckpointStore, steps: Sequence[int]) -> Progress:
    """Restore the first of some checkpoints that is whole. All ranks call this together."""
    damaged: dict[int, DamagedError] = {}
    for step in steps:
        try:
            notes = restore_state(store, step, session.state)
            if "tokens_seen" not in notes:
                raise DamagedError(f"the checkpoint of step {step} is damaged", got="no count of tokens")
        except DamagedError as error:
            damaged[step] = error
            if step == steps[-1] or not session.run.checkpoint.fall_back:
                raise damaged[steps[0]] from error
            continue
        break
    notices = [
        f"{f'{error}'.partition('; fix: ')[0]}; it is {store.set_aside(old)} now, and the run goes on from step {step}"
        for old, error in damaged.items()
    ]
    changes = changes_since(store.read_facts(step).get("options", {}), session.run)
    if changes:
        notices.append(f"changed since step {step}: {', '.join(changes)}")
    return Progress(step, notes["tokens_seen"], tuple(notices))


def train_run(
    session: Session,
    folder: RunFolder,
    store: CheckpointStore,
    begin: Progress,
    observers: Sequence[Observer],
    stop: StopRequest,
    hooks: RunHooks = ALONE_HOOKS,
) -> RunEnd:
    """Train until the last step or a stop request, from the state `begin` of a session.

    Observers and the ledger are closed on return, also after an error, before which the last complete step is saved if
    that is possible. Raises a NonFiniteError for a loss or gradient that is NaN or infinite, a DataError for a document
    that cannot be read, and a CheckpointError or RunFolderError for failed writes.
    """
    ledger = hooks.ledger or GoodputLedger(None, begin.steps)
    with ExitStack() as cleanup:
        _close_at_end(cleanup, ledger.close)  # last, so that it has all of the time
        cleanup.callback(session.state.batches.close)
        for observer in observers:
            _close_at_end(cleanup, observer.closed)
        cleanup.enter_context(_manual_garbage_collection(session.run.training.collect_garbage_every))
        loop = _Loop(session, folder, store, begin, observers, hooks, ledger)
        cleanup.callback(loop.power.close)
        cleanup.push(loop.rescue)
        end = loop.run(stop)
        ledger.enter("checkpoint")
        store.wait()
        store.close()
        if session.graphs is not None:  # not after an error: release would wait for a lost rank
            session.graphs.release()
        return end


def _close_at_end(cleanup: ExitStack, close: Callable[[], None]) -> None:
    """Close something at the end; after an error, which is the one to be raised, its own problems do not matter."""

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            close()
        except (PenstockError, OSError):
            if error is None:
                raise

    cleanup.push(end)


class _Loop:
    """State of `train_run` between steps."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        store: CheckpointStore,
        begin: Progress,
        observers: Sequence[Observer],
        hooks: RunHooks,
        ledger: GoodputLedger,
    ) -> None:
        self._mark = hooks.mark
        self._session = session
        self._run = session.run
        self._rule = session.rule
        self._folder = folder
        self._store = store
        self._begin = begin
        self._done = begin  # the steps that the parameters have
        self._before: ResumePoint | None = None  # of the step that is being made
        self._is_updating = False  # the parameters are those of no step
        self._fault: Exception | None = None  # of this rank, until all ranks end together
        self._stop = StopRequest()
        self._observers = observers
        self._begin_seconds = time.perf_counter()
        # Not read from disk: a network file system may differ between ranks.
        self._saved = begin.steps or None
        self._notices = session.notices  # for the first report
        self._watch = Stopwatch(session.device)
        self.power = PowerMeter(session.device)
        self._ledger = ledger
        self._stragglers = StragglerWatch(hooks.host_of)
        self._pulse = NO_PULSE  # of this rank, sent with the next step
        self._recorder = Recorder(session.run, folder.profile, session.device, session.axes.grid, session.axes.rank)

    def run(self, stop: StopRequest) -> RunEnd:
        steps, self._stop = self._run.training.steps, stop
        self._announce()
        done, last, is_stopping = self._begin, None, False
        while done.steps < steps and not is_stopping:
            last, wants_stop = self._step(done)
            done = self._done
            self._on_this_rank(*(partial(observer.stepped, last) for observer in self._observers))
            self._on_this_rank(partial(self._ledger.stepped, done.steps))
            # A request after the step's figures counts on a single rank only, as others do not know it.
            is_alone = self._session.axes.world.group is None
            is_stopping = wants_stop or (is_alone and stop.signal is not None)
            is_end = done.steps == steps or is_stopping
            if self._run.checkpoint.enabled and (is_end or _is_due(done.steps, self._run.checkpoint.every)):
                self._save(done)  # after the observers: the line of a step is on disk before its checkpoint
            if _is_due(done.steps, self._run.training.collect_garbage_every):
                gc.collect()  # after the same step on all ranks, so that they pause together
        self._raise_faults()
        self._recorder.finish()
        return RunEnd(
            step=done.steps,
            steps=steps,
            seconds=time.perf_counter() - self._begin_seconds,
            checkpoint=None if self._saved is None else self._store.path(self._saved),
            last=last,
            stopped_by=(stop.signal or SIGTERM).name if is_stopping and done.steps < steps else None,
        )

    def _on_this_rank(self, *calls: Callable[[], object]) -> None:
        """Make calls that may fail on this rank alone."""
        for call in calls:
            try:
                call()
            except LostRankError:
                raise
            except (PenstockError, OSError) as error:
                self._keep(error)

    def _keep(self, error: Exception) -> None:
        """Keep the first error of this rank until all ranks end together; of a single rank it is raised."""
        is_first, self._fault = self._fault is None, self._fault or error
        self._stop.has_failed = True
        if is_first and self._session.axes.world.group is None:
            raise error

    def _raise_faults(self) -> None:
        """Raise the error of the first rank that has one on all of them, which call this together."""
        if (world := self._session.axes.world).group is None:
            return
        local_fault = None if self._fault is None else [type(self._fault).__name__, str(self._fault)]
        fault = next(filter(None, all_gather_json(local_fault, world)), None)
        if fault is not None:
            error = every_kind().get(fault[0], PenstockError)(fault[1])
            error.is_of_all_ranks = True
            raise error from self._fault

    def rescue(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save the last complete step behind an error that all ranks have, unless it is saved.

        A failed save is tried again: its partial files are gone. Another failure changes nothing of the error.
        """
        is_of_all = self._session.axes.world.group is None or isinstance(error, CheckpointError)
        is_of_all |= isinstance(error, PenstockError) and error.is_of_all_ranks
        is_saved = isinstance(error, NonFiniteError | LostRankError)  # or cannot be
        if not isinstance(error, Exception) or is_saved or not is_of_all or self._is_updating:
            return
        self._fault = error  # later ones do not matter
        if not self._run.checkpoint.enabled or self._done.steps == 0:
            return
        with suppress(PenstockError, OSError, RuntimeError):  # of a GPU that failed, too
            with suppress(CheckpointError):
                self._store.wait()
            if self._store.latest_of_all() == self._done.steps:
                return
            if self._before is not None:
                self._restore(self._before)
            self._save(self._done)
            self._store.wait()

    def _restore(self, point: ResumePoint) -> None:
        self._session.state.batches.restore(point.data)
        restore_random_state(point.random)

    def _announce(self) -> None:
        size = self._session.size
        start = RunStart(
            run=self._run,
            folder=self._folder.path,
            device_name=self._session.device_name,
            kernels=self._session.kernels,
            parameters=size.parameters + size.mtp_parameters,
            active_parameters=size.active_parameters,
            steps_done=self._begin.steps,
            ranks=self._session.axes.world.size,
            micro_batches=micro_batches(self._run, self._session.axes.grid),
            graphs=self._session.graphs_note,
            sync_free=self._session.sync_free_note,
        )
        for observer in self._observers:
            observer.started(start)

    def _next_batch(self) -> Batch:
        """The batch of a step; an empty one behind an error of this rank, as other ranks are about to make the step."""
        try:
            return self._session.state.batches.next_batch()
        except (PenstockError, OSError) as error:
            self._keep(error)
        training = self._run.training
        shape = training.global_batch // self._session.axes.data.size, training.sequence_length + 1
        no_tokens = np.zeros(shape, dtype=np.int64)
        return pack(Rows(no_tokens, no_tokens), document_mask=self._run.data.document_mask)

    def _step(self, done: Progress) -> tuple[StepReport, bool]:
        state, step = self._session.state, done.steps + 1
        self._before = before = ResumePoint(state.batches.state(), random_state())
        peak = self._run.optimizer.learning_rate
        rate = learning_rate(done.steps, self._run.training.steps, peak, self._run.schedule)
        self._recorder.begin(step)
        begin_seconds = time.perf_counter()
        self._ledger.enter("data")
        self._mark(f"data of step {step}")
        self._watch.start(Span.DATA)
        with span(NUMBERED_STEP, step):
            with span(Span.DATA):
                batch = self._next_batch()
            model, launched = self._session.model, 0.0
            data_seconds = time.perf_counter() - begin_seconds
            self._ledger.enter("training")

            def enter(phase: Span) -> None:
                nonlocal launched
                self._mark(f"{phase.value} of step {step}")
                self._watch.enter(phase)
                self._is_updating = phase is Span.OPTIMIZER and launched > 0  # the gradients are those of all ranks
                if phase is Span.REDUCE:
                    launched = time.perf_counter() - begin_seconds - data_seconds

            result = train_step(model, state.optimizer, batch, self._rule, rate, self._stop, enter, self._pulse)
        # The host has read the step's figures, so the passes have ended; the kernels of the update may still run.
        seconds, phases = time.perf_counter() - begin_seconds, self._watch.stop()
        power = self.power.read()
        work = sum(phases.values()) - phases.get(Span.REDUCE, 0.0)
        self._pulse = RankPulse(data_seconds, work, launched, power.clock_mhz or 0.0)
        self._mark("")
        if result.has_failed:
            self._raise_faults()
        if not result.is_finite:
            self._recorder.end(step)
            is_loss = not math.isfinite(result.loss)
            figure, value = ("loss", result.loss) if is_loss else ("gradient norm", result.gradient_norm)
            finding = NonFiniteFinding(figure=figure, value=str(value), step=step)
            raise self._halt(finding, partial(find_origin, model, state.optimizer, batch, self._rule), before)
        self._done = Progress(step, done.tokens + self._run.tokens_per_step)
        self._before, self._is_updating = None, False
        self._ledger.enter("other")
        self._on_this_rank(partial(self._recorder.end, step))
        report = self._report(done, result, rate, seconds, self._evaluate(step))
        late = self._stragglers.add(seconds, result.pulses) if self._session.axes.rank == 0 else ()
        notices = (*report.notices, *late)
        return replace(report, phase_seconds=phases, power=power, notices=notices), result.wants_stop

    def _evaluate(self, step: int) -> HeldOutLoss | None:
        rows, every = self._session.held_out, self._run.evaluation.every
        # Step 1 is due because a curve should show its begin.
        is_due = step == self._run.training.steps or (every and (step == 1 or step % every == 0))
        if rows is None or not is_due:
            return None
        self._ledger.enter("evaluation")
        with span(Span.EVALUATE):
            held_out = evaluate(self._session.model, rows, self._rule.cut, self._rule.loss)
        if not math.isfinite(held_out.loss):
            finding = NonFiniteFinding(figure="held-out loss", value=str(held_out.loss), step=step)
            raise self._halt(finding, partial(find_held_out_origin, self._session.model, rows, self._rule))
        self._ledger.enter("other")
        return held_out

    def _report(
        self, done: Progress, result: StepResult, rate: float, seconds: float, evaluation: HeldOutLoss | None
    ) -> StepReport:
        tokens, peak = self._run.tokens_per_step, self._session.peak_flops  # tokens of all ranks; FLOP/s of one device
        per_device = tokens / seconds / self._session.axes.world.size
        moe, graphs = self._run.model.moe, self._session.graphs
        notices = (*self._notices, *self._recorder.take_notices(), *self._session.state.batches.take_notices())
        self._notices = ()
        return StepReport(
            **{field.name: getattr(result, field.name) for field in fields(StepTotals)},
            step=done.steps + 1,
            learning_rate=rate,
            tokens_seen=done.tokens + tokens,
            tokens_per_second_per_device=per_device,
            step_seconds=seconds,
            elapsed_seconds=time.perf_counter() - self._begin_seconds,
            model_flops_utilization=self._session.size.flops_per_token * per_device / peak if peak else None,
            peak_host_memory_bytes=peak_host_memory_bytes(),
            forced_balance=moe is not None and moe.balance.force_load_balance,
            records_skipped=self._session.state.batches.skipped(),
            evaluation=evaluation,
            graph_pool_bytes=0 if graphs is None else graphs.pool_bytes,
            notices=notices if graphs is None else (*notices, *graphs.take_notices()),
            expert_ranks=self._run.parallel.expert,
            wall_seconds=self._ledger.seconds(),
        )

    def _save(self, done: Progress) -> None:
        self._ledger.enter("checkpoint")
        # The lines of its steps are on disk before it is.
        self._on_this_rank(*(observer.saving for observer in self._observers))
        self._mark(f"checkpoint of step {done.steps}")
        with span(Span.SAVE):
            save_state(self._store, done.steps, self._session.state, {"tokens_seen": done.tokens})
        self._mark("")
        self._ledger.enter("other")
        self._on_this_rank(self._ledger.flush)  # steps that a restart makes again are whole lines
        self._saved = done.steps
        self._on_this_rank(*(partial(observer.saved, done.steps) for observer in self._observers))

    def _halt(
        self,
        finding: NonFiniteFinding,
        look: Callable[[], NonFiniteOrigin | None],
        before: ResumePoint | None = None,
    ) -> NonFiniteError:
        """The error that ends the run. Saves the state `before` a step that was not applied; else no state is good."""

        def save() -> None:
            with suppress(RunFolderError):  # the non-finite figure is more important than a failed recording
                self._recorder.finish()
            self._store.wait()
            if before is not None and self._run.checkpoint.enabled and self._saved != self._done.steps:
                self._restore(before)  # parameters, moments and expert bias are unchanged
                self._save(self._done)
                self._store.wait()  # on disk before the search, which may run out of memory

        def look_with_all_memory() -> NonFiniteOrigin | None:
            if self._session.graphs is not None:
                self._session.graphs.release()  # the search needs the memory of their pool
            return look()

        path, world = self._folder.nonfinite, self._session.axes.world
        return report_figure(finding, path, self._store, world, save=save, look=look_with_all_memory)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _manual_garbage_collection(every: int) -> Iterator[None]:
    """Disable Python's garbage collector inside of steps; 0 leaves it on.

    Objects older than the first step are frozen, so no collection walks through the model.
    """
    if every == 0:
        yield
        return
    gc.collect()  # before the freeze, so that no garbage is frozen
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
