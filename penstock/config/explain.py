"""Documentation of fields, from schema, presets and rules: `config explain`, docs/config.md and the JSON schema."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.base.errors import ConfigError, asked, nearest
from penstock.config.presets.registry import PRESETS
from penstock.config.rules import RULES, rule_text
from penstock.config.run import Run
from penstock.config.schema import KIND, NAME, Field, Section, as_toml, every_field, fields_of, find, kind_of, leaves
from penstock.config.versions import VERSION, VERSION_KEY, fields_of_other_name


def explain(path: str) -> str:
    """Everything about the field of a full path, or the fields of a section. Raises a ConfigError for another path."""
    fields = find(Run, path)  # alternatives of a section may share the path
    if not fields:
        raise _unknown(path)
    return _explain_section(fields[0]) if fields[0].sections else _explain_value(fields)


def fields_with(word: str) -> list[Field]:
    """Fields that another trainer calls so, then those with the word in their path, then those in whose doc it is."""
    meant, part = fields_of_other_name(word), word.lstrip("-").replace("-", "_").lower()
    fields = {field.path: field for field in every_field(Run) if not field.sections}
    ranks = {
        path: (path not in meant, part not in path)
        for path, field in fields.items()
        if path in meant or part in path or re.search(rf"\b{re.escape(word)}", field.doc, re.IGNORECASE)
    }
    return [fields[path] for path in sorted(ranks, key=lambda path: ranks[path])]


def default_text(field: Field) -> str:
    """The default as in TOML, or a phrase if there is none; a section may be left out if all its fields have one."""
    if field.required:
        return "must be given"
    return "may be left out" if isinstance(field.default, Section) or field.named else as_toml(field.default)


def _explain_value(fields: Sequence[Field]) -> str:
    """Alternatives of a section may share a field; they differ at most in its doc and type."""
    first = fields[0]
    parent = find(Run, first.path.rpartition(".")[0])
    # A field of some kinds of its section only is shown with these kinds.
    is_everywhere = not parent or len(fields) == len(parent[0].sections)
    rows = [("type", " or ".join(dict.fromkeys(field.allowed_text for field in fields)))]
    if not is_everywhere:
        rows += [("only with", f"{parent[0].path}.{KIND} = {kind_of(field.owner)}") for field in fields]
    rows += [("default", default_text(first))]
    rows += [("presets", line) for line in _preset_lines(first)]
    # Rules name fields by their full path.
    rows += [("rules", text) for text in map(rule_text, RULES) if f"`{first.path}`" in text]
    return _text_page(first.path, " ".join(dict.fromkeys(field.doc for field in fields)), rows)


def _explain_section(field: Field) -> str:
    pages = []
    for section in field.sections:
        kind = kind_of(section)
        path = f"{field.path}.{NAME}" if field.named else field.path
        title = path if kind is None else f"{path} ({KIND} = {kind})"
        rows = []
        for name, inner in fields_of(section).items():
            has_value = not inner.required and not isinstance(inner.default, Section) and not inner.named
            rows.append((name, f"{inner.allowed_text}; {'default ' if has_value else ''}{default_text(inner)}"))
        pages.append(_text_page(title, " ".join((section.__doc__ or "").split()), rows))
    return "\n\n".join(pages)


def _preset_lines(field: Field) -> list[str]:
    """`8: deepseek-v3`: a line for each value of presets that is not the default."""
    names: dict[str, list[str]] = {}
    for name, make in PRESETS.items():
        values = leaves(make())  # of one preset, by path
        if field.path in values and (field.required or values[field.path] != field.default):
            names.setdefault(as_toml(values[field.path]), []).append(name)
    return [f"{value}: {', '.join(users)}" for value, users in names.items()]


def _text_page(title: str, doc: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title, a sentence, and rows; equal labels in succession are printed once."""
    width = max(len(label) for label, _ in rows)
    lines = [title, f"  {doc}", ""]
    above = ""
    for label, text in rows:
        lines.append(f"  {'' if label == above else label:<{width}}  {text}")
        above = label
    return "\n".join(lines)


def _unknown(path: str) -> ConfigError:
    """Suggest a similar path, or paths that end in a similar name: `topk` suggests `model.moe.top_k`."""
    names = {field.path: field.path.rpartition(".")[2] for field in every_field(Run)}
    name = path.rpartition(".")[2]
    # The last name of the path, or the names that resemble it.
    meant = [name] if name in names.values() else nearest(name, names.values())
    near = nearest(path, names) if "." in path else []
    return ConfigError(
        f"there is no field {path!r}",
        allowed="full paths such as model.moe.top_k, or sections such as model.moe",
        fix=asked(near or [path for path, name in names.items() if name in meant]),
    )


REGENERATE = "make docs"  # command that writes the document; `penstock config reference` prints it

_OPENING = f"""# Configuration

Written by `{REGENERATE}` from [penstock/config](../penstock/config); change it there.

This page lists every field of a run, with type, default, unit, range and meaning, and the rules between fields.
`penstock config explain FIELD` prints the same for one field, and the presets that set it.

A run is a preset ({", ".join(f"`{name}`" for name in PRESETS)}), a preset cut to its first N layers
(`deepseek-v2-lite-8l`), or a TOML file. Overrides change single fields: `penstock train debug training.steps=5000`.

```toml
# small.toml: all other fields come from the preset
version = 1
preset = "debug"

[training]
steps = 5000

[model.moe]
experts = 16
```

- **Version.** A file without `version` has the current one; a file of another version is refused. If a key or value was
  renamed, the error gives the new name.
- **Preset and name.** A file without `preset` must set every field that has no default. A run without `name` has the
  name of its file.
- **None.** `"none"` in a file, `none` in an override, clears a field or a section that may be none.
- **Kinds.** If you set another `{KIND}` of a section, the section keeps the fields that both kinds have; you must set
  the other required fields.
- **Dependent values.** If a value that you set would break a rule below, lengths, batches and options without effect
  that you did not set are adjusted: `training.steps=12` shortens a warm-up of 20 steps to a tenth of the steps,
  `model.layers=1` leaves one layer with experts. `penstock config show` prints the result. A value that changes the
  model's function is never adjusted: `model.moe.experts=4` is refused beside the preset's `top_k` 8, and so are two
  conflicting values of yours. The number of ranks never changes these values, and a resumed run keeps them.
- **Overrides.** Text needs no quotes, and a single file stands for a list of files: `data.files=a.txt`.
"""


def reference_markdown() -> str:
    """The page: form of a file, a table for each section, the rules between fields."""
    sections = [_section_table(path, section) for path, section in _sections(Run, "")]
    rules = "\n".join(f"- {rule_text(rule)}" for rule in RULES)
    return "\n".join([_OPENING, *sections, f"## Rules between fields\n\n{rules}\n"])


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a resolved run, as `penstock config show` prints it."""
    schema = Run.model_json_schema()
    version = {"const": VERSION, "description": "Of the file; see penstock/config/versions.py.", "type": "integer"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {VERSION_KEY: version, **schema["properties"]},
    }


def _sections(section: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Every section once, with its first path."""
    sections: dict[tuple[str, type[Section]], None] = {(path, section): None}
    for name, field in fields_of(section).items():
        below = f"{path}.{name}.{NAME}" if field.named else f"{path}.{name}"
        for inner in field.sections:
            sections |= dict.fromkeys(_sections(inner, below.lstrip(".")))
    yield from sections


def _section_table(path: str, section: type[Section]) -> str:
    kind = kind_of(section)
    title = "Top of the file" if not path else f"`{path}`" if kind is None else f"`{path}`, {KIND} `{kind}`"
    rows = [_row(field) for field in fields_of(section).values()]
    doc = " ".join((section.__doc__ or "").split())
    head = "| field | type | default | unit | range | meaning |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([f"## {title}\n\n{doc}\n", head, *rows, ""])


def _row(field: Field) -> str:
    value_type = f"{field.type_text}, or none" if field.optional else field.type_text
    default = default_text(field) if field.required or field.sections else f"`{default_text(field)}`"
    cells = (f"`{field.path}`", value_type, default, field.unit, field.range_text, field.doc)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
