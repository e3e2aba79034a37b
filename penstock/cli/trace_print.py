"""Tables of `penstock trace`. Times are means of a recorded step, as in the doctor and in the report."""

from collections.abc import Sequence

from penstock.base.numbers import bytes_text, shortened
from penstock.base.spans import Span
from penstock.cli.output import print_table
from penstock.trace.analysis import RankAnalysis, TraceAnalysis
from penstock.trace.collectives import bandwidths
from penstock.trace.compare import shape_text
from penstock.trace.launches import HostWait
from penstock.trace.memory import AllocatorHistory
from penstock.trace.phases import Phase
from penstock.trace.timeline import TimeBreakdown, together

PHASES, STEPS, ROOFS, WAITS, ROWS, MEMORY_ROWS = 24, 12, 12, 6, 12, 16  # most rows of each table
STREAMS, ANNOTATIONS, PATH = 8, 12, 12
LEAST = 0.005  # share of the step below which the first lines leave a part out
SHORT_NAME = 48  # characters of an operator in a table


def ms(time_us: float) -> str:
    """Milliseconds with three decimals."""
    return f"{time_us / 1e3:,.3f}"


def print_answer(answer: TraceAnalysis, *, by_layer: bool) -> None:
    """Print all tables of an answer, with a row of phases for each layer if `by_layer`."""
    first = answer.ranks[0]  # of tables that show one rank
    device = "a CPU, whose operators take the place of kernels"
    if not answer.is_host:
        device = first.trace.device_name or "an unknown device"
    others = "" if len(answer.loaded) == 1 else f", {len(answer.loaded)} ranks"
    print(f"{first.trace.path.parent if others else first.trace.path}: {device}{others}")
    print(verdict_text(answer))
    if answer.steps > 1:
        print(f"times and counts are of one step, the mean of {answer.steps} recorded ones; --step N shows one of them")
    for rank in answer.ranks:
        for note in (*rank.trace.notes, *_left_out(rank)):
            print(f"note: rank {rank.rank}: {note}")
    # Tables of one rank name it if there are several.
    of = "" if len(answer.loaded) == 1 else f" of rank {first.rank}"
    per = answer.per_step
    print(f"\ntime {'of the process' if answer.is_host else 'on the device'}, ms")
    head = ("rank", "total", "busy", "compute", "communication", "exposed", "copies", "exposed copies", "idle")
    rows = [(f"{rank.rank}", *_spent(rank.spent, per)) for rank in answer.ranks]
    print_table(head, rows, ("exposed copies", "copies", "busy", "communication"))
    _steps(first)
    _operators(first, of, per)
    _phases(first, by_layer=by_layer, of=of, per=per)
    if not answer.is_host:
        _streams(first, of, per)
    _annotations(first, of, per)
    _path(answer)
    _communication(answer)
    _experts(answer)
    if not answer.is_host:
        _launches(first, of, per)
    _counters(first, of)
    for memory in first.memory:
        print_memory(memory, of)
    if not answer.is_host:  # its peaks are not known
        _roofline(first, of, per)


def _left_out(analysis: RankAnalysis) -> list[str]:
    """Events that count nowhere, as notes."""
    left, whole = analysis.left_out, analysis.timelines["all"]
    parts = [
        f"{count:,} events ({ms(us)} ms) {why}"
        for count, us, why in (
            (left.earlier, left.earlier_us, "were launched before the recording began"),
            (left.others, left.others_us, "belong to no step that is shown"),
        )
        if count
    ]
    if not parts:
        return []
    return [f"{' and '.join(parts)}; they are left out. With them, the recording takes {ms(whole.total_us)} ms"]


def _operators(analysis: RankAnalysis, of: str, per: float) -> None:
    if not analysis.operators:
        return
    print(f"\noperators{of}, by their own time; exposed: the part in which no computing runs beside a transfer")
    whole_us, left = analysis.spent.total_us, analysis.operators[PHASES:]
    rows = [
        (_short(row.name), _count(row.count * per), ms(row.own_us * per), *_exposed(row.exposed_us, whole_us, per))
        for row in analysis.operators
    ]
    sums = (_count(sum(row.count for row in left) * per), ms(sum(row.own_us for row in left) * per))
    rest = _exposed(sum(row.exposed_us for row in left), whole_us, per)
    print_table(("operator", "calls", "ms", "exposed ms", "of the step"), _cut(rows, PHASES, *sums, *rest))
    outside = "{} ms ({})".format(*_exposed(analysis.spent.idle_us, whole_us, per))
    print(f"outside of operators and transfers (Python, waiting): {outside}")


def _exposed(time_us: float, whole_us: float, per: float) -> tuple[str, str]:
    return ms(time_us * per), f"{time_us / whole_us:.1%}" if whole_us else ""


def _cut(rows: Sequence[Sequence[str]], limit: int, *sums: str) -> list[Sequence[str]]:
    """At most `limit` rows, and one that counts the others, with sums over these in its last cells."""
    if len(rows) <= limit:
        return list(rows)
    blank = [""] * (len(rows[0]) - 1 - len(sums))
    return [*rows[:limit], (f"{len(rows) - limit} more", *blank, *sums)]


def verdict_text(answer: TraceAnalysis) -> str:
    """The parts of a step, the largest first, as means of ranks."""
    spent = together([rank.spent for rank in answer.ranks])
    parts = {
        "compute": spent.compute_us,
        "exposed communication": spent.exposed_communication_us,
        "exposed copies": spent.exposed_memcpy_us,
        "idle": spent.idle_us,
    }
    shares = {name: us / spent.total_us if spent.total_us else 0.0 for name, us in parts.items()}
    shown = [
        f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= LEAST
    ]
    whole = f"{ms(spent.total_us * answer.per_step / len(answer.ranks))} ms"
    of = f"a step of {whole}" if answer.steps else f"all {whole}"
    return f"{of}: {', '.join(shown)}; the cause and what to change: penstock doctor"


def _spent(spent: TimeBreakdown, per: float) -> tuple[str, ...]:
    def share(time_us: float) -> str:
        return f"{ms(time_us * per)} ({time_us / spent.total_us:.1%})" if spent.total_us else ms(time_us * per)

    return (
        ms(spent.total_us * per),
        ms(spent.busy_us * per),
        share(spent.compute_us),
        ms(spent.communication_us * per),
        share(spent.exposed_communication_us),
        ms(spent.memcpy_us * per),
        ms(spent.exposed_memcpy_us * per),
        share(spent.idle_us),
    )


def _steps(first: RankAnalysis) -> None:
    if not first.steps:
        return
    print(f"\nsteps of rank {first.rank}, ms{'' if first.trace.is_host else ' on the device'}")
    rows = []
    for step in first.steps:
        span = step.timeline
        times = (span.total_us, span.compute_us, span.exposed_communication_us, span.exposed_memcpy_us, span.idle_us)
        rows.append((step.name, *map(ms, times)))
    head = ("step", "total", "compute", "exposed communication", "exposed copies", "idle")
    print_table(head, _cut(rows, STEPS))


def _phases(first: RankAnalysis, *, by_layer: bool, of: str, per: float) -> None:
    phases = first.phases.rows(by_layer=by_layer)
    print(f"\nphases{of}; exposed: time that nothing before it in the order compute, communication, copies fills")
    rows = [(row.name, "" if row.layer is None else f"{row.layer}", row.pass_, *_figures([row], per)) for row in phases]
    spent = "operators ms" if first.trace.is_host else "kernels ms"
    head = ("phase", "layer", "pass", spent, "exposed ms", "share", "events")
    print_table(head, _cut(rows, PHASES, *_figures(phases[PHASES:], per)), ("events", spent))
    print(f"other: {first.phases.other_share:.1%} of this time has no name")
    if first.unknown:
        print("kernels without a known phase that take over 2 % of the step; --names FILE gives them one")
        print_table(
            ("kernel", "ms", "share", "events", "streams"),
            [
                (
                    _short(row.name),
                    ms(row.kernel_us * per),
                    f"{row.share:.1%}",
                    _count(row.count * per),
                    ", ".join(map(str, row.streams)),
                )
                for row in first.unknown
            ],
        )
    if first.phases.replays is not None:
        print(first.phases.replays.told)


def _figures(phases: Sequence[Phase], per: float) -> tuple[str, ...]:
    return (
        ms(sum(phase.kernel_us for phase in phases) * per),
        ms(sum(phase.exposed_us for phase in phases) * per),
        f"{sum(phase.share for phase in phases):.1%}",
        _count(sum(phase.count for phase in phases) * per),
    )


def _count(number: float) -> str:
    """A mean number of a step: `12`, or `2.5` if steps differ."""
    return f"{number:,.0f}" if abs(number - round(number)) < 0.05 else f"{number:,.1f}"


def _streams(first: RankAnalysis, of: str, per: float) -> None:
    print(f"\nstreams{of}, ms; exposed as above")
    rows = [
        (
            f"{row.stream}",
            _count(row.events * per),
            *(
                ms(us * per)
                for us in (row.busy_us, row.compute_us, row.communication_us, row.copies_us, row.exposed_us)
            ),
            row.phase,
        )
        for row in first.streams
    ]
    head = ("stream", "events", "busy", "compute", "communication", "copies", "exposed", "most of it")
    print_table(head, _cut(rows, STREAMS), ("copies", "events"))


def _annotations(first: RankAnalysis, of: str, per: float) -> None:
    if not first.annotations:
        return
    inside = "operators" if first.trace.is_host else "kernels"
    print(f"\nannotations{of} (record_function), ms, nested ones in both; {inside}: launched inside")
    rows = [
        (
            _short(row.name),
            _count(row.count * per),
            ms(row.host_us * per),
            ms(row.kernel_us * per),
            ms(row.exposed_us * per),
            _count(row.events * per),
        )
        for row in first.annotations
    ]
    print_table(("annotation", "times", "host", inside, "exposed", "events"), _cut(rows, ANNOTATIONS), ("events",))


def _path(answer: TraceAnalysis) -> None:
    path = answer.path
    if not path.segments:
        return
    over = f" over {len(answer.ranks)} ranks" if len(answer.ranks) > 1 else ""
    kinds = ", ".join(f"{kind} {us / path.total_us:.1%}" for kind, us in path.by_kind().items())
    print(f"\ncritical path of {path.step or 'the recording'}{over}, {ms(path.total_us)} ms: {kinds}")
    path_rows = path.rows()
    rows = [
        (f"{row.rank}", row.kind, _short(row.name), ms(row.total_us), f"{row.share:.1%}", f"{row.count:,}")
        for row in path_rows
    ]
    rest = (ms(sum(row.total_us for row in path_rows[PATH:])), f"{sum(row.share for row in path_rows[PATH:]):.1%}", "")
    print_table(("rank", "on the path", "what", "ms", "share", "parts"), _cut(rows, PATH, *rest))


def _counters(first: RankAnalysis, of: str) -> None:
    if not first.counters:
        return
    print(f"\ncounters{of}")
    rows = [
        (
            _short(row.name),
            f"{row.samples:,}",
            *(f"{value:,.6g}" for value in (row.least, row.mean, row.most, row.last)),
        )
        for row in first.counters
    ]
    print_table(("counter", "samples", "least", "mean", "most", "last"), _cut(rows, ROWS))


def _communication(answer: TraceAnalysis) -> None:
    collectives = answer.collectives
    if not len(collectives.calls):
        return
    if len(answer.loaded) == 1:  # waiting is a difference between ranks
        print("\ncommunication: one rank cannot tell waiting from transfer; give a folder with all ranks")
        return
    print("\ncommunication across ranks, ms: pure is transfer, waiting is for ranks that came later")
    totals, per = collectives.totals_us(), answer.per_step
    late = {straggler.rank: straggler for straggler in collectives.stragglers()}  # ranks that came last at least once
    rows = []
    for rank, (pure_us, wait_us) in totals.items():
        times_last, caused_us = (late[rank].times_last, late[rank].caused_wait_us) if rank in late else (0, 0.0)
        rows.append((f"{rank}", ms(pure_us * per), ms(wait_us * per), _count(times_last * per), ms(caused_us * per)))
    print_table(("rank", "pure", "waiting", "times last", "others waited for it"), _cut(rows, 4 * ROWS))
    _bandwidths(answer)
    _unmatched(answer)


def _bandwidths(answer: TraceAnalysis) -> None:
    rates = sorted(
        bandwidths(answer.collectives), key=lambda bandwidth: -bandwidth.pure_us * bandwidth.count
    )  # most time first
    per = answer.per_step
    if not rates:
        return
    print("\nmatched collectives by size")
    rows = [
        (
            rate.name,
            f"{rate.ranks}",
            _count(rate.count * per),
            bytes_text(rate.message_bytes),
            ms(rate.pure_us),
            f"{rate.algorithm_gb_s:.1f}",
            f"{rate.bus_gb_s:.1f}",  # traffic of each link, by the formula of nccl-tests
        )
        for rate in rates
    ]
    print_table(("name", "ranks", "count", "bytes", "pure ms", "GB/s", "bus GB/s"), _cut(rows, ROWS))


def _unmatched(answer: TraceAnalysis) -> None:
    calls, unmatched = answer.collectives.calls, answer.collectives.unmatched
    if not unmatched:
        print("unmatched: none")
        return
    print(f"\nunmatched: {len(unmatched)} collectives of all steps, whose waiting is unknown")
    rows = []
    for mismatch in unmatched:
        ranks = ", ".join(f"{calls.ranks[calls.rank[row]]}" for row in mismatch.rows)
        rows.append((mismatch.group, f"{mismatch.seq}", _short(mismatch.name), ranks, mismatch.why))
    print_table(("group", "number", "name", "ranks", "because"), _cut(rows, ROWS))


def _experts(answer: TraceAnalysis) -> None:
    load = answer.experts
    rows_text = None if load.max_over_mean is None else f"{load.max_over_mean:.2f} in {load.unit} ({load.source})"
    time_text = None if load.kernel_max_over_mean is None else f"{load.kernel_max_over_mean:.2f} in time of products"
    texts = [text for text in (rows_text, time_text) if text]
    if texts:
        full = "" if load.fullest_rank is None else f"; rank {load.fullest_rank} has most"
        print(f"\nexperts: fullest rank over the mean {', '.join(texts)}{full}")
    for record in answer.recorded[-1:]:  # the last step that metrics.jsonl has
        if record.layers:
            layer = max(record.layers, key=lambda layer: record.layers[layer])
            print(f"by the metrics of step {record.step}: in layer {layer} the fullest expert has ", end="")
            print(f"{record.layers[layer]:.2f} times the mean, the most of all layers")


def _launches(first: RankAnalysis, of: str, per: float) -> None:
    launches = first.launches
    gaps, queue = launches.gaps, launches.queue
    print(f"\nlaunches{of}")
    short, kernels = _count(launches.short_count * per), _count(launches.kernel_count * per)
    print(f"  {short} of {kernels} kernels under 10 us, {ms(launches.short_us * per)} ms together")
    print(
        f"  {_count(gaps.count * per)} gaps over 10 us, {_count(gaps.long_count * per)} over 100 us, the longest "
        f"{ms(gaps.max_us)} ms; of {ms(gaps.total_us * per)} ms idle time, {ms(gaps.hosts_us * per)} ms are before a "
        f"launch, {ms(gaps.devices_us * per)} ms after it"
    )
    if queue is not None:
        print(
            f"  launch queue: mean depth {queue.mean:.1f}, maximum {queue.max:,}, empty {queue.empty_share:.1%} of the "
            f"time; from launch to start {ms(queue.median_delay_us)} ms (median)"
        )
    if launches.waits:
        print_table(("the host waits in", "times", "ms", "from"), _cut(_waits(launches.waits, per), WAITS))


def _waits(waits: Sequence[HostWait], per: float) -> list[tuple[str, ...]]:
    """A row for each call, span and pair of operators around it; layers and steps are added up."""
    times: dict[tuple[str, str], tuple[int, float]] = {}
    for wait in waits:
        # The innermost span, and the two innermost operators.
        spans = [name for name in wait.where if name in tuple(Span)]
        around = dict.fromkeys((*spans[-1:], *wait.where[-2:]))
        source = (wait.call, " > ".join(_short(name) for name in around))
        count, us = times.get(source, (0, 0.0))  # waits, microseconds
        times[source] = (count + wait.count, us + wait.total_us)
    longest = sorted(times.items(), key=lambda item: -item[1][1])
    return [(call, _count(count * per), ms(us * per), where) for (call, where), (count, us) in longest]


def _roofline(first: RankAnalysis, of: str, per: float) -> None:
    roofline = first.roofline
    if not roofline.rows:
        return
    chip = "a device whose peaks are not known" if roofline.chip is None else roofline.chip.name
    print(f"\nroofline{of}, on {chip}: {roofline.modelled_share:.0%} of the computing has a model")
    rows = [
        (
            _short(row.operator),
            # Without lists of tensors, whose shapes are tuples of tuples.
            _short(
                shape_text(
                    [shape for shape in row.shapes if isinstance(shape, tuple) and tuple not in map(type, shape)]
                )
            ),
            _count(row.count * per),
            ms(row.kernel_us * per),
            f"{row.share:.1%}",
            "" if row.flops_per_second is None else f"{row.flops_per_second / 1e12:,.0f}",
            "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:,.0f}",
            row.bound or "",
            "" if row.reached is None else f"{row.reached:.0%}",
        )
        for row in roofline.rows
    ]
    head = ("operator", "shapes", "calls", "ms", "share", "TFLOP/s", "GB/s", "bound by", "reached")
    print_table(head, _cut(rows, ROOFS), ("GB/s", "TFLOP/s", "calls", "shapes"))
    if first.used_rows is not None:
        print(first.used_rows.told)


def _short(text: str) -> str:
    return shortened(text, SHORT_NAME)


def print_memory(memory: AllocatorHistory, of: str) -> None:
    """Print the memory tables of one device; `of` names its rank in titles."""
    peak = memory.peak
    phase = " ".join(filter(None, (peak.phase, peak.pass_)))
    where = f"{phase}: {' > '.join(peak.spans)}" if peak.spans else phase
    print(f"\nmemory{of}, device {memory.device}, over the whole recording, at the time of the host")
    print(
        f"  peak: {bytes_text(peak.allocated_bytes)} allocated ({bytes_text(peak.reserved_bytes)} reserved then, "
        f"{bytes_text(int(memory.reserved.max()))} at most), in {where}"
    )
    if peak.components:
        print_table(
            ("at the peak", "bytes", "share"),
            [
                (name, bytes_text(size), f"{size / max(peak.allocated_bytes, 1):.1%}")
                for name, size in peak.components.items()
            ],
        )
    rows = memory.rows()
    largest = sorted(rows, key=lambda row: -max(row.at_peak_bytes or 0, abs(row.kept_bytes)))[:MEMORY_ROWS]
    table: list[tuple[str, ...]] = []
    for row in rows:  # in the order of the step
        if row in largest:
            there = "" if row.at_peak_bytes is None else bytes_text(row.at_peak_bytes)
            kept = f"{'-' if row.kept_bytes < 0 else ''}{bytes_text(abs(row.kept_bytes))}"
            handed_out, peak_text = bytes_text(row.handed_out_bytes), bytes_text(row.most_bytes)
            table.append((row.name, row.pass_, there, handed_out, kept, peak_text))
    if len(rows) > MEMORY_ROWS:
        table.append((f"{len(rows) - MEMORY_ROWS} smaller ones", *[""] * 5))
    print_table(("phase", "pass", "at the peak", "allocated", "allocated minus freed", "maximum"), table)
