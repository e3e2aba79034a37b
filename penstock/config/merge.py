"""Trees of values, as read from a file or from overrides, laid over one another.

A tree is what TOML gives: nested tables of plain values. `settle` turns what TOML cannot say, or says otherwise, into
what the schema takes: lists become tuples, a lone text becomes a list where one is wanted, and the text "none" becomes
None where a field may be none. Nothing here judges values: that is the schema's work, after all has been laid together.
"""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.files import parse_toml
from penstock.config.schema import KIND, Field, alternative, fields_of, fields_under, find
from penstock.config.section import Section

Tree = dict[str, Any]

NONE = "none"
"""How None is written in files and overrides."""


def parse_overrides(root: type[Section], overrides: Sequence[str]) -> Tree:
    """The tree that a list of `a.b=c` describes. Where two speak of the same field, the later one wins.

    A value is written as in TOML, and a text that is no TOML value needs no quotes: `training.precision=bf16`.

    Raises:
        ConfigError: an override is not of the form `a.b=c`, or its value starts like TOML but is not.
    """
    tree: Tree = {}
    for override in overrides:
        path, equals, text = (part.strip() for part in override.partition("="))
        names = path.split(".")
        if not equals or not all(names):
            raise ConfigError(
                f"override {override!r} is not an assignment", allowed="a.b=c, such as training.steps=100"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # How Python passes on bytes that are not UTF-8.
            raise ConfigError(f"override {path} is not UTF-8 text", got=ascii(text))
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
    """A TOML value, or the text itself. A field that takes text takes `2024` and `true` for texts too."""
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


def settle(fields: Mapping[str, Field], tree: Mapping[str, Any]) -> Tree:
    """A copy of a tree in the types that the schema takes; unknown keys stay, to be refused later with a suggestion.

    Args:
        fields: fields that may stand at the top of the tree, by name.
        tree: as TOML gives it.
    """
    return {key: _settle_value(fields.get(key), value) for key, value in tree.items()}


def _settle_value(field: Field | None, value: Any) -> Any:
    if field is None:
        return value
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{field.path} is more than 64 bits can hold", got=value)
    if field.optional and value == NONE:
        return None
    if field.sections and isinstance(value, Mapping):
        fields = fields_under(field.sections)
        if field.named:
            return {name: settle(fields, one) if isinstance(one, Mapping) else one for name, one in value.items()}
        return settle(fields, value)
    if field.takes_list and isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def paths_in(tree: Mapping[str, Any], above: str = "") -> frozenset[str]:
    """Full paths of all values in a tree; an empty table is a value.

    Args:
        tree: of tables.
        above: path of the table itself, with a dot at its end; empty for the whole tree.
    """
    found: set[str] = set()
    for key, value in tree.items():
        path = f"{above}{key}"
        found |= paths_in(value, f"{path}.") if isinstance(value, Mapping) and value else {path}
    return frozenset(found)


def merge(section: type[Section], base: Mapping[str, Any], overlay: Mapping[str, Any]) -> Tree:
    """`base` with the values of `overlay`, table by table.

    Where the overlay gives a section another `kind`, the base keeps what the new kind knows as well and loses the rest.

    Args:
        section: whose fields the trees hold.
        base: a settled tree.
        overlay: a settled tree; its values win.
    """
    merged = dict(base)
    for key, value in overlay.items():
        below = base.get(key)
        field = fields_of(section).get(key)
        if field is not None and field.sections and isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = _merge_section(field, below, value)
        else:
            merged[key] = value
    return merged


def _merge_section(field: Field, base: Mapping[str, Any], overlay: Mapping[str, Any]) -> Tree:
    if field.named:
        return dict(base) | {name: _merge_named(field, base.get(name), one) for name, one in overlay.items()}
    kind = overlay.get(KIND, base.get(KIND))
    section = alternative(field.sections, kind)
    if section is None:  # An unknown kind: the schema will refuse it and name the known ones.
        return {**base, **overlay}
    if kind != base.get(KIND):
        base = {key: value for key, value in base.items() if key in fields_of(section) and key != KIND}
    return merge(section, base, overlay)


def _merge_named(field: Field, below: Any, value: Any) -> Any:
    both = isinstance(below, Mapping) and isinstance(value, Mapping)
    return merge(field.sections[0], below, value) if both else value
