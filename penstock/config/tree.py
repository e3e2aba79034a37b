"""Trees of values: overrides parsed, trees laid over one another, and the section that a tree describes.

A tree is nested tables of plain values, as TOML gives them. `settle` converts values to the types of the schema: lists
become tuples, a lone text becomes a list if a list is wanted, and the text "none" becomes None if a field may be none.
`build` judges the values, after all trees are merged, and turns pydantic's errors into field, what, got, allowed, fix.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.base.errors import ConfigError, asked, did_you_mean, nearest
from penstock.base.files import parse_toml
from penstock.config.schema import (
    KIND,
    NAME,
    Field,
    Problem,
    Section,
    alternative,
    as_toml,
    every_field,
    fields_of,
    fields_under,
    find,
    kind_of,
    refuse,
)
from penstock.config.versions import REMOVED, fields_of_other_name, new_path

Tree = dict[str, Any]
NONE = "none"  # None in files and overrides


def parse_overrides(root: type[Section], overrides: Sequence[str]) -> Tree:
    """The tree of a list of `a.b=c`; the later one of two for the same field wins.

    A value is written as in TOML, and a text that is no TOML value needs no quotes: `training.precision=bf16`. Raises a
    ConfigError if an override is not of the form `a.b=c`, or its value starts like TOML but is not.
    """
    tree: Tree = {}
    for override in overrides:
        path, equals, text = (part.strip() for part in override.partition("="))
        names = path.split(".")
        if not equals or not all(names):
            raise ConfigError(
                f"override {override!r} is not an assignment", allowed="a.b=c, such as training.steps=100"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python passes on bytes that are not UTF-8
            raise ConfigError(f"override {path} is not UTF-8 text", got=ascii(text))
        # Walk to the table of the last name; a value on the way, such as moe=none, gives way.
        *parents, last = names
        table = tree
        for name in parents:
            inner = table.get(name)
            if not isinstance(inner, dict):
                inner = table[name] = {}
            table = inner
        table[last] = _parse_value(path, text, takes_text=any(field.takes_text for field in find(root, path)))
    return settle(fields_of(root), tree)


def _parse_value(path: str, text: str, *, takes_text: bool) -> Any:
    """A TOML value, or the text itself. A field that takes text takes `2024` and `true` as texts too."""
    try:
        table = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(
                f"override {path}: {text} is not a TOML value: {error}", fix="mind the shell's quotes"
            ) from error
        return text
    value = table.pop("value")
    is_several = bool(table)  # `1`, a new line, `seed = 2` is no single value.
    return text if is_several or (takes_text and not isinstance(value, (str, list, dict))) else value


def settle(fields: Mapping[str, Field], tree: Mapping[str, Any], above: str = "") -> Tree:
    """A copy of a tree in the types of the schema; unknown keys stay, and `build` refuses them with a suggestion."""
    return {key: _settle_value(fields.get(key), value, f"{above}{key}") for key, value in tree.items()}


def _settle_value(field: Field | None, value: Any, path: str) -> Any:
    if field is None:
        return value
    _refuse_what_nothing_holds(value, path)
    if field.optional and value == NONE:
        return None
    if field.sections and isinstance(value, Mapping):
        fields = fields_under(field.sections)
        if field.named:
            return {
                name: settle(fields, section, f"{path}.{name}.") if isinstance(section, Mapping) else section
                for name, section in value.items()
            }
        return settle(fields, value, f"{path}.")
    if field.takes_list and isinstance(value, (str, int)):  # data.files=a.txt
        return (value,)
    return tuple(value) if isinstance(value, list) else value  # frozen sections hold tuples


def _refuse_what_nothing_holds(value: Any, path: str) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:  # of TOML, and of torch
        raise ConfigError(f"{path} is more than 64 bits can hold", got=value)
    texts = (value,) if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise ConfigError(f"{path} has a null character", got=ascii(value)[:_LONGEST_VALUE])


def paths_in(tree: Mapping[str, Any], above: str = "") -> frozenset[str]:
    """Full paths of all values in a tree, with `above` before each; an empty table is a value."""
    paths: set[str] = set()
    for key, value in tree.items():
        path = f"{above}{key}"
        paths |= paths_in(value, f"{path}.") if isinstance(value, Mapping) and value else {path}
    return frozenset(paths)


def merge(section: type[Section], base: Mapping[str, Any], overlay: Mapping[str, Any]) -> Tree:
    """`base` with the values of `overlay`, table by table; both are settled. Of another `kind` shared values stay."""
    fields = fields_of(section)
    return {**base, **{key: _merge_value(fields.get(key), base.get(key), value) for key, value in overlay.items()}}


def _merge_value(field: Field | None, below: Any, value: Any) -> Any:
    if field is None or not field.sections or not isinstance(value, Mapping) or not isinstance(below, Mapping):
        return value
    if field.named:
        inner = replace(field, named=False)
        return {**below, **{name: _merge_value(inner, below.get(name), part) for name, part in value.items()}}
    kind = value.get(KIND, below.get(KIND))
    section = alternative(field.sections, kind)
    if section is None:  # an unknown kind: the schema will refuse it and name the known ones
        return {**below, **value}
    if kind != below.get(KIND):
        # Fields of the old kind go; those that the overlay gives stay and are refused if unknown.
        below = {key: value for key, value in below.items() if key in fields_of(section) and key != KIND}
    return merge(section, below, value)


AnySection = TypeVar("AnySection", bound=Section)

_LONGEST_VALUE = 60  # characters of a value in a message
_RANGE_ERRORS = ("greater_than_equal", "less_than_equal", "finite_number")  # as pydantic names them


def build(root: type[AnySection], tree: Mapping[str, Any]) -> AnySection:
    """The section that a settled tree describes. Raises a ConfigError for unknown or missing keys and wrong values."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A misspelled key is often a missing one as well: report the misspelling first.
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


class _Location(NamedTuple):
    """Place of a fault in the schema."""

    path: str
    field: Field | None  # None for an unknown key
    owner: type[Section]  # the section that has or lacks the field
    wants_name: bool  # the path ends at sections by name, and no name is given


def _locate(root: type[Section], location: tuple[int | str, ...]) -> _Location:
    """Follow pydantic's location, which has a kind after a section with alternatives, and the index in a list."""
    names: list[str] = []
    field: Field | None = None
    wants_name = False
    owner = root
    sections: tuple[type[Section], ...] = (root,)
    # location: field, kind if there are alternatives, field, ..., index in a list.
    for part in location:
        if isinstance(part, int):
            break
        if wants_name:
            names.append(part)
            wants_name = False
            continue
        if len(sections) > 1:  # the part is a kind, which is no name of the path
            sections = tuple(section for section in sections if kind_of(section) == part)
            continue
        (owner,) = sections
        names.append(part)
        field = fields_of(owner).get(part)
        sections = () if field is None else field.sections
        wants_name = field is not None and field.named
    return _Location(".".join(names), field, owner, wants_name)


def _unknown_key(root: type[Section], path: str, owner: type[Section]) -> Problem:
    """Suggest its new name, another kind of the section, our name for it, or a similar name."""
    if renamed := new_path(path):
        return Problem(path, f"is {renamed} now", fix="rename the key")
    if instead := REMOVED.get(path):
        return Problem(path, "was removed", fix=instead)
    parent, _, name = path.rpartition(".")
    siblings = fields_of(owner)
    what = "is an unknown key"
    if elsewhere := find(root, path):  # it is a field of another kind of this section
        kinds = " or ".join(str(kind_of(field.owner)) for field in elsewhere)
        return Problem(path, what, fix=f"leave it out: it belongs to {parent}.{KIND} = {kinds}")
    if ours := fields_of_other_name(path):
        return Problem(path, what, fix=f"it is {' and '.join(ours)} here")
    if near := nearest(name, siblings):
        return Problem(path, what, fix=asked(f"{parent}.{sibling}".lstrip(".") for sibling in near))
    if namesakes := {field.path: None for field in every_field(root) if field.path.rpartition(".")[2] == name}:
        return Problem(path, what, fix=asked(namesakes))
    return Problem(path, what, allowed=", ".join(siblings))


def _unknown_value(path: str, value: object, allowed: Iterable[str | int]) -> Problem:
    choices = tuple(map(str, allowed))
    fix = REMOVED.get(f"{path}={value}") or did_you_mean(value, choices)
    return Problem(path, "has an unknown value", _shown(value), ", ".join(choices), fix)


def _kinds(field: Field) -> list[str]:
    return [str(kind_of(section)) for section in field.sections]


def _shown(value: object) -> str:
    text = as_toml(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
