"""What-if questions: two runs side by side, one run on more devices, with another value, with state in host memory.

Each question takes a `Planner` (`penstock.plan.project.project` with its assumptions) and returns values, which
`penstock.cli.plan_print` prints. Everything else stays: the layout, so more devices are more data-parallel ranks, and
about the tokens of a step, so a longer sequence is fewer rows. A question without an answer, such as more expert ranks
than experts, returns a point with the refusal. A sweep without a layout is of searches (`swept_searches`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Literal

from penstock.base.errors import ConfigError, PenstockError, did_you_mean
from penstock.config.parallel import DISPATCHERS
from penstock.config.run import Run
from penstock.config.schema import Difference, as_toml, differences, find
from penstock.plan.asked_layout import layout_fields, with_layout, with_overrides
from penstock.plan.candidates import MOST_MICRO_BATCH, ladder_of
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import NETWORK, with_network
from penstock.plan.layout_names import FIELDS, FOLLOW, check_fixed
from penstock.plan.memory import components
from penstock.plan.projection import Projection, RankTime, Refusal
from penstock.plan.rules import config_refusal

Planner = Callable[[Run, Cluster], Projection]
"""Projects a run on a cluster. Raises a PenstockError where it cannot run."""

FittingRun = tuple[tuple[str, ...], Projection]  # overrides, and the projection of the run with them

CANNOT_START = "cannot-start"
"""Rule of a run that no rule of the config refuses, and that cannot be built for the cluster."""

MOST_ROWS_WITH_OFFLOADED_GRADIENTS = 2 * MOST_MICRO_BATCH  # largest micro-batch with `offload.gradients`

HOST_FORMATS = (
    (),
    ("optimizer.store_param_remainders=true",),
    ("optimizer.store_param_remainders=true", "optimizer.moment_dtype=bf16"),
    ("optimizer.store_param_remainders=true", "optimizer.moment_dtype=int8"),
)
"""Formats of the optimizer's state in the order in which they are tried."""

SHORT: Mapping[str, str] = {"sequence_length": "training.sequence_length", "global_batch": "training.global_batch"}
"""Short names of fields to sweep, besides the parts of a layout."""


def slowest(projection: Projection) -> RankTime:
    """The place on the pipeline that waits least for the others: time saved there is saved."""
    return min(projection.time.ranks, key=lambda rank: rank.waiting)


@dataclass(frozen=True, kw_only=True)
class TermChange:
    """One term of two runs, in bytes or seconds; 0 where a run does not have it."""

    name: str
    left: float
    right: float

    @property
    def more(self) -> float:
        """The right value less the left one."""
        return self.right - self.left


@dataclass(frozen=True, kw_only=True)
class ProjectionComparison:
    """Two runs side by side."""

    left: Projection
    right: Projection
    fields: tuple[Difference, ...]
    memory: tuple[TermChange, ...]  # components of the fullest ranks
    activations: tuple[TermChange, ...]  # of these ranks, by the label of the allocating module
    seconds: tuple[TermChange, ...]  # terms of the slowest places


def compare(left: Projection, right: Projection) -> ProjectionComparison:
    return ProjectionComparison(
        left=left,
        right=right,
        fields=tuple(differences(left.run, right.run)),
        memory=_changes(components(left.memory), components(right.memory)),
        activations=_changes(left.memory.terms, right.memory.terms),
        seconds=_changes(slowest(left).terms, slowest(right).terms),
    )


def _changes(left: Mapping[str, float], right: Mapping[str, float]) -> tuple[TermChange, ...]:
    names = dict.fromkeys((*left, *right))
    return tuple(TermChange(name=name, left=left.get(name, 0), right=right.get(name, 0)) for name in names)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One answer of a series of questions."""

    asked: Mapping[str, str]  # the question, such as `ep`: `16`
    answer: Projection | Refusal  # a projection, or why there is none
    efficiency: float | None = None  # tokens/s of a device over those of the first point
    gap: float = 0.0  # of a search that ended without proof, as of `Plan`


def answer_to(run: Run, cluster: Cluster, plan: Planner) -> Projection | Refusal:
    """A projection of a run, or the rule that refuses it and its reason."""
    refusal = config_refusal(run, cluster.devices)
    if refusal is None:
        try:
            return plan(run, cluster)
        except PenstockError as error:
            refusal = CANNOT_START, f"{error}"
    rule, reason = refusal
    return Refusal(layout=layout_fields(run), rule=rule, reason=reason)


def with_state_in_host_memory(run: Run, cluster: Cluster, plan: Planner, margin: float = 0.0) -> FittingRun | None:
    """With which overrides a run fits one device and leaves a share of its memory; None if it does not.

    The host has the optimizer's state, in the first of `HOST_FORMATS` that it has room for, and the sums of gradients.
    A larger micro-batch hides more of the transfer of these sums, and may need more recomputation: of the two largest,
    each with the least recomputation that fits, the faster one is taken.
    """

    @cache
    def fitting(overrides: tuple[str, ...], rows: int, modules: tuple[str, ...]) -> FittingRun | None:
        overrides = ("offload.optimizer=true", "offload.gradients=true", *overrides)
        overrides += (f"training.micro_batch={rows}", f"recompute.modules={as_toml(list(modules))}")
        answer = answer_to(with_overrides(run, overrides, cluster.devices), cluster, plan)
        if isinstance(answer, Refusal) or not answer.fits:
            return None
        return (overrides, answer) if answer.memory.total <= (1 - margin) * answer.capacity_bytes else None

    *lighter, whole = ladder_of(run.model)
    formats = next((overrides for overrides in HOST_FORMATS if fitting(overrides, 1, whole)), None)
    if formats is None:
        return None
    divisors = (
        rows for rows in range(MOST_ROWS_WITH_OFFLOADED_GRADIENTS, 0, -1) if run.training.global_batch % rows == 0
    )
    largest = islice((rows for rows in divisors if fitting(formats, rows, whole)), 2)
    fits = [next(fit for modules in (*lighter, whole) if (fit := fitting(formats, rows, modules))) for rows in largest]
    return max(fits, key=_speed)


def with_smallest_state(run: Run, cluster: Cluster, plan: Planner, fitting: FittingRun) -> FittingRun | None:
    """What `with_state_in_host_memory` found, in the last of `HOST_FORMATS`; None unless a twentieth faster.

    The update passes the state through the link, once in each step.
    """
    overrides = (*(override for override in fitting[0] if not override.startswith("optimizer.")), *HOST_FORMATS[-1])
    answer = answer_to(with_overrides(run, overrides, cluster.devices), cluster, plan)
    if isinstance(answer, Refusal) or not answer.fits:
        return None
    return (overrides, answer) if _speed((overrides, answer)) > 1.05 * _speed(fitting) else None


def _speed(fitting: FittingRun) -> float:
    return fitting[1].time.tokens_per_second_per_device


def usable_worlds(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of devices worth a search, the largest first: all, and most of them with more factors of two.

    1,000 devices are 125 nodes of 8, which only DP 125, 25 or 5 divides; 124, 120, 112 and 96 nodes leave more choices.
    """
    each = cluster.node_devices if cluster.nodes > 1 else 1
    units = cluster.devices // each
    counts = {units >> power << power for power in range(units.bit_length())}
    return tuple(each * count for count in sorted(counts, reverse=True) if 4 * count >= 3 * units)


def scale(
    run: Run, cluster: Cluster, worlds: Sequence[int], plan: Planner, kind: Literal["strong", "weak"]
) -> tuple[SweepPoint, ...]:
    """One layout on several numbers of devices, which differ in their data-parallel ranks.

    On `cluster` the run's global batch is as it is. Strong scaling keeps it; in weak scaling it grows with the devices.
    Raises a HardwareError if a number of devices does not fill its nodes.
    """
    points = []
    for world in worlds:
        share = world / cluster.devices if kind == "weak" else 1.0
        there = with_overrides(run, (), world, run.tokens_per_step * share)
        answer = answer_to(there, cluster_of(world, cluster.hardware), plan)
        points.append(SweepPoint(asked={"devices": f"{world}"}, answer=answer))
    answers = (point.answer for point in points if isinstance(point.answer, Projection))
    first = next((answer.time.tokens_per_second_per_device for answer in answers), 1.0)
    return tuple(
        replace(point, efficiency=point.answer.time.tokens_per_second_per_device / first)
        if isinstance(point.answer, Projection)
        else point
        for point in points
    )


def sweep(run: Run, cluster: Cluster, name: str, values: Sequence[str], plan: Planner) -> tuple[SweepPoint, ...]:
    """One run with several values of one field, at about the same tokens of a step.

    `name` is a part of the layout, `sequence_length`, the full path of a field, or a part of the network; `ep` is asked
    for every dispatcher. Raises a ConfigError or HardwareError if there is no such field, or it does not take a value.
    """
    questions = swept_runs(run, cluster, name, values)
    return tuple(SweepPoint(asked=asked, answer=answer_to(variant, there, plan)) for asked, variant, there in questions)


def swept_runs(
    run: Run, cluster: Cluster, name: str, values: Sequence[str]
) -> list[tuple[dict[str, str], Run, Cluster]]:
    """What is asked, and the run and the cluster of each question of a `sweep`, which raises what this raises."""
    if name in NETWORK:
        return [({name: value}, run, with_network(cluster, f"{name}={value}")) for value in values]
    field, questions = _field(name), list[dict[str, str]]()
    for value in values:
        ways = DISPATCHERS if name == "ep" and value != "1" else ()
        questions += [{name: value, "dispatcher": way} for way in ways] or [{name: value}]
    return [(asked, _with(run, cluster, field, asked), cluster) for asked in questions]


@dataclass(frozen=True, kw_only=True)
class SweptSearch:
    """A search of a sweep: the fastest layout with one value."""

    asked: Mapping[str, str]
    run: Run
    cluster: Cluster
    fixed: Mapping[str, str]  # parts of the layout
    tokens: float | None  # of a step, about; None for the run's batch


def world_searches(
    run: Run, cluster: Cluster, worlds: Sequence[int], tokens: float | None, fixed: Mapping[str, str]
) -> list[SweptSearch]:
    """A search of each number of devices, at about the same tokens of a step."""
    search = SweptSearch(asked={}, run=run, cluster=cluster, fixed=fixed, tokens=tokens or float(run.tokens_per_step))
    return [
        replace(search, asked={"devices": f"{world}"}, cluster=cluster_of(world, cluster.hardware)) for world in worlds
    ]


def swept_searches(
    run: Run, cluster: Cluster, name: str, values: Sequence[str], fixed: Mapping[str, str], tokens: float | None
) -> list[SweptSearch]:
    """The searches of a sweep, each at about the same tokens of a step; `name` and errors as of `sweep`."""
    part = name if name in FIELDS else next((part for part, path in FIELDS.items() if path == name), None)
    if part in fixed:
        raise ConfigError(f"{part} is fixed and swept", got=f"{part}={fixed[part]}", fix="leave one out")
    field = _field(name) if part is None and name not in NETWORK else None
    searches = []
    for value in values:
        search = SweptSearch(asked={name: value}, run=run, cluster=cluster, fixed=fixed, tokens=tokens)
        if name in NETWORK:
            search = replace(search, cluster=with_network(cluster, f"{name}={value}"))
        elif part is not None:
            check_fixed({part: value})
            search = replace(search, fixed={**fixed, part: value})
        else:
            changed = with_overrides(run, [f"{field}={value}"], cluster.devices)
            has_length = changed.training.sequence_length == run.training.sequence_length
            kept = tokens if has_length or tokens is not None else float(run.tokens_per_step)
            search = replace(search, run=changed, tokens=None if field == SHORT["global_batch"] else kept)
        searches.append(search)
    return searches


def _with(run: Run, cluster: Cluster, field: str | None, asked: Mapping[str, str]) -> Run:
    """The run with the asked values; without a field they are parts of the layout."""
    if field is None:
        return with_layout(run, asked, cluster.devices, run.tokens_per_step)
    (value,) = asked.values()
    keeps_batch = field == SHORT["global_batch"]
    return with_overrides(run, [f"{field}={value}"], cluster.devices, None if keeps_batch else run.tokens_per_step)


def _field(name: str) -> str | None:
    """The field of a name, or None for a part of the layout."""
    if name in FIELDS:
        return None
    path = SHORT.get(name, name)
    if find(Run, path):
        return path
    known = (*FIELDS, *SHORT, *NETWORK)
    raise ConfigError(
        f"{name} follows from the layout" if name in FOLLOW else "nothing of this name can be swept",
        got=None if name in FOLLOW else name,
        allowed=f"{', '.join(known)}, or the full path of a field",
        fix=None if name in FOLLOW else did_you_mean(name, known),
    )
