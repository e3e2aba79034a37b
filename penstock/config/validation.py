"""What pydantic found wrong, in this project's words: field, what, got, allowed, and the name that was likely meant."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.base.errors import asked, did_you_mean, nearest
from penstock.config.problem import Problem, refuse
from penstock.config.schema import (
    KIND,
    NAME,
    Field,
    as_toml,
    every_field,
    fields_of,
    fields_under,
    find,
    kind_of,
)
from penstock.config.section import Section
from penstock.config.versions import RENAMED_VALUES, new_path

AnySection = TypeVar("AnySection", bound=Section)

_LONGEST_VALUE = 60
_RANGE_ERRORS = ("greater_than_equal", "less_than_equal", "finite_number")


def build(root: type[AnySection], tree: Mapping[str, Any]) -> AnySection:
    """The section that a settled tree describes.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of the wrong type or out of range.
    """
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A misspelled key is often a missing one as well: tell the misspelling first.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    refuse([_problem(root, detail) for detail in details])
    raise AssertionError("pydantic refused the tree and named no fault")


def _problem(root: type[Section], detail: ErrorDetails) -> Problem:
    path, field, owner, wants_name = _locate(root, detail["loc"])
    fault, value = detail["type"], detail["input"]
    if field is None:
        return _unknown_key(root, path, owner)
    if fault == "missing":
        fix = 'write its fields, or start the file with preset = "debug"' if field.sections else None
        return Problem(path, "is missing", allowed=field.allowed_text, fix=fix)
    if fault == "union_tag_not_found":
        return Problem(f"{path}.{KIND}", "is missing", allowed=", ".join(_kinds(field)))
    if fault == "union_tag_invalid":
        return _unknown_value(f"{path}.{KIND}", value[KIND], _kinds(field))
    if field.choices:
        return _unknown_value(path, value, field.choices)
    if field.sections:
        inside = f"{path}.{NAME}" if wants_name else path
        examples = ", ".join(f"{inside}.{name}" for name in list(fields_under(field.sections))[:3])
        allowed = "its fields, or none" if field.optional else "its fields"
        return Problem(path, "is a section, not a value", _shown(value), allowed, fix=f"set {examples}, ...")
    what = "is out of range" if fault in _RANGE_ERRORS else "has the wrong type"
    return Problem(path, what, _shown(value), field.allowed_text)


class _Place(NamedTuple):
    """Where a fault is: the path, its field (None for an unknown key), and the section that has or lacks the field.

    After the path of sections by name, `wants_name` says that none of them is named.
    """

    path: str
    field: Field | None
    owner: type[Section]
    wants_name: bool


def _locate(root: type[Section], location: tuple[int | str, ...]) -> _Place:
    """Follow pydantic's location, which names a kind after a section with alternatives, and the index in a list."""
    names: list[str] = []
    field: Field | None = None
    wants_name = False
    owner = root
    sections: tuple[type[Section], ...] = (root,)
    for part in location:
        if isinstance(part, int):
            break
        if wants_name:
            names.append(part)
            wants_name = False
            continue
        if len(sections) > 1:
            sections = tuple(section for section in sections if kind_of(section) == part)
            continue
        (owner,) = sections
        names.append(part)
        field = fields_of(owner).get(part)
        sections = () if field is None else field.sections
        wants_name = field is not None and field.named
    return _Place(".".join(names), field, owner, wants_name)


def _unknown_key(root: type[Section], path: str, owner: type[Section]) -> Problem:
    """Suggest the key's new name, another kind of the section, a similar name beside it, or the same name elsewhere."""
    if renamed := new_path(path):
        return Problem(path, f"is {renamed} now", fix="rename the key")
    parent, _, name = path.rpartition(".")
    siblings = fields_of(owner)
    what = "is an unknown key"
    if elsewhere := find(root, path):
        kinds = " or ".join(str(kind_of(field.owner)) for field in elsewhere)
        return Problem(path, what, fix=f"leave it out: it belongs to {parent}.{KIND} = {kinds}")
    if near := nearest(name, siblings):
        return Problem(path, what, fix=asked(f"{parent}.{one}".lstrip(".") for one in near))
    if namesakes := {field.path: None for field in every_field(root) if field.path.rpartition(".")[2] == name}:
        return Problem(path, what, fix=asked(namesakes))
    return Problem(path, what, allowed=", ".join(siblings))


def _unknown_value(path: str, value: object, choices: Iterable[str]) -> Problem:
    choices = tuple(choices)
    renamed = RENAMED_VALUES.get(path, {}).get(f"{value}")
    fix = f"write {renamed}, as {value} is called now" if renamed else did_you_mean(value, choices)
    return Problem(path, "has an unknown value", _shown(value), ", ".join(choices), fix)


def _kinds(field: Field) -> list[str]:
    return [str(kind_of(section)) for section in field.sections]


def _shown(value: object) -> str:
    text = as_toml(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
