"""Pictures of what-ifs: one layout on more devices, and one run with several values of one thing.

What was asked and answered comes from penstock/plan/what_if.py; a question that has no answer leaves a gap.
"""

from collections.abc import Mapping, Sequence

from penstock.plan.projection import Projection
from penstock.plan.what_if import SweepPoint
from penstock.report.curves import Axes, Curve, Scaling, curves_figure, scaling_figure
from penstock.report.figure import Figure, gigabytes, time_text


def scaling_pictures(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> list[Figure]:
    """Speed and efficiency over devices.

    Args:
        kinds: points of `strong` and of `weak` scaling, as `penstock.plan.what_if.scale` gives them.
        base: whose layout it is.
    """
    scalings = [
        Scaling(
            name=kind,
            devices=[int(point.asked["devices"]) for point in points],
            tokens_per_second_per_device=[_speed(point) for point in points],
        )
        for kind, points in kinds.items()
    ]
    caption = f"{base.run.name} on {base.cluster.hardware.name}, {base.layout}. Projected."
    return [scaling_figure("scaling", "Scaling", caption, scalings, base.cluster.speed_unit)]


def sweep_pictures(points: Sequence[SweepPoint], base: Projection) -> list[Figure]:
    """Speed, and memory of the fullest rank, over what is swept; a curve for each dispatcher where they are asked for.

    Args:
        points: as `penstock.plan.what_if.sweep` gives them; none for values that are no numbers.
        base: from which the runs differ.
    """
    name = next((name for point in points for name in point.asked if name != "dispatcher"), "")
    if not points or not all(point.asked[name].isdecimal() for point in points):
        return []
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.asked.get("dispatcher", base.layout.dispatcher), []).append(point)
    label = name.rpartition(".")[2].replace("_", " ")
    caption = f"{base.run.name} on {base.cluster.devices:,} x {base.cluster.hardware.name}, {base.layout}. Projected."
    speeds = [_curve(group, name, dispatcher, "speed") for dispatcher, group in groups.items()]
    memories = [_curve(group, name, dispatcher, "memory") for dispatcher, group in groups.items()]
    return [
        curves_figure("sweep-speed", f"Speed over {label}", caption, Axes(x=label, y=base.cluster.speed_unit), speeds),
        curves_figure(
            "sweep-memory",
            f"Memory over {label}",
            caption,
            Axes(x=label, y="memory of the fullest rank (GB)"),
            memories,
        ),
    ]


def _speed(point: SweepPoint) -> float | None:
    """Tokens per second of a device, or nothing."""
    return point.answer.time.tokens_per_second_per_device if isinstance(point.answer, Projection) else None


def _curve(points: Sequence[SweepPoint], name: str, dispatcher: str, what: str) -> Curve:
    """Answers as one curve."""
    ys: list[float | None] = []
    for point in points:
        memory = point.answer.memory.total / 1e9 if isinstance(point.answer, Projection) else None
        ys.append(_speed(point) if what == "speed" else memory)
    xs, notes = [float(point.asked[name]) for point in points], [_note(point) for point in points]
    return Curve(name=dispatcher, xs=xs, ys=ys, notes=notes)


def _note(point: SweepPoint) -> str:
    """What is written beside a point on hover."""
    one = point.answer
    if not isinstance(one, Projection):
        return one.rule
    return f"step {time_text(one.time.step_seconds)}, {gigabytes(one.memory.total)}{'' if one.fits else ': too much'}"
