"""Pictures of docs/concepts.md, drawn from the code that runs: schedules by the clock, ranks by the grid.

python -m tools.concept_pictures

Needs the extra `pictures`.
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from penstock.layout.actions import Kind, even_costs, play
from penstock.layout.grid import Grid
from penstock.layout.schedules import schedule

FOLDER = Path("docs/pictures")
DPI = 120
RANKS, MICRO_BATCHES = 4, 8
SHOWN = (("1f1b", 1), ("interleaved", 2), ("zb-1f1b", 1), ("zb-v", 2))
"""Schedules, and stages that a rank has of each."""

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#e4933a",
    Kind.INPUT: "#e4933a",
    Kind.WEIGHT: "#6aa66a",
}
NAMES = {"forward": "#4c78a8", "backward, or its input gradients": "#e4933a", "weight gradients": "#6aa66a"}
SECOND_STAGE = 0.62
"""How much of its colour a rank's second stage keeps."""

INK = "#7d8590"
"""Of letters and lines: readable on white and on black."""

GROUPS = ("#4c78a8", "#e4933a", "#6aa66a", "#b279a2", "#d9a900", "#59a5b5", "#c05b5b", "#8a7967")


def draw_schedules(path: Path) -> None:
    """What every rank does when, for the same model under several schedules."""
    figure, panels = pyplot.subplots(len(SHOWN), 1, figsize=(9, 1.55 * len(SHOWN)), sharex=True)
    longest = 0.0
    for panel, (name, stages_per_rank) in zip(panels, SHOWN, strict=True):
        plan = schedule(name, ranks=RANKS, stages_per_rank=stages_per_rank, micro_batches=MICRO_BATCHES)
        share = 1 / stages_per_rank
        played = play(plan, even_costs(plan.stages, (share, share, share)))
        longest = max(longest, played.span)
        for event in played.events:
            second = event.action.stage >= RANKS
            panel.add_patch(
                Rectangle(
                    (event.start, RANKS - 1 - event.rank + 0.06),
                    event.end - event.start,
                    0.88,
                    facecolor=COLOURS[event.action.kind],
                    alpha=SECOND_STAGE if second else 1.0,
                    edgecolor="white",
                    linewidth=0.4,
                )
            )
            middle = (event.start + event.end) / 2
            number = str(event.action.micro_batch)
            panel.text(middle, RANKS - 0.5 - event.rank, number, ha="center", va="center", fontsize=6, color="white")
        bubble = 1 - sum(played.busy) / (RANKS * played.span)
        panel.set_title(f"{name}: {bubble:.1%} idle", fontsize=9, loc="left", color=INK)
        _bare(panel)
        panel.set_ylim(0, RANKS)
        panel.set_yticks([RANKS - 0.5 - rank for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    panels[-1].set_xlim(0, longest)
    keys = [Patch(color=colour, label=name) for name, colour in NAMES.items()]
    figure.legend(handles=keys, loc="lower center", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    _save(figure, path)


def draw_folding(path: Path) -> None:
    """The same eight ranks, divided for attention and for experts."""
    grid = Grid(world=8, tensor=2, context=2, expert=8)
    figure, panels = pyplot.subplots(2, 1, figsize=(8, 2.6))
    rows = (
        ("attention and dense layers: TP 2 x CP 2 x DP 2; one colour shares one row of tokens", _row_of(grid)),
        ("experts: EP 8 over the same ranks; each holds an eighth of the experts", list(range(8))),
    )
    for panel, (title, groups) in zip(panels, rows, strict=True):
        for rank, group in enumerate(groups):
            panel.add_patch(Rectangle((rank + 0.04, 0.05), 0.92, 0.9, facecolor=GROUPS[group % len(GROUPS)]))
            panel.text(rank + 0.5, 0.5, f"rank {rank}", ha="center", va="center", fontsize=8, color="white")
        panel.set_title(title, fontsize=9, loc="left", color=INK)
        _bare(panel)
        panel.set_xlim(0, 8)
        panel.set_ylim(0, 1)
        panel.axis("off")
    figure.tight_layout()
    _save(figure, path)


def _row_of(grid: Grid) -> list[int]:
    """Which row of tokens each rank works on: its place on the data axis."""
    return [grid.place(rank)["data"] for rank in range(grid.world)]


def _bare(panel: Axes) -> None:
    panel.tick_params(length=0, labelsize=8, colors=INK)
    for side in panel.spines.values():
        side.set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(f"wrote {path}")


def main() -> None:
    """Draw both."""
    matplotlib.rcParams |= {"svg.hashsalt": "penstock", "svg.fonttype": "none"}
    draw_schedules(FOLDER / "schedules.png")
    draw_folding(FOLDER / "folding.svg")


if __name__ == "__main__":
    main()
