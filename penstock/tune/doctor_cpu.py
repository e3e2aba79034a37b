"""What the doctor says of a run on a CPU: no wall, its operators, and the changes that they make evident.

Walls are judged from kernels of a device and from the time in which the device idles. On a CPU operators and Python
take turns in one process, so none of this exists; nothing is guessed in its place.
"""

from collections.abc import Iterator
from typing import Any

from penstock.trace.host_table import HostTable
from penstock.tune.doctor_evidence import Evidence
from penstock.tune.doctor_remedy import accepted

OUTSIDE = 0.2
"""Share of a step outside of operators from which fewer passes are worth a try."""

AGAIN = 0.05
"""Share of a step that is computed twice, from which that is told."""


def cpu_sentence(evidence: Evidence) -> str:
    """The conclusion."""
    device = f" ({evidence.facts.device})" if evidence.facts.device else ""
    return (
        "no wall is judged: memory, communication, compute and host are judged from kernels of a device, and this is "
        f"a recording of a CPU{device}"
    )


def cpu_changes(table: HostTable, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Changes, as overrides, and what makes them evident.

    Args:
        table: of the first rank.
        evidence: with the configuration, if it is known.
    """
    run = evidence.facts.run
    if run is None:
        return
    training, ranks = run.training, evidence.facts.world or 1
    rows = training.global_batch // ranks
    change = f"training.micro_batch={rows}"
    if table.outside >= OUTSIDE and rows > training.micro_batch and accepted(run, change, evidence.facts.world):
        passes = rows // training.micro_batch
        yield change, f"one pass a step instead of {passes}: no operator runs in {table.outside:.0%} of the step"
    again = sum(row.share for row in table.phases if row.pass_ == "recompute")
    change = "recompute.modules=[]"
    if again >= AGAIN and accepted(run, change, evidence.facts.world):
        yield change, f"nothing is computed twice, if memory allows: now {again:.0%} of the step"


def cpu_json(table: HostTable, evidence: Evidence) -> dict[str, Any]:
    """The keys of `verdict_json`, without a wall, and the table."""
    return {
        "wall": None,
        "then": [],
        "verdict": cpu_sentence(evidence),
        "total_us": table.step_us,
        "evidence": [],
        "remedies": [{"change": change, "what": what} for change, what in cpu_changes(table, evidence)],
        "missing": list(evidence.missing),
        "host": table.as_json(),
    }
