"""What metrics.jsonl tells, over the steps of a run: loss, gradients, learning rate, speed, and phases of the step."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from penstock.config.run import Run
from penstock.plan.projection import Projection
from penstock.report.colours import LIMIT, PHASES, SERIES, part_colours
from penstock.report.figure import Figure, share_text, three_digits, time_text, time_unit
from penstock.report.thin import Points, curve, thinned
from penstock.tune.doctor.run_facts import USUAL

Line = Mapping[str, Any]

DECADES = 100.0
"""Ratio of the most to the least from which on an axis is logarithmic."""

TOP, BOTTOM = (0.56, 1.0), (0.0, 0.42)
"""Domains of two panels of one picture."""


def loss_figure(lines: Sequence[Line]) -> Figure | None:
    """Loss of training, of each depth of multi-token prediction, and on held-out text.

    Args:
        lines: of metrics.jsonl.

    Returns:
        The picture, or None without a recorded loss.
    """
    train = _points(lines, "loss")
    if train is None:
        return None
    hover = "step %{x:,}<br>{} %{y:.4f}"
    data = curve(train, "train", SERIES[0], hover.replace("{}", "train"))
    for depth in range(max(len(line.get("mtp_losses") or ()) for line in lines)):
        steps = [line for line in lines if len(line.get("mtp_losses") or ()) > depth]
        points = thinned([line["step"] for line in steps], [line["mtp_losses"][depth] for line in steps])
        name = f"multi-token prediction {depth + 1}"
        data += curve(points, name, SERIES[4 + depth % 3], hover.replace("{}", name))
    held_out = _points(lines, "evaluation_loss")
    last = f"Last: {train.ys[-1]:.4f} in training"
    if held_out is not None:
        traces = curve(held_out, "held out", SERIES[1], hover.replace("{}", "held out"))
        marks = {"mode": "lines+markers", "marker": {"color": SERIES[1], "size": 7}, "opacity": 1.0}
        data += [*traces[:-1], traces[-1] | marks]
        last += f", {held_out.ys[-1]:.4f} on held-out text"
    return Figure(
        name="loss",
        title="Loss",
        caption=f"nats per token. {last}. {train.words}".strip(),
        data=data,
        layout={"xaxis": _steps(), "yaxis": {"title": {"text": "loss (nats/token)"}}, "hovermode": "closest"},
    )


def gradient_figure(lines: Sequence[Line], run: Run | None) -> Figure | None:
    """Norm of the gradient above, learning rate below.

    Args:
        lines: of metrics.jsonl.
        run: says where gradients are clipped.
    """
    norm, rate = _points(lines, "gradient_norm"), _points(lines, "learning_rate")
    if norm is None or rate is None:
        return None
    data = curve(norm, "gradient norm", SERIES[0], "step %{x:,}<br>gradient norm %{y:.4~g}")
    data += curve(rate, "learning rate", SERIES[2], "step %{x:,}<br>learning rate %{y:.3~e}", yaxis="y2")
    shapes, clipped = [], ""
    if run is not None and run.training.clip_norm:
        shapes = [_level(run.training.clip_norm, "y")]
        above = sum(line["gradient_norm"] > run.training.clip_norm for line in _having(lines, "gradient_norm"))
        clipped = f" Dashed: clipped to {run.training.clip_norm:g}, in {above / len(lines):.0%} of the recorded steps."
    return Figure(
        name="gradient",
        title="Gradient norm and learning rate",
        caption=f"The norm is of all gradients together, before clipping.{clipped} {norm.words}".strip(),
        data=data,
        layout={
            "xaxis": _steps() | {"anchor": "y2"},
            "yaxis": {"title": {"text": "gradient norm"}, "domain": TOP, **_scale(norm)},
            "yaxis2": {"title": {"text": "learning rate"}, "rangemode": "tozero", "domain": BOTTOM, "tickformat": "~g"},
            "shapes": shapes,
            "showlegend": False,
            "hovermode": "closest",
        },
    )


def speed_figure(lines: Sequence[Line], planned: Projection | None, unit: str = "tokens/s/device") -> Figure | None:
    """Tokens per second of a device, and below it model FLOPs utilization where it is known.

    Args:
        lines: of metrics.jsonl.
        planned: the run where it ran, drawn as dashed lines.
        unit: of the speed.
    """
    speed, mfu = _points(lines, "tokens_per_second_per_device"), _points(lines, "model_flops_utilization")
    if speed is None:
        return None
    data = curve(speed, unit, SERIES[0], f"step %{{x:,}}<br>%{{y:,.0f}} {unit}")
    usual = usual_of(lines, "tokens_per_second_per_device")
    words = [f"{three_digits(usual)} {unit}" if usual is not None else ""]
    shapes = []
    layout: dict[str, Any] = {"yaxis": {"title": {"text": unit}, "rangemode": "tozero", "tickformat": ","}}
    if mfu is not None:
        data += curve(mfu, "MFU", SERIES[2], "step %{x:,}<br>MFU %{y:.1%}", yaxis="y2")
        layout["yaxis"]["domain"] = TOP
        layout["yaxis2"] = {"title": {"text": "MFU"}, "rangemode": "tozero", "domain": BOTTOM, "tickformat": ".2~%"}
        words.append(f"MFU {share_text(usual_of(lines, 'model_flops_utilization') or 0.0)}")
    plan = ""
    if planned is not None:
        shapes.append(_level(planned.time.tokens_per_second_per_device, "y"))
        plan = f" Dashed, the plan: {three_digits(planned.time.tokens_per_second_per_device)} {unit}"
        if mfu is not None:
            shapes.append(_level(planned.time.model_flops_utilization, "y2"))
            plan += f", MFU {share_text(planned.time.model_flops_utilization)}"
        plan += "."
    unknown = "" if mfu is not None else " No MFU: the peak of the device is not known."
    axis = _steps() | ({"anchor": "y2"} if mfu is not None else {})
    return Figure(
        name="speed",
        title="Throughput",
        caption=f"Usual (median of the last half): {', '.join(filter(None, words))}.{plan}{unknown} {speed.words}",
        data=data,
        layout={"xaxis": axis, **layout, "shapes": shapes, "showlegend": False, "hovermode": "closest"},
    )


def step_figure(lines: Sequence[Line], planned: Projection | None) -> Figure | None:
    """Time of the step, with its phases stacked where they were timed.

    Args:
        lines: of metrics.jsonl.
        planned: the run where it ran, drawn as a dashed line.
    """
    whole = _points(lines, "step_seconds")
    if whole is None:
        return None
    size, unit = time_unit(usual_of(lines, "step_seconds") or max(whole.ys))
    timed = [line for line in lines if isinstance(line.get("phase_seconds"), Mapping)]
    names = list(dict.fromkeys(name for line in timed for name in line["phase_seconds"]))
    colours = part_colours(names, PHASES)
    data: list[dict[str, Any]] = []
    # A line has the phases of the step before it.
    xs = [line["step"] - 1 for line in timed]
    for name in names:
        points = thinned(xs, [line["phase_seconds"].get(name, 0.0) / size for line in timed])
        data.append(_layer(points, name, colours[name], unit))
    scaled = thinned([line["step"] for line in _having(lines, "step_seconds")], _scaled(lines, size))
    total = curve(scaled, "step", SERIES[4], f"step %{{x:,}}<br>%{{y:.4~g}} {unit}")
    usual = usual_of(lines, "step_seconds")
    caption = [f"Usual (median of the last half): {time_text(usual)}." if usual is not None else ""]
    caption.append("Stacked: phases on the first rank's device." if names else "Phases were not timed.")
    shapes = []
    if planned is not None:
        shapes.append(_level(planned.time.step_seconds / size, "y"))
        caption.append(f"Dashed, the plan: {time_text(planned.time.step_seconds)}.")
    return Figure(
        name="step",
        title="Time of a step",
        caption=" ".join([*filter(None, caption), whole.words]).strip(),
        data=[*data, *total],
        layout={
            "xaxis": _steps(),
            "yaxis": {"title": {"text": f"time of a step ({unit})"}, "rangemode": "tozero", "tickformat": ","},
            "shapes": shapes,
            "hovermode": "x unified" if names else "closest",
            "showlegend": bool(names),
        },
    )


def _scale(points: Points) -> dict[str, Any]:
    """A logarithmic axis where values differ by much."""
    least, most = min(points.lows), max(points.highs)
    return {"type": "log", "dtick": 1} if least > 0 and most / least > DECADES else {"rangemode": "tozero"}


def usual_of(lines: Sequence[Line], name: str) -> float | None:
    """The median of a field over the last half of the lines that have it: the first compile, capture and warm up."""
    values = [float(line[name]) for line in _having(lines, name)]
    return median(values[int(len(values) * USUAL) :]) if values else None


def _layer(points: Points, name: str, colour: str, unit: str) -> dict[str, Any]:
    """A phase as a layer of the stack."""
    return {
        "type": "scatter",
        "mode": "lines",
        "stackgroup": "phases",
        "name": name,
        "x": list(points.xs),
        "y": [float(f"{value:.4g}") for value in points.ys],
        "line": {"width": 0.5, "color": colour},
        "fillcolor": colour,
        "hovertemplate": f"%{{y:.3~g}} {unit}",
    }


def _having(lines: Sequence[Line], name: str) -> list[Line]:
    """Lines in which a field is a number."""
    return [line for line in lines if isinstance(line.get(name), int | float)]


def _scaled(lines: Sequence[Line], size: float) -> list[float]:
    return [line["step_seconds"] / size for line in _having(lines, "step_seconds")]


def _points(lines: Sequence[Line], name: str) -> Points | None:
    """A field over the steps, or None if no line has it."""
    found = _having(lines, name)
    return thinned([line["step"] for line in found], [float(line[name]) for line in found]) if found else None


def _steps() -> dict[str, Any]:
    return {"title": {"text": "step"}, "tickformat": ",d"}


def _level(at: float, axis: str) -> dict[str, Any]:
    """A dashed line across a panel."""
    place = {"type": "line", "xref": "x domain", "yref": axis, "x0": 0, "x1": 1}
    return place | {"y0": at, "y1": at, "line": {"color": LIMIT, "width": 1.5, "dash": "dash"}}
