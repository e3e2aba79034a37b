"""What a field or a section means, for `penstock config explain`: the schema, the presets and the rules, read aloud."""

from collections.abc import Sequence

from penstock.base.errors import ConfigError, asked, nearest
from penstock.config.compare import leaves
from penstock.config.presets.registry import PRESETS
from penstock.config.rules import RULES, rule_text
from penstock.config.run import Run
from penstock.config.schema import KIND, NAME, Field, as_toml, every_field, fields_of, find, kind_of
from penstock.config.section import Section


def explain(path: str) -> str:
    """All there is to know about a field: doc, type, unit, range, default, the presets that set it, its rules.

    Args:
        path: full path of a field, such as `model.moe.top_k`, or of a section, whose fields are then listed.

    Raises:
        ConfigError: there is no such field.
    """
    fields = find(Run, path)
    if not fields:
        raise _unknown(path)
    return _explain_section(fields[0]) if fields[0].sections else _explain_value(fields)


def default_text(field: Field) -> str:
    """The default as in TOML, or that there is none; a section may be left out if all its fields have one."""
    if field.required:
        return "must be given"
    return "may be left out" if isinstance(field.default, Section) or field.named else as_toml(field.default)


def _explain_value(fields: Sequence[Field]) -> str:
    """Alternatives of a section may share a field; they differ in its doc and type at most."""
    first = fields[0]
    parent = find(Run, first.path.rpartition(".")[0])
    is_everywhere = not parent or len(fields) == len(parent[0].sections)
    rows = [("type", " or ".join(dict.fromkeys(field.allowed_text for field in fields)))]
    if not is_everywhere:
        rows += [("only with", f"{parent[0].path}.{KIND} = {kind_of(field.owner)}") for field in fields]
    rows += [("default", default_text(first))]
    rows += [("presets", line) for line in _preset_lines(first)]
    rows += [("rules", text) for text in map(rule_text, RULES) if f"`{first.path}`" in text]
    return _page(first.path, " ".join(dict.fromkeys(field.doc for field in fields)), rows)


def _explain_section(field: Field) -> str:
    pages = []
    for section in field.sections:
        kind = kind_of(section)
        path = f"{field.path}.{NAME}" if field.named else field.path
        title = path if kind is None else f"{path} ({KIND} = {kind})"
        rows = [(name, f"{one.allowed_text}; {_default_clause(one)}") for name, one in fields_of(section).items()]
        pages.append(_page(title, " ".join((section.__doc__ or "").split()), rows))
    return "\n\n".join(pages)


def _default_clause(field: Field) -> str:
    has_value = not field.required and not isinstance(field.default, Section) and not field.named
    return f"default {default_text(field)}" if has_value else default_text(field)


def _preset_lines(field: Field) -> list[str]:
    """`8: deepseek-v3`, a line for each value that a preset gives other than the default."""
    names: dict[str, list[str]] = {}
    for name, make in PRESETS.items():
        values = leaves(make())
        if field.path in values and (field.required or values[field.path] != field.default):
            names.setdefault(as_toml(values[field.path]), []).append(name)
    return [f"{value}: {', '.join(users)}" for value, users in names.items()]


def _page(title: str, doc: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title, a sentence, and rows whose label is written once for several of the same."""
    width = max(len(label) for label, _ in rows)
    lines = [title, f"  {doc}", ""]
    above = ""
    for label, text in rows:
        lines.append(f"  {'' if label == above else label:<{width}}  {text}")
        above = label
    return "\n".join(lines)


def _unknown(path: str) -> ConfigError:
    """Suggest a like path, or else the paths that end in a like name: `topk` is most likely `model.moe.top_k`."""
    names = {field.path: field.path.rpartition(".")[2] for field in every_field(Run)}
    name = path.rpartition(".")[2]
    meant = [name] if name in names.values() else nearest(name, names.values())
    near = nearest(path, names) if "." in path else []
    return ConfigError(
        f"there is no field {path!r}",
        allowed="full paths such as model.moe.top_k, or sections such as model.moe",
        fix=asked(near or [path for path, name in names.items() if name in meant]),
    )
