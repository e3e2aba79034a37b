"""Communication across ranks: how long a collective takes, how long ranks wait in it, and for whom.

All ranks are inside until the last has come, so with starts on one clock

    pure     the shortest time that any rank spent in it
    waiting  of rank r: the start of the last rank - its own start
    last     who started last: the others' waiting is its doing, whatever made it late

That holds for an uneven all-to-all as well: the last to arrive counts, not the one with most to send. Kernels that
write into other devices' memory have no common end; there, waiting is the lesser of that and what their time exceeds
the shortest by. Ranks that are not there may have come later still, so with traces of some ranks only, waiting is a
lower bound and `pure` an upper one. One rank alone cannot tell them apart, and a broadcast's ranks do not all wait:
nan. What was not matched (`matching.UnmatchedCollective`) has neither number.

Bytes are divided by pure time, so a late rank does not make a link look slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.trace.calls import CollectiveCalls, SyncKind, calls_of
from penstock.trace.events import NONE, Flags, Floats, Integers, Trace
from penstock.trace.matching import MatchedCollectives, UnmatchedCollective, match_collectives

LAST_US = 1.0
"""Nobody is last if nobody waits longer than this, or than twice what the clocks are known to: it may be chance."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that others waited for.

    Attributes:
        times_last: collectives that it came to last.
        caused_wait_us: what all others together waited in these.
        held_up_us: the same of the one that waited longest in each.
        waited_us: what it waited for others in all collectives.
    """

    rank: int
    times_last: int
    caused_wait_us: float
    held_up_us: float
    waited_us: float


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Collectives of one name, number of ranks and size (to the next power of two).

    Attributes:
        ranks: of the group.
        count: collectives.
        message_bytes: median; what `algorithm_gb_s` divides.
        pure_us: median.
        algorithm_gb_s: bytes of the message over pure time, 1e9 bytes a second.
        bus_gb_s: the same by what each rank's links carry, as nccl-tests reckons.
    """

    name: str
    ranks: int
    count: int
    message_bytes: float
    pure_us: float
    algorithm_gb_s: float
    bus_gb_s: float


@dataclass(frozen=True, kw_only=True)
class ExchangeImbalance:
    """All-to-alls of one group: how unequal ranks' parts are, as a mean over them.

    Attributes:
        count: all-to-alls.
        mean_bytes: received by a rank.
        received_max_over_mean: of bytes; 1 is even.
        sent_max_over_mean: of bytes; 1 is even.
        fullest_rank: who sent or received most in most of them; None if all have the same.
    """

    group: str
    name: str
    count: int
    mean_bytes: float
    received_max_over_mean: float
    sent_max_over_mean: float
    fullest_rank: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveTimes:
    """What was matched, timed.

    Attributes:
        meetings: who met whom.
        pure_us: [meeting]; nan where it cannot be told.
        wait_us: [meeting, rank]; nan where it cannot be told, or the rank took no part.
        last: [meeting], index into the ranks, or NONE if nobody waited.
    """

    meetings: MatchedCollectives
    pure_us: Floats
    wait_us: Floats
    last: Integers

    @property
    def calls(self) -> CollectiveCalls:
        """The kernels of all ranks."""
        return self.meetings.calls

    @property
    def unmatched(self) -> tuple[UnmatchedCollective, ...]:
        """Kernels of which no time but their own is known."""
        return self.meetings.unmatched

    @property
    def cost_us(self) -> Floats:
        """Microseconds that each rank (row) waited for each other (column)."""
        ranks = len(self.calls.ranks)
        blamed = self.last != NONE
        cost_us = np.zeros((ranks, ranks))
        np.add.at(cost_us.T, self.last[blamed], np.nan_to_num(self.wait_us[blamed]))
        return cost_us

    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that were last at least once, the most expensive first."""
        cost_us, waited_us = self.cost_us, np.nansum(self.wait_us, axis=0)
        found = []
        for number in np.unique(self.last[self.last != NONE]):
            late = self.last == number
            found.append(
                Straggler(
                    rank=self.calls.ranks[number],
                    times_last=int(late.sum()),
                    caused_wait_us=float(cost_us[:, number].sum()),
                    held_up_us=float(np.nanmax(self.wait_us[late], axis=1).sum()),
                    waited_us=float(waited_us[number]),
                )
            )
        return tuple(sorted(found, key=lambda one: one.caused_wait_us, reverse=True))

    def totals_us(self) -> dict[int, tuple[float, float]]:
        """Pure and waiting time of each rank, summed over all collectives whose waiting is known."""
        spent_us = np.where(np.isnan(self.wait_us), 0.0, self.pure_us[:, None])
        sums = zip(spent_us.sum(axis=0).tolist(), np.nansum(self.wait_us, axis=0).tolist(), strict=True)
        return dict(zip(self.calls.ranks, sums, strict=True))


def collectives_of(traces: Mapping[int, Trace]) -> CollectiveTimes:
    """Match and time the communication of some ranks.

    Args:
        traces: by rank.
    """
    return timed(match_collectives(calls_of(traces)))


def timed(meetings: MatchedCollectives) -> CollectiveTimes:
    """Split the time of every meeting into pure and waiting."""
    calls, met, clocks = meetings.calls, meetings.met, meetings.clocks
    present = met != NONE
    way = np.where(present, calls.way[met], NONE).max(axis=1, initial=NONE)
    start_us = np.where(present, clocks.start_us(calls)[met], -np.inf)
    spent_us = np.where(present, calls.duration_us[met], np.inf)
    pure_us = spent_us.min(axis=1, initial=np.inf)
    behind_us = start_us.max(axis=1, initial=-np.inf)[:, None] - start_us
    most_us = np.where((way == SyncKind.DEVICE)[:, None], spent_us - pure_us[:, None], spent_us)
    wait_us = np.where(present, np.clip(np.minimum(behind_us, most_us), 0.0, None), np.nan)
    wait_us[way == SyncKind.ALONE] *= 0.0
    known = _known(calls, met, way)
    wait_us[~(known & clocks.is_joined(present))] = np.nan
    longest_us = np.nan_to_num(wait_us).max(axis=1, initial=0.0)
    doubt_us = 2 * np.where(present, clocks.spread_us, 0.0).max(axis=1, initial=0.0)
    last = np.where(longest_us > np.maximum(LAST_US, doubt_us), start_us.argmax(axis=1), NONE)
    return CollectiveTimes(meetings=meetings, pure_us=np.where(known, pure_us, np.nan), wait_us=wait_us, last=last)


def _known(calls: CollectiveCalls, met: Integers, way: Integers) -> Flags:
    """Of which meetings the time can be told apart: all ranks wait in it, and more than one is there or none lacks."""
    present = (met != NONE).sum(axis=1)
    enough: Flags = (present > 1) | (group_sizes(calls, met) == 1) | (way == SyncKind.ALONE)
    return enough & (way != SyncKind.ROOTED)


def group_sizes(calls: CollectiveCalls, met: Integers) -> Integers:
    """Ranks of the group of each meeting, those without a trace too; 0 if unknown."""
    sizes = np.array([group.size for group in calls.groups] + [0])
    return sizes[calls.group[any_row(met)]]


def any_row(met: Integers) -> Integers:
    """A row of `CollectiveCalls` for each meeting."""
    return met.max(axis=1, initial=NONE)


# ------------------------------------------------------------------------------------------------------------- bytes


def message_bytes(collectives: CollectiveTimes) -> Floats:
    """Bytes of each meeting: what is gathered or scattered in all, else what the busiest rank sends or gets."""
    calls, met = collectives.calls, collectives.meetings.met
    larger = np.fmax(calls.sent_bytes, calls.received_bytes)[met]
    return np.where(met != NONE, larger, -np.inf).max(axis=1, initial=-np.inf)


def _bus_factor(name: str, ranks: int) -> float:
    if "reduce" in name and "all" in name:
        return 2 * (ranks - 1) / ranks
    is_shared = any(part in name for part in ("gather", "scatter", "all_to_all", "alltoall"))
    return (ranks - 1) / ranks if is_shared else 1.0


def bandwidths(collectives: CollectiveTimes) -> tuple[Bandwidth, ...]:
    """By name, ranks and size, where pure time and bytes are known."""
    calls, met = collectives.calls, collectives.meetings.met
    sizes, pure_us, row = message_bytes(collectives), collectives.pure_us, any_row(met)
    told = np.isfinite(sizes) & (sizes > 0) & np.isfinite(pure_us) & (pure_us > 0) & (calls.way[row] <= SyncKind.UNEVEN)
    powers = np.ceil(np.log2(np.where(told, sizes, 1.0))).astype(np.int64)
    keys = np.stack([calls.name_id[row], group_sizes(calls, met), powers])
    found = []
    for name, ranks, power in np.unique(keys[:, told], axis=1).T.tolist():
        chosen = told & np.all([name, ranks, power] == keys.T, axis=1)
        rate = float(np.median(sizes[chosen] / pure_us[chosen])) / 1e3
        found.append(
            Bandwidth(
                name=calls.names[name],
                ranks=ranks,
                count=int(chosen.sum()),
                message_bytes=float(np.median(sizes[chosen])),
                pure_us=float(np.median(pure_us[chosen])),
                algorithm_gb_s=rate,
                bus_gb_s=rate * _bus_factor(calls.names[name], max(1, ranks)),
            )
        )
    return tuple(found)


def exchange_imbalances(collectives: CollectiveTimes) -> tuple[ExchangeImbalance, ...]:
    """All-to-alls whose bytes are known on all ranks, by group and name."""
    calls, met = collectives.calls, collectives.meetings.met
    row = any_row(met)
    is_exchange = np.array(["all_to_all" in name or "alltoall" in name for name in calls.names], dtype=bool)
    least = np.where(met != NONE, (calls.sent_bytes + calls.received_bytes)[met], np.inf).min(axis=1, initial=np.inf)
    told = is_exchange[calls.name_id[row]] & ((met != NONE).sum(axis=1) > 1) & (least > 0)
    keys = np.stack([calls.group[row], calls.name_id[row]])
    found = []
    for group, name in np.unique(keys[:, told], axis=1).T.tolist():
        rows = met[told & np.all([group, name] == keys.T, axis=1)]
        members = np.flatnonzero(rows[0] != NONE)
        received, sent = calls.received_bytes[rows[:, members]], calls.sent_bytes[rows[:, members]]
        busier = np.where((received.max(axis=1) > sent.max(axis=1))[:, None], received, sent)
        fullest = int(np.bincount(members[busier.argmax(axis=1)]).argmax())
        found.append(
            ExchangeImbalance(
                group=calls.groups[group].name if group != NONE else "",
                name=calls.names[name],
                count=len(rows),
                mean_bytes=float(received.mean()),
                received_max_over_mean=float((received.max(axis=1) / received.mean(axis=1)).mean()),
                sent_max_over_mean=float((sent.max(axis=1) / sent.mean(axis=1)).mean()),
                fullest_rank=None if bool((busier == busier[:, :1]).all()) else calls.ranks[fullest],
            )
        )
    return tuple(found)
