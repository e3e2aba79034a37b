"""Every rule of dispatch, by the line that the user reads."""

import pytest

from penstock.base.errors import ConfigError
from penstock.config import dispatch_rules as rules
from penstock.config.problem import refuse
from penstock.config.rules import Rule
from tests.config.small import unchecked_run

PADDED = ("model.moe.balance.capacity_factor=1.5", "model.moe.balance.pad_to_capacity=true")

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.sent_rows_are_counted_by_the_host,
        ("dispatch.method=all-to-all", "dispatch.sync_free=2"),
        "dispatch.sync_free cannot be had with dispatch.method all-to-all, whose row counts the host reads; got 2; "
        "allowed: 0, 1; fix: set dispatch.method=all-gather",
    ),
    (
        rules.padded_rows_are_sent,
        (*PADDED, "dispatch.method=all-gather"),
        "dispatch.method gathers tokens, but model.moe.balance.pad_to_capacity sends padded rows; got all-gather; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    ),
]

FINE: dict[str, tuple[str, ...]] = {
    "what is sent is counted": ("dispatch.method=all-to-all", "dispatch.sync_free=1"),
    "what is padded is sent at every stage": (*PADDED, "dispatch.method=all-to-all", "dispatch.sync_free=3"),
    "what is gathered has every stage": ("dispatch.method=all-gather", "dispatch.sync_free=0"),
    "auto has every stage": ("dispatch.sync_free=3",),
    "a dense model": ("model.moe=none", "model.dense_layers=4", "dispatch.method=all-gather", "dispatch.sync_free=2"),
}


@pytest.mark.parametrize(("rule", "overrides", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_says_what_is_wrong_and_what_would_be_right(
    rule: Rule, overrides: tuple[str, ...], message: str
) -> None:
    problem = rule(unchecked_run(overrides))
    assert problem is not None
    with pytest.raises(ConfigError) as raised:
        refuse([problem])
    assert str(raised.value) == message


@pytest.mark.parametrize("case", FINE)
def test_what_is_possible_passes_every_rule(case: str) -> None:
    run = unchecked_run(FINE[case])
    assert [rule.__name__ for rule in rules.DISPATCH_RULES if rule(run) is not None] == []


def test_every_rule_has_a_test() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(rules.DISPATCH_RULES)
