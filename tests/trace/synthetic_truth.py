"""The truth about a synthetic job, and its timeline counted moment by moment."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COMMUNICATION = ("nccl", "deep_ep", "push_rows", "take_rows", "return_rows", "sum_ranks", "wait_kernel")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A collective as it was.

    Attributes:
        group: its process group; empty if kernels did it without a library.
        seq: sequence number as written, or its place in the group.
        pure_us: time from the arrival of the last rank to the end.
        wait_us: what each rank waited for the last.
        sizes: bytes of the larger side on each rank.
    """

    group: str
    seq: int
    name: str
    pure_us: float
    wait_us: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def last(self) -> int | None:
        """The last rank; None if no rank waited."""
        return self.wait_us.index(0.0) if max(self.wait_us) else None


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The expected results.

    Attributes:
        timelines: for each rank what `timeline` returns.
        rows: [step][layer][rank], (token, expert) pairs at the experts of a rank.
        offsets_us: how far each rank's clock is ahead.
    """

    timelines: tuple[dict[str, float], ...]
    meetings: tuple[Meeting, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    offsets_us: tuple[float, ...]

    def times_last(self) -> dict[int, int]:
        """Number of collectives in which others waited for a rank."""
        lasts = [one.last for one in self.meetings if one.last is not None]
        return {rank: lasts.count(rank) for rank in sorted(set(lasts))}

    def caused_wait_us(self) -> dict[int, float]:
        """Waiting of all others together for each rank."""
        cost: dict[int, float] = {}
        for one in self.meetings:
            if one.last is not None:
                cost[one.last] = cost.get(one.last, 0.0) + sum(one.wait_us)
        return cost


def timeline(events: list[dict[str, Any]]) -> dict[str, float]:
    """Total, busy, compute, communication, exposed and idle time of a rank, in microseconds, moment by moment."""
    ends = []
    for event in events:
        kind = _kind(event)
        if kind is not None:
            ends += [(event["ts"], kind, 1), (event["ts"] + event["dur"], kind, -1)]
    names = ("busy", "compute", "communication", "exposed_communication", "memcpy", "exposed_memcpy", "idle")
    sums = dict.fromkeys(names, 0.0)
    running = {"compute": 0, "communication": 0, "memcpy": 0}
    ends.sort(key=lambda end: end[0])
    for (begin, kind, change), (end, _, _) in pairwise(ends):
        running[kind] += change
        for name in _true_now(running):
            sums[name] += end - begin
    return {"total": ends[-1][0] - ends[0][0]} | sums


def _true_now(running: dict[str, int]) -> list[str]:
    names = [name for name, number in running.items() if number]
    if not names:
        return ["idle"]
    if names == ["communication"] or names == ["communication", "memcpy"]:
        names = [*names, "exposed_communication"]
    if names == ["memcpy"]:
        names = [*names, "exposed_memcpy"]
    return [*names, "busy"]


def _kind(event: dict[str, Any]) -> str | None:
    """Which part of the timeline a device event belongs to."""
    if event["cat"] == "gpu_memcpy":
        return "memcpy"
    if event["cat"] == "gpu_memset":
        return "compute"
    if event["cat"] != "kernel":
        return None
    return "communication" if any(name in event["name"] for name in COMMUNICATION) else "compute"
