"""The two views: what stands in them, and that they fit."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.view import (
    BLOCKS,
    COLUMNS,
    FORCED_BALANCE,
    PANEL_WIDTH,
    STOPPING,
    LiveView,
    PlainView,
    RunPanel,
    Trail,
    facts_of,
    load_bars,
    spark_line,
)
from penstock.config.model import Balance
from penstock.config.run import Run
from penstock.train.observer import LayerReport
from tests.train.tiny_run import HELD_OUT, run_start, step_report, tiny_model, tiny_run


def forced(folder: Path) -> Run:
    moe = tiny_model().moe
    assert moe is not None
    return tiny_run(folder, model=tiny_model(moe=moe.model_copy(update={"balance": Balance(force_load_balance=True)})))


def drawn(panel: RunPanel, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(panel.render(width))
    return file.getvalue().splitlines()


def plain(run: Run, width: int = 80) -> tuple[PlainView, io.StringIO]:
    """The plain view of a run that has started, and what it prints."""
    file = io.StringIO()
    view = PlainView(Console(file=file, width=width))
    view.started(run_start(run))
    return view, file


def live(run: Run) -> tuple[LiveView, io.StringIO]:
    """The live view of a run that has started, and what it draws."""
    file = io.StringIO()
    view = LiveView(Console(file=file, width=80, force_terminal=True, color_system=None))
    view.started(run_start(run))
    return view, file


def lines_of(run: Run, steps: int, *, seconds: float) -> list[str]:
    """Plain lines of a run whose steps take so many seconds each."""
    view, file = plain(run)
    for step in range(1, steps + 1):
        view.stepped(step_report(step, elapsed_seconds=step * seconds))
    view.closed()
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 56, 64, 80, 120, 200])
def test_the_panel_fits_and_holds_every_figure(width: int, tmp_path: Path) -> None:
    panel = RunPanel(run_start(tiny_run(tmp_path)))
    panel.add(step_report(1))
    panel.add(step_report(2, evaluation=HELD_OUT, model_flops_utilization=0.412))
    panel.saved_step = 2
    lines = drawn(panel, width)
    assert all(len(line) <= width for line in lines)
    assert len({len(line) for line in lines}) == 1  # a frame
    assert "\u2026" not in "".join(lines[1:-1]), "something was cut off"
    text = " ".join(" ".join(line.strip("\u2502") for line in lines).split())
    for figure in (
        "1.24 M parameters, 730.0 k active",
        "a laptop",
        "2 of 4",
        "50%",
        "left",
        "2.5000 nats/token",
        "2.885 bits/byte",
        "after step 2",
        "1,234 tokens/s",
        "41.2% of peak FLOP/s",
        "0.5 gradient norm",
        "learning rate 1.00e-03",
        "1.24 GB",
        "1.60 max/mean",
        "3 dropped",
        "layer 1",
        "layer 2",
        "saved",
    ):
        assert figure in text


def test_large_figures_are_whole_at_any_width(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    training = run.training.model_copy(update={"steps": 10_000_000})
    panel = RunPanel(run_start(run.model_copy(update={"training": training})))
    panel.add(step_report(1_234_567, tokens_per_second_per_device=23_456_789.0, evaluation=HELD_OUT))
    for width in range(40, 201, 4):
        lines = drawn(panel, width)
        assert {len(line) for line in lines} == {min(width, PANEL_WIDTH)}
        words = " ".join(" ".join(line.strip("\u2502") for line in lines).split())
        for figure in ("1,234,567 of 10,000,000", "12%", "23,456,789 tokens/s", "1.00e-03", "after step 1,234,567"):
            assert figure in words, f"{figure} at {width}"


def test_the_panel_can_be_drawn_before_the_first_step_and_of_a_dense_model(tmp_path: Path) -> None:
    text = "\n".join(drawn(RunPanel(run_start(tiny_run(tmp_path), steps_done=2)), 80))
    assert "2 of 4" in text and "left" not in text
    panel = RunPanel(run_start(tiny_run(tmp_path)))
    panel.add(step_report(1, layers=()))
    assert "experts" not in "\n".join(drawn(panel, 80))


def test_of_many_layers_the_least_even_are_shown_in_order(tmp_path: Path) -> None:
    panel = RunPanel(run_start(tiny_run(tmp_path)))
    layers = tuple(
        LayerReport(layer=layer, slots=(10 + layer % 7, 10, 10), dropped=0, auxiliary_loss=0.0) for layer in range(40)
    )
    panel.add(step_report(1, layers=layers))
    shown = [line.split()[2] for line in drawn(panel, 80) if " layer " in line]
    assert len(shown) == 6
    assert shown == sorted(shown, key=int)
    assert all(int(layer) % 7 >= 5 for layer in shown)  # these have 15 or 16 slots


def test_forced_balance_is_marked_everywhere(tmp_path: Path) -> None:
    run = forced(tmp_path)
    assert FORCED_BALANCE in "\n".join(drawn(RunPanel(run_start(run)), 80))
    header, *_, line = lines_of(run, 1, seconds=1.0)
    assert FORCED_BALANCE in header
    assert FORCED_BALANCE in line


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "text"),
    [
        (1, 1, "4 x 12 tokens"),
        (1, 2, "4 x 12 tokens in 2 micro-batches"),
        (2, 1, "4 x 12 tokens in 1 micro-batch on each of 2"),
    ],
)
def test_the_batch_is_that_of_all_ranks_and_its_parts(
    ranks: int, micro_batches: int, text: str, tmp_path: Path
) -> None:
    start = replace(run_start(tiny_run(tmp_path)), ranks=ranks, micro_batches=micro_batches)
    assert facts_of(start)["batch"] == text


def test_what_became_of_graphs_stands_in_the_head_if_anybody_asked(tmp_path: Path) -> None:
    start = run_start(tiny_run(tmp_path))
    assert "graphs" not in facts_of(start)
    assert facts_of(replace(start, graphs="none: device cpu has no graphs"))["graphs"].startswith("none: device cpu")


def test_a_notice_is_told_once_by_both_views(tmp_path: Path) -> None:
    notice = "graphs: one pass captured in 0.2 s; its pool keeps 5.05 GB"
    for view, file in (plain(tiny_run(tmp_path)), live(tiny_run(tmp_path))):
        view.stepped(step_report(1, notices=(notice,)))
        view.stepped(step_report(2))
        view.closed()
        assert file.getvalue().count(notice) == 1


def test_plain_lines_are_aligned(tmp_path: Path) -> None:
    *_, heads, first, _ = lines_of(tiny_run(tmp_path), 2, seconds=9.0)
    assert heads.split() == list(COLUMNS)
    assert len(heads) == len(first) == sum(COLUMNS.values())
    assert first.split()[:3] == ["1", "of", str(tiny_run(tmp_path).training.steps)]
    assert first.split()[3:] == ["5.0000", "-", "0.5", "1.00e-03", "1,234", "-", "1.24", "GB", "1.60"]


def test_a_long_run_does_not_print_thousands_of_lines(tmp_path: Path) -> None:
    day = lines_of(tiny_run(tmp_path), 86_400, seconds=1.0)
    assert 1000 < len(day) < 1600  # of 86,400 steps: at first every 2 s, then every 60 s
    assert len(lines_of(tiny_run(tmp_path), 1000, seconds=0.01)) < 15  # 10 s


def test_steps_that_evaluate_are_always_printed(tmp_path: Path) -> None:
    view, file = plain(tiny_run(tmp_path))
    for step in (1, 2, 3):
        view.stepped(step_report(step, elapsed_seconds=0.001, evaluation=HELD_OUT if step == 2 else None))
    assert [line.split()[0] for line in file.getvalue().splitlines()[-2:]] == ["1", "2"]


def test_plain_lines_are_not_wrapped_and_hold_no_colors(tmp_path: Path) -> None:
    view, file = plain(tiny_run(tmp_path), width=20)
    view.stepped(step_report(1))
    view.stopping()
    assert file.getvalue().splitlines()[-1] == STOPPING
    assert "\x1b" not in file.getvalue()


def test_the_live_view_draws_and_leaves_the_last_panel(tmp_path: Path) -> None:
    view, file = live(tiny_run(tmp_path))
    for step in range(1, 5):
        view.stepped(step_report(step))
        view.saved(step)
    view.stopping()
    view.closed()
    screen = file.getvalue()
    assert "0 of 4" in screen
    last = screen[screen.rindex("penstock") :]
    assert "4 of 4" in last
    assert STOPPING in last


def test_the_live_view_does_not_draw_at_every_step(tmp_path: Path) -> None:
    view, file = live(tiny_run(tmp_path))
    for step in range(1, 200):
        view.stepped(step_report(step + 4))  # none is the last step
    view.closed()
    assert file.getvalue().count("penstock") < 20  # titles of panels
    LiveView(Console(file=io.StringIO(), force_terminal=True)).closed()  # A view that never started can be closed.


def test_a_spark_line_goes_from_its_lowest_to_its_highest() -> None:
    assert spark_line([1, 2, 3], 10) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert spark_line([2, 2], 10) == BLOCKS[0] * 2
    assert spark_line([], 10) == ""
    for count in (1, 9, 10, 11, 25, 1000):
        line = spark_line([float(index) for index in range(count)], 10)
        assert len(line) == min(count, 10) and list(line) == sorted(line)


def test_a_bar_is_half_high_at_the_mean_and_full_at_twice_it() -> None:
    assert load_bars([2, 2, 2, 2], 4) == BLOCKS[3] * 4
    assert load_bars([4, 0, 2, 2], 4) == BLOCKS[7] + BLOCKS[0] + BLOCKS[3] * 2
    assert load_bars([80, 0, 0, 0], 4) == BLOCKS[7] + BLOCKS[0] * 3
    assert load_bars([0, 0], 2) == BLOCKS[0] * 2
    assert load_bars([1, 1], 6) == f"{BLOCKS[3] * 2} {BLOCKS[3] * 2}", "few experts get wide bars"


def test_many_experts_share_bars_and_the_fullest_is_seen() -> None:
    slots = [1] * 256
    slots[100] = 1000
    bars = load_bars(slots, 40)
    assert len(bars) <= 40
    assert bars.count(BLOCKS[7]) == 1  # the expert with 1000 slots


def test_a_trail_keeps_its_shape_in_bounded_memory() -> None:
    trail = Trail(capacity=8)
    for step in range(1000):
        trail.add(float(step))
    values = trail.values
    assert len(values) <= 9  # 8, and one that is pending
    assert values == sorted(values)
    assert values[0] < 200
    assert values[-1] > 900


def test_a_short_trail_is_exact() -> None:
    trail = Trail(capacity=8)
    for step in range(5):
        trail.add(float(step))
    assert trail.values == [0, 1, 2, 3, 4]
