"""`penstock train --fake-world N --rank R`: one rank of a world that is not there, and what it holds."""

from penstock.base.numbers import bytes_text, count_text
from penstock.config.run import Run
from penstock.layout.actions import text
from penstock.layout.grid import DENSE_AXES, EXPERT_AXES
from penstock.layout.stages import stages_text
from penstock.parallel.axes import Axes, Axis
from penstock.train.rehearsal import Rehearsal, rehearse

_LABEL_WIDTH = 12
_SHOWN_ACTIONS = 24
_GROUPS = ("tensor", "context", "dense_data", "pipeline", "expert", "expert_data", "embedding")


def print_rehearsal(run: Run, *, world: int, rank: int) -> None:
    """Build one rank without memory and print what it is and holds.

    Raises:
        ConfigError: the layout does not fit.
    """
    rehearsal = rehearse(run, world=world, rank=rank)
    for label, line in _lines(run, rehearsal):
        print(f"{label:<{_LABEL_WIDTH}}{line}")


def _lines(run: Run, rehearsal: Rehearsal) -> list[tuple[str, str]]:
    model = rehearsal.model
    axes = model.axes
    lines = [
        ("run", f"{run.name}, rank {axes.rank} of {axes.grid.world}, nothing allocated"),
        ("dense", _place(axes, DENSE_AXES)),
        ("experts", _place(axes, EXPERT_AXES)),
    ]
    for name in _GROUPS:
        axis: Axis = getattr(axes, name)
        if axis.size > 1:
            lines.append((name, f"place {axis.rank} of {axis.size}, ranks {_ranks(axis.ranks)}"))
    for number, stage in rehearsal.stages.items():
        lines.append((f"stage {number}", stages_text((stage,))))
    if model.places is not None:
        lines.append(("positions", f"{len(model.places)} of {run.training.sequence_length}, {_ranks(model.places)}"))
    lines += [
        ("parameters", f"{count_text(rehearsal.dense)} dense, {count_text(rehearsal.expert)} in experts"),
        ("weights", bytes_text(rehearsal.weight_bytes)),
        ("gradients", bytes_text(rehearsal.gradient_bytes)),
        ("optimizer", bytes_text(rehearsal.optimizer_bytes)),
    ]
    if rehearsal.host_bytes:
        lines.append(("on the host", bytes_text(rehearsal.host_bytes)))
    if model.pipeline is not None:
        schedule = model.pipeline.schedule
        actions = text(schedule, axes.pipeline.rank).split()
        more = f" ... ({len(actions)} actions)" if len(actions) > _SHOWN_ACTIONS else ""
        lines.append((schedule.name, " ".join(actions[:_SHOWN_ACTIONS]) + more))
    return lines


def _place(axes: Axes, view: tuple[str, ...]) -> str:
    place = axes.grid.place(axes.rank, view)
    return ", ".join(f"{axis} {place[axis]} of {size}" for axis, size in zip(view, axes.grid.shape(view), strict=True))


def _ranks(ranks: tuple[int, ...]) -> str:
    """All of a few; the first ones and the last of many."""
    shown = ranks if len(ranks) <= 8 else (*ranks[:6], "...", ranks[-1])
    return " ".join(map(str, shown))
