"""The answer to a request of `penstock plan`, as text and as JSON: a plan, a comparison, a series, a training run.

Both end with what the figures rest on, but for a topic of a plan that is explained.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.numbers import bytes_text, count_text, counted, duration_text, time_text
from penstock.cli.output import print_table
from penstock.cli.plan_print import (
    caveats,
    cluster_text,
    conclusion,
    explain,
    facts,
    grounds,
    print_balance,
    print_plan,
    sizes_text,
    unproved,
    verdict,
)
from penstock.cli.plan_request import PlanRequest
from penstock.plan.balance import BalanceCase, balance_json
from penstock.plan.campaign import DAY, HOUR, RESTART_SECONDS, WRITE_SECONDS, Campaign, PhaseCost, campaign_json
from penstock.plan.hardware import Cluster
from penstock.plan.projection import COVERED, Plan, Projection, Refusal, candidate_json, plan_json, speed_range
from penstock.plan.what_if import ProjectionComparison, SweepPoint, TermChange
from penstock.report.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points by kind: those of a sweep, of numbers of devices, of strong and of weak scaling."""

    points: Mapping[str, Sequence[SweepPoint]]
    base: Projection | None = None  # what the points differ from; None if each has the best layout of a search
    swept: str = ""  # name of the swept field


Result = Plan | Series | Campaign | ProjectionComparison


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """An answer, and the plan whose candidates are written and drawn."""

    model: str
    cluster: Cluster
    assumed: tuple[str, ...]  # lines
    result: Result
    plan: Plan | None = None  # None for several plans
    balance: tuple[BalanceCase, ...] = ()  # of the plan
    figures: tuple[Figure, ...] = ()


def print_answer(answer: PlanAnswer, request: PlanRequest) -> None:
    """Print an answer. Raises a PenstockError for a topic of a candidate if there is none."""
    topic, assumed = request.options.explain, answer.assumed
    if request.options.json:
        print(json.dumps(_answer_json(answer), indent=2))
        return
    match answer.result:
        case Plan() as plan if topic is not None:
            explain(plan, topic)
            return
        case Plan() as plan:
            print_plan(plan, assumed)
            print_balance(answer.balance)
            return
        case Series() as series:
            _print_series(series, answer.cluster)
        case Campaign() as campaign:
            _print_campaign(campaign)
        case ProjectionComparison() as comparison:
            _print_comparison(comparison, *request.names)
    print()
    print(*grounds(answer.cluster, assumed), sep="\n")


def _answer_json(answer: PlanAnswer) -> dict[str, Any]:
    match answer.result:
        case Plan() as plan:
            ranges = _range_json(plan.candidates[0]) if plan.candidates else None
            entries = plan_json(plan) | {"range": ranges} | balance_json(answer.balance)
        case Series() as series:
            swept = {"sweep": series.swept} if series.swept else {}
            entries = swept | {kind: _points_json(points) for kind, points in series.points.items()}
        case Campaign() as campaign:
            entries = campaign_json(campaign)
        case ProjectionComparison() as comparison:
            entries = _comparison_json(comparison)
    head = {"model": answer.model, "hardware": answer.cluster.hardware.name, "world": answer.cluster.devices}
    return head | entries | {"grounds": grounds(answer.cluster, answer.assumed)}


def _range_json(projection: Projection) -> dict[str, Any] | None:
    if (likely := speed_range(projection.run, projection.cluster)) is None:
        return None
    speed = projection.time.tokens_per_second_per_device
    return {
        "tokens_per_second_per_device": [likely.low * speed, likely.high * speed],
        "covered": COVERED,
        "runs": likely.runs,
        "is_comparable": likely.is_comparable,
    }


_LARGEST_TERMS = 12


def _print_comparison(comparison: ProjectionComparison, left: str, right: str) -> None:
    """Print the differences of two runs by size, under their names."""
    for name, projection in ((left, comparison.left), (right, comparison.right)):
        print(f"{name}: {conclusion(projection)}")
    print()
    if comparison.fields:
        fields = [(change.field, change.left or "-", change.right or "-") for change in comparison.fields]
        print_table(("field", left, right), fields)
        print()
    memory = _change_rows(comparison.memory, bytes_text)
    totals = TermChange(name="total", left=comparison.left.memory.total, right=comparison.right.memory.total)
    print_table(("memory", left, right, "more"), [*memory, *_change_rows([totals], bytes_text, all_of_them=True)])
    print(f"of the fullest ranks, {comparison.left.memory.rank} and {comparison.right.memory.rank}\n")
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
    more = [f"{'-' if change.more < 0 else '+'}{text(abs(change.more))}" for change in shown]
    return [(change.name, text(change.left), text(change.right), by) for change, by in zip(shown, more, strict=True)]


def _comparison_json(comparison: ProjectionComparison) -> dict[str, Any]:
    terms = {"memory": comparison.memory, "activations": comparison.activations, "seconds": comparison.seconds}
    changes = {what: [vars(term) | {"more": term.more} for term in changed] for what, changed in terms.items()}
    sides = {"left": candidate_json(comparison.left), "right": candidate_json(comparison.right)}
    return {**sides, "fields": [vars(change) for change in comparison.fields], "changes": changes}


def _print_series(series: Series, cluster: Cluster) -> None:
    base = series.base
    if base is None:
        _print_searches(next(iter(series.points.values())), cluster)
        return
    if series.swept:
        print(f"from: {conclusion(base)}\n")
        _print_points(series.points["points"], cluster.speed_unit)
        return
    print(f"layout: {base.layout}")
    batch = f"{base.run.training.global_batch:,} rows"
    titles = {
        "strong": f"strong scaling: {batch} a step on any number of devices, as far as they can share them",
        "weak": f"weak scaling: {batch} a step on {cluster.devices} devices, as many for each on all",
    }
    for kind, points in series.points.items():
        print(f"\n{titles[kind]}")
        _print_points(points, cluster.speed_unit)


def _print_searches(points: Sequence[SweepPoint], cluster: Cluster) -> None:
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


def _points_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
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


def _print_campaign(campaign: Campaign) -> None:
    """Print a row for each phase of a training run, their sum, the assumed failures, and what is said of each plan."""
    cluster, costs = campaign.cluster, campaign.phases
    print(f"{costs[0].plan.model} on {cluster_text(cluster)}")
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
        print(f"phase {number}, {verdict(cost.plan)}: {conclusion(cost.projection)}")
        print(f"memory    {facts(cost.projection)['memory']}")
        if (lost := cost.interruptions) is not None:
            steps = max(1, round(lost.interval_seconds / cost.projection.time.step_seconds))
            print(
                f"goodput   {lost.goodput:.1%}; a failure every {lost.between_seconds / HOUR:.1f} h, "
                f"a checkpoint every {counted(steps, 'step')} ({duration_text(lost.interval_seconds)}), "
                f"which stops training for {time_text(lost.save_seconds)}"
            )
    for line in dict.fromkeys(line for cost in costs for line in caveats(cost.plan)):
        print(line)
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
