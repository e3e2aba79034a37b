"""From a name or a file to a checked run, and back to a file.

A target is a preset (`debug`), a variant of one (`deepseek-v2-lite-8l`), a TOML file, or the folder of a run, whose
config.toml is read. A name that is a preset is the preset, even where a folder has the same name; write `./debug` for
the folder. The steps are always the same: read a tree, lay the overrides over it, build the run, let what the user did
not write follow what the user wrote (penstock/config/follow.py), check the rules.

A file may start from a preset with `preset = "debug"` at its top: what else it says wins, table by table. A file that
gives no `name` is a run named after the file. `version` at its top is that of penstock/config/versions.py.
"""

import os.path
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.base.errors import ConfigError, asked, did_you_mean_path, nearest
from penstock.base.files import MOST_TOML_BYTES, parse_toml, read_bounded
from penstock.config.follow import follow
from penstock.config.presets.registry import is_preset, preset
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.schema import Section, fields_of
from penstock.config.tree import NONE, Tree, build, merge, parse_overrides, paths_in, settle
from penstock.config.versions import VERSION, VERSION_KEY, check_version

RUN_FILE = "config.toml"  # the resolved configuration in the folder of a run
CONFIG_FILE = "config.json"  # the model in a folder of Hugging Face weights
_PRESET = "preset"


def load_run(target: str, overrides: Sequence[str] = (), *, follows: bool = True, is_whole: bool = True) -> Run:
    """The run that a user asks for, resolved and checked. Raises a ConfigError if there is none.

    Of overrides `a.b=c` the later ones win. Values that were not written follow the written ones unless `follows` is
    false: a run that goes on stays as it is. Of a run that is not whole, rules are not asked: more of it will change.
    """
    tree, written = _read_target(target)
    return _built(tree, overrides, written if follows else None, is_whole=is_whole)


def with_overrides(run: Run, overrides: Sequence[str], *, is_whole: bool = True) -> Run:
    """The run with overrides, `a.b=c` each, checked. Raises a ConfigError if an override or the result is wrong."""
    return _built(run.model_dump(), overrides, frozenset(), is_whole=is_whole)


def _built(tree: Tree, overrides: Sequence[str], written: frozenset[str] | None, *, is_whole: bool = True) -> Run:
    """The run of a tree, in which values follow those at the paths that were written; None lets none follow."""
    changes = parse_overrides(Run, overrides)
    run = build(Run, merge(Run, tree, changes))
    if written is not None:
        run = follow(run, written | paths_in(changes))
    if is_whole:
        check(run)
    return run


def huggingface_config_in(target: str) -> Path | None:
    """The `config.json` that a target names, or that is in its folder; None if it names a run."""
    path = Path(target)
    if is_preset(target) or os.path.isfile(path / RUN_FILE):
        return None
    if os.path.isdir(path):
        path /= CONFIG_FILE
    return path if path.suffix == ".json" and os.path.exists(path) else None


def dump_toml(run: Run) -> str:
    """The run as a file, every field written out. Loading it gives an equal run."""
    return tomli_w.dumps({VERSION_KEY: VERSION, **_as_table(run)})


def _read_target(target: str) -> tuple[Tree, frozenset[str]]:
    """What a target says, and the paths of what the user wrote there."""
    if is_preset(target):
        return preset(target).model_dump(), frozenset()
    path = Path(target)
    if huggingface_config_in(target):
        only = "" if any(path.glob("*.safetensors")) else " --config-only"
        fix = f"import it first: penstock import {path} --output NAME{only}"
        raise ConfigError(f"{path} is a Hugging Face model, not a run", fix=fix)
    if os.path.isdir(path):
        if not os.path.isfile(path / RUN_FILE):
            raise ConfigError(f"{path} is not the folder of a run", allowed=f"a folder with a {RUN_FILE}")
        return _read_file(path / RUN_FILE)
    if os.path.exists(path) or path.suffix == ".toml" or len(path.parts) > 1:
        return _read_file(path)
    return preset(target).model_dump(), frozenset()  # it is no preset, and the error says which there are


def _read_file(path: Path) -> tuple[Tree, frozenset[str]]:
    """The settled tree of a file, laid over the preset that it starts from, and the paths that the user wrote in it."""
    table = _parse_file(path)
    check_version(table, str(path))
    for key in table:
        if key not in fields_of(Run) and key != _PRESET and nearest(key, (*fields_of(Run), _PRESET)) == [_PRESET]:
            raise ConfigError(f"{path}: {key} is an unknown key", fix=asked([_PRESET]))
    name = table.pop(_PRESET, None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{path}: {_PRESET} must be the name of a preset", got=name)
    base: Tree = {} if name is None else preset(name).model_dump()
    # The file wins over its preset; its own name wins over the name of the file.
    tree = settle(fields_of(Run), table)
    # The configuration in the folder of a run was written by the run.
    written = frozenset() if path.name == RUN_FILE else paths_in(tree)
    return merge(Run, {**base, "name": path.stem}, tree), written


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = read_bounded(path, MOST_TOML_BYTES).decode("utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}", fix=did_you_mean_path(path) or "check the path, or name a preset"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1  # of the first wrong byte
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text", fix="save it as UTF-8") from error
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_fault(path, text, str(error))) from error


def _syntax_fault(path: Path, text: str, message: str) -> str:
    """Python ends its message with `(at line 3, column 5)` or `(at end of document)`; editors jump to `file:3`."""
    where = re.search(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$", message)
    if where is None:
        return f"{path} is not TOML: {message}"
    line = where["line"] or text.count("\n") + 1  # the end of the document is its last line
    return f"{path}:{line}: this is not TOML: {message[: where.start()]}"


def _as_table(section: Section) -> Tree:
    """TOML has no None: a field that is None is left out where that is its default, and written as "none" elsewhere."""
    table: Tree = {}
    for name, value in section:
        field = fields_of(type(section))[name]
        if isinstance(value, Section):
            table[name] = _as_table(value)
        elif field.named:
            table[name] = {key: _as_table(inner) for key, inner in value.items()}
        elif value is not None:
            table[name] = list(value) if isinstance(value, tuple) else value  # TOML has arrays
        elif field.required or field.default is not None:
            table[name] = NONE  # its default is something else
    return table
