"""Rules between fields. `knob` declares the range of one field; rules judge several fields together.

A rule is a function from a run to a `Problem`, or to None if the run obeys it. It never changes the run. Its docstring
is the rule as users read it, with the full path of every field: the reference and `penstock config explain` print it.

To add a rule: write a public function beside similar ones, and add its cases to tests/config/rule_cases.txt.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Literal

from penstock.config import dispatcher, graph_rules, layout_rules, model_rules, run_rules
from penstock.config.parallel import Captured, Graphs
from penstock.config.run import Run
from penstock.config.schema import Problem, refuse

Rule = Callable[[Run], Problem | None]


def _rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """Public functions of a module that return a problem, in the order of their definition."""
    functions = (value for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
    return tuple(
        value
        for value in functions
        # Imported helpers are no rules.
        if value.__module__ == module.__name__ and value.__annotations__.get("return") == Problem | None
    )


_MODULES = (model_rules, run_rules, layout_rules, dispatcher, graph_rules)

# All rules, in the order in which problems are reported.
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))


def check(run: Run) -> None:
    """Refuse a run that breaks rules: a ConfigError with the first problem in full, and the fields of the others."""
    refuse(problems(run))


def problems(run: Run) -> list[Problem]:
    return [problem for rule in RULES if (problem := rule(run)) is not None]


def capture_problem(run: Run, what: Captured) -> Problem | None:
    """The first rule that forbids a kind of capture for a run, or None; the run's own capture is not read."""
    asked = run.model_copy(update={"graphs": Graphs(capture=what)})  # auto asks about each kind in turn
    return next((problem for rule in _rules_of(graph_rules) if (problem := rule(asked)) is not None), None)


def capture_on(vendor: str, run: Run) -> Literal["none"] | Captured:
    """What `graphs.capture` captures where the host limits passes: auto is the first kind that no rule forbids.

    Auto captures on NVIDIA's GPUs, where graphs have been run (penstock/train/capture.py).
    """
    if run.graphs.capture != "auto":
        return run.graphs.capture
    if vendor != "nvidia":
        return "none"
    kinds: tuple[Captured, ...] = ("full", "partial")
    return next((kind for kind in kinds if capture_problem(run, kind) is None), "none")


def rule_text(rule: Callable[..., object]) -> str:
    return " ".join((rule.__doc__ or "").split())
