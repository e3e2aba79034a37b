"""docs/schedules.md shows what the clock says."""

from pathlib import Path

from penstock.layout.clock import even_costs, play
from penstock.layout.schedules import SCHEDULES
from tests.layout.schedule_sizes import even

PAGE = Path(__file__).resolve().parents[2] / "docs/schedules.md"

AT_MOST = {
    "gpipe": "m",
    "1f1b": "p",
    "interleaved": "((v - 1) g + 2 p - 1) / v",
    "zb-1f1b": "p",
    "zb-v": "p",
    "v-half": "p / 2 + 1",
    "v-min": "p / 3 + 4 / 3",
    "dualpipe-v": "p + 1 / 2",
}


def rows() -> list[str]:
    """The table of the page: 8 ranks, 32 micro-batches."""
    lines = [(name, SCHEDULES[name].fewest) for name in SCHEDULES]
    lines.insert(1 + lines.index(("interleaved", 2)), ("interleaved", 4))
    return [row(name, stages) for name, stages in lines]


def row(name: str, stages_per_rank: int) -> str:
    one = even(name, 8, 32, stages_per_rank)
    fast = play(one, even_costs(one.stages))
    slow = play(one, even_costs(one.stages, send=0.1 * stages_per_rank))
    bubbles = f"{100 * fast.bubble:.2f} % | {100 * slow.bubble:.2f} %"
    return f"| `{name}` | {stages_per_rank} | {bubbles} | {max(fast.peak_live):.4g} | {AT_MOST[name]} |"


def test_the_table_is_what_the_clock_says():
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith(" |") and " % |" in line]
    assert table == rows()
