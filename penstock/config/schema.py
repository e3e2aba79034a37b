"""Sections of a configuration, and the schema read as data: the fields of a section and their allowed values.

A section is frozen and strict: no field changes after loading, no unknown key passes, no type is guessed, no number is
infinite or NaN. `knob` is the one way to declare a field. Overrides, error messages, `penstock config explain` and the
reference all read `Field`. Sections use exactly these types: bool, int, float, str, `Literal` of texts or numbers,
`tuple[str, ...]`, `tuple[int, ...]`, a section, alternative sections that differ in their field `kind`,
`dict[str, Section]` (any number of sections under names of the user's choice), and any of these or None.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from penstock.base.errors import ConfigError

_LINE = re.compile(
    r"(?P<field>\S+) (?P<what>.*?)(; got (?P<got>.*?))?(; allowed: (?P<allowed>.*?))?(; fix: (?P<fix>.*))?", re.DOTALL
)
_MOST_OTHERS = 4  # fields of further problems that a message names
_MOST_DIVISORS = 12  # that a message lists


@dataclass(frozen=True)
class Problem:
    """One mistake, and how to mend it."""

    field: str  # path of the field that most likely changes
    what: str  # what is wrong with it; reads on after the path
    got: str | None = None  # the offending value, if `what` does not show it
    allowed: str | None = None
    fix: str | None = None

    @classmethod
    def from_line(cls, line: str) -> "Problem":
        """The problem of a line as users read it: `FIELD WHAT`, and perhaps `; got GOT; allowed: ALLOWED; fix: FIX`."""
        parts = _LINE.fullmatch(line)  # lazy groups: the first `; got ` ends WHAT
        assert parts is not None, f"{line!r} names a field and a mistake"
        return cls(**parts.groupdict())


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a ConfigError, with the first problem in full and the fields of some others, if there is any."""
    if not problems:
        return
    first, *others = problems
    fields = [problem.field for problem in others[:_MOST_OTHERS]]
    fields += ["..."] if len(others) > _MOST_OTHERS else []
    also = f" (also wrong: {', '.join(fields)})" if fields else ""
    raise ConfigError(f"{first.field} {first.what}{also}", got=first.got, allowed=first.allowed, fix=first.fix)


def must_divide(field: str, size: int, whole: str, count: int) -> Problem | None:
    """The size in a field divides the `count` in the field `whole`."""
    if count % size == 0:
        return None
    return Problem(field, f"must divide {whole} ({count})", f"{size}", divisors(count))


def at_most(field: str, size: int, limit: str, count: int) -> Problem | None:
    """The size in a field is at most the `count` in the field `limit`."""
    if size <= count:
        return None
    return Problem(field, f"is more than {limit}", f"{size}", f"1 to {count}")


def multiples_near(number: int, divisor: int) -> str:
    """The multiples of a divisor below and above a number, in words."""
    below = number - number % divisor
    return " or ".join(f"{multiple}" for multiple in (below, below + divisor) if multiple)


@cache
def divisors(number: int) -> str:
    """The divisors of a number in words, or a few of them if they are many."""
    texts = [f"{divisor}" for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(texts if len(texts) <= _MOST_DIVISORS else [*texts[: _MOST_DIVISORS - 1], "..."])


class Section(BaseModel):
    """One part of a run's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def knob(default: Any = ..., *, doc: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """Declare a field of a section: required if `default` is `...`, with a number from `low` to `high`.

    `doc` is one or two sentences for the reference; `unit` is empty for names and switches.
    """
    return pydantic.Field(default, description=doc, ge=low, le=high, json_schema_extra={"unit": unit})


KIND = "kind"  # the field that distinguishes alternatives of a section
NAME = "NAME"  # placeholder in a path for a name of the user's choice

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple[str, ...]: "list of texts",
    tuple[int, ...]: "list of whole numbers",
}
_SECTION_WORDS = {False: "section", True: "sections by name"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of one section."""

    path: str  # its name; the full path, such as `model.moe.top_k`, if it comes from `every_field` or `find`
    owner: type[Section]
    doc: str
    unit: str
    type_text: str  # in words, without the range
    low: float | None
    high: float | None
    choices: tuple[str | int, ...]  # the only allowed values, or empty
    sections: tuple[type[Section], ...]  # the section that it holds, or the alternatives; empty for a value
    named: bool  # it holds any number of such sections, by name
    optional: bool  # it may be none
    required: bool
    default: Any

    @property
    def takes_text(self) -> bool:
        """Whether its value is one text."""
        if self.choices:
            return all(isinstance(choice, str) for choice in self.choices)
        return self.type_text == _WORDS[str]

    @property
    def takes_list(self) -> bool:
        """Whether its value is a list."""
        return self.type_text in (_WORDS[tuple[str, ...]], _WORDS[tuple[int, ...]])

    @property
    def range_text(self) -> str:
        """Its bounds, without the unit: `>= 1`, `0 to 1`, or empty."""
        if self.low is not None and self.high is not None:
            return f"{self.low:.12g} to {self.high:.12g}"  # 12 digits write 2**32 in full
        if self.low is not None:
            return f">= {self.low:.12g}"
        return "" if self.high is None else f"<= {self.high:.12g}"

    @property
    def allowed_text(self) -> str:
        """Type, range and unit: `whole number >= 1 (steps)`, or `softmax, sigmoid`."""
        text = f"{self.type_text} {self.range_text}".rstrip() + (f" ({self.unit})" if self.unit else "")
        return f"{text}, or none" if self.optional else text


@cache
def fields_of(section: type[Section]) -> Mapping[str, Field]:
    """Fields of one section by name, in the order of declaration."""
    return MappingProxyType({name: _field(section, name, info) for name, info in section.model_fields.items()})


def _field(owner: type[Section], name: str, info: FieldInfo) -> Field:
    types = _alternatives(info.annotation)
    named = any(get_origin(type_) is dict for type_ in types)
    if named:  # dict[str, Section]: the alternatives are those of its values
        types = tuple(get_args(type_)[1] for type_ in types)
    sections = tuple(type_ for type_ in types if isinstance(type_, type) and issubclass(type_, Section))
    values = [type_ for type_ in types if type_ not in sections and type_ is not NoneType]
    choices = get_args(values[0]) if values and get_origin(values[0]) is Literal else ()
    extra = info.json_schema_extra
    assert isinstance(extra, dict), f"{owner.__name__}.{name} is declared by knob"
    low, high = _limits(info)
    return Field(
        path=name,
        owner=owner,
        doc=info.description or "",
        unit=str(extra["unit"]),
        type_text=", ".join(map(str, choices)) or (_SECTION_WORDS[named] if sections else _WORDS[values[0]]),
        low=low,
        high=high,
        choices=choices,
        sections=sections,
        named=named,
        optional=NoneType in types,
        # A kind decides what its section is, so it must be written, although in Python its only value is its default.
        required=info.is_required() or name == KIND,
        default=None if info.is_required() else info.default,
    )


def _limits(info: FieldInfo) -> tuple[float | None, float | None]:
    low = next((float(bound.ge) for bound in info.metadata if isinstance(bound, Ge)), None)  # type: ignore[arg-type]
    high = next((float(bound.le) for bound in info.metadata if isinstance(bound, Le)), None)  # type: ignore[arg-type]
    return low, high


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, also if nested or in `Annotated`; of any other type, the type itself."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for argument in get_args(annotation) for inner in _alternatives(argument))
    return (annotation,)


def kind_of(section: type[Section]) -> str | None:
    """The value of `kind` of this alternative, or None for a section without alternatives."""
    field = fields_of(section).get(KIND)
    return None if field is None else str(field.default)


def alternative(sections: Iterable[type[Section]], kind: object) -> type[Section] | None:
    """The alternative that `kind` names, or the only one; None for an unknown kind."""
    sections = tuple(sections)
    if len(sections) == 1:
        return sections[0]
    return next((section for section in sections if kind_of(section) == kind), None)


def fields_under(sections: Iterable[type[Section]]) -> dict[str, Field]:
    """Fields of all alternatives by name; of equal names the first alternative's."""
    return {name: field for section in reversed(tuple(sections)) for name, field in fields_of(section).items()}


@cache
def every_field(root: type[Section], prefix: str = "") -> tuple[Field, ...]:
    """Every field below `root`, a section before its fields; a path appears once for each alternative that has it."""
    fields = []
    for name, field in fields_of(root).items():
        path = f"{prefix}{name}"
        fields.append(replace(field, path=path))
        for section in field.sections:
            fields += every_field(section, f"{path}.{NAME}." if field.named else f"{path}.")
    return tuple(fields)


def find(root: type[Section], path: str) -> tuple[Field, ...]:
    """Fields at a full path: none if it is unknown, several if alternatives share the name."""
    names = path.split(".")
    return tuple(
        field
        for places, field in _by_depth(root).get(len(names), ())
        if all(part in (name, NAME) for name, part in zip(names, places, strict=True))
    )


@cache
def _by_depth(root: type[Section]) -> Mapping[int, list[tuple[list[str], Field]]]:
    """Every field with the names of its path, by their number."""
    fields: dict[int, list[tuple[list[str], Field]]] = {}
    for field in every_field(root):
        places = field.path.split(".")
        fields.setdefault(len(places), []).append((places, field))
    return fields


def as_toml(value: object) -> str:
    """A value as in a file or an override; None is `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {as_toml(item)}' for key, item in value.items())}}}"
    return str(value)


@dataclass(frozen=True)
class Difference:
    """A field with different values in two runs, as in TOML; None in a run that has no such field."""

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
            for key, inner in value.items():
                values |= leaves(inner, f"{path}.{key}.")
        else:
            values[path] = value
    return values


def differences(left: Section, right: Section) -> list[Difference]:
    """The fields in which two runs differ, in the order of the schema."""
    lefts, rights = leaves(left), leaves(right)
    texts = [{field: as_toml(value) for field, value in values.items()} for values in (lefts, rights)]
    return [
        Difference(field, texts[0].get(field), texts[1].get(field))
        for field in {**lefts, **rights}
        if field not in lefts or field not in rights or lefts[field] != rights[field]
    ]
