"""Two runs side by side: the fields in which they differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.run import Run
from penstock.config.schema import as_toml, fields_of
from penstock.config.section import Section


@dataclass(frozen=True)
class Difference:
    """A field whose value is not the same.

    Attributes:
        field: full path.
        left: its value in the first run as in TOML; None if that run has no such field.
        right: the same of the second run.
    """

    field: str
    left: str | None
    right: str | None


def leaves(section: Section, prefix: str = "") -> dict[str, Any]:
    """Every value by its full path, in the order of the schema; a section that is none is a value too."""
    values: dict[str, Any] = {}
    for name, value in section:
        path = f"{prefix}{name}"
        if isinstance(value, Section):
            values |= leaves(value, f"{path}.")
        elif fields_of(type(section))[name].named:
            for one, inner in value.items():
                values |= leaves(inner, f"{path}.{one}.")
        else:
            values[path] = value
    return values


def differences(left: Run, right: Run) -> list[Difference]:
    """The fields in which two runs differ, in the order of the schema."""
    lefts, rights = leaves(left), leaves(right)
    return [
        Difference(field, _text(lefts, field), _text(rights, field))
        for field in {**lefts, **rights}
        if field not in lefts or field not in rights or lefts[field] != rights[field]
    ]


def _text(values: Mapping[str, Any], field: str) -> str | None:
    return as_toml(values[field]) if field in values else None
