"""The timeline of a run: passes planned and measured on one axis; without a pipeline what each rank did in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.plan.projection import Projection
from penstock.report.figure import Figure, three_digits
from penstock.report.run_evidence import RunEvidence, sentence
from penstock.report.run_lanes import measured_phases
from penstock.report.run_memory import place_name
from penstock.report.run_passes import has_passes, measured_passes
from penstock.report.run_steps import clock_of, last_step
from penstock.report.timeline import Timeline, planned, shares_of, timeline_figure
from penstock.trace.answer import RankAnswer

LANES = 64
"""Of one picture at most."""

LATE = 4
"""Ranks for which others wait most are drawn in any case."""


def timeline_pictures(evidence: RunEvidence) -> tuple[list[Figure], list[str]]:
    """The picture, and what it lacks."""
    has_pipeline = any(has_passes(one) for one in evidence.ranks)
    plan = _planned(evidence.projection)
    if not evidence.ranks:
        figures = [] if plan is None else [timeline_figure("timeline", "Pipeline, planned", [plan])]
        return figures, [sentence(evidence.lacks.trace)]
    if has_pipeline:
        return _pipeline(evidence, plan)
    return [_phases(evidence)], []


def _planned(projection: Projection | None) -> Timeline | None:
    """The plan's passes, if the run has a pipeline."""
    if projection is None or projection.time.schedule is None or projection.time.playback is None:
        return None
    found = planned(projection.time.schedule, projection.time.playback, shares_of(projection))
    lanes = [replace(lane, name=place_name(projection, place)) for place, lane in enumerate(found.lanes)]
    return replace(found, lanes=lanes, gaps="bubble")


def _pipeline(evidence: RunEvidence, plan: Timeline | None) -> tuple[list[Figure], list[str]]:
    """Passes of ranks under those of their place."""
    places = _places_of(evidence)
    count = len(plan.lanes) if plan is not None else max(places.values()) + 1
    kept = _kept(sorted(set(places.values())), count, LANES // (1 if plan is None else 2))
    ranks = _of_places(evidence.ranks, places, kept, LANES - (len(kept) if plan is not None else 0))
    clock = clock_of(evidence, ranks)
    measured = replace(measured_passes(evidence, ranks, clock, places), gaps="bubble")
    timelines = [measured]
    if plan is not None:
        timelines.insert(0, replace(plan, lanes=[replace(plan.lanes[place], place=place) for place in kept]))
    step = last_step(ranks)
    title = "Pipeline, planned and measured" if plan is not None else "Pipeline, measured"
    figure = timeline_figure("timeline", title if step is None else f"{title} in step {step}", timelines)
    some = (
        f" {len(ranks)} of {len(evidence.ranks)} recorded ranks are drawn." if len(ranks) < len(evidence.ranks) else ""
    )
    left = f" {len(kept)} of {count} places are drawn." if len(kept) < count else ""
    caption = f"{figure.caption} {clock.words}{some}{left}"
    return [replace(figure, caption=caption)], [] if plan is not None else [sentence(evidence.lacks.plan)]


def _places_of(evidence: RunEvidence) -> Mapping[int, int]:
    """The place on the pipeline of each rank with a trace: ranks of a place follow each other."""
    told = max((one.trace.world or 0 for one in evidence.ranks), default=0)
    world = told or evidence.facts.world or max(one.rank for one in evidence.ranks) + 1
    places = evidence.run.parallel.pipeline if evidence.run is not None else world
    return {one.rank: one.rank * places // world for one in evidence.ranks}


def _kept(recorded: Sequence[int], count: int, most: int) -> list[int]:
    """Places to draw: those with a recorded rank before others."""
    first = {recorded[at] for at in _spread(range(len(recorded)), most)}
    rest = [place for place in range(count) if place not in first]
    return sorted(first | {rest[at] for at in _spread(range(len(rest)), most - len(first))})


def _of_places(
    ranks: Sequence[RankAnswer], places: Mapping[int, int], kept: Sequence[int], most: int
) -> list[RankAnswer]:
    """Equally many ranks of each place that is drawn."""
    each = max(1, most // max(1, len(kept)))
    chosen = []
    for place in kept:
        of_place = [one for one in ranks if places[one.rank] == place]
        chosen += [of_place[at] for at in _spread(range(len(of_place)), each)]
    return chosen


def _spread(numbers: range, most: int) -> list[int]:
    """So many of them, evenly, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    if most < 1:
        return []
    return sorted({round(at * (len(numbers) - 1) / max(1, most - 1)) for at in range(most)})


def _telling(evidence: RunEvidence) -> list[RankAnswer]:
    """All ranks; or of too many those that others waited for most, and evenly many of the rest."""
    late = [one.rank for one in evidence.answer.collectives.stragglers()] if evidence.answer is not None else []
    first = [one for one in evidence.ranks if one.rank in late[:LATE]]
    rest = [one for one in evidence.ranks if one not in first]
    chosen = [*first, *(rest[at] for at in _spread(range(len(rest)), LANES - len(first)))]
    return sorted(chosen, key=lambda one: one.rank)


def _phases(evidence: RunEvidence) -> Figure:
    """What each rank did."""
    ranks = _telling(evidence)
    clock = clock_of(evidence, ranks)
    lanes = measured_phases(ranks, clock)
    step = last_step(ranks)
    words = [f"What {'operators of each process' if evidence.is_host else 'kernels of each device'} were for."]
    if lanes.has_halves:
        words.append("Upper half of a lane: computing; lower half: communication and copies.")
    if lanes.slot_us:
        words.append(f"Cut into slots of {three_digits(lanes.slot_us)} \u00b5s, each coloured by what took most of it.")
    if len(ranks) < len(evidence.ranks):
        words.append(f"{len(ranks)} of {len(evidence.ranks)} recorded ranks, with those that others wait for most.")
    title = "The trace" if step is None else f"Step {step}, measured"
    figure = timeline_figure("timeline", title, [lanes.timeline])
    return replace(figure, caption=" ".join(filter(None, [*words, "Grey is idle.", clock.words])))
