"""`penstock trace`: where the time of a step went, from what a profiler has recorded.

    penstock trace rank0.json.gz                one file, of any program that PyTorch's profiler has recorded
    penstock trace traces/                      a folder with a file for each rank
    penstock trace runs/first --step 12         what a run of ours has recorded, one step of it
    penstock trace runs/first --json            the same for programs
    penstock trace diff A B                     what became faster and slower
    penstock trace replay PATH --op NAME        a script that runs one operator again

A first word that is no verb is a path; a file that is called like a verb is `./diff`. What is asked is settled here,
the answer comes from penstock/trace/answer.py. Nothing of it imports PyTorch, so a small file is answered before a
training program would have started.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.base.errors import TraceError, did_you_mean
from penstock.base.numbers import bytes_text, shortened
from penstock.base.spans import Span
from penstock.cli.output import print_next, print_table
from penstock.cli.verbs import Verb, group_of, load_by_name
from penstock.trace.analysis import RankAnalysis, TraceAnalysis, analyse_files, analysis_json
from penstock.trace.collectives import bandwidths
from penstock.trace.compare import shape_text
from penstock.trace.host_table import HostRow, HostTable, host_table
from penstock.trace.launches import HostWait
from penstock.trace.memory import AllocatorHistory
from penstock.trace.phases import Phase
from penstock.trace.timeline import TimeBreakdown

READ, READ_ALL = "PATH", "PATHS"  # names of the verb if none is typed: the second if only paths and flags follow
JSON, LAYERS = "--json", "--layers"
RUN_FILE = "config.toml"  # in the folder of a run; `penstock.config.load` has it too, but its import takes long

VERBS = (
    Verb("diff", "penstock.cli.trace_diff", "diff", "What became faster and slower from one trace to another."),
    Verb("replay", "penstock.cli.trace_replay", "replay", "Write a script that runs one operator of a trace again."),
)

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Files (.json, .json.gz), a folder of ranks, or a run.")
]
Json = Annotated[bool, typer.Option(JSON, help="Print JSON.")]
Rank = Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only the tables of this rank.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only this step, by its number.")]
Layers = Annotated[bool, typer.Option(LAYERS, help="Phases by layer.")]

_Verbs: Any = group_of(*VERBS)


class _PathsOrVerb(_Verbs):
    """A group that takes a first word that is not a verb as a path."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Insert the verb that is meant."""
        if args and args[0] in self.commands:
            return super().parse_args(ctx, args)
        if args and not Path(args[0]).exists() and (fix := did_you_mean(args[0], [verb.name for verb in VERBS])):
            raise TraceError(f"there is no {args[0]}, and no verb of this name", fix=fix)
        options = {word for word in args if word.startswith("-")}
        # typer checks values of options with pydantic, whose import takes as long as to answer for a small trace. So a
        # call with flags only has a verb without such options.
        is_plain = options <= {JSON, LAYERS} and len(options) < len(args)
        return super().parse_args(ctx, [READ_ALL if is_plain else READ, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Leave an inserted verb out of the usage line."""
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name in (READ, READ_ALL) else name, command, rest  # usage says `penstock trace PATH...`


app = typer.Typer(cls=_PathsOrVerb, add_completion=False)


@app.callback()
def trace() -> None:
    """Show where the time of a step went."""


@app.command(READ, hidden=True)
def read(paths: Paths, as_json: Json = False, rank: Rank = None, step: Step = None, layers: Layers = False) -> None:
    """Show where the time of a step went.

    Two more verbs: penstock trace diff A B, and penstock trace replay PATH --op NAME.
    """
    try:
        answer = analyse_files(paths, step=step, rank=rank)
    except TraceError as error:
        if "holds no trace" in error.what and (paths[0] / RUN_FILE).is_file():
            # By name, because it imports pydantic.
            command = load_by_name("penstock.tune.doctor.run_facts", "recording_command")(paths[0])
            raise TraceError(error.what, fix=f"record some steps: {command}") from error
        raise
    if as_json:
        host = {"host": [host_table(one).as_json() for one in answer.ranks]} if answer.is_host else {}
        print(json.dumps(analysis_json(answer) | host, allow_nan=False))
    else:
        print_answer(answer, by_layer=layers)
        print_next("doctor", *paths)


@app.command(READ_ALL, hidden=True, context_settings={"allow_extra_args": True})
def read_all(context: typer.Context, as_json: Json = False, layers: Layers = False) -> None:
    """The same for a call with flags only."""
    read([Path(word) for word in context.args], as_json=as_json, layers=layers)


PHASES, STEPS, ROOFS, WAITS, ROWS, MEMORY_ROWS = 24, 12, 12, 6, 12, 16  # most rows of each table
SHORT_NAME = 48  # characters of an operator in a table


def ms(time_us: float) -> str:
    """Milliseconds with three decimals."""
    return f"{time_us / 1e3:,.3f}"


def print_answer(answer: TraceAnalysis, *, by_layer: bool) -> None:
    """Print all tables of an answer, with a row of phases for each layer if `by_layer`."""
    first = answer.ranks[0]  # of tables that show one rank
    if answer.is_host:
        several = len(answer.loaded) > 1
        print(f"{first.trace.path.parent if several else first.trace.path}: a CPU, no kernel of a device")
        print_host_tables([host_table(one) for one in answer.ranks], most=PHASES)
        return
    device = first.trace.device_name or "an unknown device"
    others = "" if len(answer.loaded) == 1 else f", {len(answer.loaded)} ranks"
    print(f"{first.trace.path.parent if others else first.trace.path}: {device}{others}")
    if answer.steps > 1:
        print(f"times are sums over {answer.steps} recorded steps, but for the table of steps; --step N gives one")
    for one in answer.ranks:
        for note in one.trace.notes:
            print(f"note: rank {one.rank}: {note}")
    # Tables of one rank name it if there are several.
    of = "" if len(answer.loaded) == 1 else f" of rank {first.rank}"
    _timelines(answer.ranks)
    _steps(first)
    _phases(first, by_layer=by_layer, of=of)
    _communication(answer)
    _experts(answer)
    _launches(first, of)
    for memory in first.memory:
        print_memory(memory, of)
    _roofline(first, of)


def print_host_tables(tables: Sequence[HostTable], *, most: int) -> None:
    """Print the work of CPUs per step: operators, then phases of the first rank, at most `most` rows each."""
    first, several = tables[0], len(tables) > 1
    for one in tables:
        rank = f"rank {one.rank}: " if several else ""
        outside = f"{ms(one.outside_us)} ms ({one.outside:.1%}) outside of operators (Python, waiting)"
        print(f"{rank}{ms(one.step_us)} ms {one.span}, of which {outside}")
    of, per = (f" of rank {first.rank}" if several else ""), (" per step" if first.steps else "")
    print(f"\noperators{of}, by the time that they take themselves, without operators that they call")
    head = (f"calls{per}", f"ms{per}", "share")
    print_table(("operator", *head), _host_rows(first.operators, most, lambda row: (row.name,)))
    print(f"\nphases{of}, by the same time")
    print_table(("phase", "pass", *head), _host_rows(first.phases, most, lambda row: (row.name, row.pass_)))


def _host_rows(rows: Sequence[HostRow], most: int, names: Callable[[HostRow], tuple[str, ...]]) -> list[Sequence[str]]:
    texts = [(*names(row), f"{row.calls:,.0f}", ms(row.own_us), f"{row.share:.1%}") for row in rows]
    left = rows[most:]
    calls, own_us = sum(row.calls for row in left), sum(row.own_us for row in left)
    return _cut(texts, most, f"{calls:,.0f}", ms(own_us), f"{sum(row.share for row in left):.1%}")


def _cut(rows: Sequence[Sequence[str]], most: int, *sums: str) -> list[Sequence[str]]:
    """At most `most` rows, and one that counts the others, with sums over these in its last cells."""
    if len(rows) <= most:
        return list(rows)
    blank = [""] * (len(rows[0]) - 1 - len(sums))
    return [*rows[:most], (f"{len(rows) - most} more", *blank, *sums)]


def _timelines(ranks: Sequence[RankAnalysis]) -> None:
    print("\ntime on the device, ms; linked: only what was launched inside the recording")
    rows = []
    for one in ranks:
        same = one.timelines["all"] == one.timelines["linked"]  # then one row says both
        for name, timeline in one.timelines.items():
            if name == "all" or not same:
                rows.append((f"{one.rank}", "all, linked" if same else name, *_spent(timeline)))
    head = (
        "rank",
        "events",
        "total",
        "busy",
        "compute",
        "communication",
        "exposed",
        "copies",
        "exposed copies",
        "idle",
    )
    print_table(head, rows, ("exposed copies", "copies", "busy", "communication"))


def _spent(one: TimeBreakdown) -> tuple[str, ...]:
    def share(time_us: float) -> str:
        return f"{ms(time_us)} ({time_us / one.total_us:.1%})" if one.total_us else ms(time_us)

    return (
        ms(one.total_us),
        ms(one.busy_us),
        share(one.compute_us),
        ms(one.communication_us),
        share(one.exposed_communication_us),
        ms(one.memcpy_us),
        ms(one.exposed_memcpy_us),
        share(one.idle_us),
    )


def _steps(first: RankAnalysis) -> None:
    if not first.steps:
        return
    print(f"\nsteps of rank {first.rank}, ms on the device")
    rows = []
    for step in first.steps:
        one = step.timeline
        times = (one.total_us, one.compute_us, one.exposed_communication_us, one.exposed_memcpy_us, one.idle_us)
        rows.append((step.name, *map(ms, times)))
    head = ("step", "total", "compute", "exposed communication", "exposed copies", "idle")
    print_table(head, _cut(rows, STEPS))


def _phases(first: RankAnalysis, *, by_layer: bool, of: str) -> None:
    found = first.phases.rows(by_layer=by_layer)
    print(
        f"\nphases{of}; exposed: device time that nothing before it in the order compute, communication, copies fills"
    )
    rows = [(one.name, "" if one.layer is None else f"{one.layer}", one.pass_, *_figures([one])) for one in found]
    head = ("phase", "layer", "pass", "kernels ms", "exposed ms", "share", "events")
    print_table(head, _cut(rows, PHASES, *_figures(found[PHASES:])), ("events", "kernels ms"))
    print(f"other: {first.phases.other_share:.1%} of this time has no name")
    if first.phases.replays is not None:
        print(first.phases.replays.told)


def _figures(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Sums over phases."""
    return (
        ms(sum(one.kernel_us for one in phases)),
        ms(sum(one.exposed_us for one in phases)),
        f"{sum(one.share for one in phases):.1%}",
        f"{sum(one.count for one in phases):,}",
    )


def _communication(answer: TraceAnalysis) -> None:
    collectives = answer.collectives
    if not len(collectives.calls):
        return
    if len(answer.loaded) == 1:  # waiting is a difference between ranks
        print("\ncommunication: one rank cannot tell waiting from transfer; give a folder with all ranks")
        return
    print("\ncommunication across ranks, ms: pure is transfer, waiting is for ranks that came later")
    totals = collectives.totals_us()
    late = {one.rank: one for one in collectives.stragglers()}  # ranks that came last at least once
    rows = []
    for rank, (pure_us, wait_us) in totals.items():
        last = (f"{late[rank].times_last}", ms(late[rank].caused_wait_us)) if rank in late else ("0", ms(0.0))
        rows.append((f"{rank}", ms(pure_us), ms(wait_us), *last))
    print_table(("rank", "pure", "waiting", "times last", "others waited for it"), _cut(rows, 4 * ROWS))
    _bandwidths(answer)
    _unmatched(answer)


def _bandwidths(answer: TraceAnalysis) -> None:
    told = sorted(bandwidths(answer.collectives), key=lambda one: -one.pure_us * one.count)  # most time first
    if not told:
        return
    print("\nmatched collectives by size")
    rows = [
        (
            one.name,
            f"{one.ranks}",
            f"{one.count}",
            bytes_text(one.message_bytes),
            ms(one.pure_us),
            f"{one.algorithm_gb_s:.1f}",
            f"{one.bus_gb_s:.1f}",  # traffic of each link, by the formula of nccl-tests
        )
        for one in told
    ]
    print_table(("name", "ranks", "count", "bytes", "pure ms", "GB/s", "bus GB/s"), _cut(rows, ROWS))


def _unmatched(answer: TraceAnalysis) -> None:
    calls, unmatched = answer.collectives.calls, answer.collectives.unmatched
    if not unmatched:
        print("unmatched: none")
        return
    print(f"\nunmatched: {len(unmatched)} collectives, of which no waiting is told")
    rows = []
    for one in unmatched:
        ranks = ", ".join(f"{calls.ranks[calls.rank[row]]}" for row in one.rows)
        rows.append((one.group, f"{one.seq}", _short(one.name), ranks, one.why))
    print_table(("group", "number", "name", "ranks", "because"), _cut(rows, ROWS))


def _experts(answer: TraceAnalysis) -> None:
    load = answer.experts
    rows_text = None if load.max_over_mean is None else f"{load.max_over_mean:.2f} in {load.unit} ({load.source})"
    time_text = None if load.kernel_max_over_mean is None else f"{load.kernel_max_over_mean:.2f} in time of products"
    texts = [text for text in (rows_text, time_text) if text]
    if texts:
        full = "" if load.fullest_rank is None else f"; rank {load.fullest_rank} has most"
        print(f"\nexperts: fullest rank over the mean {', '.join(texts)}{full}")
    for one in answer.recorded[-1:]:  # the last step that metrics.jsonl has
        if one.layers:
            layer = max(one.layers, key=lambda layer: one.layers[layer])
            print(f"by the metrics of step {one.step}: in layer {layer} the fullest expert has ", end="")
            print(f"{one.layers[layer]:.2f} times the mean, the most of all layers")


def _launches(first: RankAnalysis, of: str) -> None:
    one = first.launches
    gaps, queue = one.gaps, one.queue
    print(f"\nlaunches{of}")
    print(f"  {one.short_count:,} of {one.kernel_count:,} kernels under 10 us, {ms(one.short_us)} ms together")
    print(
        f"  {gaps.count:,} gaps over 10 us, {gaps.long_count:,} over 100 us, the longest {ms(gaps.max_us)} ms; of "
        f"{ms(gaps.total_us)} ms idle the host was late in {ms(gaps.hosts_us)}, work was there in {ms(gaps.devices_us)}"
    )
    if queue is not None:
        print(
            f"  queue: {queue.mean:.1f} deep in the mean, {queue.max:,} at most, empty {queue.empty_share:.1%} of the "
            f"time; from launch to start {ms(queue.median_delay_us)} ms in the median"
        )
    if one.waits:
        print_table(("the host waits in", "times", "ms", "from"), _cut(_waits(one.waits), WAITS))


def _waits(waits: Sequence[HostWait]) -> list[tuple[str, ...]]:
    """A row for each call, span and pair of operators around it; layers and steps are added up."""
    times: dict[tuple[str, str], tuple[int, float]] = {}
    for one in waits:
        # The innermost span, and the two innermost operators.
        spans = [name for name in one.where if name in tuple(Span)]
        around = dict.fromkeys((*spans[-1:], *one.where[-2:]))
        place = (one.call, " > ".join(_short(name) for name in around))
        count, us = times.get(place, (0, 0.0))  # waits, microseconds
        times[place] = (count + one.count, us + one.total_us)
    longest = sorted(times.items(), key=lambda item: -item[1][1])
    return [(call, f"{count:,}", ms(us), where) for (call, where), (count, us) in longest]


def _roofline(first: RankAnalysis, of: str) -> None:
    found = first.roofline
    if not found.rows:
        return
    chip = "a device whose peaks are not known" if found.chip is None else found.chip.name
    print(f"\nroofline{of}, on {chip}: {found.modelled_share:.0%} of the computing has a model")
    rows = [
        (
            _short(row.operator),
            # Without lists of tensors, whose shapes are tuples of tuples.
            _short(shape_text([one for one in row.shapes if isinstance(one, tuple) and tuple not in map(type, one)])),
            f"{row.count:,}",
            ms(row.kernel_us),
            f"{row.share:.1%}",
            "" if row.flops_per_second is None else f"{row.flops_per_second / 1e12:,.0f}",
            "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:,.0f}",
            row.bound or "",
            "" if row.reached is None else f"{row.reached:.0%}",
        )
        for row in found.rows
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
    print(f"\nmemory{of}, device {memory.device}, at the time of the host")
    print(
        f"  {bytes_text(peak.allocated_bytes)} handed out at most ({bytes_text(peak.reserved_bytes)} reserved then, "
        f"{bytes_text(int(memory.reserved.max()))} at most), in {where}"
    )
    if peak.components:
        print_table(
            ("held then", "bytes", "share"),
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
            handed_out, most = bytes_text(row.handed_out_bytes), bytes_text(row.most_bytes)
            table.append((row.name, row.pass_, there, handed_out, kept, most))
    if len(rows) > MEMORY_ROWS:
        table.append((f"{len(rows) - MEMORY_ROWS} smaller ones", *[""] * 5))
    print_table(("phase", "pass", "of it at the peak", "handed out", "more after than before", "most held"), table)
