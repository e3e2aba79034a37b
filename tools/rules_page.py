"""docs/rules.md: what a planner and a doctor know beforehand, and what became of the rules of others."""

from penstock.config.rules import RULES as CONFIG_RULES
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.book import LEGAL, RULES, rule_name
from penstock.plan.rules.order import ORDER
from penstock.plan.rules.prune import PRUNE
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
            _PRUNED,
            *table(COLUMNS, _rows(PRUNE)),
            _ORDERED,
            *table(("", *COLUMNS), [(f"{place}", *row) for place, row in enumerate(_rows(ORDER), start=1)]),
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

A plan projects what may be worth it and says by name why it leaves out the rest. A rule looks at plain numbers
([rule.py](../penstock/plan/rules/rule.py)): sizes of a layout, the question, facts of the model. What it has
against them is one line with the numbers of the case. There are four kinds.

## Legal

The run's own config refuses it when the run is loaded or started. A search asks these first, because they cost less
than a run. Each is the function that the config itself calls, by its name, which
[config.md](config.md) has all of; a plan uses them for the others too.
"""

_PRUNED = """
## Pruned

Legal, and not projected by a search, because another layout does the same with less or is the same. A layout that is
asked for by name is projected nevertheless.
"""

_ORDERED = """
## Tried last

Layouts are walked through in this order. Each rule gives a layout a rank, 0 if it has nothing to say, and ranks are
compared from the first rule to the last. Behind the first ranks at which anything fits, no layout is projected any
more: the first rule by which it differs refuses it. So what a rule says is: only if nothing fits without.
"""

_ADVISED = """
## Advice

The layout stays, and times decide. `penstock plan --layout` prints what these rules say of the layout that was asked
for, and what those of the order above have against it; `--json` has the changes as well.
"""

_OTHERS = """
## The rules of others

Megatron-Core and Megatron Bridge have the largest collection of such rules, in documents and in code; ids and words
are ours, read in August 2026 from Megatron-Core 0.20. Many hold for any program that trains so, many are about their
options. *config*: the run is refused. *plan*: one of the rules above. *projection*: memory and times show it, case by
case. *environment*: a variable that is [set](environment.md). *doctor*: a question about a run that was measured; a
plan has no answer. *moot*: cannot happen here. *theirs*: about something that is not here.
"""
