"""`penstock plan --explain TOPIC`: the terms that a projection is the sum of.

memory               components, by place on the pipeline
memory.activations   what the fullest rank holds at its fullest moment, by the module that allocated it
time                 terms of the step, by place on the pipeline
refused              every refusal with its reason
hardware             where each figure of the hardware comes from
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.base.errors import PenstockError, did_you_mean
from penstock.base.numbers import bytes_text, time_text
from penstock.cli.plan_print import cluster_text, conclusion, moment_text, refused_text, sourced_tables
from penstock.cli.table import print_table
from penstock.plan.projection import Plan, Projection
from penstock.plan.what_if import COMPONENTS, components

_HELD = "held"
_NEEDS_CANDIDATE = ("memory", "memory.activations", "time")


def check_topic(topic: str) -> None:
    """Refuse a topic that there is not, before anything is computed.

    Raises:
        PenstockError: with those that there are.
    """
    if topic not in TOPICS:
        told = did_you_mean(topic, TOPICS)
        raise PenstockError("--explain knows no such topic", got=topic, allowed=", ".join(TOPICS), fix=told)


def explain(plan: Plan, topic: str) -> None:
    """Print what a plan's first candidate, or the plan, is made of.

    Raises:
        PenstockError: the topic is of a candidate, and there is none.
    """
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
    """A column for each place on the pipeline; a long pipeline lies on its side, a row for each."""
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
    rows = [(_term_name(name), bytes_text(size), _share(size, whole)) for name, size in terms if size]
    rows.append(("together", bytes_text(sum(memory.terms.values())), ""))
    print_table(("allocated by", "bytes", "share"), rows)
    if memory.logits:
        print(f"of that logits and what the loss holds, a component of its own: {bytes_text(memory.logits)}")
    _moments(plan.candidates[0])


def _moments(best: Projection) -> None:
    """The fullest moment of every place, which need not be the same."""
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


def _term_name(name: str) -> str:
    return "other micro-batches" if name == _HELD else name


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _time(plan: Plan) -> None:
    best = plan.candidates[0]
    ranks = best.time.ranks
    names = sorted({name for rank in ranks for name in rank.terms}, key=lambda name: -_most(best, name))
    rows = [(name, *(time_text(rank.terms.get(name, 0.0)) for rank in ranks)) for name in names]
    rows.append(("together", *(time_text(sum(rank.terms.values())) for rank in ranks)))
    for name, word in (
        ("communication", "communication"),
        ("exposed_communication", "exposed"),
        ("host", "host-bound"),
    ):
        rows.append((f"({word})", *(time_text(vars(rank)[name]) for rank in ranks)))
    _print_places(best, "term", rows)
    print("terms add up to the time of a place; those in brackets are part of others")


def _most(best: Projection, name: str) -> float:
    return max(rank.terms.get(name, 0.0) for rank in best.time.ranks)


def _refused(plan: Plan) -> None:
    if not plan.refused:
        print("nothing was refused")
        return
    rows = [(one.rule, f"{one.count:,}", refused_text(one.layout), one.reason) for one in plan.refused]
    print_table(("rule", "layouts", "where", "because"), sorted(rows, key=lambda row: row[0]), ("where",))


def _hardware(plan: Plan) -> None:
    hardware = plan.cluster.hardware
    rows = [(name, table.source) for name, table in sourced_tables(plan.cluster).items()]
    rows += [(f"{one.operator}, {len(one.points)} points", one.source) for one in hardware.measured]
    print_table(("figures", "source"), rows)


TOPICS: Mapping[str, Callable[[Plan], None]] = {
    "memory": _memory,
    "memory.activations": _activations,
    "time": _time,
    "refused": _refused,
    "hardware": _hardware,
}
"""What can be explained."""
