"""A run by recorded loads without and with replicas of experts: a table of `penstock plan --routing metrics.jsonl`."""

from collections.abc import Sequence

from penstock.base.numbers import time_text
from penstock.cli.output import print_table
from penstock.plan.balance import BalanceCase


def print_balance(cases: Sequence[BalanceCase]) -> None:
    """The table; nothing without cases. Forced balance is the last one, and the limit of all others."""
    if not cases:
        return
    least = cases[-1].step_seconds
    rows = [
        (
            case.name,
            f"{case.loads.fullest:.3f}",
            f"{case.loads.replicas:.1f}" if case.loads.replicas else "",
            time_text(case.exposed_seconds) if case.exposed_seconds else "",
            time_text(case.step_seconds),
            f"{least / case.step_seconds:.1%}",
        )
        for case in cases
    ]
    head = ("dispatch.balance", "fullest rank", "replicas", "waiting for them", "step", "of forced")
    print_table(head, rows, ("waiting for them", "replicas"))
    print("fullest rank: its rows over the even share; replicas of a layer on all ranks: means of layers and steps")
