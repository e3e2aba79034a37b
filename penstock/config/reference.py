"""The written reference of all fields, `docs/config.md`, and the JSON schema for editors; both made from the schema."""

from collections.abc import Iterator
from typing import Any

from penstock.config.explain import default_text
from penstock.config.presets.registry import PRESETS
from penstock.config.rules import RULES, rule_text
from penstock.config.run import Run
from penstock.config.schema import KIND, NAME, Field, fields_of, kind_of
from penstock.config.section import Section
from penstock.config.versions import VERSION, VERSION_KEY

REGENERATE = "make docs"
"""The command that writes the document anew; `penstock config reference` prints it."""

_OPENING = f"""# Configuration

Written by `{REGENERATE}` from [penstock/config](../penstock/config); change it there.

A run is a preset ({", ".join(f"`{name}`" for name in PRESETS)}), a preset cut to its first N layers
(`deepseek-v2-lite-8l`), or a TOML file. Overrides change single fields: `penstock train debug training.steps=5000`.

```toml
# small.toml: everything that is not said here is as in the preset
version = 1
preset = "debug"

[training]
steps = 5000

[model.moe]
experts = 16
```

- A file of another `version` is refused; a file without it is of the current one. A key or value that was renamed is
  refused with its new name.
- A file that names no `preset` must give every field without a default. A file without `name` is named after itself.
- `"none"` in a file, `none` in an override, clears a field or a section that may be none.
- A section of another `{KIND}` keeps the fields that both kinds know; the other fields of the new kind must be given.
- What you do not write follows what you write: `training.steps=12` shortens a preset's warm-up of 20 steps to a tenth
  of the steps, `model.layers=1` leaves one layer with experts, `model.moe.experts=4` lowers `top_k`. A value changes
  only where it would break a rule below, and `penstock config show` prints what came out. Two things that you wrote and
  that do not go together are refused. Ranks never change what is trained, and a run that goes on keeps its values.
- In an override, a text needs no quotes, and one file is a list of files: `data.files=a.txt`.

`penstock config explain FIELD` says the same as this page, and which presets set the field.
"""


def reference_markdown() -> str:
    """The whole page: how to write a run, a table for each section, the rules between fields."""
    sections = [_section(path, section) for path, section in _sections(Run, "")]
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
    """Every section with its path, each once: a section that stands under two kinds is told under the first."""
    found: dict[tuple[str, type[Section]], None] = {(path, section): None}
    for name, field in fields_of(section).items():
        below = f"{path}.{name}.{NAME}" if field.named else f"{path}.{name}"
        for inner in field.sections:
            found |= dict.fromkeys(_sections(inner, below.lstrip(".")))
    yield from found


def _section(path: str, section: type[Section]) -> str:
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
