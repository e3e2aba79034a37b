"""docs/rules.md: what a planner and a doctor know beforehand, and what became of the rules of others."""

from penstock.config.rules import RULES as CONFIG_RULES
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.book import LEGAL, RULES, rule_name
from penstock.plan.rules.rule import Rule
from tools.hardware_page import table
from tools.megatron_rules import TABLE, Entry

COLUMNS = ("name", "rule", "change", "from")


def rules_page() -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD,
            *table(("name", "rule", "from"), [(f"`{one.name}`", _cell(one.doc), _cell(one.source)) for one in LEGAL]),
            _ADVISED,
            *table(COLUMNS, _rows(ADVICE)),
            _OTHERS,
            *_others(),
        ]
    )


def _rows(rules: tuple[Rule, ...]) -> list[tuple[str, ...]]:
    return [
        (f"`{one.name}`", _cell(one.doc), " ".join(f"`{change}`" for change in one.fix), _cell(one.source))
        for one in rules
    ]


def _others() -> list[str]:
    lines = []
    for topic, entries in TABLE:
        lines += [f"### {topic}", "", *table(("id", "says", "here", "by"), [_other(entry) for entry in entries]), ""]
    return lines


def _other(entry: Entry) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in entry.rules)
    return entry.name, _cell(entry.says), entry.verdict, _cell("; ".join(part for part in (names, entry.why) if part))


def known_names() -> set[str]:
    """Every name that an entry may give: rules of plans, and of the config."""
    return {one.name for one in RULES} | {rule_name(one) for one in CONFIG_RULES}


def _cell(text: str) -> str:
    """Text that ends no cell."""
    return text.replace("|", "\\|")


_HEAD = """# Rules of a plan

Written by `make docs` from `penstock/plan/rules/`; change them there.

A rule looks at plain numbers ([rule.py](../penstock/plan/rules/rule.py)): sizes of a layout, the cluster, facts of the
model. What it has against them is one line with the numbers of the case. There are two kinds.

## Legal

The run's own config refuses it when the run is loaded or started. A search asks these first, because they cost less
than a run. Each is the function that the config itself calls, by its name, which
[config.md](config.md) has all of; a plan uses them for the others too.
"""

_ADVISED = """
## Advice

What guides of the field say against a layout. No search leaves a layout out because of it: times decide. A plan tells
what these rules have against its best layout, and the speed of the best layout that it found without; `penstock plan
--layout` tells the same of the layout that was asked for, and `--json` has the changes as well.
"""

_OTHERS = """
## The rules of others

Megatron-Core and Megatron Bridge have the largest collection of such rules, in documents and in code; ids and words
are ours, read in August 2026 from Megatron-Core 0.20. Many hold for any program that trains so, many are about their
options. *config*: the run is refused. *plan*: one of the rules above. *projection*: memory and times show it, case by
case. *environment*: a variable that is [set](environment.md). *doctor*: a question about a run that was measured; a
plan has no answer. *moot*: cannot happen here. *theirs*: about something that is not here.
"""
