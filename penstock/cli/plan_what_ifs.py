"""What-ifs of `penstock plan` as text and as JSON; the values come from penstock/plan/what_if.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.base.numbers import bytes_text, time_text
from penstock.cli.plan_print import conclusion
from penstock.cli.table import print_table
from penstock.plan.projection import Projection, Refusal, candidate_json
from penstock.plan.what_if import ProjectionComparison, SweepPoint, TermChange

_LARGEST_TERMS = 12


def print_comparison(comparison: ProjectionComparison, left: str, right: str) -> None:
    """Print what differs between two runs, and by how much.

    Args:
        comparison: of them.
        left: name of the first.
        right: of the second.
    """
    for name, one in ((left, comparison.left), (right, comparison.right)):
        print(f"{name}: {conclusion(one)}")
    print()
    if comparison.fields:
        fields = [(one.field, one.left or "-", one.right or "-") for one in comparison.fields]
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
    step = _step_change(comparison)
    seconds = _change_rows(comparison.seconds, time_text)
    print_table(("time", left, right, "more"), [*seconds, *_change_rows([step], time_text, all_of_them=True)])
    print(f"terms of the place that waits least; {_speed_text(comparison, left, right)}")


def _step_change(comparison: ProjectionComparison) -> TermChange:
    left, right = comparison.left.time.step_seconds, comparison.right.time.step_seconds
    return TermChange(name="step", left=left, right=right)


def _speed_text(comparison: ProjectionComparison, left: str, right: str) -> str:
    speeds = [one.time.tokens_per_second_per_device for one in (comparison.left, comparison.right)]
    return f"{right} trains {speeds[1] / speeds[0]:.2f} x the tokens per second of {left}"


def _change_rows(
    changes: Sequence[TermChange], text: Callable[[float], str], *, all_of_them: bool = False
) -> list[tuple[str, ...]]:
    """Rows of what differs, the largest difference first; what is equal on both sides is left out."""
    told = [change for change in changes if change.more or all_of_them]
    told.sort(key=lambda change: -abs(change.more))
    return [(one.name, text(one.left), text(one.right), _signed(one.more, text)) for one in told]


def _signed(more: float, text: Callable[[float], str]) -> str:
    return f"{'-' if more < 0 else '+'}{text(abs(more))}"


def comparison_json(comparison: ProjectionComparison) -> dict[str, Any]:
    """Everything of a comparison."""
    terms = {"memory": comparison.memory, "activations": comparison.activations, "seconds": comparison.seconds}
    return {
        "left": candidate_json(comparison.left),
        "right": candidate_json(comparison.right),
        "fields": [{"field": one.field, "left": one.left, "right": one.right} for one in comparison.fields],
        "changes": {
            what: [{"name": one.name, "left": one.left, "right": one.right, "more": one.more} for one in changes]
            for what, changes in terms.items()
        },
    }


def print_scaling(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> None:
    """Print one layout on several numbers of devices.

    Args:
        kinds: points of strong and of weak scaling.
        base: whose layout it is.
    """
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
    """Print one run with several values of one thing."""
    print(f"from: {conclusion(base)}\n")
    _print_points(points, base.cluster.speed_unit)


def _print_points(points: Sequence[SweepPoint], speed: str) -> None:
    asked = list(dict.fromkeys(name for point in points for name in point.asked))
    with_efficiency = any(point.efficiency is not None for point in points)
    words = ["step", speed, *(["efficiency"] if with_efficiency else []), "MFU", "bubble", "exposed", "memory"]
    rows = []
    for point in points:
        row = [point.asked.get(name, "") for name in asked]
        rows.append([*row, *_cells(point, with_efficiency=with_efficiency)])
    print_table((*(name.rpartition(".")[2] for name in asked), "rows", *words, ""), rows, ("exposed", "bubble", "MFU"))
    refusals = [point.answer for point in points if isinstance(point.answer, Refusal)]
    for reason in dict.fromkeys(f"{one.rule}: {one.reason}" for one in refusals):
        print(reason)


def _cells(point: SweepPoint, *, with_efficiency: bool) -> list[str]:
    one = point.answer
    if isinstance(one, Refusal):
        return [*[""] * (7 + with_efficiency), one.rule]
    if (way := one.layout.dispatcher) != point.asked.get("dispatcher", way):
        return [*[""] * (7 + with_efficiency), f"comes down to {way}"]
    time = one.time
    cells = [f"{one.run.training.global_batch:,}", time_text(time.step_seconds)]
    cells += [f"{time.tokens_per_second_per_device:,.0f}"]
    if with_efficiency:
        cells += ["" if point.efficiency is None else f"{point.efficiency:.1%}"]
    cells += [f"{time.model_flops_utilization:.1%}", f"{time.bubble:.1%}"]
    cells += [time_text(time.exposed_communication_seconds), bytes_text(one.memory.total)]
    return [*cells, "" if one.fits else f"{bytes_text(one.over_bytes)} too much"]


def points_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """What was asked, and a candidate of the contract with its rows, or the refusal."""
    found: list[dict[str, Any]] = []
    for point in points:
        one = point.answer
        if isinstance(one, Refusal):
            found.append({"asked": dict(point.asked), "refused": {"rule": one.rule, "reason": one.reason}})
        else:
            batch = {"global_batch": one.run.training.global_batch, "efficiency": point.efficiency}
            found.append({"asked": dict(point.asked), **batch, "candidate": candidate_json(one)})
    return found
