"""A plan as text: the conclusion, the candidates, the refusals with reasons, and the origin of the figures."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.base.errors import PenstockError, did_you_mean
from penstock.base.numbers import bytes_text, count_text, counted, duration_text, shortened, time_text
from penstock.cli.output import print_table
from penstock.kernels.tuning import LAUNCHES_FROM
from penstock.plan.asked_layout import differing_fields, field_label
from penstock.plan.campaign import DAY, HOUR, RESTART_SECONDS, WRITE_SECONDS, Campaign, PhaseCost, campaign_json
from penstock.plan.hardware import ORIGINS, Cluster, Hardware, SourcedTable
from penstock.plan.known_error import error_text
from penstock.plan.layout_names import FOLLOW
from penstock.plan.memory import COMPONENTS, components
from penstock.plan.projection import MARGIN, MEMORY, SLOWER, Advice, Layout, Plan, Projection, Refusal, candidate_json
from penstock.plan.what_if import ProjectionComparison, SweepPoint, TermChange, slowest

_SIZES = ("tp", "cp", "pp", "ep", "etp")
_CHOICES = ("schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher", "shard")
"""Parts of a layout that are printed in one line behind the table if all candidates agree."""

_IN_SIZES = {*_SIZES, "vpp", *FOLLOW}  # parts of a layout in the text of its sizes, or that follow from them

_LEAST = ("left", "exposed", "bubble", "MFU", "memory", *map(field_label, reversed(_CHOICES)))
"""Columns that a narrow terminal drops first; columns that distinguish rows go last."""

LONGEST_REASON = 110  # characters of a reason in the table of refusals

_PASSES: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}


def moment_text(moment: str) -> str:
    """A moment of a step with the pass by name: `backward of stage 3`."""
    return re.sub(r"\b[FBIW](?= of stage)", lambda match: _PASSES[match[0]], moment)


def sizes_text(layout: Layout | Mapping[str, object]) -> str:
    """Sizes above 1, without undecided ones: `CP2 PP24 x 4 EP8`; `DP8` where no size divides the model."""
    values = asdict(layout) if isinstance(layout, Layout) else layout
    sizes = []
    for name in _SIZES:
        size, stages = values.get(name), values.get("vpp")
        if isinstance(size, int) and size > 1:
            sizes.append(f"{name.upper()}{size}" + (f" x {stages}" if name == "pp" and stages not in (None, 1) else ""))
    is_settled = all(values.get(name) is not None for name in _SIZES)
    if not sizes and is_settled:  # each rank has the whole model
        replicas = values.get("dp")
        return f"DP{replicas}" if isinstance(replicas, int) and replicas > 1 else "one rank"
    return " ".join(sizes) or "any"


def cluster_text(cluster: Cluster) -> str:
    """Such as `768 MI300X (96 nodes of 8), 206.1 GB each`."""
    hardware = cluster.hardware
    each, whole = cluster.node_devices, hardware.node.devices
    size = f"{each}" if each == whole else f"{whole}, {each} used of each"
    nodes = f" ({cluster.nodes} nodes of {size})" if cluster.nodes > 1 else ""
    node = hardware.node
    pods = ""
    if cluster.pod_devices:
        pods = f", pods of {counted(cluster.pod_devices // each, 'node')}, {node.oversubscription:g}:1 between them"
    rails = ", rails" if node.rails and cluster.nodes > 1 else ""
    return f"{cluster.devices} {hardware.name}{nodes}{pods}{rails}, {bytes_text(hardware.memory.capacity_bytes)} each"


def conclusion(projection: Projection) -> str:
    """One line about a candidate: layout, speed, memory."""
    time, capacity = projection.time, bytes_text(projection.capacity_bytes)
    each = f"{time.tokens_per_second_per_device:,.0f} {projection.cluster.speed_unit}"
    speed = f"{time_text(time.step_seconds)} a step, {each}"
    if projection.fits:
        return f"{projection.layout}: {speed}, {bytes_text(projection.memory.total)} of {capacity}"
    if projection.memory.total <= projection.capacity_bytes:
        share = bytes_text(projection.cluster.hardware.host_link.memory_bytes)
        lacks = f"{bytes_text(projection.over_bytes)} too much in the host, of which a device has {share}"
        return f"{projection.layout}: does not fit: {lacks} (host_link.memory_bytes); if it did, {speed}"
    parts = components(projection.memory)
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{projection.layout}: does not fit: {bytes_text(projection.over_bytes)} too much on rank "
        f"{projection.memory.rank}, which needs {bytes_text(projection.memory.total)} of {capacity} "
        f"({largest} {bytes_text(parts[largest])}); if it did, {speed}"
    )


def print_plan(plan: Plan, assumed: Sequence[str]) -> None:
    """Print a plan, and a line for each assumption that the user may change."""
    print(f"{plan.model} on {cluster_text(plan.cluster)}")
    if plan.candidates:
        best = plan.candidates[0]
        print(f"{'asked' if plan.considered == 1 else f'best{unproved(plan.gap)}'}: {conclusion(best)}")
        print()
        print_candidates(plan.candidates)
        if plan.considered > 1 and len(plan.candidates) > 1:
            print("rows: the fastest found of each way to divide the model, then others (--top)")
        print()
        for label, text in _facts(best).items():
            print(f"{label:<10}{text}")
        for advice in plan.advice:
            print(f"advice: {advice_text(advice, best, is_search=plan.considered > 1)}")
    elif plan.considered == 1 and plan.refused:
        (refusal,) = plan.refused
        print(f"asked: {refused_text(refusal.layout)}: refused by {refusal.rule}: {refusal.reason}")
    elif plan.considered == 0:
        print(f"nothing fits: no grid of {plan.cluster.devices:,} devices has the sizes that are asked for")
    else:
        print(f"nothing fits, of {plan.considered:,} layouts")
    for close in plan.close:
        print(f"may not fit: {conclusion(close)}; {bytes_text(-close.over_bytes)} left")
    if plan.nearest is not None:
        print(f"nearest: {conclusion(plan.nearest)}")
    for help_text in plan.helps:
        print(f"would fit: {help_text}")
    if plan.considered > 1 and plan.refused:
        print()
        print_refusals(plan.refused, plan.considered)
    print()
    print(*grounds(plan.cluster, assumed), sep="\n")


def unproved(gap: float) -> str:
    """What the bound of a search that ended early leaves open, behind `best`; empty after a proof."""
    if not gap:
        return ""
    faster = f"{gap:.1%} faster" if gap < 1 else f"{1 + gap:.1f} x as fast"
    return f" found; not proved: up to {faster} may exist"


def print_candidates(candidates: Sequence[Projection]) -> None:
    """Print a row for each candidate, then one line with the choices that all share."""
    first = asdict(candidates[0].layout)
    differing = {name: texts for name, texts in differing_fields(candidates).items() if name not in _IN_SIZES}
    head = ["", "layout", *map(field_label, differing)]
    head += ["step", candidates[0].cluster.speed_unit, "MFU", "bubble", "exposed", "memory", "left"]
    rows = []
    for number, candidate in enumerate(candidates, start=1):
        time = candidate.time
        row = [f"{number}", sizes_text(candidate.layout), *(texts[number - 1] for texts in differing.values())]
        row += [time_text(time.step_seconds), f"{time.tokens_per_second_per_device:,.0f}"]
        row += [f"{time.model_flops_utilization:.1%}", f"{time.bubble:.1%}"]
        row += [time_text(time.exposed_communication_seconds), bytes_text(candidate.memory.total)]
        row += [bytes_text(-candidate.over_bytes) if candidate.fits else f"{bytes_text(candidate.over_bytes)} too much"]
        rows.append(row)
    print_table(head, rows, _LEAST)
    same = [f"{field_label(name)} {first[name]}" for name in _CHOICES if name not in differing]
    if same:
        print(f"{'all' if len(candidates) > 1 else 'with'}: {', '.join(same)}")


def _facts(best: Projection) -> dict[str, str]:
    """Batch, memory and time of the first candidate, by label."""
    run, layout, memory, slowest_rank = best.run, best.layout, best.memory, slowest(best)
    training = run.training
    parts = {name: size for name, size in components(memory).items() if size}
    passes = f"passes {time_text(slowest_rank.passes)}, waiting {time_text(slowest_rank.waiting)}"
    return {
        "batch": f"{training.global_batch:,} rows of {training.sequence_length:,} = {run.tokens_per_step:,} tokens a "
        f"step: {layout.dp} x {training.global_batch // (layout.dp * training.micro_batch)} micro-batches of "
        f"{training.micro_batch}",
        "memory": f"{', '.join(f'{name} {bytes_text(size)}' for name, size in parts.items())}; rank {memory.rank} at "
        f"its fullest, {moment_text(memory.moment)}"
        + (f"; {bytes_text(memory.host)} of the host" if memory.host else ""),
        "time": f"{passes}, update {time_text(slowest_rank.update)}; rank {slowest_rank.rank}, which waits least",
        **({"bubble": _bubble_text(best)} if layout.pp > 1 else {}),
    }


def _bubble_text(best: Projection) -> str:
    """Why ranks of a pipeline wait: for the ramps at its ends, and for the rank with the most work."""
    layout, training = best.layout, best.run.training
    busy = [rank.passes for rank in best.time.ranks]
    span = max(rank.passes + rank.waiting for rank in best.time.ranks)
    uneven = (max(busy) - sum(busy) / len(busy)) / span
    ramps = 1 - max(busy) / span
    text = f"ranks wait for {best.time.bubble:.1%} of the passes: {ramps:.1%} while the pipeline fills and drains"
    if layout.schedule in ("1f1b", "interleaved"):
        passes = training.global_batch // (layout.dp * training.micro_batch)
        formula = (layout.pp - 1) / (layout.pp - 1 + passes * layout.vpp)
        text += f" ((p - 1) / (p - 1 + m v) of equal stages without messages: {formula:.1%})"
    return f"{text}, {uneven:.1%} for the rank with the most work"


def advice_text(advice: Advice, best: Projection, *, is_search: bool) -> str:
    """What a rule has against the best layout, and how fast the best without it is."""
    text = f"{advice.reason} ({advice.rule}, {advice.source})"
    if not is_search:
        return text
    if advice.without is None:
        return f"{text}; no layout without it was found to fit"
    return f"{text}; without it: {advice.without:,.0f} {best.cluster.speed_unit}"


REASONS: Mapping[str, str] = {MEMORY: "do not fit", MARGIN: "may not fit", SLOWER: "are no faster"}
"""Why legal layouts are no candidates."""


def print_refusals(refused: Sequence[Refusal], considered: int) -> None:
    """Print how many layouts were left out and why, and a row for each rule of illegal ones with an example."""
    legal = {refusal.rule: refusal.count for refusal in refused if refusal.rule in REASONS}
    counted_rules = sorted(
        (refusal for refusal in refused if refusal.rule not in REASONS), key=lambda refusal: -refusal.count
    )
    illegal = sum(refusal.count for refusal in counted_rules)
    counts = [f"{legal[rule]:,} {what}" for rule, what in REASONS.items() if rule in legal]
    counts += [f"{illegal:,} are illegal"] if illegal else []
    print(f"left out: {sum(legal.values()) + illegal:,} of {considered:,} layouts: {', '.join(counts)}")
    if counted_rules:
        rows = [
            (
                refusal.rule,
                f"{refusal.count:,}",
                refused_text(refusal.layout),
                shortened(refusal.reason, LONGEST_REASON),
            )
            for refusal in counted_rules
        ]
        print_table(("illegal by", "layouts", "such as", "because"), rows, ("such as",))


def refused_text(layout: Mapping[str, object]) -> str:
    """Sizes and choices of a refused layout, as far as they were decided."""
    choices = [
        f"{word} {layout[name]}"
        for name, word in (("schedule", "schedule"), ("micro_batch", "mb"), ("recompute", "recompute"))
        if layout.get(name) not in (None, "none", "1f1b")
    ]
    return ", ".join([sizes_text(layout), *choices])


def grounds(cluster: Cluster, assumed: Sequence[str]) -> list[str]:
    """Assumptions, origins of the figures, and the known error, because a projection is not a measurement."""
    figures = f"figures of {cluster.hardware.name}: {origins_text(cluster)}"
    return [*(f"assumed: {line}" for line in assumed), f"{figures} (--explain hardware)", error_text(cluster)]


def origins_text(cluster: Cluster) -> str:
    """Origin of each table of figures: measured, reported, data sheet or guessed; collectives by count."""
    collectives = _collectives(cluster)
    origins = []
    for origin in ORIGINS:
        names = [name for name, table in _tables(cluster.hardware).items() if table.origin == origin]
        count = sum(table.origin == origin for table in collectives.values())
        names += [f"{count} of {len(collectives)} collectives"] if count else []
        origins += [f"{origin} {', '.join(names)}"] if names else []
    return "; ".join(origins)


def sourced_tables(cluster: Cluster) -> dict[str, SourcedTable]:
    return _tables(cluster.hardware) | _collectives(cluster)


def _tables(hardware: Hardware) -> dict[str, SourcedTable]:
    kernels = LAUNCHES_FROM.get(hardware.kernels)
    return {
        **({} if kernels is None else {"kernels": SourcedTable(source=kernels)}),
        "memory": hardware.memory,
        "peaks": hardware.peaks,
        "node": hardware.node,
        "overhead": hardware.overhead,
        "host": hardware.host,
        "host link": hardware.host_link,
        "efficiency": hardware.efficiency,
    }


def _collectives(cluster: Cluster) -> dict[str, SourcedTable]:
    """Collectives by name; those between nodes only if there are several."""
    return {
        f"{table.kind} in a {table.reach}": table
        for table in cluster.hardware.collectives
        if table.reach == "node" or cluster.nodes > 1
    }


_HELD = "held"
_NEEDS_CANDIDATE = ("memory", "memory.activations", "time")


def check_topic(topic: str) -> None:
    """Refuse an unknown topic before anything is computed: a PenstockError that lists the topics."""
    if topic not in TOPICS:
        fix = did_you_mean(topic, TOPICS)
        raise PenstockError("--explain knows no such topic", got=topic, allowed=", ".join(TOPICS), fix=fix)


def explain(plan: Plan, topic: str) -> None:
    """Print the terms of a plan's first candidate, or of the plan. Raises a PenstockError without a candidate."""
    check_topic(topic)
    print(f"{plan.model} on {cluster_text(plan.cluster)}")
    if topic in _NEEDS_CANDIDATE:
        if not plan.candidates:
            raise PenstockError("no layout fits, so none can be explained", fix="--explain refused, or name a --layout")
        print(conclusion(plan.candidates[0]))
    print()
    TOPICS[topic](plan)


def _memory(plan: Plan) -> None:
    best = plan.candidates[0]
    columns = [components(memory) for memory in best.memories]
    rows = [
        (name, *(bytes_text(column[name]) for column in columns))
        for name in COMPONENTS
        if any(column[name] for column in columns)
    ]
    rows.append(("total", *(bytes_text(memory.total) for memory in best.memories)))
    rows.append(("host", *(bytes_text(memory.host) for memory in best.memories)))
    rows.append(("fullest at", *(moment_text(memory.moment) for memory in best.memories)))
    _print_places(best, "component", rows)
    print(f"a place on the pipeline is named by its first rank; a device has {bytes_text(best.capacity_bytes)}")


def _print_places(best: Projection, what: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a column for each place on the pipeline, or a row for each if the pipeline is long."""
    names = [f"rank {memory.rank}" for memory in best.memories]
    if len(names) <= 4:
        print_table((what, *names), rows)
        return
    heads = ("place", *(row[0] for row in rows))
    print_table(heads, [(name, *(row[at] for row in rows)) for at, name in enumerate(names, start=1)])


def _activations(plan: Plan) -> None:
    memory = plan.candidates[0].memory
    whole = memory.activations + memory.logits
    print(
        f"rank {memory.rank} at its fullest, {moment_text(memory.moment)}: activations {bytes_text(memory.activations)}"
    )
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    rows = [
        ("other micro-batches" if name == _HELD else name, bytes_text(size), f"{size / whole:.1%}" if whole else "")
        for name, size in terms
        if size
    ]
    rows.append(("together", bytes_text(sum(memory.terms.values())), ""))
    print_table(("allocated by", "bytes", "share"), rows)
    if memory.logits:
        print(f"of that logits and what the loss holds, a component of its own: {bytes_text(memory.logits)}")
    _moments(plan.candidates[0])


def _moments(best: Projection) -> None:
    """Print the fullest moment of every place, which may differ."""
    rows = [
        (
            f"rank {memory.rank}",
            moment_text(memory.moment),
            bytes_text(memory.terms.get(_HELD, 0)),
            bytes_text(memory.activations),
        )
        for memory in best.memories
    ]
    print()
    print_table(("place", "fullest at", "of other micro-batches", "activations"), rows)


def _time(plan: Plan) -> None:
    best = plan.candidates[0]
    ranks = best.time.ranks
    longest = {name: max(rank.terms.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank.terms}
    names = sorted(sorted(longest), key=lambda name: -longest[name])
    rows = [(name, *(time_text(rank.terms.get(name, 0.0)) for rank in ranks)) for name in names]
    rows.append(("together", *(time_text(sum(rank.terms.values())) for rank in ranks)))
    marked = {"communication": "communication", "exposed_communication": "exposed", "host": "host-bound"}
    for name, word in marked.items():
        rows.append((f"({word})", *(time_text(vars(rank)[name]) for rank in ranks)))
    _print_places(best, "term", rows)
    print("terms add up to the time of a place; those in brackets are part of others")


def _refused(plan: Plan) -> None:
    if not plan.refused:
        print("nothing was refused")
        return
    rows = [
        (refusal.rule, f"{refusal.count:,}", refused_text(refusal.layout), refusal.reason) for refusal in plan.refused
    ]
    print_table(("rule", "layouts", "where", "because"), sorted(rows, key=lambda row: row[0]), ("where",))


def _hardware(plan: Plan) -> None:
    hardware = plan.cluster.hardware
    rows = [(name, table.source) for name, table in sourced_tables(plan.cluster).items()]
    rows += [(f"{curve.operator}, {len(curve.points)} points", curve.source) for curve in hardware.measured]
    print_table(("figures", "source"), rows)


TOPICS: Mapping[str, Callable[[Plan], None]] = {
    "memory": _memory,
    "memory.activations": _activations,
    "time": _time,
    "refused": _refused,
    "hardware": _hardware,
}
"""Topics of --explain."""


_LARGEST_TERMS = 12


def print_comparison(comparison: ProjectionComparison, left: str, right: str) -> None:
    """Print the differences of two runs by size, under their names."""
    for name, projection in ((left, comparison.left), (right, comparison.right)):
        print(f"{name}: {conclusion(projection)}")
    print()
    if comparison.fields:
        fields = [
            (projection.field, projection.left or "-", projection.right or "-") for projection in comparison.fields
        ]
        print_table(("field", left, right), fields)
        print()
    memory = _change_rows(comparison.memory, bytes_text)
    totals = TermChange(name="total", left=comparison.left.memory.total, right=comparison.right.memory.total)
    places = f"of the fullest ranks, {comparison.left.memory.rank} and {comparison.right.memory.rank}"
    print_table(("memory", left, right, "more"), [*memory, *_change_rows([totals], bytes_text, all_of_them=True)])
    print(places)
    print()
    terms = sorted(comparison.activations, key=lambda change: -abs(change.more))[:_LARGEST_TERMS]
    if rows := _change_rows(terms, bytes_text):
        print_table(("activations of", left, right, "more"), rows)
        print()
    before, after = comparison.left.time, comparison.right.time
    step = TermChange(name="step", left=before.step_seconds, right=after.step_seconds)
    seconds = _change_rows(comparison.seconds, time_text)
    print_table(("time", left, right, "more"), [*seconds, *_change_rows([step], time_text, all_of_them=True)])
    speedup = after.tokens_per_second_per_device / before.tokens_per_second_per_device
    print(f"terms of the place that waits least; {right} trains {speedup:.2f} x the tokens per second of {left}")


def _change_rows(
    changes: Sequence[TermChange], text: Callable[[float], str], *, all_of_them: bool = False
) -> list[tuple[str, ...]]:
    """Rows of differing terms, the largest difference first."""
    shown = [change for change in changes if change.more or all_of_them]
    shown.sort(key=lambda change: -abs(change.more))
    return [
        (
            change.name,
            text(change.left),
            text(change.right),
            f"{'-' if change.more < 0 else '+'}{text(abs(change.more))}",
        )
        for change in shown
    ]


def comparison_json(comparison: ProjectionComparison) -> dict[str, Any]:
    terms = {"memory": comparison.memory, "activations": comparison.activations, "seconds": comparison.seconds}
    return {
        "left": candidate_json(comparison.left),
        "right": candidate_json(comparison.right),
        "fields": [vars(change) for change in comparison.fields],
        "changes": {
            what: [vars(change) | {"more": change.more} for change in changes] for what, changes in terms.items()
        },
    }


def print_scaling(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> None:
    """Print one layout on several numbers of devices: points of strong and of weak scaling."""
    print(f"layout: {base.layout}")
    batch = f"{base.run.training.global_batch:,} rows"
    titles = {
        "strong": f"strong scaling: {batch} a step on any number of devices, as far as they can share them",
        "weak": f"weak scaling: {batch} a step on {base.cluster.devices} devices, as many for each on all",
    }
    for kind, points in kinds.items():
        print(f"\n{titles[kind]}")
        _print_points(points, base.cluster.speed_unit)


def print_sweep(points: Sequence[SweepPoint], base: Projection) -> None:
    """Print one run with several values of one field."""
    print(f"from: {conclusion(base)}\n")
    _print_points(points, base.cluster.speed_unit)


def print_searches(points: Sequence[SweepPoint], cluster: Cluster) -> None:
    """Print the fastest layout of each value, or of each number of devices with what it leaves spare."""
    (name, *_), has_worlds = points[0].asked, "devices" in points[0].asked
    print(f"{cluster_text(cluster)}: the fastest layout of each {'number of them' if has_worlds else name}\n")
    speeds = [_speed_of_all(point) for point in points]
    rows = []
    for point, speed in zip(points, speeds, strict=True):
        answer, value = point.answer, point.asked[name]
        rows.append([f"{int(value):,}", f"{cluster.devices - int(value):,}"] if has_worlds else [value])
        if isinstance(answer, Refusal):
            rows[-1] += ["", "", "", "", "", answer.reason]
            continue
        rows[-1] += [f"{answer.run.training.global_batch:,}", time_text(answer.time.step_seconds)]
        rows[-1] += [f"{answer.time.tokens_per_second_per_device:,.0f}", f"{speed:,.0f}"]
        rows[-1] += [f"{speed / max(speeds):.1%}", f"{answer.layout}"]
        rows[-1][-1] += f"; best{unproved(point.gap)}" if point.gap else ""
    head = [*(("devices", "spare") if has_worlds else (name.rpartition(".")[2],)), "rows", "step"]
    print_table([*head, cluster.speed_unit, "tokens/s", "of the most", ""], rows, ("step",))


def _speed_of_all(point: SweepPoint) -> float:
    """Tokens per second of all devices; 0 without an answer."""
    answer = point.answer
    return 0.0 if isinstance(answer, Refusal) else answer.time.tokens_per_second_per_device * answer.cluster.devices


def _print_points(points: Sequence[SweepPoint], speed: str) -> None:
    asked = list(dict.fromkeys(name for point in points for name in point.asked))
    with_efficiency = any(point.efficiency is not None for point in points)
    columns = ["step", speed, *(["efficiency"] if with_efficiency else []), "MFU", "bubble", "exposed", "memory"]
    rows = [
        [*(point.asked.get(name, "") for name in asked), *_cells(point, with_efficiency=with_efficiency)]
        for point in points
    ]
    print_table(
        (*(name.rpartition(".")[2] for name in asked), "rows", *columns, ""), rows, ("exposed", "bubble", "MFU")
    )
    refusals = [point.answer for point in points if isinstance(point.answer, Refusal)]
    for reason in dict.fromkeys(f"{refusal.rule}: {refusal.reason}" for refusal in refusals):
        print(reason)


def _cells(point: SweepPoint, *, with_efficiency: bool) -> list[str]:
    answer = point.answer
    if isinstance(answer, Refusal):
        return [*[""] * (7 + with_efficiency), answer.rule]
    if (way := answer.layout.dispatcher) != point.asked.get("dispatcher", way):
        return [*[""] * (7 + with_efficiency), f"comes down to {way}"]
    time = answer.time
    cells = [f"{answer.run.training.global_batch:,}", time_text(time.step_seconds)]
    cells += [f"{time.tokens_per_second_per_device:,.0f}"]
    if with_efficiency:
        cells += ["" if point.efficiency is None else f"{point.efficiency:.1%}"]
    cells += [f"{time.model_flops_utilization:.1%}", f"{time.bubble:.1%}"]
    cells += [time_text(time.exposed_communication_seconds), bytes_text(answer.memory.total)]
    return [*cells, "" if answer.fits else f"{bytes_text(answer.over_bytes)} too much"]


def points_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """Each point with its candidate and rows, or with its refusal."""
    entries: list[dict[str, Any]] = []
    for point in points:
        answer = point.answer
        if isinstance(answer, Refusal):
            entries.append({"asked": dict(point.asked), "refused": {"rule": answer.rule, "reason": answer.reason}})
        else:
            batch = {"global_batch": answer.run.training.global_batch, "efficiency": point.efficiency}
            entries.append({"asked": dict(point.asked), **batch, "candidate": candidate_json(answer)})
    return entries


def print_campaign(campaign: Campaign, *, as_json: bool) -> None:
    """Print a row for each phase of a training run, their sum, and the assumed failures."""
    if as_json:
        print(json.dumps(campaign_json(campaign), indent=2))
        return
    cluster, costs = campaign.cluster, campaign.phases
    print(f"{costs[0].projection.run.name} on {cluster_text(cluster)}")
    head = ["phase", "sequence", "tokens/step", "tokens", "layout", cluster.speed_unit, "days", "GPU-hours"]
    head += ["cost"] * (campaign.price is not None) + ["MWh"] * (campaign.watts is not None)
    rows = []
    for number, cost in enumerate(costs, start=1):
        best = cost.projection
        row = [f"{number}", f"{best.run.training.sequence_length:,}", count_text(best.run.tokens_per_step)]
        row += [count_text(cost.phase.tokens), sizes_text(best.layout)]
        rows.append([*row, f"{best.time.tokens_per_second_per_device:,.0f}", *_campaign_sums(campaign, (cost,))])
    if len(rows) > 1:
        tokens = count_text(sum(cost.phase.tokens for cost in costs))
        rows.append(["all", "", "", tokens, "", "", *_campaign_sums(campaign, costs)])
    print_table(head, rows, ("tokens/step", "layout"))
    for number, cost in enumerate(costs, start=1):
        if (lost := cost.interruptions) is not None:
            steps = max(1, round(lost.interval_seconds / cost.projection.time.step_seconds))
            print(
                f"phase {number}: {lost.goodput:.1%} goodput; a failure every {lost.between_seconds / HOUR:.1f} h, "
                f"a checkpoint every {counted(steps, 'step')} ({duration_text(lost.interval_seconds)}), "
                f"which stops training for {time_text(lost.save_seconds)}"
            )
    if costs[0].interruptions is None:
        print("assumed: no failures (--mtbf HOURS of one device)")
    else:
        print(
            f"assumed: {duration_text(RESTART_SECONDS)} from a failure until training goes on, "
            f"and {duration_text(WRITE_SECONDS)} to write a checkpoint in the background"
        )
    if campaign.watts is not None:
        print(f"assumed: {campaign.watts:g} W of each device, without its host and cooling (--watts)")


def _campaign_sums(campaign: Campaign, phases: Sequence[PhaseCost]) -> list[str]:
    """Days, hours of devices, and as far as they are known cost and energy of phases."""
    prices, joules = [campaign.cost(cost) for cost in phases], [campaign.energy_joules(cost) for cost in phases]
    return [
        f"{sum(cost.seconds for cost in phases) / DAY:,.1f}",
        f"{sum(cost.device_hours for cost in phases):,.0f}",
        *([f"{sum(price or 0 for price in prices):,.0f}"] if campaign.price is not None else []),
        *([f"{sum(energy or 0 for energy in joules) / HOUR / 1e6:,.2f}"] if campaign.watts is not None else []),
    ]
