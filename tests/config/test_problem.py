"""How problems become one line."""

import pytest

from penstock.base.errors import ConfigError
from penstock.config.problem import Problem, refuse


def test_nothing_wrong_is_nothing_said() -> None:
    refuse([])


def test_a_problem_is_told_in_one_line_with_all_its_parts() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse([Problem("a.b", "is too small", got="1", allowed=">= 2", fix="raise it")])
    assert str(raised.value) == "a.b is too small; got 1; allowed: >= 2; fix: raise it"


def test_of_further_problems_the_fields_are_told() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse([Problem("a", "is wrong", got="1"), Problem("b", "too"), Problem("c.d", "too")])
    assert str(raised.value) == "a is wrong (also wrong: b, c.d); got 1"


def test_many_further_problems_are_cut_short() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse([Problem(f"f{number}", "is wrong") for number in range(9)])
    assert str(raised.value) == "f0 is wrong (also wrong: f1, f2, f3, f4, ...)"
