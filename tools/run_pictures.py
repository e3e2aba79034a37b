"""Pictures of the README, from a real run: the live view in the middle of it, and its loss curve.

    python -m tools.run_pictures                  trains the debug preset (about a minute) and draws both
    python -m tools.run_pictures training.steps=300

The live view is the panel that a terminal shows, fed by the run itself and saved as SVG by rich; the curve is read from
the run's metrics.jsonl. Needs the extra `pictures`.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from rich.console import Console

from penstock.cli.view import RunPanel
from penstock.config.load import load_run
from penstock.parallel.launch.environment import read_environment
from penstock.train.loop import Progress, open_store, train_run
from penstock.train.metrics import MetricsFile
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.run_folder import create_run_folder
from penstock.train.setup import prepare
from penstock.train.step import StopRequest

FOLDER = Path("docs/pictures")
WIDTH = 100
SMOOTH = 20
"""Training losses that are averaged for one point of the curve."""


class Photographer(Observer):
    """Observer that draws the live view when three quarters of the run are done.

    Args:
        path: SVG to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._panel: RunPanel | None = None

    def started(self, start: RunStart) -> None:
        """Make the panel; the temporary folder's name is no part of the picture."""
        self._panel = RunPanel(replace(start, folder=Path("runs") / start.run.name))

    def stepped(self, report: StepReport) -> None:
        """Take a step in."""
        assert self._panel is not None, "a run starts before it steps"
        self._panel.add(report)
        if report.step == self._panel.steps * 3 // 4:
            console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
            console.print(self._panel.render(WIDTH))
            self._path.write_text(console.export_svg(title="penstock train debug"), encoding="utf-8")

    def saved(self, step: int) -> None:
        """Show that a checkpoint was made."""
        assert self._panel is not None, "a run starts before it saves"
        self._panel.saved_step = step

    def closed(self) -> None:
        """Nothing to release."""


def main(overrides: Sequence[str] = ()) -> None:
    """Train once and draw both pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        run = load_run("debug", [*overrides, f"record.folder={temporary}", "record.tensorboard=false"])
        session = prepare(run, read_environment())
        run, folder = create_run_folder(session.run, number_if_taken=False)
        session = replace(session, run=run)
        observers: list[Observer] = [MetricsFile(folder.metrics, 1), Photographer(FOLDER / "live-view.svg")]
        with StopRequest(lambda: None) as stop:
            end = train_run(session, folder, open_store(run, folder), Progress(), observers, stop)
        draw_curve(folder.metrics, FOLDER / "loss-curve.svg")
        print(f"{end.step} steps in {end.seconds:.0f} s")


def draw_curve(metrics: Path, path: Path) -> None:
    """Training and held-out loss in bits per byte over the tokens seen."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    # Losses are nats a token; a token of the debug preset is a byte, ends of documents apart.
    bits = [line["loss"] / 0.6931471805599453 for line in lines]
    smooth = [sum(bits[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(bits))]
    tokens = [line["tokens_seen"] / 1000 for line in lines]
    held_out = [(line["tokens_seen"] / 1000, line.get("evaluation_bits_per_byte")) for line in lines]
    held_out = [(x, y) for x, y in held_out if y is not None]
    pyplot.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = pyplot.subplots(figsize=(7.5, 3.4), layout="constrained")
    axes.plot(tokens, bits, color="#9ecae1", linewidth=0.5, label="training, each step")
    axes.plot(tokens, smooth, color="#2171b5", linewidth=1.6, label=f"training, mean of {SMOOTH} steps")
    axes.plot(*zip(*held_out, strict=True), "o-", color="#d94801", linewidth=1.6, markersize=4, label="held out")
    axes.set(xlabel="thousand tokens", ylabel="bits per byte", ylim=(0, 8.5), xlim=(0, tokens[-1]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
