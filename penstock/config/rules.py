"""Rules between fields. What one field may be is said by its knob; what two or more may be together is said here.

A rule is a function from a run to a `Problem`, or to None if the run is fine. It never changes anything. Its docstring
is the rule as users read it, with the full path of every field: the reference and `penstock config explain` print it.

To add a rule: write the function beside its like, put it into the tuple there, and give it a row in the tests.
"""

from collections.abc import Callable

from penstock.config.data_rules import DATA_RULES
from penstock.config.dispatch_rules import DISPATCH_RULES
from penstock.config.float8_rules import FLOAT8_RULES
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
    *FLOAT8_RULES,
)
"""All rules, in the order in which problems are told."""


def check(run: Run) -> None:
    """Refuse an impossible combination.

    Raises:
        ConfigError: a rule is broken; the first is told in full, of the others the fields.
    """
    refuse(problems(run))


def problems(run: Run) -> list[Problem]:
    """What the rules say against a run; empty if it is fine."""
    return [problem for rule in RULES if (problem := rule(run)) is not None]


def capture_problem(run: Run, what: Captured) -> Problem | None:
    """What keeps a run's passes, or parts of its layers, from being captured, whatever it asks for; None if no rule."""
    asked = run.model_copy(update={"graphs": Graphs(capture=what)})
    return next((problem for rule in GRAPH_RULES if (problem := rule(asked)) is not None), None)


def rule_text(rule: Callable[..., object]) -> str:
    """The rule in words."""
    assert rule.__doc__ is not None, f"{rule} is documented"
    return " ".join(rule.__doc__.split())
