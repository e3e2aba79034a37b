"""Tables of measurements, as documents show them between their markers.

Tables are data, in tables.toml:

    [dispatch-launches]
    caption = "{origin}. 8,192 tokens of a rank, from a graph, one thing changed."
    head = "shape | changed | dispatch: | combine:"
    at = "launches"
    row = "{shape} | {changed} | {dispatch_us:,.0f} us | {combine_us:,.0f} us"

`at` is the way to a part of the result's numbers. `row` is filled once for each entry of it, and sees the whole
`{numbers}` too; `rows` are written out. An entry whose `needs` is None gets the row `otherwise`. `names` are texts for
`{name}`, and say which entries are shown, in which order. A title that ends with a colon has its column on the right.

A field is a way through the data (keys and list positions, joined by dots), or two with ` / ` between them for their
quotient, and a format, which may begin with a factor: `{figures.step_seconds:1e3*.1f} ms`. The caption also has
`{origin}`. None is nothing, and a list is its items with spaces between them.

What this cannot say is a Jinja template, `text`. It sees `numbers`, `environment`, `commit` and `origin`; lines that
begin with % are statements, and a line that ends in a backslash goes on in the next. `call table(head)` makes a table
of its lines; filters are those of `FILTERS`.
"""

import string
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import jinja2

Result = dict[str, Any]

SPECS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def walk(value: Any, way: str) -> Any:
    """The part of a result that keys and list positions lead to, joined by dots. LookupError if there is none."""
    key, dot, rest = way.partition(".")
    while dot and isinstance(value, dict) and key not in value:  # a key may have dots of its own
        longer, dot, rest = rest.partition(".")
        key = f"{key}.{longer}"
    try:
        part = value[int(key) if isinstance(value, list) else key]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise LookupError(f"nothing at {key!r} in {value!r:.60}") from error
    return walk(part, rest) if rest else part


def shown(value: Any, spec: str) -> str:
    """A figure by a format such as `,.0f` or `1e3*.1f`. Raises LookupError if it does not go with the value."""
    factor, star, rest = spec.rpartition("*")
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, str):
        value = value.replace("|", "/")  # a bar would end the cell
    try:
        return format(value * float(factor), rest) if star else format(value, spec)
    except (TypeError, ValueError) as error:
        raise LookupError(f"{value!r:.50} has no format {spec!r}") from error


class _Template(string.Formatter):
    """Texts whose fields are ways through a result."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value, *divisors = (walk(kwargs, way) for way in field_name.split(" / "))
        return (value / divisors[0] if divisors else value), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return shown(value, format_spec)


def filled(text: str, data: Any) -> str:
    """A text with its fields."""
    return _Template().vformat(text, (), data)


def table(head: str, rows: Iterable[str]) -> str:
    """A Markdown table.

    Args:
        head: titles with bars between them; a colon at the end of one puts its column on the right.
        rows: cells with bars between them.
    """
    titles = head.split(" | ")
    rules = "|".join("---:" if title.endswith(":") else "---" for title in titles)
    lines = [f"| {line} |" for line in (" | ".join(title.removesuffix(":") for title in titles), *rows)]
    return "\n".join([lines[0], f"|{rules}|", *lines[1:]])


def origin(result: Result) -> str:
    """On what, with what and from which commit it was measured."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "cuda") if name in environment)
    count = environment.get("ranks") or environment.get("devices")
    where = f"{count} x" if count and count > 1 else "one"
    return f"Measured on {where} {environment['device']} ({versions}), commit `{result['commit']}`"


def one_gpu(result: Result) -> str:
    """Origin of a result whose benchmark used one GPU, however many the machine has."""
    environment = {name: value for name, value in result["environment"].items() if name not in ("ranks", "devices")}
    return origin(result | {"environment": environment}) + "."


def _each_shown(values: Iterable[Any], spec: str) -> list[str]:
    """Values by a format, or in the text of one: `{}:`."""
    return [spec.format(value) if "{}" in spec else shown(value, spec) for value in values]


def _code(value: Any) -> Any:
    return f"`{value}`" if isinstance(value, str) else [f"`{item}`" for item in value]


def _where(rows: Iterable[Result], key: str, value: object) -> list[Result]:
    return [row for row in rows if row.get(key) == value]


def _passing(cases: Iterable[Result], allowed: Result, *parts: str) -> int:
    """Cases within tolerances, in all of their parts if they have some; a figure that is missing is a failure."""
    rows = [[case[part] for part in parts] or [case] for case in cases]
    return sum(all(row.get(name, 1.0) <= allowed[name] for row in case for name in allowed) for case in rows)


def _largest(rows: list[Result], allowed: Result) -> str:
    return ", ".join(f"{name} {max(row.get(name, 1.0) for row in rows):.1e}" for name in allowed)


def _not_captured(rows: Iterable[Result], titles: Result) -> str:
    """A line below a table that names what no graph holds, so that its launches count too."""
    ways = sorted({titles.get(way, way) for row in rows for way in row.get("not_captured", {})})
    return f"\nLaunched from Python and not replayed by a graph: {', '.join(ways)}." if ways else ""


FILTERS: Mapping[str, Callable[..., Any]] = {
    "f": lambda value, spec="": shown(value, spec),
    "each": _each_shown,
    "code": _code,
    "median": lambda values: median(list(values)),
    "geometric_mean": geometric_mean,
    "over": lambda rows, name, other: [row[name] / row[other] for row in rows],
    "names": lambda dicts: list(dict.fromkeys(name for row in dicts for name in row)),
    "pairs": lambda rows, *keys: list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows)),
    "where": _where,
    "items_like": lambda table, pattern: [item for item in table.items() if fnmatchcase(item[0], pattern)],
    "column": lambda rows, key: [row.get(key) for row in rows],
    "without": lambda rows, key, value: [row for row in rows if row.get(key) != value],
    "without_commas": lambda texts: [text for text in texts if "," not in text],
    "each_pair": lambda pairs, spec: [spec.format(*pair) for pair in pairs],
    "seed_counts": lambda cases: {case["case"]: len(case.get("seeds", ["one"])) for case in cases},
    "passing": _passing,
    "largest": _largest,
    "not_captured": _not_captured,
    "in_layer": lambda weight: weight.removeprefix("blocks.").lstrip("0123456789").removeprefix("."),
}
_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined, line_statement_prefix="%", trim_blocks=True)
_JINJA.filters |= FILTERS


def _templated(spec: dict[str, Any], result: Result) -> str:
    """A table by its template. LookupError if the result does not have what it asks for."""

    def lines(head: str, caller: Callable[[], str]) -> str:
        return table(head, (line for line in _joined(caller()).split("\n") if line)) + "\n"

    facts = result | {"spec": spec, "table": lines}
    if "device" in result.get("environment", {}):
        facts |= {"origin": origin(result), "one_gpu": one_gpu(result)}
    try:
        return _joined(_JINJA.from_string(spec["text"]).render(facts)).strip("\n")
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
        raise LookupError(f"{error}") from error


def _joined(text: str) -> str:
    return text.replace("\\\n", "")


def specified(name: str, result: Result) -> str:
    """The table that tables.toml describes."""
    spec = SPECS.get(SPECS[name].get("like", ""), {}) | SPECS[name]
    if "text" in spec:
        return _templated(spec, result)
    part = walk(result["numbers"], spec["at"]) if "at" in spec else result["numbers"]
    rows = _each(spec, part, result["numbers"]) if "row" in spec else filled(spec["rows"], part).strip().splitlines()
    made = table(spec["head"], rows)
    return f"{filled(spec['caption'], result | {'origin': origin(result)})}\n\n{made}" if "caption" in spec else made


def _each(spec: dict[str, Any], part: Any, numbers: Any) -> Iterator[str]:
    entries = part if isinstance(part, dict) else dict(enumerate(part))
    names: dict[Any, str] = spec.get("names", dict.fromkeys(entries, "{name}"))
    for key, name in names.items():
        is_whole = "needs" not in spec or entries[key].get(spec["needs"]) is not None
        row = spec["row" if is_whole else "otherwise"].replace("{name}", name)
        yield filled(row, entries[key] | {"key": key, "numbers": numbers})


TABLES: dict[str, Callable[[Result], str]] = {name: partial(specified, name) for name in SPECS}
