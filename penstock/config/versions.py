"""Versions of configuration files: what a field was called before, and what a file of then must say now.

A file says `version = 1` at its top; one that does not is of version 1. When a field is renamed, moved or removed,
`VERSION` grows by one and `CHANGES` says how. Two kinds of files are older than the program that reads them:

    a file that a person wrote   is refused with the exact line to write instead: only its author knows what was meant
    config.toml of a run         was written whole by us, so it is brought up to date as it is read, and the run goes on

Fields that are new need no version: they have defaults. A removed field that had its default in an old run is left out;
one that had another value cannot be, and is refused. Nothing has changed so far: `CHANGES` is empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.schema import as_toml

VERSION = 1
"""Of the files that are written now."""

VERSION_KEY = "version"

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A field that older files have otherwise.

    Attributes:
        since: the version in which it became so.
        old: full path that the field, or the section, had.
        new: path that it has since; the same if only values are called otherwise; empty if it is gone.
        values: what values are called since, by what they were called.
        default: of a field that is gone: what it was where nobody set it.
        instead: of a field that is gone: what to do about it.
    """

    since: int
    old: str
    new: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    default: Any = None
    instead: str = ""


CHANGES: tuple[Change, ...] = ()
"""In the order of versions."""


@dataclass(frozen=True)
class _Found:
    """A value that a file has under an old path.

    Attributes:
        change: the first that concerns it.
        path: that it has now; empty if the field is gone.
        value: that it has now.
        last: the change that took the field away, or the first.
    """

    change: Change
    path: str
    value: Any
    last: Change


def pop_version(table: Tree, source: str) -> int:
    """Take the version out of a file's table.

    Args:
        table: of a whole file; loses the key.
        source: name of the file.

    Raises:
        ConfigError: it is no version, or one that only a later Penstock knows.
    """
    version = table.pop(VERSION_KEY, 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(f"{source}: {VERSION_KEY} is no version", got=as_toml(version), allowed=f"1 to {VERSION}")
    if version > VERSION:
        raise ConfigError(
            f"{source}: the file is of a later version than this Penstock",
            got=f"{VERSION_KEY} = {version}",
            allowed=f"1 to {VERSION}",
            fix="update Penstock",
        )
    return version


def refuse_old(
    tree: Mapping[str, Any], version: int, source: str, known: Sequence[str], changes: Sequence[Change] = CHANGES
) -> None:
    """Refuse what is said as in older versions, and say how it is said now.

    Args:
        tree: of a file or of overrides.
        version: of the file.
        source: its name, or what else begins the message.
        known: full paths of today. An old path that is none of them is always told, whatever version the file claims.
        changes: the table.

    Raises:
        ConfigError: as said, everything in one line.
    """
    found = [
        one
        for one in _find(tree, changes)
        if one.change.since > version or (one.change.old not in known and one.change.old != one.path)
    ]
    if not found:
        return
    newest = max(change.since for change in changes)
    raise ConfigError(
        f"{source}: {'; '.join(map(_advice, found))}",
        fix=f"write that, and {VERSION_KEY} = {newest}" if version < newest else "write that",
    )


def brought_up_to_date(tree: Mapping[str, Any], version: int, source: str, changes: Sequence[Change] = CHANGES) -> Tree:
    """The tree of a run's own file as it would be written today.

    Args:
        tree: as it was written.
        version: of the file.
        source: its name.
        changes: the table.

    Raises:
        ConfigError: a field that is gone had a value that nothing stands for any more.
    """
    made = _copy(tree)
    for change in changes:
        if change.since <= version or not _has(made, change.old):
            continue
        value = _take(made, change.old)
        if change.new:
            _put(made, change.new, _renamed(change, value))
        elif value != change.default:
            raise ConfigError(
                f"{source}: this run has {change.old}, which is gone since version {change.since}",
                got=as_toml(value),
                allowed=as_toml(change.default),
                fix=change.instead or None,
            )
    return made


def _find(tree: Mapping[str, Any], changes: Sequence[Change]) -> Iterator[_Found]:
    """Every value under an old path, with what all later changes made of it."""
    for place, change in enumerate(changes):
        if not _has(tree, change.old):
            continue
        value = _take(_copy(tree), change.old)
        if change.old == change.new and _renamed(change, value) == value:
            continue
        path, value, last = change.new, _renamed(change, value), change
        for later in changes[place + 1 :]:
            if path and (path == later.old or path.startswith(f"{later.old}.")):
                path, value, last = (
                    later.new and later.new + path[len(later.old) :],
                    _renamed(later, value) if path == later.old else value,
                    later,
                )
        yield _Found(change, path, value, last)


def _advice(found: _Found) -> str:
    """What to write instead, in a few words."""
    change, last = found.change, found.last
    if not found.path:
        instead = f": {last.instead}" if last.instead else ""
        return f"`{change.old}` is gone since version {last.since}, leave it out{instead}"
    if isinstance(found.value, Mapping):
        return f"section `{change.old}` is called `{found.path}` since version {last.since}: write [{found.path}]"
    now = f"write {found.path} = {as_toml(found.value)}"
    if found.path == change.old:
        return f"a value of `{change.old}` is called otherwise since version {last.since}: {now}"
    return f"`{change.old}` is called `{found.path}` since version {last.since}: {now}"


def _renamed(change: Change, value: Any) -> Any:
    return change.values.get(value, value) if isinstance(value, str) else value


def _copy(tree: Mapping[str, Any]) -> Tree:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _has(tree: Mapping[str, Any], path: str) -> bool:
    name, _, rest = path.partition(".")
    if name not in tree:
        return False
    inner = tree[name]
    return not rest or (isinstance(inner, Mapping) and _has(inner, rest))


def _take(tree: Tree, path: str) -> Any:
    """The value at a path that is there, which is taken out of the tree, and tables with it that become empty."""
    name, _, rest = path.partition(".")
    if not rest:
        return tree.pop(name)
    value = _take(tree[name], rest)
    if not tree[name]:
        del tree[name]
    return value


def _put(tree: Tree, path: str, value: Any) -> None:
    """Lay a value into a tree; a table is laid over one that is there, whose own values stay."""
    name, _, rest = path.partition(".")
    if rest:
        _put(tree.setdefault(name, {}), rest, value)
    elif isinstance(value, dict) and isinstance(tree.get(name), dict):
        tree[name] = value | tree[name]
    else:
        tree[name] = value
