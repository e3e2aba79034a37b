"""Pages of the documents that say what the code says: prose of tools/pages/NAME.md.in with tables of the code in it."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.base.shapes import LEGEND
from penstock.base.spans import Span
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.parallel.launch.environment import READ
from penstock.parallel.launch.environment import RULES as VARIABLES
from penstock.plan.rules import ADVICE, LEGAL, RULES, rule_name
from penstock.train.goodput import KINDS
from penstock.train.metrics import FIELDS, LAYER_FIELDS, PHASE_FIELDS, MetricField
from penstock.train.sinks import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER

ROOT = Path(__file__).resolve().parents[1]
MEGATRON_RULES = ROOT / "tools/megatron_rules.toml"


def page(name: str, **parts: str | Iterable[str]) -> str:
    """The prose of a page with its parts, each a text or lines, where their names stand."""
    text = (ROOT / f"tools/pages/{name}.md.in").read_text(encoding="utf-8")
    for part, lines in parts.items():
        text = text.replace(f"<!--{part}-->", lines if isinstance(lines, str) else "\n".join(lines))
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def glossary() -> str:
    """docs/glossary.md: one word for one thing."""
    letters = [f"| `{letter}` | {meaning} |" for letter, meaning in LEGEND.items()]
    spans = [f"{number}. `{span.value}`" for number, span in enumerate(Span, start=1)]
    return page("glossary", letters=letters, spans=spans)


def decisions() -> str:
    """docs/decisions/README.md: the list of decisions, by the first line of each page."""
    titles = {
        path.name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(": ")
        for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    }
    return page("decisions", decisions=(f"| [{title[0]}]({name}) | {title[2]} |" for name, title in titles.items()))


def environment_page() -> str:
    """docs/environment.md, from the tables of variables in penstock/parallel/launch/environment.py."""
    rules = [
        f"| `{rule.name}` | {rule.shown or f'`{rule.value}`'} | {rule.when} | {rule.why} | {rule.source} |"
        for rule in VARIABLES
    ]
    also = [
        f"- `{rule.name}` is not set if the shell has set {' or '.join(f'`{name}`' for name in rule.also)}."
        for rule in VARIABLES
        if rule.also
    ]
    read = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |" for names, meaning in READ.items()
    ]
    return page("environment", rules=[*rules, "", *also], read=read)


def metrics_page() -> str:
    """docs/metrics.md: every metric of a run: its unit, its meaning, and its name at the Prometheus endpoint."""
    phases = {str(phase): MetricField("s", doc) for phase, doc in PHASE_FIELDS.items()}
    sections = {
        "## Fields of a line": _metrics(FIELDS, EXPORTED),
        "## `layers`": _metrics(LAYER_FIELDS, EXPORTED_OF_LAYER),
        "## `phase_seconds`": _metrics(phases),
        "## `wall_seconds`": _metrics({kind: MetricField("s", doc) for kind, doc in KINDS.items()}),
        "## Only at the Prometheus endpoint": _metrics(ENDPOINT_FIELDS),
    }
    return page("metrics", fields="\n\n".join(f"{title}\n\n{fields}" for title, fields in sections.items()))


def _metrics(fields: Mapping[str, MetricField], exported: Mapping[str, str] | None = None) -> str:
    """Rows of Markdown, with the endpoint's names in a last column if there are any."""
    rows = [f"| `{name}` | {field.unit} | {field.doc} |" for name, field in fields.items()]
    head, line = "| field | unit | meaning |", "|---|---|---|"
    if exported is not None:
        names = (exported.get(name) for name in fields)
        rows = [f"{row} {'' if name is None else f'`{name}`'} |" for row, name in zip(rows, names, strict=True)]
        head, line = f"{head} Prometheus |", f"{line}---|"
    return "\n".join((head, line, *rows))


def rules_page() -> str:
    """docs/rules.md: what a planner and a doctor know beforehand, and what became of the rules of others."""
    legal = [(f"`{rule.name}`", _cell(rule.doc), _cell(rule.source)) for rule in LEGAL]
    advice = [
        (f"`{rule.name}`", _cell(rule.doc), " ".join(f"`{change}`" for change in rule.fix), _cell(rule.source))
        for rule in ADVICE
    ]
    others = [line for topic, entries in rules_of_others().items() for line in _topic(topic, entries)]
    return page(
        "rules",
        legal=table(("name", "rule", "from"), legal),
        advice=table(("name", "rule", "change", "from"), advice),
        others=others,
    )


def rules_of_others() -> dict[str, dict[str, Any]]:
    """Rules of Megatron-Core and Megatron Bridge by topic and name: tools/megatron_rules.toml says what they hold."""
    return tomllib.loads(MEGATRON_RULES.read_text(encoding="utf-8"))


def _topic(topic: str, entries: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, entry in entries.items():
        rules = ", ".join(f"`{rule}`" for rule in entry.get("rules", ()))
        reasons = "; ".join(part for part in (rules, entry.get("why", "")) if part)
        rows.append((name, _cell(entry["says"]), entry["verdict"], _cell(reasons)))
    return [f"### {topic}", "", *table(("id", "says", "here", "by"), rows), ""]


def known_names() -> set[str]:
    """Every name that an entry may give: rules of plans, and of the config."""
    return {rule.name for rule in RULES} | {rule_name(rule) for rule in CONFIG_RULES}


def _cell(text: str) -> str:
    """Text that ends no cell."""
    return text.replace("|", "\\|")
