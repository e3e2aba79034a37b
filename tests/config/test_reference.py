"""docs/config.md, and the JSON schema."""

from pathlib import Path

from penstock.config.explain import REGENERATE, json_schema, reference_markdown
from penstock.config.load import load_run
from penstock.config.presets.debug import debug
from penstock.config.rules import RULES, rule_text
from penstock.config.run import Run
from penstock.config.schema import every_field

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_written_reference_is_not_stale() -> None:
    written = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    assert written == reference_markdown(), f"docs/config.md is stale; run: {REGENERATE}"


def test_every_field_and_every_rule_is_in_the_reference() -> None:
    text = reference_markdown()
    assert [field.path for field in every_field(Run) if field.doc.replace("|", "\\|") not in text] == []
    assert [rule_text(rule) for rule in RULES if f"- {rule_text(rule)}\n" not in text] == []


def test_every_section_has_one_table() -> None:
    titles = [line for line in reference_markdown().splitlines() if line.startswith("## ")]
    assert titles[:4] == [
        "## Top of the file",
        "## `model`",
        "## `model.attention`, kind `gqa`",
        "## `model.attention.rope`",
    ]
    assert len(set(titles)) == len(titles)


def test_a_row_says_type_default_unit_and_range() -> None:
    assert "\n| `steps` | whole number | must be given | steps | >= 1 | Optimizer steps. |\n" in reference_markdown()


def test_every_table_is_six_cells_wide() -> None:
    rows = [line for line in reference_markdown().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}


def test_the_example_in_the_reference_is_a_run(tmp_path: Path) -> None:
    example = reference_markdown().split("```toml\n")[1].split("```")[0]
    path = tmp_path / "small.toml"
    path.write_text(example, encoding="utf-8")
    run = load_run(str(path))
    assert (run.name, run.training.steps) == ("small", 5000)
    assert run.model.attention == debug().model.attention


def test_the_json_schema_knows_fields_bounds_and_kinds() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["required"] == ["name", "model", "training", "optimizer"]
    definitions = schema["$defs"]
    assert definitions["Training"]["properties"]["steps"]["minimum"] == 1
    assert definitions["Training"]["properties"]["steps"]["unit"] == "steps"
    assert definitions["Training"]["additionalProperties"] is False
    assert set(definitions["Model"]["properties"]["attention"]["discriminator"]["mapping"]) == {"gqa", "mla"}
