"""A verdict as text: the conclusion first, then evidence, remedies by gain, and what is missing."""

from penstock.cli.figures import bytes_text
from penstock.cli.table import print_table
from penstock.tune.doctor import Fact, Verdict
from penstock.tune.doctor_evidence import Evidence

_SOURCES = {"trace": "traces", "plan": "the plan", "none": "nothing"}


def print_verdict(verdict: Verdict, evidence: Evidence) -> None:
    """Print a verdict.

    Args:
        verdict: what the doctor says.
        evidence: of what.
    """
    print(verdict.sentence)
    if evidence.ranks:
        of = f", {evidence.steps} steps" if evidence.steps > 1 else ""
        gains = "; gains are of one step" if evidence.steps > 1 else ""
        total = f"{verdict.walls.total_us / 1e3:,.1f} ms{of}, mean of ranks{gains}"
        print(f"times are of {_SOURCES[evidence.source]}: {total}")
    print()
    print_table(("wall", "evidence", "ms", "share", "bytes"), [_row(fact) for fact in verdict.facts])
    print()
    if verdict.remedies:
        rows, steps = [], max(1, evidence.steps)
        for one in verdict.remedies:
            gain = f"-{bytes_text(one.gain_bytes)}" if one.gain_bytes else f"{one.gain_us / steps / 1e3:,.2f}"
            rows.append((gain, f"{verdict.walls.share(one.gain_us):.1%}", one.change, one.rule))
        print_table(
            ("gains ms, at most" if steps == 1 else "gains ms a step, at most", "of step", "change", "rule"), rows
        )
        print()
        for one in verdict.remedies:
            print(f"{one.rule}: {one.what} [{one.source}]")
        print("gains do not add up: several changes may take away the same time")
    else:
        print("no change that is known wins more than noise")
    for line in verdict.missing:
        print(f"missing: {line}")


def _row(fact: Fact) -> tuple[str, ...]:
    return (
        fact.wall,
        fact.what,
        "" if fact.time_us is None else f"{fact.time_us / 1e3:,.2f}",
        "" if fact.share is None else f"{fact.share:.1%}",
        "" if fact.size is None else bytes_text(fact.size),
    )
