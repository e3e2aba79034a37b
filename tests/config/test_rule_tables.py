"""Every rule between fields breaks as its table says, and what is possible passes them all.

The tables are in test_model_rules, test_run_rules, test_layout_rules, and in the modules *_rule_table.
"""

import pytest

from penstock.base.errors import ConfigError
from penstock.config.problem import refuse
from penstock.config.rules import RULES, Rule
from tests.config import (
    data_rule_table,
    dispatch_rule_table,
    float8_rule_table,
    graph_rule_table,
    test_layout_rules,
    test_model_rules,
    test_run_rules,
)
from tests.config.small import unchecked_run

TABLES = (
    test_model_rules,
    test_run_rules,
    test_layout_rules,
    data_rule_table,
    dispatch_rule_table,
    graph_rule_table,
    float8_rule_table,
)
BROKEN = [row for table in TABLES for row in table.BROKEN]
FINE = {name: overrides for table in TABLES for name, overrides in table.FINE.items()}


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
    assert [rule.__name__ for rule in RULES if rule(run) is not None] == []


def test_every_rule_has_a_row() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_no_two_cases_have_one_name() -> None:
    assert len(FINE) == sum(len(table.FINE) for table in TABLES)
