"""A plan as text: the conclusion, the candidates, the refusals with reasons, and the origin of the figures."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from penstock.base.errors import PenstockError
from penstock.base.numbers import bytes_text, counted, shortened, time_text
from penstock.cli.output import print_table
from penstock.cli.plan_request import Topic
from penstock.config.run import Run
from penstock.kernels.tuning import LAUNCHES_FROM
from penstock.plan.asked_layout import differing_fields, field_label
from penstock.plan.assumptions import Assumptions
from penstock.plan.balance import BalanceCase
from penstock.plan.costs import assumed_imbalance
from penstock.plan.hardware import ORIGINS, Cluster, Hardware, SourcedTable
from penstock.plan.layout_names import FOLLOW
from penstock.plan.memory import COMPONENTS, components
from penstock.plan.projection import (
    MARGIN,
    MEMORY,
    SLOWER,
    Advice,
    Layout,
    Plan,
    Projection,
    Refusal,
    error_text,
    speed_range,
)
from penstock.plan.software import OWN
from penstock.plan.what_if import slowest

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
        print(f"{verdict(plan)}: {conclusion(best)}")
        if (likely := speed_range(best.run, best.cluster)) is not None:
            print(f"range: {likely.text(best.time.tokens_per_second_per_device, best.cluster.speed_unit)}")
        print()
        print_candidates(plan.candidates)
        if plan.considered > 1 and len(plan.candidates) > 1:
            print("rows: the fastest found of each way to divide the model, then others (--top)")
        print()
        for label, text in facts(best).items():
            print(f"{label:<10}{text}")
    elif plan.considered == 1 and plan.refused:
        (refusal,) = plan.refused
        print(f"asked: {refused_text(refusal.layout)}: refused by {refusal.rule}: {refusal.reason}")
    elif plan.considered == 0:
        print(f"nothing fits: no grid of {plan.cluster.devices:,} devices has the sizes that are asked for")
    else:
        print(f"nothing fits, of {plan.considered:,} layouts")
    for line in caveats(plan):
        print(line)
    if plan.nearest is not None:
        print(f"nearest: {conclusion(plan.nearest)}")
    for help_text in plan.helps:
        print(f"would fit: {help_text}")
    if plan.considered > 1 and plan.refused:
        print()
        print_refusals(plan.refused, plan.considered)
    print()
    print(*grounds(plan.cluster, assumed), sep="\n")


def verdict(plan: Plan) -> str:
    """How the first candidate was found."""
    return "asked" if plan.considered == 1 else f"best{unproved(plan.gap)}"


def unproved(gap: float) -> str:
    """What the bound of a search that ended early leaves open, behind `best`; empty after a proof."""
    if not gap:
        return ""
    faster = f"{gap:.1%} faster" if gap < 1 else f"{1 + gap:.1f} x as fast"
    return f" found; not proved: up to {faster} may exist"


def caveats(plan: Plan) -> list[str]:
    """Lines of what is said against the first candidate, or for others."""
    best, is_search = next(iter(plan.candidates), None), plan.considered > 1
    lines = [f"advice: {advice_text(advice, best, is_search=is_search)}" for advice in plan.advice if best]
    return lines + [f"may not fit: {conclusion(near)}; {bytes_text(-near.over_bytes)} left" for near in plan.close]


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


def facts(best: Projection) -> dict[str, str]:
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
    counted_rules = [refusal for refusal in refused if refusal.rule not in REASONS]
    counted_rules.sort(key=lambda refusal: -refusal.count)
    illegal = sum(refusal.count for refusal in counted_rules)
    counts = [f"{legal[rule]:,} {what}" for rule, what in REASONS.items() if rule in legal]
    counts += [f"{illegal:,} are illegal"] if illegal else []
    print(f"left out: {sum(legal.values()) + illegal:,} of {considered:,} layouts: {', '.join(counts)}")
    if counted_rules:
        rows = []
        for refusal in counted_rules:
            where, why = refused_text(refusal.layout), shortened(refusal.reason, LONGEST_REASON)
            rows.append((refusal.rule, f"{refusal.count:,}", where, why))
        print_table(("illegal by", "layouts", "such as", "because"), rows, ("such as",))


def refused_text(layout: Mapping[str, object]) -> str:
    """Sizes and choices of a refused layout, as far as they were decided."""
    choices = [
        f"{word} {layout[name]}"
        for name, word in (("schedule", "schedule"), ("micro_batch", "mb"), ("recompute", "recompute"))
        if layout.get(name) not in (None, "none", "1f1b")
    ]
    return ", ".join([sizes_text(layout), *choices])


_SAVING: Mapping[str, str] = {
    "run": "activations are those that the run itself keeps (--saving)",
    "conventional": "activations as operators that are not fused keep them (--saving)",
}


def assumed_lines(assumptions: Assumptions, run: Run) -> list[str]:
    """A line for each assumption about the run that may be changed."""
    lines = []
    if run.model.moe is not None:
        forced = "model.moe.balance.force_load_balance" if run.model.moe.balance.force_load_balance else "--imbalance"
        share = f"{assumed_imbalance(run, assumptions.in_time):.4g} x their even share of rows, at most all"
        loads = assumptions.loads
        if loads is not None and forced == "--imbalance":
            forced = f"mean of {loads.layers} layers and {len(loads.steps_LE)} steps, --routing {loads.path}"
        lines.append(f"the fullest rank's experts get {share} ({forced})")
        if assumptions.in_turn:
            lines.append("tokens take the experts in turn, as benchmarks that force balance do (--routing)")
    if run.data.document_mask:
        lines.append("each row is one document in attention, so shorter ones take less time (data.document_mask)")
    lines.append(_SAVING[assumptions.saving])
    software = assumptions.software
    return lines if software == OWN else [*lines, f"{software} (--software); {software.source}"]


def print_balance(cases: Sequence[BalanceCase]) -> None:
    """The run with and without replicas of experts, if there are cases; forced balance, the last one, is the limit."""
    if not cases:
        return
    least = cases[-1].step_seconds
    rows = []
    for case in cases:
        replicas = f"{case.loads.replicas:.1f}" if case.loads.replicas else ""
        exposed = time_text(case.exposed_seconds) if case.exposed_seconds else ""
        row = (case.name, f"{case.loads.fullest:.3f}", replicas, exposed, time_text(case.step_seconds))
        rows.append((*row, f"{least / case.step_seconds:.1%}"))
    head = ("dispatch.balance", "fullest rank", "replicas", "waiting for them", "step", "of forced")
    print_table(head, rows, ("waiting for them", "replicas"))
    print("fullest rank: its rows over the even share; replicas of a layer on all ranks: means of layers and steps")


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
_NEEDS_CANDIDATE: tuple[Topic, ...] = ("memory", "memory.activations", "time")


def explain(plan: Plan, topic: Topic) -> None:
    """Print the terms of a plan's first candidate, or of the plan. Raises a PenstockError without a candidate."""
    print(f"{plan.model} on {cluster_text(plan.cluster)}")
    if plan.candidates:
        print(conclusion(plan.candidates[0]))
    elif topic in _NEEDS_CANDIDATE:
        raise PenstockError("no layout fits, so none can be explained", fix="--explain refused, or name a --layout")
    print()
    TOPICS[topic](plan)


def _memory(plan: Plan) -> None:
    best = plan.candidates[0]
    columns = [components(memory) for memory in best.memories]
    names = [name for name in COMPONENTS if any(column[name] for column in columns)]
    rows = [(name, *(bytes_text(column[name]) for column in columns)) for name in names]
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
    moment = moment_text(memory.moment)
    print(f"rank {memory.rank} at its fullest, {moment}: activations {bytes_text(memory.activations)}")
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
    rows = []
    for memory in best.memories:
        sizes = (bytes_text(memory.terms.get(_HELD, 0)), bytes_text(memory.activations))
        rows.append((f"rank {memory.rank}", moment_text(memory.moment), *sizes))
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
    refused = sorted(plan.refused, key=lambda refusal: refusal.rule)
    rows = [(entry.rule, f"{entry.count:,}", refused_text(entry.layout), entry.reason) for entry in refused]
    print_table(("rule", "layouts", "where", "because"), rows, ("where",))


def _hardware(plan: Plan) -> None:
    hardware = plan.cluster.hardware
    rows = [(name, table.source) for name, table in sourced_tables(plan.cluster).items()]
    rows += [(f"{curve.operator}, {len(curve.points)} points", curve.source) for curve in hardware.measured]
    print_table(("figures", "source"), rows)


TOPICS: Mapping[Topic, Callable[[Plan], None]] = {
    "memory": _memory,
    "memory.activations": _activations,
    "time": _time,
    "refused": _refused,
    "hardware": _hardware,
}
"""Topics of --explain."""
