"""Tables of measurements, as documents show them between their markers.

Most tables are data, in tables.toml:

    [dispatch-launches]
    caption = "{origin}. 8,192 tokens of a rank, from a graph, one thing changed."
    head = "shape | changed | dispatch: | combine:"
    at = "launches"
    row = "{shape} | {changed} | {dispatch_us:,.0f} us | {combine_us:,.0f} us"

`at` is the way to a part of the result's numbers. `row` is filled once for each entry of it; `rows` are written out.
`names` gives entries a text `{name}`, and says which are shown, in which order. A title that ends with a colon has its
column on the right.

A field is a way through the data (keys and list positions, joined by dots) and a format, which may begin with a factor:
`{figures.step_seconds:1e3*.1f} ms`. The caption also has `{origin}`. None is shown as nothing.
"""

import string
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
    """A figure by a format such as `,.0f` or `1e3*.1f`; nothing for None. Raises LookupError if it is no number."""
    factor, star, rest = spec.rpartition("*")
    if value is None:
        return ""
    try:
        return format(value * float(factor), rest) if star else format(value, spec)
    except (TypeError, ValueError) as error:
        raise LookupError(f"{value!r:.50} has no format {spec!r}") from error


class _Template(string.Formatter):
    """Texts whose fields are ways through a result."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return walk(kwargs, field_name), field_name

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
    where = f"{count} x" if count else "one"
    return f"Measured on {where} {environment['device']} ({versions}), commit `{result['commit']}`"


def specified(name: str, result: Result) -> str:
    """The table that tables.toml describes."""
    spec = SPECS[name]
    part = walk(result["numbers"], spec["at"]) if "at" in spec else result["numbers"]
    rows = _each(spec, part) if "row" in spec else filled(spec["rows"], part).strip().splitlines()
    made = table(spec["head"], rows)
    return f"{filled(spec['caption'], result | {'origin': origin(result)})}\n\n{made}" if "caption" in spec else made


def _each(spec: dict[str, Any], part: Any) -> Iterator[str]:
    entries = part if isinstance(part, dict) else dict(enumerate(part))
    names: dict[Any, str] = spec.get("names", {key: key for key in entries})
    for key, name in names.items():
        yield filled(spec["row"], entries[key] | {"name": name})


TABLES: dict[str, Callable[[Result], str]] = {name: partial(specified, name) for name in SPECS}
