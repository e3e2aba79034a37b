"""A verdict as text: the conclusion first, then evidence, remedies by gain, and what is missing."""

from penstock.base.numbers import bytes_text
from penstock.cli.table import print_table
from penstock.cli.trace_print import print_host_tables
from penstock.trace.host_table import HostTable
from penstock.tune.doctor.diagnosis import Diagnosis, EvidenceLine, cpu_changes, cpu_sentence, ms_text, spent_text
from penstock.tune.doctor.evidence import Evidence

ROWS = 8
"""Of each table of a CPU."""


def print_verdict(verdict: Diagnosis, evidence: Evidence) -> None:
    """Print a verdict.

    Args:
        verdict: what the doctor says.
        evidence: of what.
    """
    print(verdict.sentence)
    for note in verdict.notes:
        print(f"note: {note}")
    if evidence.ranks:
        print(spent_text(verdict, evidence))
    per = "ms per step" if evidence.steps or not evidence.ranks else "ms"
    print()
    print_table(("wall", "evidence", per, "share", "bytes"), [_row(fact) for fact in verdict.lines])
    print()
    if verdict.remedies:
        rows = []
        for one in verdict.remedies:
            gain = f"-{bytes_text(one.gain_bytes)}" if one.gain_bytes else ms_text(one.gain_us)
            rows.append((gain, f"{verdict.times.share(one.gain_us):.1%}", one.change, one.rule))
        print_table((f"gains {per}, at most", "of step", "change", "rule"), rows)
        print()
        for one in verdict.remedies:
            print(f"{one.rule}: {one.what} [{one.source}]")
        print("gains do not add up: several changes may take away the same time")
    else:
        print("no change that is known wins more than noise")
    for line in verdict.missing:
        print(f"missing: {line}")


def print_cpu(table: HostTable, evidence: Evidence) -> None:
    """Print what is said of a run on a CPU.

    Args:
        table: what its first rank did.
        evidence: with the configuration, if it is known.
    """
    print(cpu_sentence(evidence))
    print_host_tables([table], most=ROWS)
    print()
    changes = list(cpu_changes(table, evidence))
    for change, why in changes:
        print(f"{change}: {why}")
    if not changes and table.operators:
        longest = table.operators[0]
        print(f"no change is evident: the longest operator is {longest.name}, {longest.share:.1%} of the step")
    for line in evidence.missing:
        print(f"missing: {line}")


def _row(fact: EvidenceLine) -> tuple[str, ...]:
    return (
        fact.bottleneck,
        fact.what,
        "" if fact.time_us is None else ms_text(fact.time_us),
        "" if fact.share is None else f"{fact.share:.1%}",
        "" if fact.size is None else bytes_text(fact.size),
    )
