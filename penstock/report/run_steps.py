"""Which recorded step is drawn, and on what clock: what the pictures of traces agree on.

The last step that all ranks have recorded is drawn: the first one of a recording is often slower. Each rank's times are
taken back to the common clock that ends of collectives tell (penstock/trace/clocks.py). Ranks that nothing joins with
the others begin where their own step does, and `Clock.words` says so; processes on the CPUs of one machine share a
clock, so theirs is left as it is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.report.run_evidence import RunEvidence
from penstock.trace.answer import RankAnswer


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The times of a drawn step.

    Attributes:
        windows_us: of each rank, start and end of the step on the device, by the clock of its file.
        zero_us: of each rank, where the axis begins, by the same clock.
        words: how the clocks were aligned.
    """

    windows_us: Mapping[int, tuple[float, float]]
    zero_us: Mapping[int, float]
    words: str


def last_step(ranks: Sequence[RankAnswer]) -> int | None:
    """The number of the last step in which all of these ranks did something, or None."""
    numbers = [{step.number for step in one.steps if step.timeline.events} for one in ranks]
    return max(set.intersection(*numbers), default=None) if numbers else None


def step_name(one: RankAnswer, number: int | None) -> str | None:
    """The name of the region of a step, or None without steps."""
    return next((step.name for step in one.steps if step.number == number), None)


def window_us(one: RankAnswer, number: int | None) -> tuple[float, float]:
    """Start and end of a step on the device; of all that was recorded without steps."""
    for step in one.steps:
        if step.number == number:
            return step.window_us
    gpu = one.trace.gpu
    return float(gpu.start_us[0]), float(gpu.end_us.max())


def clock_of(evidence: RunEvidence, ranks: Sequence[RankAnswer]) -> Clock:
    """The clock on which some ranks are drawn.

    Args:
        evidence: of the run.
        ranks: with a trace.
    """
    assert evidence.answer is not None, "ranks have traces"
    number = last_step(ranks)
    windows = {one.rank: window_us(one, number) for one in ranks}
    clocks, order = evidence.answer.collectives.meetings.clocks, evidence.answer.collectives.calls.ranks
    ahead = {rank: float(clocks.ahead_us[place]) for place, rank in enumerate(order)}
    island = {rank: 0 if evidence.is_host else int(clocks.island[place]) for place, rank in enumerate(order)}
    main = Counter(island[rank] for rank in windows).most_common(1)[0][0]
    together = [rank for rank in windows if island[rank] == main]
    begin = min(windows[rank][0] - ahead[rank] for rank in together)
    zero = {rank: begin + ahead[rank] if rank in together else windows[rank][0] for rank in windows}
    words = ""
    if len(windows) > 1 and evidence.is_host:
        words = "Times are those of the machine's own clock."
    elif len(together) > 1:
        moved = max(abs(ahead[rank]) for rank in together)
        words = "By the ends of collectives the clocks of all ranks agree."
        if moved >= 1:
            words = f"Clocks are aligned by the ends of collectives, the furthest by {moved:,.0f} \u00b5s."
    if len(together) < len(windows):
        words += f" Nothing joins the clocks of {len(windows) - len(together)} ranks: each begins at its own start."
    return Clock(windows_us=windows, zero_us=zero, words=words.strip())
