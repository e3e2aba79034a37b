"""All that is known of a run, read once: configuration, metrics, starts, traces, plan, verdict; and why one lacks.

    the folder of a run   ->  config.toml, metrics.jsonl, starts.jsonl, profile/
    traces of any program ->  what the traces say; there is neither a plan nor a metric then

Nothing here is an error but a file that is damaged: what is not there is a line in `lacks`, which stands in the page
where the picture would be. Traces of a CPU are read as if it were the device (penstock/trace/load.py). The doctor
does not judge these, because its walls are those of devices.

Which recorded step is drawn, and on what clock: what the pictures of traces agree on.

The last step that all ranks have recorded is drawn: the first one of a recording is often slower. Each rank's times are
taken back to the common clock that ends of collectives tell (penstock/trace/matching.py). Ranks that nothing joins with
the others begin where their own step does, and `StepClock.words` says so; processes on the CPUs of one machine share a
clock, so theirs is left as it is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError, DeviceError, HardwareError, KernelError, TraceError
from penstock.config.run import Run
from penstock.plan.hardware import Cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.trace.analysis import RankAnalysis, TraceAnalysis, analyse_traces
from penstock.trace.load import read_traces
from penstock.tune.doctor.diagnosis import Diagnosis, cpu_sentence, diagnose
from penstock.tune.doctor.evidence import Evidence, RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from penstock.tune.doctor.planned import with_projection
from penstock.tune.doctor.run_facts import (
    METRICS,
    STARTS,
    cluster_for,
    compared,
    facts_of,
    is_run,
    json_lines,
    recording_command,
)

LAYERS = 400
"""Recorded steps whose layers are looked at, evenly, the last among them."""


@dataclass(frozen=True, kw_only=True)
class MissingReasons:
    """Why something is not there, in one line each, without a full stop; empty where it is.

    Attributes:
        steps: of the metrics.
        trace: of any rank.
        plan: of the run.
        verdict: of the doctor.
    """

    steps: str = ""
    trace: str = ""
    plan: str = ""
    verdict: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunEvidence:
    """What a page is made of.

    Attributes:
        path: of the run, or of traces.
        judged: what the doctor looks at.
        lines: of metrics.jsonl; not all of them with their layers.
        starts: of starts.jsonl.
        answer: what the traces say.
        is_host: the traces are of a CPU, which stands for the device.
        projection: of the run, where it ran.
        verdict: of the doctor.
        lacks: reasons.
    """

    path: Path
    judged: Evidence
    lines: tuple[Mapping[str, Any], ...] = ()
    starts: tuple[Mapping[str, Any], ...] = ()
    answer: TraceAnalysis | None = None
    is_host: bool = False
    projection: Projection | None = None
    verdict: Diagnosis | None = None
    lacks: MissingReasons = field(default_factory=MissingReasons)

    @property
    def facts(self) -> RunFacts:
        """What is known of the run besides times."""
        return self.judged.facts

    @property
    def run(self) -> Run | None:
        """The configuration, from the folder or from a trace."""
        return self.facts.run

    @property
    def name(self) -> str:
        """Of the run, or of what was given."""
        return self.path.absolute().name

    @property
    def ranks(self) -> tuple[RankAnalysis, ...]:
        """Those with a trace."""
        return () if self.answer is None else self.answer.ranks

    @property
    def is_cpu(self) -> bool:
        """The run is on a CPU, as far as one can tell; of traces alone that of their device."""
        if self.starts:
            return self.starts[-1].get("cuda") is None and self.starts[-1].get("hip") is None
        if self.ranks:
            return self.is_host
        is_gpu = self.facts.capacity_bytes is not None or self.projection is not None
        return not (is_gpu or (self.run is not None and self.run.device == "cuda"))

    @property
    def speed_unit(self) -> str:
        """Of a device's speed."""
        return "tokens/s/CPU" if self.is_cpu else "tokens/s/GPU"


def sentence(reason: str) -> str:
    """A reason with a capital and a full stop."""
    return f"{reason[:1].upper()}{reason[1:].rstrip('.')}." if reason else ""


def gather(path: Path, *, on: str | None = None, plans: bool = True) -> RunEvidence:
    """Read everything.

    Args:
        path: the folder of a run; or a trace, or a folder of traces.
        on: what the run is on (`8xH200`); None takes what its traces or starts say.
        plans: project the run.

    Raises:
        TraceError: a trace is damaged, or the path holds neither a run nor a trace.
        ConfigError: the configuration of the run cannot be read.
        RunFolderError: its metrics or starts cannot be read.
        HardwareError: `on` is no hardware.
    """
    found = _of_run(path) if is_run(path) else RunEvidence(path=path, judged=_judged_by(RunFacts()), lacks=_NO_RUN)
    found = _with_traces(found)
    if found.answer is None and not is_run(path):
        raise TraceError(found.lacks.trace)
    evidence = _judged(found)
    cluster = cluster_for(evidence.facts, on) if plans and evidence.facts.run is not None else None
    projection, lack = _projected(evidence, cluster, plans=plans)
    if projection is not None:
        evidence = with_projection(replace(evidence, notes=compared(evidence.facts, projection.cluster)), projection)
    verdict, refused = _verdict(evidence, found)
    return replace(
        found,
        judged=evidence,
        projection=projection,
        verdict=verdict,
        lacks=replace(found.lacks, plan=lack, verdict=refused),
    )


def _judged_by(facts: RunFacts) -> Evidence:
    """Evidence without times."""
    return Evidence(source="none", ranks=(), facts=facts)


_NO_RUN = MissingReasons(steps="these are traces, not the folder of a run, so there are no metrics")


def _of_run(path: Path) -> RunEvidence:
    lines = [line for line in json_lines(path / METRICS, LAYERS) if isinstance(line.get("step"), int)]
    facts, missing = facts_of(path, lines)
    starts = tuple(json_lines(path / STARTS))
    return RunEvidence(
        path=path,
        judged=_judged_by(facts),
        lines=tuple(lines),
        starts=starts,
        lacks=MissingReasons(steps="; ".join(missing)),
    )


def _with_traces(found: RunEvidence) -> RunEvidence:
    """Traces of devices, or else of the host."""
    try:
        traces, is_host = read_traces(found.path)
    except TraceError as error:
        if is_run(found.path) and "holds no trace" in error.what:
            lack = f"no step was traced; record some steps: {recording_command(found.path)}"
            return replace(found, lacks=replace(found.lacks, trace=lack))
        raise
    return replace(found, answer=analyse_traces(traces, is_host=is_host), is_host=is_host)


def _judged(found: RunEvidence) -> Evidence:
    """The doctor's evidence."""
    if found.answer is None:
        return found.judged
    return evidence_of(found.answer, found.facts)


def _projected(evidence: Evidence, cluster: Cluster | None, *, plans: bool) -> tuple[Projection | None, str]:
    """The plan, or why there is none."""
    run = evidence.facts.run
    if not plans:
        return None, "no plan was asked for (--no-plan)"
    if run is None:
        return None, "no plan: the configuration of the run is not known"
    if cluster is None:
        device = evidence.facts.device
        what = "nothing says what the run is on" if device is None else f"no hardware file is of {device}"
        return None, f"no plan: {what}; --on names the devices, such as 8xH200"
    try:
        return project(run, cluster), ""
    except (ConfigError, DeviceError, HardwareError, KernelError) as error:
        return None, f"no plan on {cluster.devices} x {cluster.hardware.name}: {error}"


def _verdict(evidence: Evidence, found: RunEvidence) -> tuple[Diagnosis | None, str]:
    """The doctor's, or why there is none."""
    try:
        return diagnose(evidence), ""
    except TraceError:
        if found.is_host:
            return None, cpu_sentence(evidence)
        return None, f"no verdict: {found.lacks.trace}; and without a plan there is nothing else to judge by"


# ------------------------------------------------------------------------------------------------------------ run steps


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """The times of a drawn step.

    Attributes:
        windows_us: of each rank, start and end of the step on the device, by the clock of its file.
        zero_us: of each rank, where the axis begins, by the same clock.
        words: how the clocks were aligned.
    """

    windows_us: Mapping[int, tuple[float, float]]
    zero_us: Mapping[int, float]
    words: str


def last_step(ranks: Sequence[RankAnalysis]) -> int | None:
    """The number of the last step in which all of these ranks did something, or None."""
    numbers = [{step.number for step in one.steps if step.timeline.events} for one in ranks]
    return max(set.intersection(*numbers), default=None) if numbers else None


def step_name(one: RankAnalysis, number: int | None) -> str | None:
    """The name of the region of a step, or None without steps."""
    return next((step.name for step in one.steps if step.number == number), None)


def window_us(one: RankAnalysis, number: int | None) -> tuple[float, float]:
    """Start and end of a step on the device; of all that was recorded without steps."""
    for step in one.steps:
        if step.number == number:
            return step.window_us
    gpu = one.trace.gpu
    return float(gpu.start_us[0]), float(gpu.end_us.max())


def clock_of(evidence: RunEvidence, ranks: Sequence[RankAnalysis]) -> StepClock:
    """The clock on which some ranks are drawn.

    Args:
        evidence: of the run.
        ranks: with a trace.
    """
    assert evidence.answer is not None, "ranks have traces"
    number = last_step(ranks)
    windows = {one.rank: window_us(one, number) for one in ranks}
    clocks, order = evidence.answer.collectives.meetings.clocks, evidence.answer.collectives.calls.ranks
    ahead = {rank: float(clocks.ahead_us[place]) for place, rank in enumerate(order)}
    island = {rank: 0 if evidence.is_host else int(clocks.island[place]) for place, rank in enumerate(order)}
    main = Counter(island[rank] for rank in windows).most_common(1)[0][0]
    together = [rank for rank in windows if island[rank] == main]
    begin = min(windows[rank][0] - ahead[rank] for rank in together)
    zero = {rank: begin + ahead[rank] if rank in together else windows[rank][0] for rank in windows}
    words = ""
    if len(windows) > 1 and evidence.is_host:
        words = "Times are those of the machine's own clock."
    elif len(together) > 1:
        moved = max(abs(ahead[rank]) for rank in together)
        words = "By the ends of collectives the clocks of all ranks agree."
        if moved >= 1:
            words = f"Clocks are aligned by the ends of collectives, the furthest by {moved:,.0f} \u00b5s."
    if len(together) < len(windows):
        words += f" Nothing joins the clocks of {len(windows) - len(together)} ranks: each begins at its own start."
    return StepClock(windows_us=windows, zero_us=zero, words=words.strip())
