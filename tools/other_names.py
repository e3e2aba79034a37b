"""penstock/config/other_names.json: names of other trainers for our fields, from the tables of docs/coming-from.md.

In a row of a table, the last cell has our fields and the others have the names of other programs, as code. As many
names as fields correspond in their order; otherwise each name stands for all fields of the row.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.config.run import Run
from penstock.config.schema import every_field

PAGE = Path("docs/coming-from.md")

_CODE = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"(--[a-z][a-z0-9-]+|[a-z][a-z0-9_.]+)(?: |=|$)")


def other_names_json() -> str:
    """The file: by name, the paths of fields."""
    names: dict[str, list[str]] = {}
    for name, fields in _pairs(PAGE.read_text(encoding="utf-8")):
        names.setdefault(name, fields)
    return json.dumps(dict(sorted(names.items())), indent=1) + "\n"


def _pairs(text: str) -> Iterator[tuple[str, list[str]]]:
    paths = {field.path for field in every_field(Run)}
    for row in re.findall(r"^\|(.+)\|$", text, re.M):
        *others, own = re.split(r"(?<!\\)\|", row)[1:]
        fields = list(_fields(own, paths))
        for cell in others if fields else ():
            names = [match[1] for match in map(_NAME.match, _CODE.findall(cell)) if match is not None]
            names = [name for name in names if name not in paths and not name.endswith(".py")]
            for number, name in enumerate(names):
                yield name, [fields[number]] if len(names) == len(fields) else fields


def _fields(cell: str, paths: set[str]) -> Iterator[str]:
    """Fields that a cell names; a name alone is beside the field before it."""
    section = ""
    for code in _CODE.findall(cell):
        name = re.split(r"[ =]", code)[0]
        for path in (name, f"{section}.{name}"):
            if path in paths:
                section = path.rpartition(".")[0]
                yield path
                break
