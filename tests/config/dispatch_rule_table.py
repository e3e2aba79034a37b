"""Every rule of dispatch, by the line that the user reads."""

from penstock.config import dispatch_rules as rules
from penstock.config.rules import Rule

PADDED = ("model.moe.balance.capacity_factor=1.5", "model.moe.balance.pad_to_capacity=true")

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.sent_rows_are_counted_by_the_host,
        ("dispatch.method=all-to-all", "dispatch.sync_free=2"),
        "dispatch.sync_free cannot be had with dispatch.method all-to-all, whose row counts the host reads; got 2; "
        "allowed: 0, 1; fix: set dispatch.method=auto",
    ),
    (
        rules.padded_rows_are_sent,
        (*PADDED, "dispatch.method=hierarchical"),
        "dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got hierarchical; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    ),
    (
        rules.padded_rows_are_sent,
        (*PADDED, "dispatch.method=all-gather"),
        "dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got all-gather; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    ),
]

FINE: dict[str, tuple[str, ...]] = {
    "what is sent is counted": ("dispatch.method=all-to-all", "dispatch.sync_free=1"),
    "what is padded is sent at every stage": (*PADDED, "dispatch.method=all-to-all", "dispatch.sync_free=3"),
    "what is gathered has every stage": ("dispatch.method=all-gather", "dispatch.sync_free=0"),
    "what is written into other GPUs' memory has every stage": ("dispatch.method=symmetric", "dispatch.sync_free=0"),
    "what goes to nodes first has every stage": ("dispatch.method=hierarchical", "dispatch.sync_free=3"),
    "auto has every stage": ("dispatch.sync_free=3",),
    "a dense model dispatches nothing": (
        "model.moe=none",
        "model.dense_layers=4",
        "dispatch.method=all-gather",
        "dispatch.sync_free=2",
    ),
}
