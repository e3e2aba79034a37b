"""Views of a run: a live panel on a terminal, plain lines elsewhere.

Both are observers of the loop and show the same figures. The training thread draws the panel between two steps, at most
`DRAWS_PER_SECOND` times a second: a thread of its own would compete for Python's lock. Plain lines come for the first
step, every evaluation and the last step, and otherwise at intervals that grow up to `SLOWEST_LINE_SECONDS`, so that the
log of a long run stays readable. Blocks are Unicode block elements: U+2581 is an eighth of a cell high, U+2588 is full.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import EPIPE
from functools import partial
from itertools import pairwise

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.base.numbers import bytes_text, count_text, duration_text
from penstock.train.observer import LayerReport, Observer, RunStart, StepReport

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # one cell, from an eighth to full
DOT = "\u00b7"  # separator of facts in one line
FORCED_BALANCE = "FORCED BALANCE, BENCHMARK ONLY"  # mark of every figure of a run with forced balance

DRAWS_PER_SECOND = 5.0
PANEL_WIDTH = 110  # most columns of the panel
FRAME_WIDTH = 4  # columns of its lines and spaces at both sides
LABEL_WIDTH, VALUE_WIDTH, GAP = 8, 20, 2  # columns of the label, of the value at least, and of the gap between them
NARROWEST_DETAIL = 22  # columns that a detail needs beside its figure; with fewer it goes below

STOPPING = "stopping after this step; Ctrl-C once more stops at once, unsaved"

LAYERS_SHOWN = 6
UNEVEN, VERY_UNEVEN = 1.5, 2.5  # load of the fullest expert over the mean from which it is drawn yellow, and red
FIRST_LINE_SECONDS, SLOWEST_LINE_SECONDS = 2.0, 60.0


def facts_of(start: RunStart) -> dict[str, str]:
    """The lines at the top of every view, by label: model, batch, device, kernels."""
    run = start.run
    size = f"{count_text(start.parameters)} parameters"
    if start.active_parameters != start.parameters:
        size += f", {count_text(start.active_parameters)} active for a token"
    batch = f"{run.training.global_batch} x {run.training.sequence_length} tokens"
    sharers = start.ranks // (run.parallel.tensor * run.parallel.context * run.parallel.pipeline)  # data-parallel ranks
    if start.micro_batches > 1 or sharers > 1:
        batch += f" in {start.micro_batches} micro-batch{'es' if start.micro_batches > 1 else ''}"
    if sharers > 1:
        batch += f" on each of {sharers}"
    notes = {"sync-free": start.sync_free, "graphs": start.graphs}
    return {
        "model": f"{size} {DOT} {run.training.precision}",
        "batch": batch,
        "device": start.device_name if start.ranks == 1 else f"{start.ranks} x {start.device_name}",
        "kernels": start.kernels,
    } | {label: note for label, note in notes.items() if note}


def is_forced(start: RunStart) -> bool:
    """Whether the router's choice is ignored, so that figures are of benchmarks only."""
    moe = start.run.model.moe
    return moe is not None and moe.balance.force_load_balance


class RunConsole(Console):
    """Raises the error if the reader of the output is gone, so that the run saves; rich ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(EPIPE, os.strerror(EPIPE))


class LiveView(Observer):
    """Observer that draws a panel on a terminal and keeps it up to date."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._panel: RunPanel | None = None
        self._drawn_seconds = 0.0

    def started(self, start: RunStart) -> None:
        self._panel = RunPanel(start)
        self._live.start()
        self._draw()

    def stepped(self, report: StepReport) -> None:
        assert self._panel is not None, "a run starts before it steps"
        self._panel.add(report)
        for notice in report.notices:
            self.note(notice)
        is_due = time.monotonic() - self._drawn_seconds >= 1 / DRAWS_PER_SECOND  # drawing takes time from training
        if is_due or report.evaluation is not None or report.step == self._panel.steps:
            self._draw()

    def note(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def saved(self, step: int) -> None:
        assert self._panel is not None, "a run starts before it saves"
        self._panel.saved_step = step
        self._draw()

    def stopping(self) -> None:
        if self._panel is not None:
            self._panel.notice = STOPPING
            self._draw()

    def closed(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        if self._panel is not None:
            self._live.update(self._panel.render(self._live.console.width), refresh=True)
            self._drawn_seconds = time.monotonic()


class RunPanel:
    """The panel's content, drawn from reports alone, so that tests and pictures need no run."""

    def __init__(self, start: RunStart) -> None:
        self.steps = start.run.training.steps
        self.saved_step = start.steps_done or None  # of the newest checkpoint
        self.notice = ""  # message to the user
        self._start = start
        self._losses = Trail()
        self._held_out = Trail()
        self._last: StepReport | None = None
        self._evaluated: tuple[int, float] | None = None  # step, bits per byte

    def add(self, report: StepReport) -> None:
        self._last = report
        self._losses.add(report.loss)
        if report.evaluation is not None:
            self._evaluated = report.step, report.evaluation.bits_per_byte
            self._held_out.add(report.evaluation.bits_per_byte)

    def render(self, width: int) -> RenderableType:
        width = min(width, PANEL_WIDTH)
        forced = is_forced(self._start)
        parts: list[RenderableType] = [Text(FORCED_BALANCE, style="bold red")] if forced else []
        parts += [self._facts(width - FRAME_WIDTH), "", self._figures(width - FRAME_WIDTH)]
        parts += [Text(self.notice, style="bold yellow")] if self.notice else []
        return Panel(
            Group(*parts),
            title=Text.assemble(("penstock", "bold cyan"), f" {DOT} ", (self._start.run.name, "bold")),
            title_align="left",
            subtitle=Text(str(self._start.folder), style="dim"),
            subtitle_align="right",
            box=ROUNDED,
            width=width,
            padding=(0, 1),
            border_style="red" if forced else "cyan",
        )

    def _facts(self, width: int) -> Table:
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=LABEL_WIDTH, style="dim")
        grid.add_column(width=width - LABEL_WIDTH - GAP, overflow="fold")
        for label, text in facts_of(self._start).items():
            grid.add_row(label, text)
        return grid

    def _figures(self, width: int) -> Table:
        """Label, value and detail in a row each; on a narrow terminal the detail is below its value."""
        done = self._start.steps_done if self._last is None else self._last.step
        lines = [_Line("step", Text(f"{done:,} of {self.steps:,}", style="bold"), self._progress(done))]
        if self._last is not None:
            lines += [*self._training(self._last), *_experts(self._last)]
        if self.saved_step is not None:
            lines.append(_Line("saved", Text(f"step {self.saved_step:,}")))
        value_width = max(VALUE_WIDTH, *(len(line.value) for line in lines))
        beside = width - LABEL_WIDTH - value_width - 2 * GAP  # columns for details
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=LABEL_WIDTH, style="dim")
        if beside >= NARROWEST_DETAIL:
            grid.add_column(width=value_width)
            grid.add_column(width=beside, overflow="fold")
            for line in lines:
                grid.add_row(line.label, line.value, line.draw(beside))
            return grid
        below = width - LABEL_WIDTH - GAP
        grid.add_column(width=below, overflow="fold")
        for line in lines:
            grid.add_row(line.label, line.value)
            if line.detail:
                grid.add_row("", line.draw(below))
        return grid

    def _progress(self, done: int) -> "_Detail":
        share, time_left = f"{done / self.steps:4.0%}", ""
        if self._last is not None:
            seconds = self._last.elapsed_seconds  # of this process, which began after steps_done
            left = seconds / (done - self._start.steps_done) * (self.steps - done)
            time_left = f"{duration_text(left)} left" if done < self.steps else f"in {duration_text(seconds)}"

        def draw(width: int) -> RenderableType:
            # share, bar, time left; without room for a bar only the share and the time.
            bar_width = width - len(share) - len(time_left) - 2 * GAP
            if bar_width < len(share):
                return f"{share.strip()}  {time_left}"
            row = Table.grid(padding=(0, GAP, 0, 0))
            row.add_row(ProgressBar(total=self.steps, completed=done, width=bar_width), share, time_left)
            return row

        return draw

    def _training(self, last: StepReport) -> list["_Line"]:
        losses, held_out = self._losses.values, self._held_out.values
        loss = _figure(f"{last.loss:.4f}", "nats/token")
        lines = [_Line("loss", loss, lambda width: Text(spark_line(losses, width), style="green"))]
        if self._evaluated is not None:
            step, bits = self._evaluated
            when = f"after step {step:,}"

            def history(width: int) -> RenderableType:
                drawn = spark_line(held_out, max(width - len(when) - GAP, 0))
                return Text.assemble((drawn, "green"), "  " if drawn else "", when)

            lines.append(_Line("held out", _figure(f"{bits:.3f}", "bits/byte"), history))
        details = [f"{last.step_seconds:.3g} s a step"]
        if last.model_flops_utilization is not None:
            details.append(f"{last.model_flops_utilization:.1%} of peak FLOP/s")
        speed = _figure(f"{last.tokens_per_second_per_device:,.0f}", "tokens/s")
        lines.append(_Line("speed", speed, ", ".join(details)))
        norm = _figure(f"{last.gradient_norm:.3g}", "gradient norm")
        lines.append(_Line("update", norm, f"learning rate {last.learning_rate:.2e}"))
        lines.append(_Line("memory", _figure(bytes_text(last.peak_memory_bytes), "at most")))
        return lines


_Detail = str | Callable[[int], RenderableType]  # text, which is wrapped, or a drawing for a number of columns


@dataclass(frozen=True)
class _Line:
    label: str
    value: Text
    detail: _Detail = ""

    def draw(self, width: int) -> RenderableType:
        return self.detail if isinstance(self.detail, str) else self.detail(width)


def _experts(last: StepReport) -> list[_Line]:
    worst = last.worst_layer
    if worst is None:
        return []
    entropy = min(layer.entropy for layer in last.layers)  # of the least even layer
    dropped = sum(layer.dropped for layer in last.layers)
    facts = f"entropy {entropy:.3f}, {dropped:,} dropped"
    lines = [_Line("experts", _figure(f"{worst.max_over_mean:.2f}", "max/mean"), facts)]
    # The least even layers, in the order of the model.
    shown = sorted(last.layers, key=lambda layer: layer.max_over_mean, reverse=True)[:LAYERS_SHOWN]
    for layer in sorted(shown, key=lambda layer: layer.layer):
        lines.append(_Line(f"layer {layer.layer}", Text(f"{layer.max_over_mean:.2f}"), partial(_bars, layer)))
    return lines


def _bars(layer: LayerReport, width: int) -> Text:
    load = layer.max_over_mean
    style = "red" if load >= VERY_UNEVEN else "yellow" if load >= UNEVEN else "cyan"
    return Text(load_bars(layer.slots, width), style=style)


def _figure(number: str, unit: str) -> Text:
    return Text.assemble((number, "bold"), f" {unit}")


class PlainView(Observer):
    """Observer that prints aligned lines to any console."""

    def __init__(self, console: Console, machine: Mapping[str, str] | None = None) -> None:
        self._console = console
        self._machine = machine or {}  # facts of the process for a log, by label
        self._columns = dict(COLUMNS)
        self._start: RunStart | None = None
        self._next_seconds = 0.0

    def started(self, start: RunStart) -> None:
        self._start = start
        self._print(f"penstock: {start.run.name} in {start.folder}{self._mark}")
        for label, text in {**facts_of(start), **self._machine}.items():
            self._print(f"  {label:<7} {text}")
        steps = start.run.training.steps
        self._columns["step"] = max(COLUMNS["step"], len(f"  {steps} of {steps}"))
        self._print("".join(f"{name:>{width}}" for name, width in self._columns.items()))

    def stepped(self, report: StepReport) -> None:
        assert self._start is not None, "a run starts before it steps"
        for notice in report.notices:
            self.note(notice)
        is_last = report.step == self._start.run.training.steps
        if is_last or report.evaluation is not None or report.elapsed_seconds >= self._next_seconds:
            # Lines come at intervals of a twentieth of the time so far.
            pause = min(max(report.elapsed_seconds / 20, FIRST_LINE_SECONDS), SLOWEST_LINE_SECONDS)
            self._next_seconds = report.elapsed_seconds + pause
            cells = zip(_cells(report, self._start.run.training.steps), self._columns.values(), strict=True)
            self._print("".join(f"{cell:>{width}}" for cell, width in cells) + self._mark)

    def note(self, line: str) -> None:
        self._print(f"  {line}")

    def stopping(self) -> None:
        self._print(STOPPING)

    @property
    def _mark(self) -> str:
        return f"  {FORCED_BALANCE}" if self._start is not None and is_forced(self._start) else ""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


# Heads of the plain view's columns, and their widths. `load` is the largest max/mean of a layer's experts.
COLUMNS = {
    "step": 8, "loss": 9, "bits/byte": 11, "norm": 9, "rate": 10, "tokens/s": 11, "MFU": 8, "memory": 11, "load": 7,
}  # fmt: skip


def _cells(report: StepReport, steps: int) -> list[str]:
    """A step of so many as cells of the plain view; a dash stands for an unknown value."""
    worst, utilization = report.worst_layer, report.model_flops_utilization
    return [
        f"{report.step} of {steps}",
        f"{report.loss:.4f}",
        "-" if report.evaluation is None else f"{report.evaluation.bits_per_byte:.3f}",
        f"{report.gradient_norm:.3g}",
        f"{report.learning_rate:.2e}",
        f"{report.tokens_per_second_per_device:,.0f}",
        "-" if utilization is None else f"{utilization:.1%}",
        bytes_text(report.peak_memory_bytes),
        "-" if worst is None else f"{worst.max_over_mean:.2f}",
    ]


def spark_line(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` blocks, the lowest an eighth high, the highest full; neighbours averaged."""
    bins = min(len(values), width)  # of equally many neighbours, but for rounding
    edges = [round(index * len(values) / bins) for index in range(bins + 1)] if bins else []
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def load_bars(slots: Sequence[int], width: int) -> str:
    """Load of each expert as a bar: half high is the mean, full twice the mean; of many, the fullest neighbour."""
    mean = sum(slots) / len(slots) or 1.0
    group = -(-len(slots) // width)  # experts of one bar, rounded up
    fullest = [max(slots[start : start + group]) for start in range(0, len(slots), group)]
    cell = 3 if len(fullest) * 3 <= width else 1  # two blocks and a gap for each expert, if there is room
    half = len(BLOCKS) // 2  # blocks of a bar at the mean
    bars = (BLOCKS[min(max(round(load / mean * half), 1), len(BLOCKS)) - 1] for load in fullest)
    return "".join(bar if cell == 1 else bar * 2 + " " for bar in bars).rstrip()


class Trail:
    """A history in bounded memory: when `capacity` values are stored, neighbours are joined into their mean."""

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._stride = 1  # steps of one value
        self._pending: list[float] = []  # fewer than a stride
        self._means: list[float] = []  # oldest first

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append(sum(self._pending) / self._stride)
            self._pending = []
        if len(self._means) == self._capacity:  # from now on twice as many steps for each value
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stride *= 2

    @property
    def values(self) -> list[float]:
        """Stored values, oldest first."""
        return [*self._means, *([sum(self._pending) / len(self._pending)] if self._pending else [])]
