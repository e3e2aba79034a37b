"""A plan as text: the conclusion first, then what was compared, what was refused and why, and what it all rests on."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock.base.numbers import bytes_text, shortened, time_text
from penstock.cli.table import print_table
from penstock.plan.asked_layout import FOLLOW, differing_fields, field_label
from penstock.plan.hardware import ORIGINS, Cluster, Hardware, SourcedTable
from penstock.plan.projection import Layout, Plan, Projection, Refusal
from penstock.plan.what_if import components, slowest

_SIZES = ("tp", "cp", "pp", "ep", "etp")
_CHOICES = ("schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher", "shard")
"""Parts of a layout that stand in one line behind the table where candidates do not differ in them."""

_IN_SIZES = {*_SIZES, "vpp", *FOLLOW}
"""Parts of a layout that the text of its sizes says, or that follow from them."""

_LEAST = ("left", "exposed", "bubble", "MFU", "memory", *map(field_label, reversed(_CHOICES)))
"""Columns of candidates that a narrow terminal misses least: what tells rows apart is left out last."""

LONGEST_REASON = 110
"""Characters of a reason in the table of refusals."""

_PASSES: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """How far projections were from runs that were measured, as shares of what was measured.

    Attributes:
        runs: how many, on which devices.
        memory: of the fullest rank's allocator, median and largest.
        step: of the time of a step, median and largest.
    """

    runs: str
    memory: tuple[float, float]
    step: tuple[float, float]

    def __str__(self) -> str:
        sizes = (f"{median:.1%} (median) to {largest:.1%}" for median, largest in (self.memory, self.step))
        return f"error against {self.runs}: memory {next(sizes)}, step {next(sizes)}"


KNOWN_ERROR = KnownError(
    runs="30 runs on H200",
    memory=(0.002, 0.039),
    step=(0.028, 0.086),
)
"""From benchmarks/results/projection-h200.json, as docs/plan.md quotes it."""


def moment_text(moment: str) -> str:
    """A moment of a step, its passes by name: `backward of stage 3`."""
    return re.sub(r"\b[FBIW](?= of stage)", lambda found: _PASSES[found[0]], moment)


def sizes_text(layout: Layout | Mapping[str, object]) -> str:
    """Sizes above 1: `CP2 PP24 x 4 EP8`; those that are not settled are left out."""
    values = asdict(layout) if isinstance(layout, Layout) else layout
    words = []
    for name in _SIZES:
        size, stages = values.get(name), values.get("vpp")
        if isinstance(size, int) and size > 1:
            words.append(f"{name.upper()}{size}" + (f" x {stages}" if name == "pp" and stages not in (None, 1) else ""))
    is_settled = all(values.get(name) is not None for name in _SIZES)
    return " ".join(words) or ("one rank for all" if is_settled else "any")


def cluster_text(cluster: Cluster) -> str:
    """Such as `768 MI300X (96 nodes of 8), 206.1 GB each`."""
    hardware = cluster.hardware
    nodes = f" ({cluster.nodes} nodes of {cluster.node_devices})" if cluster.nodes > 1 else ""
    return f"{cluster.devices} {hardware.name}{nodes}, {bytes_text(hardware.memory.capacity_bytes)} each"


def conclusion(projection: Projection) -> str:
    """The one line that matters, of one candidate."""
    time, capacity = projection.time, bytes_text(projection.capacity_bytes)
    each = f"{time.tokens_per_second_per_device:,.0f} {projection.cluster.speed_unit}"
    speed = f"{time_text(time.step_seconds)} a step, {each}"
    if projection.fits:
        return f"{projection.layout}: {speed}, {bytes_text(projection.memory.total)} of {capacity}"
    parts = components(projection.memory)
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{projection.layout}: does not fit: {bytes_text(projection.over_bytes)} too much on rank "
        f"{projection.memory.rank}, which needs {bytes_text(projection.memory.total)} of {capacity} "
        f"({largest} {bytes_text(parts[largest])}); if it did, {speed}"
    )


def print_plan(plan: Plan, assumed: Sequence[str]) -> None:
    """Print a plan.

    Args:
        plan: what was found.
        assumed: a line for each assumption that the user may change.
    """
    print(f"{plan.model} on {cluster_text(plan.cluster)}")
    if plan.candidates:
        best = plan.candidates[0]
        print(f"{'best' if plan.considered > 1 else 'asked'}: {conclusion(best)}")
        print()
        print_candidates(plan.candidates)
        print()
        for label, text in _facts(best).items():
            print(f"{label:<10}{text}")
        for told in plan.advice:
            print(f"advice: {told.reason} ({told.rule}, {told.source})")
    elif len(plan.refused) == 1:
        (one,) = plan.refused
        print(f"asked: {refused_text(one.layout)}: refused by {one.rule}: {one.reason}")
    elif plan.considered == 0:
        print(f"nothing fits: no grid of {plan.cluster.devices:,} devices has the sizes that are asked for")
    else:
        print(f"nothing fits, of {plan.considered:,} layouts")
    if plan.considered > 1 and plan.refused:
        print()
        print_refusals(plan.refused, plan.considered)
    print()
    print_grounds(plan.cluster, assumed)


def print_candidates(candidates: Sequence[Projection]) -> None:
    """A row for each; choices in which they do not differ come behind the table, in one line."""
    first = asdict(candidates[0].layout)
    told = {name: texts for name, texts in differing_fields(candidates).items() if name not in _IN_SIZES}
    head = ["", "layout", *map(field_label, told)]
    head += ["step", candidates[0].cluster.speed_unit, "MFU", "bubble", "exposed", "memory", "left"]
    rows = []
    for number, one in enumerate(candidates, start=1):
        time = one.time
        row = [f"{number}", sizes_text(one.layout), *(texts[number - 1] for texts in told.values())]
        row += [time_text(time.step_seconds), f"{time.tokens_per_second_per_device:,.0f}"]
        row += [f"{time.model_flops_utilization:.1%}", f"{time.bubble:.1%}"]
        row += [time_text(time.exposed_communication_seconds), bytes_text(one.memory.total)]
        row += [bytes_text(-one.over_bytes) if one.fits else f"{bytes_text(one.over_bytes)} too much"]
        rows.append(row)
    print_table(head, rows, _LEAST)
    same = [f"{field_label(name)} {first[name]}" for name in _CHOICES if name not in told]
    if same:
        print(f"{'all' if len(candidates) > 1 else 'with'}: {', '.join(same)}")


def _facts(best: Projection) -> dict[str, str]:
    """What the first candidate is made of."""
    run, layout, memory, place = best.run, best.layout, best.memory, slowest(best)
    training = run.training
    parts = {name: size for name, size in components(memory).items() if size}
    passes = f"passes {time_text(place.passes)}, waiting {time_text(place.waiting)}"
    return {
        "batch": f"{training.global_batch:,} rows of {training.sequence_length:,} = {run.tokens_per_step:,} tokens a "
        f"step: {layout.dp} x {training.global_batch // (layout.dp * training.micro_batch)} micro-batches of "
        f"{training.micro_batch}",
        "memory": f"{', '.join(f'{name} {bytes_text(size)}' for name, size in parts.items())}; rank {memory.rank} at "
        f"its fullest, {moment_text(memory.moment)}",
        "time": f"{passes}, update {time_text(place.update)}; rank {place.rank}, which waits least",
    }


def print_refusals(refused: Sequence[Refusal], considered: int) -> None:
    """A row for each rule: how many layouts, and for the first of them where and why."""
    groups: dict[str, list[Refusal]] = defaultdict(list)
    for one in refused:
        groups[one.rule].append(one)
    counts = {rule: sum(one.count for one in ones) for rule, ones in groups.items()}
    print(
        f"refused: {sum(counts.values()):,} of {considered:,} layouts; a reason of each rule (all: --explain refused)"
    )
    rows = []
    for rule in sorted(groups, key=lambda rule: -counts[rule]):
        first = groups[rule][0]
        rows.append((rule, f"{counts[rule]:,}", refused_text(first.layout), shortened(first.reason, LONGEST_REASON)))
    print_table(("rule", "layouts", "where", "because"), rows, ("where",))


def refused_text(layout: Mapping[str, object]) -> str:
    """What of a refused layout was settled: sizes, and the choices that have a value."""
    choices = [
        f"{word} {layout[name]}"
        for name, word in (("schedule", "schedule"), ("micro_batch", "mb"), ("recompute", "recompute"))
        if layout.get(name) not in (None, "none", "1f1b")
    ]
    return ", ".join([sizes_text(layout), *choices])


def print_grounds(cluster: Cluster, assumed: Sequence[str]) -> None:
    """What the figures rest on, so that nobody takes a projection for a measurement."""
    for line in assumed:
        print(f"assumed: {line}")
    print(f"figures of {cluster.hardware.name}: {origins_text(cluster)} (--explain hardware)")
    print(f"{KNOWN_ERROR} (docs/projection.md)")


def origins_text(cluster: Cluster) -> str:
    """Which figures are measured, reported, from the data sheet, or guessed; of collectives how many."""
    collectives = _collectives(cluster)
    told = []
    for origin in ORIGINS:
        names = [name for name, table in _tables(cluster.hardware).items() if table.origin == origin]
        count = sum(table.origin == origin for table in collectives.values())
        names += [f"{count} of {len(collectives)} collectives"] if count else []
        told += [f"{origin} {', '.join(names)}"] if names else []
    return "; ".join(told)


def sourced_tables(cluster: Cluster) -> dict[str, SourcedTable]:
    """All that has a source, by name."""
    return _tables(cluster.hardware) | _collectives(cluster)


def _tables(hardware: Hardware) -> dict[str, SourcedTable]:
    return {
        "memory": hardware.memory,
        "peaks": hardware.peaks,
        "node": hardware.node,
        "overhead": hardware.overhead,
        "host": hardware.host,
        "host link": hardware.host_link,
        "efficiency": hardware.efficiency,
    }


def _collectives(cluster: Cluster) -> dict[str, SourcedTable]:
    """Those between nodes only where there are several."""
    return {
        f"{one.kind} in a {one.reach}": one
        for one in cluster.hardware.collectives
        if one.reach == "node" or cluster.nodes > 1
    }
