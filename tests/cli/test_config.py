"""`penstock config`, verb by verb. `show` has a file of its own."""

import json
from functools import partial
from pathlib import Path

import pytest

from penstock.config.explain import explain, json_schema, reference_markdown
from penstock.config.load import dump_toml
from penstock.config.presets.debug import debug
from penstock.config.presets.registry import PRESETS
from tests.cli import answers

printed = partial(answers.printed, "config")


refused = partial(answers.refused, "config")


def test_config_alone_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert all(verb in text for verb in ("show", "list", "explain", "diff", "validate", "schema", "reference"))


def test_list_shows_every_preset_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = printed(capsys, "list").splitlines()
    assert header.split() == ["preset", "layers", "experts", "what"]
    assert [row.split()[0] for row in rows] == list(PRESETS)
    assert " ".join(rows[2].split()).startswith("deepseek-v2-lite 27 6 of 64 DeepSeek-V2-Lite: ")


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["name"] for one in json.loads(printed(capsys, "list", "--json"))] == list(PRESETS)


def test_explain_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "explain", "model.moe.top_k") == explain("model.moe.top_k") + "\n"


def test_explain_refuses_an_unknown_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fix: did you mean model.moe.top_k?" in refused(capsys, "explain", "topk")


def test_diff_shows_fields_that_differ(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "dense.toml"
    path.write_text(
        'preset = "debug"\nname = "debug"\n[model]\nmoe = "none"\nlayers = 2\ndense_layers = 2\n', encoding="utf-8"
    )
    rows = [line.split() for line in printed(capsys, "diff", "debug", str(path)).splitlines()]
    assert rows[0] == ["field", "debug", str(path)]
    assert ["model.dense_layers", f"{debug().model.dense_layers}", "2"] in rows
    assert ["model.moe", "-", "none"] in rows


def test_diff_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "diff", "deepseek-v2-lite", "deepseek-v2-lite-8l", "--json"))
    assert found == [
        {"field": "name", "left": '"deepseek-v2-lite"', "right": '"deepseek-v2-lite-8l"'},
        {"field": "model.layers", "left": "27", "right": "8"},
    ]


def test_diff_of_equal_runs_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(debug()), encoding="utf-8")
    assert printed(capsys, "diff", "debug", str(tmp_path)) == f"debug and {tmp_path} are the same\n"


def test_validate_says_what_would_be_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "debug"\n', encoding="utf-8")
    assert printed(capsys, "validate", str(path), "training.steps=5000") == (
        f"{path} is valid: run mine, 5000 steps of {debug().tokens_per_step} tokens\n"
        f"next:  penstock train {path} training.steps=5000\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'preset = "debug"\ntraining.stpes = 3\n',
            "training.stpes is an unknown key; fix: did you mean training.steps?",
        ),
        (
            'preset = "deepseek-v3"\nmodel.moe.top_k = 999\n',
            "model.moe.top_k is more than model.moe.experts; got 999; allowed: 1 to 256",
        ),
        ("[training", "{path}:1: this is not TOML: Expected ']' at the end of a table declaration"),
    ],
)
def test_validate_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    assert refused(capsys, "validate", str(path)) == message.format(path=path)


def test_schema_prints_the_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "schema")) == json_schema()


def test_reference_prints_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "reference") == reference_markdown()
