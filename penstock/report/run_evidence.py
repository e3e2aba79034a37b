"""Everything known of a run, read once: configuration, metrics, starts, traces, plan and diagnosis.

    the folder of a run   ->  config.toml, metrics.jsonl, starts.jsonl, profile/
    traces of any program ->  the traces only; there is neither a plan nor a metric

Only damaged files are errors: missing evidence is a line in `lacks`, which the page prints instead of the figure. CPU
traces are read as if the CPU were the device (penstock/trace/load.py). The doctor does not diagnose these, because its
bottlenecks are those of devices.

Figures of traces show the last step that all ranks recorded, because the first recorded step is often slower. Each
rank's times are moved to the common clock of the collectives (penstock/trace/matching.py). Ranks that no collective
joins with the others begin at their own step, and `StepClock.words` says so; processes on the CPUs of one machine share
a clock.
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
from penstock.trace.analysis import RankAnalysis, TraceAnalysis, analyse_traces, last_step, window_us
from penstock.trace.load import load_ranks
from penstock.trace.recognize import PhaseNames
from penstock.train.goodput import wall_seconds
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
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

GOODPUT = "goodput.jsonl"
LAYERS = 400  # recorded steps whose layers are read, evenly spaced, the last one included


@dataclass(frozen=True, kw_only=True)
class MissingReasons:
    """Reasons why metrics, traces, plan or diagnosis are missing: a line without a full stop, empty if present."""

    steps: str = ""
    trace: str = ""
    plan: str = ""
    verdict: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunEvidence:
    """The content of a page."""

    path: Path
    judged: Evidence
    lines: tuple[Mapping[str, Any], ...] = ()  # of metrics.jsonl; only some of them have layers
    starts: tuple[Mapping[str, Any], ...] = ()
    wall_seconds: Mapping[str, float] = field(default_factory=dict)  # of all processes of the run, by kind
    answer: TraceAnalysis | None = None
    projection: Projection | None = None  # of the run on its hardware
    verdict: Diagnosis | None = None
    lacks: MissingReasons = field(default_factory=MissingReasons)

    @property
    def facts(self) -> RunFacts:
        return self.judged.facts

    @property
    def run(self) -> Run | None:
        return self.facts.run

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def ranks(self) -> tuple[RankAnalysis, ...]:
        return () if self.answer is None else self.answer.ranks

    @property
    def is_host(self) -> bool:
        return self.answer is not None and self.answer.is_host

    @property
    def is_cpu(self) -> bool:
        """The run is on a CPU: by its starts, else its traces, else what is known of its device."""
        if self.starts:
            return self.starts[-1].get("cuda") is None and self.starts[-1].get("hip") is None
        if self.ranks:
            return self.is_host
        # Plans exist for GPUs only.
        is_gpu = self.facts.capacity_bytes is not None or self.projection is not None
        return not (is_gpu or (self.run is not None and self.run.device == "cuda"))

    @property
    def speed_unit(self) -> str:
        return "tokens/s/CPU" if self.is_cpu else "tokens/s/GPU"


def sentence(reason: str) -> str:
    """A reason with a capital letter and a full stop."""
    return f"{reason[:1].upper()}{reason[1:].rstrip('.')}." if reason else ""


def gather(path: Path, *, on: str | None = None, plans: bool = True, names: PhaseNames | None = None) -> RunEvidence:
    """Read everything.

    `path` is the folder of a run, a trace, or a folder of traces. `on` is hardware (`8xH200`); None takes it from the
    traces or starts. `names` are phases of kernels that the user names. Raises a TraceError, ConfigError or
    RunFolderError if traces, configuration or metrics cannot be read, a HardwareError if `on` is not known.
    """
    findings = _with_traces(_of_run(path) if is_run(path) else _of_traces(path), names)
    if findings.answer is None and not is_run(path):
        raise TraceError(findings.lacks.trace)
    evidence = findings.judged if findings.answer is None else evidence_of(findings.answer, findings.facts)
    cluster = cluster_for(evidence.facts, on) if plans and evidence.facts.run is not None else None
    projection, lack = _projected(evidence, cluster, plans=plans)
    if projection is not None:
        evidence = with_projection(replace(evidence, notes=compared(evidence.facts, projection.cluster)), projection)
    verdict, refused = _verdict(evidence, findings)
    return replace(
        findings,
        judged=evidence,
        projection=projection,
        verdict=verdict,
        lacks=replace(findings.lacks, plan=lack, verdict=refused),
    )


def _of_traces(path: Path) -> RunEvidence:
    lacks = MissingReasons(steps="these are traces, not the folder of a run, so there are no metrics")
    return RunEvidence(path=path, judged=Evidence(source="none", ranks=(), facts=RunFacts()), lacks=lacks)


def _of_run(path: Path) -> RunEvidence:
    lines = [line for line in json_lines(path / METRICS, LAYERS) if isinstance(line.get("step"), int)]
    facts, missing = facts_of(path, lines)
    return RunEvidence(
        path=path,
        judged=Evidence(source="none", ranks=(), facts=facts),
        lines=tuple(lines),
        starts=tuple(json_lines(path / STARTS)),
        wall_seconds=wall_seconds(path / GOODPUT),
        lacks=MissingReasons(steps="; ".join(missing)),
    )


def _with_traces(findings: RunEvidence, names: PhaseNames | None) -> RunEvidence:
    try:
        traces = load_ranks(findings.path, names=names)
    except TraceError as error:
        if is_run(findings.path) and "holds no trace" in error.what:
            lack = f"no step was traced; record some steps: {recording_command(findings.path)}"
            return replace(findings, lacks=replace(findings.lacks, trace=lack))
        raise
    return replace(findings, answer=analyse_traces(traces))


def _projected(evidence: Evidence, cluster: Cluster | None, *, plans: bool) -> tuple[Projection | None, str]:
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


def _verdict(evidence: Evidence, findings: RunEvidence) -> tuple[Diagnosis | None, str]:
    try:
        return diagnose(evidence), ""
    except TraceError:
        return None, f"no verdict: {findings.lacks.trace}; and without a plan there is nothing else to judge by"


# ------------------------------------------------------------------------------------------------------------ run steps


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """The times of a drawn step."""

    # Of each rank, start and end of the step on the device, on the clock of its file.
    windows_us: Mapping[int, tuple[float, float]]
    zero_us: Mapping[int, float]  # of each rank, the origin of the axis, on the same clock
    words: str


def step_name(rank: RankAnalysis, number: int | None) -> str | None:
    """The name of the region of a step, or None without steps."""
    return next((step.name for step in rank.steps if step.number == number), None)


def clock_of(evidence: RunEvidence, ranks: Sequence[RankAnalysis]) -> StepClock:
    """The clock on which some ranks with traces are drawn."""
    assert evidence.answer is not None, "ranks have traces"
    number = last_step(ranks)
    windows = {rank.rank: window_us(rank, number) for rank in ranks}
    clocks, order = evidence.answer.collectives.meetings.clocks, evidence.answer.collectives.calls.ranks
    ahead = dict(zip(order, clocks.ahead_us.tolist(), strict=True))
    island = dict(zip(order, clocks.island.tolist(), strict=True))
    main = Counter(island[rank] for rank in windows).most_common(1)[0][0]  # the largest island
    together = [rank for rank in windows if island[rank] == main]
    begin = min(windows[rank][0] - ahead[rank] for rank in together)  # first start, on the common clock
    zero = {rank: begin + ahead[rank] if rank in together else windows[rank][0] for rank in windows}
    text = ""
    if len(together) > 1:
        moved = max(abs(ahead[rank]) for rank in together)  # microseconds
        text = "By the ends of collectives the clocks of all ranks agree."
        if moved >= 1:
            text = f"Clocks are aligned by the ends of collectives, the furthest by {moved:,.0f} \u00b5s."
    if len(together) < len(windows):
        text += f" Nothing joins the clocks of {len(windows) - len(together)} ranks: each begins at its own start."
    return StepClock(windows_us=windows, zero_us=zero, words=text.strip())
