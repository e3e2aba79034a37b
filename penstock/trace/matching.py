"""Matches the kernels of different ranks that were one collective, and aligns the clocks of the ranks.

1. By number: PyTorch counts the collectives of a process group, and the count is in the trace. Equal group, number and
   name is the same collective.
2. Clocks are aligned by those. Ranks leave a symmetric collective together, so its end is one moment on all clocks:

       ahead of rank r = median over collectives of (its end - the median end of all ranks)

   The median tolerates a few uneven ends, and an offset within its own error counts as 0. Process groups are joined at
   the ranks that they share, and processes of a CPU at the machine, whose clock they share. Ranks that nothing joins
   are on separate islands, whose times are not compared. Drift is ignored: within a trace it is smaller than the launch
   of a kernel.
3. By order and time, if there is no number. A group runs its collectives one after the other. Two ranks that have the
   same names in the same order, and that were inside nearly every one of them at one moment, are in step. Otherwise the
   k-th kernel of one rank matches the k-th of another if they end together. If an event is missing, later ones are
   shifted against each other; a shift is accepted from `RUN` neighbours on, because a single pair can end together by
   chance. Long series come first, because they align more clocks. Kernels that write into other devices' memory need
   not end together: they match by the nearest time.
4. A collective that lacks a rank, or whose ranks were not inside it at one moment, is listed as unmatched with the
   reason, and no waiting time is computed from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.trace.calls import CollectiveCalls, SyncKind
from penstock.trace.events import NONE, Flags, Floats, Integers


@dataclass(frozen=True, kw_only=True, eq=False)
class ClockOffsets:
    """Offsets of the ranks' clocks."""

    ahead_us: Floats  # of each rank, relative to the median clock of its island
    island: Integers  # of each rank; only ranks of one island can be compared
    shared: Integers  # number of moments that determine each rank's offset
    spread_us: Floats  # median distance of these moments from `ahead_us`; 0 if there are none

    def start_us(self, calls: CollectiveCalls) -> Floats:
        """Starts on the common clock."""
        return calls.start_us - self.ahead_us[calls.rank]

    def end_us(self, calls: CollectiveCalls) -> Floats:
        """Ends on the common clock."""
        return calls.end_us - self.ahead_us[calls.rank]

    def is_joined(self, present: Flags) -> Flags:
        """All present ranks of each row are on one island."""
        highest = np.where(present, self.island, NONE).max(axis=1, initial=NONE)
        lowest = np.where(present, self.island, len(self.island)).min(axis=1, initial=len(self.island))
        joined: Flags = highest == lowest
        return joined


@dataclass(frozen=True, kw_only=True, eq=False)
class _RankSet:
    members: Integers  # indices of the ranks
    ahead_us: Floats  # of each member
    moments: int  # collectives that determine them
    is_strict: bool  # all ranks leave these together


def align_clocks(calls: CollectiveCalls, met: Integers) -> ClockOffsets:
    """Offsets of all ranks' clocks, by collectives `met` as in `MatchedCollectives`."""
    ahead_us, island = np.zeros(len(calls.ranks)), np.array(calls.clock)  # islands of one clock, most of one rank
    # Collectives of at least two ranks whose ends are one moment.
    present = met != NONE
    sync = np.where(present, calls.sync[met], SyncKind.TOGETHER).max(axis=1, initial=SyncKind.TOGETHER)
    met = met[(present.sum(axis=1) > 1) & (sync <= SyncKind.UNEVEN)]
    # Sets with strict collectives first: later sets move no rank whose island is joined already.
    for rank_set in sorted(
        _rank_sets(calls, met), key=lambda rank_set: (rank_set.is_strict, rank_set.moments), reverse=True
    ):
        first, *others = rank_set.members
        # Move the whole island of the other rank, so that known differences stay.
        for other, apart in zip(others, rank_set.ahead_us[1:] - rank_set.ahead_us[0], strict=True):
            if island[other] != island[first]:
                moved = island == island[other]
                ahead_us[moved] += ahead_us[first] + apart - ahead_us[other]
                island[moved] = island[first]
    for number in np.unique(island):
        ahead_us[island == number] -= np.median(ahead_us[island == number])
    shared, spread_us = _spread(calls, met, ahead_us)
    if len(set(calls.clock)) == 1:  # ends of one machine differ by scheduling, not by clocks
        spread_us[:] = 0.0
    # Offsets below their standard error are noise: the clocks of one host are equal.
    ahead_us[np.abs(ahead_us) <= spread_us / np.sqrt(np.maximum(shared, 1))] = 0.0
    return ClockOffsets(ahead_us=ahead_us, island=island, shared=shared, spread_us=spread_us)


def _rank_sets(calls: CollectiveCalls, met: Integers) -> list[_RankSet]:
    """One for each set of ranks that met, from its strict collectives if it has any."""
    present = met != NONE
    rank_sets = []
    packed: NDArray[np.uint8] = np.packbits(present, axis=1)  # a set of ranks as bits: quicker to sort
    _, first, kinds = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    for kind, example in enumerate(first):
        members = np.flatnonzero(present[example])
        rows = met[kinds.reshape(-1) == kind][:, members]
        is_strict = calls.sync[rows[:, 0]] == SyncKind.TOGETHER
        if is_strict.any():
            rows = rows[is_strict]
        ends = calls.end_us[rows]  # [collective, member]
        ahead = np.median(ends - np.median(ends, axis=1, keepdims=True), axis=0)
        rank_sets.append(_RankSet(members=members, ahead_us=ahead, moments=len(rows), is_strict=bool(is_strict.any())))
    return rank_sets


def _spread(calls: CollectiveCalls, met: Integers, ahead_us: Floats) -> tuple[Integers, Floats]:
    """Number of moments that each rank shared, and the median distance of its ends from the common ones."""
    present = met != NONE
    shared, spread = present.sum(axis=0), np.zeros(len(ahead_us))
    if not len(met):
        return shared, spread
    ends = np.where(present, calls.end_us[met] - ahead_us, np.nan)  # [collective, rank], on the common clock
    away = np.abs(ends - np.nanmedian(ends, axis=1, keepdims=True))
    is_strict = np.where(present, calls.sync[met], SyncKind.TOGETHER).max(axis=1) == SyncKind.TOGETHER
    for rank in np.flatnonzero(shared):
        strict = is_strict & present[:, rank]
        spread[rank] = np.median(away[strict if strict.any() else present[:, rank], rank])
    return shared, spread


# ------------------------------------------------------------------------------------------------------------- matching

RUN = 3  # consecutive pairs that must end together before a shift of the order is accepted
TOLERANCE_US = 50.0  # ends of one collective can differ by this on aligned clocks

TOLERANCE_SHARE = 0.03
"""They can also differ by this share of the shorter duration: the last parts of a long transfer arrive at different
times."""

IN_STEP = 0.9
"""Share of a group's collectives that two ranks must be inside at one moment. Not all: in an all-to-all, a rank that
sends another rank nothing does not wait for it."""

_SHIFTS = 8  # largest shift of the order between two ranks that is tried


@dataclass(frozen=True, kw_only=True)
class UnmatchedCollective:
    """Kernels that should be one collective but could not be matched."""

    group: str  # of the collective; "" if unknown
    seq: int  # its number in the group, or its place among the rank's kernels without number
    name: str
    why: str
    rows: tuple[int, ...]
    missing: tuple[int, ...]  # ranks that lack it


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedCollectives:
    """Collectives that were found on all ranks of their group; kernels of `SyncKind.PAIR` are in none."""

    calls: CollectiveCalls
    met: Integers  # [collective, rank], row of `calls`; NONE if the rank is not in the group
    seq: Integers  # [collective], number in the group, or place
    clocks: ClockOffsets
    unmatched: tuple[UnmatchedCollective, ...]  # kernels that were not found on all ranks

    def __len__(self) -> int:
        return len(self.met)

    def only(self, is_kept: Mapping[int, Flags]) -> "MatchedCollectives":
        """Those whose kernels are all kept, by rank and row of its `Trace.gpu`; `gpu_row` then counts kept rows."""
        calls = self.calls
        masks = [is_kept[rank] for rank in calls.ranks]
        kept = np.array(
            [masks[rank][row] for rank, row in zip(calls.rank.tolist(), calls.gpu_row.tolist(), strict=True)],
            dtype=bool,
        )
        places = [np.cumsum(mask) - 1 for mask in masks]
        chosen = calls.take(kept)
        new_rows = [places[rank][row] for rank, row in zip(chosen.rank.tolist(), chosen.gpu_row.tolist(), strict=True)]
        new = np.append(np.where(kept, np.cumsum(kept) - 1, NONE), NONE)  # of each call; NONE reads the appended NONE
        whole = np.append(kept, True)[self.met].all(axis=1)
        return replace(
            self,
            calls=replace(chosen, gpu_row=np.array(new_rows, dtype=np.int64)),
            met=new[self.met[whole]],
            seq=self.seq[whole],
            unmatched=tuple(
                replace(collective, rows=tuple(int(new[row]) for row in collective.rows))
                for collective in self.unmatched
                if kept[list(collective.rows)].all()
            ),
        )


@dataclass
class _Matches:
    """Accumulates matched and unmatched collectives; fields as in `MatchedCollectives`."""

    met: Integers
    seq: Integers
    unmatched: list[UnmatchedCollective] = field(default_factory=list)

    def add(self, met: Integers, seq: Integers) -> None:
        self.met, self.seq = np.concatenate([self.met, met]), np.concatenate([self.seq, seq])


def match_collectives(calls: CollectiveCalls) -> MatchedCollectives:
    matches = _Matches(met=np.empty((0, len(calls.ranks)), dtype=np.int64), seq=np.empty(0, dtype=np.int64))
    open_to_all = calls.sync != SyncKind.PAIR
    is_numbered = open_to_all & (calls.group != NONE) & (calls.seq != NONE)
    _by_number(calls, np.flatnonzero(is_numbered), matches)
    clocks = align_clocks(calls, matches.met)
    for rows in sorted(_series(calls, np.flatnonzero(open_to_all & ~is_numbered)), key=len, reverse=True):
        _by_order(calls, rows, clocks, matches)
        if len(np.unique(clocks.island)) > 1:  # new matches can join islands
            clocks = align_clocks(calls, matches.met)
    clocks = align_clocks(calls, matches.met)
    together = _met_at_once(calls, matches.met, clocks)
    for rows, seq in zip(matches.met[~together], matches.seq[~together].tolist(), strict=True):
        present = tuple(rows[rows != NONE].tolist())
        matches.unmatched.append(_unmatched(calls, seq, present, (), "its ranks were not inside at one moment"))
    met, seq = matches.met[together], matches.seq[together]
    order = np.argsort(calls.start_us[met.max(axis=1, initial=0)], kind="stable")  # by start on some rank's clock
    matches.unmatched.sort(key=lambda collective: float(calls.start_us[collective.rows[0]]))
    return MatchedCollectives(
        calls=calls, met=met[order], seq=seq[order], clocks=clocks, unmatched=tuple(matches.unmatched)
    )


def _unmatched(
    calls: CollectiveCalls, seq: int, rows: tuple[int, ...], missing: tuple[int, ...], why: str
) -> UnmatchedCollective:
    group = calls.group[rows[0]]
    return UnmatchedCollective(
        group="" if group == NONE else calls.groups[group].name,
        seq=seq,
        name=calls.name(rows[0]),
        why=why,
        rows=rows,
        missing=missing,
    )


def _by_number(calls: CollectiveCalls, rows: Integers, matches: _Matches) -> None:
    """Matches kernels by sequence number. Repeated numbers of one rank match in order."""
    if not len(rows):
        return
    rows = rows[np.lexsort((calls.start_us[rows], calls.rank[rows], calls.seq[rows], calls.group[rows]))]
    # Number of equal rows directly before each: a rank can repeat a number.
    position = np.arange(len(rows))
    begins = np.where(_changes(calls.group[rows], calls.seq[rows], calls.rank[rows]), position, 0)
    occurrence = position - np.maximum.accumulate(begins)
    by_meeting = np.lexsort((calls.rank[rows], occurrence, calls.seq[rows], calls.group[rows]))
    rows, occurrence = rows[by_meeting], occurrence[by_meeting]
    # Rows of one collective are contiguous now, one for each rank.
    is_new = _changes(calls.group[rows], calls.seq[rows], occurrence)
    firsts, meeting = (
        np.flatnonzero(is_new),
        np.cumsum(is_new) - 1,
    )  # first row of each collective; collective of each row
    met = np.full((len(firsts), len(calls.ranks)), NONE)
    met[meeting, calls.rank[rows]] = rows
    groups, seqs = calls.group[rows[firsts]], calls.seq[rows[firsts]]
    names = calls.name_id[rows]
    of_one_name = np.minimum.reduceat(names, firsts) == np.maximum.reduceat(names, firsts)
    # [group, rank]: least and greatest number, and whether the rank should take part.
    sizes = (len(calls.groups), len(calls.ranks))
    first_seq, last_seq = np.full(sizes, np.iinfo(np.int64).max), np.full(sizes, NONE)
    np.minimum.at(first_seq, (calls.group[rows], calls.rank[rows]), calls.seq[rows])
    np.maximum.at(last_seq, (calls.group[rows], calls.rank[rows]), calls.seq[rows])
    takes_part = last_seq != NONE
    for number, group in enumerate(calls.groups):
        if group.members:
            takes_part[number] |= np.isin(calls.ranks, group.members)
    lacking = takes_part[groups] & (met == NONE)
    whole = of_one_name & ~lacking.any(axis=1)
    matches.add(met[whole], seqs[whole])
    for index in np.flatnonzero(~whole):
        group, seq, absent = groups[index], int(seqs[index]), np.flatnonzero(lacking[index])
        missing = tuple(calls.ranks[rank] for rank in absent)
        why = "its ranks call it by different names"
        if of_one_name[index]:
            bounds = zip(missing, first_seq[group, absent].tolist(), last_seq[group, absent].tolist(), strict=True)
            why = "; ".join(_reason_missing(f"rank {rank}", seq, first, last) for rank, first, last in bounds)
        matches.unmatched.append(_unmatched(calls, seq, tuple(met[index][met[index] != NONE].tolist()), missing, why))


def _reason_missing(rank: str, seq: int, first: int, last: int) -> str:
    """The reason why a rank lacks a collective, by its first and last number in the group (`last` NONE: no number)."""
    if last == NONE:
        return f"{rank} has none of this group"
    if seq < first:
        return f"the recording of {rank} begins later"
    return f"the recording of {rank} ends earlier" if seq > last else f"{rank} has no event for it"


def _changes(*columns: Integers) -> Flags:
    """Mask of the rows that differ from the row before in any column; the first row does."""
    change = np.ones(len(columns[0]), dtype=bool)
    change[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return change


# -------------------------------------------------------------------------------------------------- by order and time


def _series(calls: CollectiveCalls, rows: Integers) -> list[Integers]:
    """Kernels without number, in lists whose order should be equal on all ranks.

    There is a list for each group; without group, one for each name of another library; of NCCL, one for each stream if
    all ranks use the same streams.
    """
    is_device = calls.sync[rows] >= SyncKind.DEVICE
    bare = (calls.group[rows] == NONE) & ~is_device
    streams = [set(calls.stream[rows[bare & (calls.rank[rows] == rank)]].tolist()) for rank in range(len(calls.ranks))]
    by_stream = bare & all(stream == streams[0] for stream in streams)
    # Kernels with equal group, name and stream are one list.
    labels = (
        calls.group[rows],
        np.where(is_device, calls.name_id[rows], NONE),
        np.where(by_stream, calls.stream[rows], NONE),
    )
    _, kind = np.unique(np.stack(labels), axis=1, return_inverse=True)
    return [rows[kind.reshape(-1) == number] for number in range(int(kind.max(initial=NONE)) + 1)]


def _by_order(calls: CollectiveCalls, rows: Integers, clocks: ClockOffsets, matches: _Matches) -> None:
    ranks = len(calls.ranks)
    rank_rows = [rows[calls.rank[rows] == rank] for rank in range(ranks)]  # of each rank, sorted by start
    group = calls.group[rows[0]]
    taking_part = np.array([len(kernels) > 0 for kernels in rank_rows])
    if group != NONE and calls.groups[group].members:
        taking_part |= np.isin(calls.ranks, calls.groups[group].members)
    lead = int(np.argmax([len(kernels) for kernels in rank_rows]))  # others are paired with the rank that has the most
    met = np.full((len(rank_rows[lead]), ranks), NONE)
    met[:, lead] = rank_rows[lead]
    for rank in np.flatnonzero(taking_part):
        if rank != lead:
            places, partners = _pairs(calls, rank_rows[lead], rank_rows[rank], clocks)
            met[places, rank] = rank_rows[rank][partners]
    whole = ((met != NONE) == taking_part).all(axis=1)
    places = _places(calls, rank_rows[lead])
    matches.add(met[whole], places[whole])
    if taking_part.sum() > 1:
        _add_unmatched(calls, rank_rows, met[whole], taking_part, matches)


def _places(calls: CollectiveCalls, rows: Integers) -> Integers:
    """Place of these rows among all kernels of their rank that have neither number nor own series."""
    if not len(rows):
        return rows
    first = rows[0]
    alike = (calls.rank == calls.rank[first]) & (calls.group == calls.group[first]) & (calls.seq == NONE)
    if calls.sync[first] >= SyncKind.DEVICE:
        alike &= calls.name_id == calls.name_id[first]
    else:
        alike &= calls.sync < SyncKind.DEVICE
    places: Integers = np.searchsorted(np.flatnonzero(alike), rows)
    return places


def _add_unmatched(
    calls: CollectiveCalls, rank_rows: list[Integers], met: Integers, taking_part: Flags, matches: _Matches
) -> None:
    """Lists the unmatched kernels of a series; kernels of the same place are one entry."""
    matched = set(met.reshape(-1).tolist())
    left: dict[int, list[int]] = {}  # by position in the series of each rank
    for rows in rank_rows:
        for position, row in enumerate(rows.tolist()):
            if row not in matched:
                left.setdefault(position, []).append(row)
    for present in left.values():
        have = {int(calls.rank[row]) for row in present}
        missing = tuple(calls.ranks[rank] for rank in np.flatnonzero(taking_part) if rank not in have)
        why = "no number, and kernels of this place do not end together"
        if missing:
            why = f"no kernel of rank {', '.join(map(str, missing))} ends with it"
        position = int(_places(calls, np.array(present[:1]))[0])
        matches.unmatched.append(_unmatched(calls, position, tuple(present), missing, why))


def _pairs(calls: CollectiveCalls, lead: Integers, other: Integers, clocks: ClockOffsets) -> tuple[Integers, Integers]:
    """Indices into `lead` and `other` that are the same collective."""
    if not len(other):
        return other, other
    is_device = calls.sync[lead[0]] >= SyncKind.DEVICE
    in_order = np.arange(len(lead))
    if is_device and clocks.island[calls.rank[lead[0]]] != clocks.island[calls.rank[other[0]]]:
        return (in_order, in_order) if len(lead) == len(other) else (lead[:0], lead[:0])  # no time can be compared
    if not is_device and _in_step(calls, lead, other, clocks):
        return in_order, in_order
    # Candidates: pairs that are each other's nearest end on the common clock.
    ends, end = calls.end_us[lead], calls.end_us[other] - _clock_difference(calls, lead, other, clocks)
    partner, back = _nearest(ends, end), _nearest(end, ends)
    shorter = np.minimum(calls.duration_us[lead][partner], calls.duration_us[other])
    near = np.abs(ends[partner] - end) <= np.maximum(TOLERANCE_US, TOLERANCE_SHARE * shorter)
    indices = np.flatnonzero((near | is_device) & (back[partner] == np.arange(len(other))))
    shift = indices - partner[indices]  # of the order of the two ranks
    if is_device and len(lead) == len(other) and np.count_nonzero(shift == 0) > len(lead) / 2:
        return in_order, in_order
    # Runs of consecutive pairs with one shift.
    breaks = np.ones(len(indices), dtype=bool)
    breaks[1:] = (np.diff(indices) != 1) | (np.diff(shift) != 0)
    run = np.cumsum(breaks) - 1  # number of the run of each pair
    believed = (shift == 0) | (np.bincount(run)[run] >= RUN) if len(indices) else breaks
    return partner[indices[believed]], indices[believed]


def _in_step(calls: CollectiveCalls, lead: Integers, other: Integers, clocks: ClockOffsets) -> bool:
    """Two ranks of a group have the same collectives in the same order, and met in nearly all."""
    if len(lead) != len(other) or calls.group[lead[0]] == NONE or (calls.name_id[lead] != calls.name_id[other]).any():
        return False
    first, second = calls.rank[lead[0]], calls.rank[other[0]]
    apart_us = float(clocks.ahead_us[second] - clocks.ahead_us[first])
    if clocks.island[first] != clocks.island[second]:
        apart_us = float(np.median(calls.end_us[other] - calls.end_us[lead]))
    begun_us = np.maximum(calls.start_us[lead], calls.start_us[other] - apart_us)
    ended_us = np.minimum(calls.end_us[lead], calls.end_us[other] - apart_us)
    return bool((begun_us <= ended_us + TOLERANCE_US).mean() >= IN_STEP)


def _nearest(times_us: Floats, wanted_us: Floats) -> Integers:
    order = np.argsort(times_us, kind="stable")
    times_us = times_us[order]
    after = np.clip(np.searchsorted(times_us, wanted_us), 1, max(1, len(order) - 1))
    before, after = after - 1, np.minimum(after, len(order) - 1)  # neighbours; equal if there is one time only
    nearer_before = wanted_us - times_us[before] <= times_us[after] - wanted_us
    return order[np.where(nearer_before, before, after)]


def _clock_difference(calls: CollectiveCalls, lead: Integers, other: Integers, clocks: ClockOffsets) -> float:
    """Offset of the other rank's clock: known, or the difference of ends that most pairs of one shift share."""
    first, second = calls.rank[lead[0]], calls.rank[other[0]]
    if clocks.island[first] == clocks.island[second]:
        return float(clocks.ahead_us[second] - clocks.ahead_us[first])
    window = max(TOLERANCE_US, TOLERANCE_SHARE * float(np.median(calls.duration_us[np.concatenate([lead, other])])))
    best, largest = 0.0, RUN - 1
    # Try each shift of the order; the most frequent difference of ends is the offset.
    for shift in sorted(range(-_SHIFTS, _SHIFTS + 1), key=abs):
        ours, theirs = lead[max(0, -shift) :], other[max(0, shift) :]
        count = min(len(ours), len(theirs))
        differences = np.sort(calls.end_us[theirs[:count]] - calls.end_us[ours[:count]])
        # Differences within a window from each one on.
        inside = np.searchsorted(differences, differences + window, side="right") - np.arange(count)
        if count and int(inside.max()) > largest:
            begin, largest = int(inside.argmax()), int(inside.max())
            best = float(np.median(differences[begin : begin + largest]))
    return best


def _met_at_once(calls: CollectiveCalls, met: Integers, clocks: ClockOffsets) -> Flags:
    """A moment exists at which all ranks of each collective were inside; True where that is not required."""
    present = met != NONE
    latest = np.where(present, clocks.start_us(calls)[met], -np.inf).max(axis=1, initial=-np.inf)
    earliest = np.where(present, clocks.end_us(calls)[met], np.inf).min(axis=1, initial=np.inf)
    sync = np.where(present, calls.sync[met], NONE).max(axis=1, initial=NONE)
    together: Flags = (latest <= earliest + TOLERANCE_US) | (sync > SyncKind.UNEVEN) | ~clocks.is_joined(present)
    return together
