"""Rules between fields: each breaks as rule_cases.txt says, possible runs pass all of them, and texts name fields."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config import model_rules, run_rules
from penstock.config.fit import SPLITTING_SCHEDULES
from penstock.config.rules import RULES, check, problems, rule_text
from penstock.config.run import Run
from penstock.config.schema import Problem, find, refuse
from penstock.layout.schedules import SCHEDULES, schedule
from tests.config.small import unchecked_run

CASES = re.findall(
    r"^(fine, )?(.+?): (.*)\n(?: {4}(.*))?", Path(__file__).with_name("rule_cases.txt").read_text(), re.M
)
BROKEN = [pytest.param(name, shlex.split(text), told, id=name) for fine, name, text, told in CASES if told and not fine]
FINE = [shlex.split(overrides) for fine, _, overrides, _ in CASES if fine]
BY_NAME = {rule.__name__: rule for rule in RULES}
SEVERAL = ("training.micro_batch=3", "model.moe.top_k=9", "name=a b")  # breaks three rules


@pytest.mark.parametrize(("rule", "overrides", "message"), BROKEN)
def test_a_broken_rule_says_what_is_wrong_and_what_would_be_right(
    rule: str, overrides: list[str], message: str
) -> None:
    problem = BY_NAME[rule](unchecked_run(overrides))
    assert problem is not None
    with pytest.raises(ConfigError) as raised:
        refuse([problem])
    assert str(raised.value) == message


def test_a_possible_run_passes_every_rule() -> None:
    for overrides in FINE:
        run = unchecked_run(overrides)
        assert [rule.__name__ for rule in RULES if rule(run) is not None] == [], overrides


def test_every_rule_has_a_case() -> None:
    assert {case.id for case in BROKEN} == set(BY_NAME)


def test_the_first_problem_is_told_in_full_and_the_others_by_field() -> None:
    run = unchecked_run(SEVERAL)
    assert all(find(Run, problem.field) for problem in problems(run))
    told = r"model.moe.top_k is more than model.moe.experts \(also wrong: name, training.global_batch\); got 9; allowed"
    with pytest.raises(ConfigError, match=told):
        check(run)


def test_the_text_of_a_rule_names_fields_that_exist() -> None:
    for rule in RULES:
        paths = re.findall(r"`([^`]+)`", rule_text(rule))
        assert paths and [path for path in paths if not find(Run, path)] == [], rule.__name__


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([Problem("a.b", "is small", "1", ">= 2", "raise it")], "a.b is small; got 1; allowed: >= 2; fix: raise it"),
        ([Problem("a", "is wrong", got="1"), Problem("b", "too")], "a is wrong (also wrong: b); got 1"),
        ([Problem(f"f{n}", "is wrong") for n in range(9)], "f0 is wrong (also wrong: f1, f2, f3, f4, ...)"),
    ],
)
def test_problems_are_one_line_with_the_first_in_full(wrong: list[Problem], message: str) -> None:
    refuse([])
    with pytest.raises(ConfigError) as raised:
        refuse(wrong)
    assert str(raised.value) == message


def test_many_divisors_are_cut_short() -> None:
    # 360 has 24 divisors.
    problem = model_rules.groups_divide_experts(unchecked_run(["model.moe.experts=360", "model.moe.router.n_group=7"]))
    assert problem is not None
    assert problem.allowed == "1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, ..."


def test_one_mistake_is_told_once_where_two_rules_read_it() -> None:
    groups = ("model.moe.router.n_group=4", "model.moe.router.topk_group=2", "model.moe.router.group_score=top2")
    run = unchecked_run([*groups, "model.moe.top_k=9"])  # more than all 8 experts, and than the groups hold
    assert [rule for rule in RULES if rule(run)] == [model_rules.top_k_is_within_experts]


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", "caf\u00e9", "a\nb", "x" * 101, ".."])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    run = unchecked_run(()).model_copy(update={"name": name})
    assert run_rules.name_is_a_folder_name(run) is not None


def test_decay_is_not_judged_while_the_warmup_is_wrong() -> None:
    run = unchecked_run(("schedule.decay=wsd", "schedule.decay_steps=5", "training.steps=10"))  # the warm-up takes 20
    assert run_rules.decay_comes_after_warmup(run) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_that_are_said_to_split_backward_do(name: str) -> None:
    made = [
        schedule(name, ranks=ranks, stages_per_rank=SCHEDULES[name].fewest, micro_batches=micro_batches)
        for ranks in (2, 3, 4)  # small pipelines show it
        for micro_batches in (8, 12)
    ]
    assert {one.splits_backward for one in made} == {name in SPLITTING_SCHEDULES}
