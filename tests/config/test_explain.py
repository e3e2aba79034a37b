"""`penstock config explain`, docs/config.md, and the JSON schema."""

import re
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config.explain import REGENERATE, default_text, explain, json_schema, reference_markdown
from penstock.config.load import load_run
from penstock.config.presets.debug import debug
from penstock.config.rules import RULES, rule_text
from penstock.config.run import Run
from penstock.config.schema import every_field, fields_of


def test_a_field_is_explained_with_range_presets_and_rules() -> None:
    text = explain("model.moe.router.topk_group")
    assert text.splitlines() == [
        "model.moe.router.topk_group",
        "  Groups that one token may choose from.",
        "",
        "  type     whole number 1 to 65536 (groups)",
        "  default  1",
        "  presets  3: deepseek-v2",
        "           4: deepseek-v3, deepseek-v3.2",
        "  rules    `model.moe.router.n_group` divides `model.moe.experts`. `model.moe.router.topk_group` is at most "
        "`model.moe.router.n_group`.",
        "           The groups that are kept (`model.moe.router.topk_group`) hold at least `model.moe.top_k` experts.",
    ]


def test_presets_with_the_default_are_not_listed_and_a_field_of_one_kind_says_so() -> None:
    assert "presets" not in explain("data.shuffle")  # every preset has the default
    assert "  only with  model.attention.kind = mla\n" in explain("model.attention.kv_lora_rank")
    assert "only with" not in explain("model.attention.heads")
    text = explain("model.attention.kind")
    assert "  type     gqa or mla or compressed\n" in text
    assert "  default  must be given\n" in text


def test_a_section_lists_its_fields() -> None:
    text = explain("schedule")
    assert text.startswith("schedule\n  Learning rate over the steps")
    assert "\n  final_ratio   number 0 to 1; default 0.1" in text


def test_a_section_of_several_kinds_lists_each() -> None:
    text = explain("model.attention")
    assert "model.attention (kind = gqa)\n" in text
    assert "model.attention (kind = mla)\n" in text
    assert re.search("\n  rope +section; may be left out", text)


def test_defaults_in_words() -> None:
    fields = fields_of(Run)
    assert [default_text(fields[name]) for name in ("name", "schedule", "device")] == [
        "must be given",
        "may be left out",
        '"auto"',
    ]


def test_every_field_can_be_explained() -> None:
    assert all(explain(path).startswith(path) for path in {field.path for field in every_field(Run)})


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("top_k", "model.moe.top_k"),
        ("topk", "model.moe.top_k"),  # resembles a last name
        ("trainig.steps", "training.steps"),
        ("z_loss_coef", "model.moe.balance.z_loss_coef or training.z_loss_coef"),  # a name of two fields
        ("model.moes", "model.moe"),
        ("qqqq", None),
    ],
)
def test_an_unknown_field_is_refused_with_what_was_meant(path: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        explain(path)
    fix = "" if meant is None else f"; fix: did you mean {meant}?"
    allowed = "full paths such as model.moe.top_k, or sections such as model.moe"
    assert str(raised.value) == f"there is no field {path!r}; allowed: {allowed}{fix}"


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
    assert len(set(titles)) == len(titles)  # a section of two paths has one table


def test_a_row_has_six_cells_with_type_default_unit_and_range() -> None:
    rows = [line for line in reference_markdown().splitlines() if line.startswith("|")]
    assert "| `steps` | whole number | must be given | steps | >= 1 | Optimizer steps. |" in rows
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}  # borders of six cells


def test_the_example_in_the_reference_is_a_run(tmp_path: Path) -> None:
    example = reference_markdown().split("```toml\n")[1].split("```")[0]  # the first block
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
    kinds = definitions["Model"]["properties"]["attention"]["discriminator"]["mapping"]
    assert set(kinds) == {"gqa", "mla", "compressed"}
