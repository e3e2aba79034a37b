"""Rules between fields. `knob` declares the range of one field; rules judge several fields together.

A rule is a function from a run to a `Problem`, or to None if the run obeys it. It never changes the run. Its docstring
is the rule as users read it, with the full path of every field: the reference and `penstock config explain` print it.

To add a rule: write the function beside similar ones, add it to the tuple there, and add a row to the tests.
"""

from collections.abc import Callable

from penstock.config.data_rules import DATA_RULES
from penstock.config.dispatch_rules import DISPATCH_RULES
from penstock.config.graph_rules import GRAPH_RULES
from penstock.config.layout_rules import LAYOUT_RULES
from penstock.config.model_rules import MODEL_RULES
from penstock.config.parallel import Captured, Graphs
from penstock.config.problem import Problem, refuse
from penstock.config.run import Run
from penstock.config.run_rules import RUN_RULES

Rule = Callable[[Run], Problem | None]

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *RUN_RULES,
    *DATA_RULES,
    *LAYOUT_RULES,
    *DISPATCH_RULES,
    *GRAPH_RULES,
)
"""All rules, in the order in which problems are reported."""


def check(run: Run) -> None:
    """Refuse a run that breaks rules.

    Raises:
        ConfigError: the first problem in full, and the fields of the others.
    """
    refuse(problems(run))


def problems(run: Run) -> list[Problem]:
    """All problems of a run."""
    return [problem for rule in RULES if (problem := rule(run)) is not None]


def capture_problem(run: Run, what: Captured) -> Problem | None:
    """The first rule that forbids a kind of capture for a run, or None; the run's own capture is not read."""
    asked = run.model_copy(update={"graphs": Graphs(capture=what)})
    return next((problem for rule in GRAPH_RULES if (problem := rule(asked)) is not None), None)


def rule_text(rule: Callable[..., object]) -> str:
    """The text of a rule."""
    assert rule.__doc__ is not None, f"{rule} is documented"
    return " ".join(rule.__doc__.split())
