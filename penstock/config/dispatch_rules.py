"""Rules between fields of dispatch. Each docstring is the rule as users read it.

What kernels must leave out at a stage is judged where they are chosen, because that depends on the device
(`penstock.models.kernels`).
"""

from penstock.config.problem import Problem
from penstock.config.run import Run

STAGES = 4
"""Values of `dispatch.sync_free`, from 0."""

COUNTS_STAY = 2
"""The first value of `dispatch.sync_free` at which row counts stay on the device."""


def sent_rows_are_counted_by_the_host(run: Run) -> Problem | None:
    """`dispatch.method` all-to-all goes with `dispatch.sync_free` 0 or 1, and with any value if it sends padding.

    The host must know how many rows to send and receive. Padding is `model.moe.balance.pad_to_capacity`.
    """
    if run.dispatch.method != "all-to-all" or run.dispatch.sync_free < COUNTS_STAY or _pads(run):
        return None
    return Problem(
        "dispatch.sync_free",
        "cannot be had with dispatch.method all-to-all, whose row counts the host reads",
        got=f"{run.dispatch.sync_free}",
        allowed="0, 1",
        fix="set dispatch.method=auto",
    )


def padded_rows_are_sent(run: Run) -> Problem | None:
    """`model.moe.balance.pad_to_capacity` goes with `dispatch.method` auto or all-to-all.

    It sends the capacity of every expert, and has static shapes already.
    """
    if run.dispatch.method in ("auto", "all-to-all") or not _pads(run):
        return None
    return Problem(
        "dispatch.method",
        "sends no padding, but model.moe.balance.pad_to_capacity does",
        got=run.dispatch.method,
        allowed="auto, all-to-all",
        fix="set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    )


def _pads(run: Run) -> bool:
    return run.model.moe is not None and run.model.moe.balance.pad_to_capacity


DISPATCH_RULES = (sent_rows_are_counted_by_the_host, padded_rows_are_sent)
