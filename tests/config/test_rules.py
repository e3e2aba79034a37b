"""The tuple of rules as a whole."""

import re

import pytest

from penstock.base.errors import ConfigError
from penstock.config import data_rules, dispatch_rules, graph_rules, layout_rules, model_rules, run_rules
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.config.problem import Problem, refuse
from penstock.config.rules import RULES, Rule, check, problems, rule_text
from penstock.config.run import Run
from penstock.config.schema import find
from tests.config.small import unchecked_run

SEVERAL = ("training.micro_batch=3", "model.moe.top_k=9", "name=a b")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_obeys_every_rule(name: str) -> None:
    check(PRESETS[name]())


def test_a_broken_rule_is_refused_when_a_run_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.moe\.top_k is more than model\.moe\.experts; got 999; allowed: 1 to 256"
    ):
        load_run("deepseek-v3", ["model.moe.top_k=999"])


def test_the_first_problem_is_told_in_full_and_the_others_by_field() -> None:
    with pytest.raises(ConfigError) as raised:
        check(unchecked_run(SEVERAL))
    assert str(raised.value) == (
        "model.moe.top_k is more than model.moe.experts (also wrong: name, training.global_batch); got 9; "
        "allowed: 1 to 8"
    )


def test_problems_are_given_as_data() -> None:
    found = problems(unchecked_run(SEVERAL))
    assert [type(problem) for problem in found] == [Problem] * 3
    assert all(find(Run, problem.field) for problem in found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_text_of_a_rule_names_fields_that_exist(rule: Rule) -> None:
    paths = re.findall(r"`([^`]+)`", rule_text(rule))
    assert paths, "it names a field"
    assert [path for path in paths if not find(Run, path)] == []


def test_no_rule_is_left_out_of_the_tuple() -> None:
    for module, listed in (
        (model_rules, model_rules.MODEL_RULES),
        (run_rules, run_rules.RUN_RULES),
        (data_rules, data_rules.DATA_RULES),
        (layout_rules, layout_rules.LAYOUT_RULES),
        (dispatch_rules, dispatch_rules.DISPATCH_RULES),
        (graph_rules, graph_rules.GRAPH_RULES),
    ):
        written = [
            value
            for name, value in vars(module).items()
            if callable(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if value.__annotations__.get("return") == Problem | None
        ]
        assert written == list(listed)
    assert len(set(RULES)) == len(RULES)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (
            [Problem("a.b", "is too small", got="1", allowed=">= 2", fix="raise it")],
            "a.b is too small; got 1; allowed: >= 2; fix: raise it",
        ),
        (
            [Problem("a", "is wrong", got="1"), Problem("b", "too"), Problem("c.d", "too")],
            "a is wrong (also wrong: b, c.d); got 1",
        ),
        (
            [Problem(f"f{number}", "is wrong") for number in range(9)],
            "f0 is wrong (also wrong: f1, f2, f3, f4, ...)",
        ),
    ],
)
def test_problems_are_one_line_with_the_first_in_full(problems: list[Problem], message: str) -> None:
    refuse([])
    with pytest.raises(ConfigError) as raised:
        refuse(problems)
    assert str(raised.value) == message
