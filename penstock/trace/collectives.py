"""Duration of collectives across ranks, waiting inside them, and the ranks that caused it.

All ranks are inside until the last has come, so with starts on one clock

    pure     the shortest time that any rank spent in it
    waiting  of rank r: start of the last rank - its own start
    last     the rank that started last and so caused the waiting of the others

This also holds for an uneven all-to-all: the last arrival counts, not the largest message. Kernels that write into
other devices' memory have no common end; there, waiting is the lesser of this difference and the time beyond the
shortest. Ranks without a trace can have come even later, so with traces of some ranks, waiting is a lower bound and
`pure` an upper one. With a single rank, or in a broadcast, waiting is unknown: nan. Bytes are divided by pure time, so
a late rank does not make a link look slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.trace.calls import CollectiveCalls, SyncKind, calls_of
from penstock.trace.events import NONE, Floats, Integers, Trace
from penstock.trace.matching import MatchedCollectives, UnmatchedCollective, match_collectives

LAST_US = 1.0  # no rank is last if the longest wait is shorter than this, or than twice the uncertainty of the clocks


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that others waited for."""

    rank: int
    times_last: int  # number of collectives that it came to last
    caused_wait_us: float  # waiting of all other ranks together in these
    held_up_us: float  # waiting of the rank that waited longest in each of these
    waited_us: float  # its own waiting in all collectives


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Collectives of one name, number of ranks and size (to the next power of two)."""

    name: str
    ranks: int
    count: int
    message_bytes: float
    pure_us: float
    algorithm_gb_s: float  # message bytes over pure time, in 1e9 bytes per second
    bus_gb_s: float  # traffic of each rank's links, by the formula of nccl-tests


@dataclass(frozen=True, kw_only=True)
class ExchangeImbalance:
    """All-to-alls of one group: how unequal the ranks' parts are, as a mean over them."""

    group: str
    name: str
    count: int
    mean_bytes: float
    received_max_over_mean: float  # of bytes; 1 is even
    sent_max_over_mean: float
    fullest_rank: int | None  # the rank with the most traffic in most of them; None if all have the same


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveTimes:
    """Times of the matched collectives."""

    meetings: MatchedCollectives
    pure_us: Floats  # [collective]; nan if unknown
    wait_us: Floats  # [collective, rank]; nan if unknown, or if the rank took no part
    last: Integers  # [collective], index into the ranks, or NONE if no rank waited

    @property
    def calls(self) -> CollectiveCalls:
        return self.meetings.calls

    @property
    def unmatched(self) -> tuple[UnmatchedCollective, ...]:
        """Kernels of which only the duration is known."""
        return self.meetings.unmatched

    @property
    def cost_us(self) -> Floats:
        """Microseconds that each rank (row) waited for each other rank (column)."""
        ranks = len(self.calls.ranks)
        has_last = self.last != NONE
        cost_us = np.zeros((ranks, ranks))
        # Row `last` of the transpose: column `last` of the matrix.
        np.add.at(cost_us.T, self.last[has_last], np.nan_to_num(self.wait_us[has_last]))
        return cost_us

    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that were last at least once, the most expensive first."""
        cost_us, waited_us = self.cost_us, np.nansum(self.wait_us, axis=0)
        stragglers = []
        for number in np.unique(self.last[self.last != NONE]):
            late = self.last == number
            stragglers.append(
                Straggler(
                    rank=self.calls.ranks[number],
                    times_last=int(late.sum()),
                    caused_wait_us=float(cost_us[:, number].sum()),
                    held_up_us=float(np.nanmax(self.wait_us[late], axis=1).sum()),
                    waited_us=float(waited_us[number]),
                )
            )
        return tuple(sorted(stragglers, key=lambda straggler: straggler.caused_wait_us, reverse=True))

    def totals_us(self) -> dict[int, tuple[float, float]]:
        """Pure and waiting time of each rank, summed over all collectives whose waiting is known."""
        spent_us = np.where(np.isnan(self.wait_us), 0.0, self.pure_us[:, None])
        sums = zip(spent_us.sum(axis=0).tolist(), np.nansum(self.wait_us, axis=0).tolist(), strict=True)
        return dict(zip(self.calls.ranks, sums, strict=True))


def collectives_of(traces: Mapping[int, Trace]) -> CollectiveTimes:
    """Match and time the communication of some ranks."""
    return timed(match_collectives(calls_of(traces)))


def timed(meetings: MatchedCollectives) -> CollectiveTimes:
    """Split the time of every matched collective into pure and waiting."""
    calls, met, clocks = meetings.calls, meetings.met, meetings.clocks
    present = met != NONE
    sync = np.where(present, calls.sync[met], NONE).max(axis=1, initial=NONE)
    # [collective, rank]; the -inf starts and inf durations of absent ranks drop out of max and min.
    start_us = np.where(present, clocks.start_us(calls)[met], -np.inf)  # on the common clock
    spent_us = np.where(present, calls.duration_us[met], np.inf)
    pure_us = spent_us.min(axis=1, initial=np.inf)
    behind_us = start_us.max(axis=1, initial=-np.inf)[:, None] - start_us  # start of the last rank - own start
    most_us = np.where((sync == SyncKind.DEVICE)[:, None], spent_us - pure_us[:, None], spent_us)
    wait_us = np.where(present, np.clip(np.minimum(behind_us, most_us), 0.0, None), np.nan)
    wait_us[sync == SyncKind.ALONE] *= 0.0  # keeps the nan of absent ranks
    # Waiting is known where all ranks wait, and more than one has a trace or none is missing.
    known = (present.sum(axis=1) > 1) | (group_sizes(calls, met) == 1) | (sync == SyncKind.ALONE)
    known &= sync != SyncKind.ROOTED
    wait_us[~(known & clocks.is_joined(present))] = np.nan
    longest_us = np.nan_to_num(wait_us).max(axis=1, initial=0.0)
    doubt_us = 2 * np.where(present, clocks.spread_us, 0.0).max(axis=1, initial=0.0)  # starts compare two clocks
    last = np.where(longest_us > np.maximum(LAST_US, doubt_us), start_us.argmax(axis=1), NONE)
    return CollectiveTimes(meetings=meetings, pure_us=np.where(known, pure_us, np.nan), wait_us=wait_us, last=last)


def group_sizes(calls: CollectiveCalls, met: Integers) -> Integers:
    """Number of ranks in the group of each collective, including ranks without a trace; 0 if unknown."""
    sizes = np.array([group.size for group in calls.groups] + [0])
    return sizes[calls.group[any_row(met)]]


def any_row(met: Integers) -> Integers:
    """A row of `CollectiveCalls` for each collective."""
    return met.max(axis=1, initial=NONE)


# ------------------------------------------------------------------------------------------------------------- bytes


def message_bytes(collectives: CollectiveTimes) -> Floats:
    """Bytes of each collective: the gathered or scattered total, else the largest of what a rank sends or receives."""
    calls, met = collectives.calls, collectives.meetings.met
    larger = np.fmax(calls.sent_bytes, calls.received_bytes)[met]
    return np.where(met != NONE, larger, -np.inf).max(axis=1, initial=-np.inf)


def bandwidths(collectives: CollectiveTimes) -> tuple[Bandwidth, ...]:
    """By name, ranks and size, where pure time and bytes are known."""
    calls, met = collectives.calls, collectives.meetings.met
    sizes, pure_us, row = message_bytes(collectives), collectives.pure_us, any_row(met)
    is_known = (
        np.isfinite(sizes) & (sizes > 0) & np.isfinite(pure_us) & (pure_us > 0) & (calls.sync[row] <= SyncKind.UNEVEN)
    )
    powers = np.ceil(np.log2(np.where(is_known, sizes, 1.0))).astype(np.int64)
    keys = np.stack([calls.name_id[row], group_sizes(calls, met), powers])  # [3, collective]
    figures = []
    for name, ranks, power in np.unique(keys[:, is_known], axis=1).T.tolist():
        chosen = is_known & np.all([name, ranks, power] == keys.T, axis=1)
        rate = float(np.median(sizes[chosen] / pure_us[chosen])) / 1e3  # bytes per us -> 1e9 bytes per s
        text, others = calls.names[name], 1 - 1 / max(1, ranks)
        is_shared = any(part in text for part in ("gather", "scatter", "all_to_all", "alltoall"))
        # Factors of nccl-tests. An all-reduce sends everything twice: reduce-scatter, then all-gather.
        bus = 2 * others if "reduce" in text and "all" in text else others if is_shared else 1.0
        figures.append(
            Bandwidth(
                name=text,
                ranks=ranks,
                count=int(chosen.sum()),
                message_bytes=float(np.median(sizes[chosen])),
                pure_us=float(np.median(pure_us[chosen])),
                algorithm_gb_s=rate,
                bus_gb_s=rate * bus,
            )
        )
    return tuple(figures)


def exchange_imbalances(collectives: CollectiveTimes) -> tuple[ExchangeImbalance, ...]:
    """All-to-alls whose bytes are known on all ranks, by group and name."""
    calls, met = collectives.calls, collectives.meetings.met
    row = any_row(met)
    least = np.where(met != NONE, (calls.sent_bytes + calls.received_bytes)[met], np.inf).min(axis=1, initial=np.inf)
    is_known = calls.is_exchange[row] & ((met != NONE).sum(axis=1) > 1) & (least > 0)  # False for nan
    keys = np.stack([calls.group[row], calls.name_id[row]])
    imbalances = []
    for group, name in np.unique(keys[:, is_known], axis=1).T.tolist():
        rows = met[is_known & np.all([group, name] == keys.T, axis=1)]
        members = np.flatnonzero(rows[0] != NONE)
        received, sent = calls.received_bytes[rows[:, members]], calls.sent_bytes[rows[:, members]]
        # Of each all-to-all the less even side: experts receive unevenly forward and send unevenly backward.
        busier = np.where((received.max(axis=1) > sent.max(axis=1))[:, None], received, sent)
        fullest = int(np.bincount(members[busier.argmax(axis=1)]).argmax())
        imbalances.append(
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
    return tuple(imbalances)
