"""`penstock config`, verb by verb."""

import json
from functools import partial
from pathlib import Path

import pytest

from penstock.config.explain import explain, json_schema, reference_markdown
from penstock.config.load import dump_toml, load_run
from penstock.config.presets.debug import debug
from penstock.config.presets.registry import PRESETS
from penstock.config.size import size_of
from tests.cli import answers

printed = partial(answers.printed, "config")
refused = partial(answers.refused, "config")


def test_config_alone_shows_its_verbs() -> None:
    text = printed()
    assert all(verb in text for verb in ("show", "list", "explain", "diff", "validate", "schema", "reference"))


def test_list_shows_every_preset_on_a_line() -> None:
    header, *rows = printed("list").splitlines()
    assert header.split() == ["preset", "layers", "experts", "what"]
    assert [row.split()[0] for row in rows] == list(PRESETS)
    assert [one["name"] for one in json.loads(printed("list", "--json"))] == list(PRESETS)
    assert " ".join(rows[2].split()).startswith("deepseek-v2-lite 27 6 of 64 DeepSeek-V2-Lite: ")


def test_explain_prints_the_explanation_and_refuses_an_unknown_field() -> None:
    assert printed("explain", "model.moe.top_k") == explain("model.moe.top_k") + "\n"
    assert "fix: did you mean model.moe.top_k?" in refused("explain", "topk")


def test_diff_shows_fields_that_differ() -> None:
    dense = '[model]\nmoe = "none"\nlayers = 2\ndense_layers = 2\n'
    Path("dense.toml").write_text(f'preset = "debug"\nname = "debug"\n{dense}')
    rows = [line.split() for line in printed("diff", "debug", "dense.toml").splitlines()]
    assert rows[0] == ["field", "debug", "dense.toml"]
    assert ["model.dense_layers", f"{debug().model.dense_layers}", "2"] in rows
    assert ["model.moe", "-", "none"] in rows


def test_diff_as_json() -> None:
    found = json.loads(printed("diff", "deepseek-v2-lite", "deepseek-v2-lite-8l", "--json"))
    assert found == [
        {"field": "name", "left": '"deepseek-v2-lite"', "right": '"deepseek-v2-lite-8l"'},
        {"field": "model.layers", "left": "27", "right": "8"},
    ]


def test_diff_of_equal_runs_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(debug()), encoding="utf-8")
    assert printed("diff", "debug", str(tmp_path)) == f"debug and {tmp_path} are the same\n"


def test_validate_says_what_would_be_trained(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "debug"\n', encoding="utf-8")
    assert printed("validate", str(path), "training.steps=5000") == (
        f"{path} is valid: run mine, 5000 steps of {debug().tokens_per_step} tokens\n"
        f"next:  penstock train {path} training.steps=5000\n"
    )


def test_schema_and_reference_are_those_of_the_library() -> None:
    assert json.loads(printed("schema")) == json_schema()
    assert printed("reference") == reference_markdown()


@pytest.mark.parametrize(
    ("name", "parameters", "rest"),
    [
        ("deepseek-v2-lite", "15.7 B", ["active      2.66 B parameters for each token", "training    16.4 GFLOP"]),
        ("deepseek-v3", "671.0 B", ["prediction  11.6 B more, for multi-token prediction", "active      37.6 B"]),
    ],
)
def test_a_preset_is_shown_with_what_it_weighs(name: str, parameters: str, rest: list[str]) -> None:
    lines = [line for line in printed("show", name).splitlines() if line.startswith("#")]
    assert lines[0] == f"# parameters  {parameters}"
    for line, beginning in zip(lines[1:], rest, strict=False):
        assert line.startswith(f"# {beginning}")
    assert lines[-1].endswith("for each token, at sequence length 4096")


def test_the_output_is_a_file_that_gives_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(printed("show", "debug", "seed=30"), encoding="utf-8")
    assert load_run(str(path)) == load_run("debug", ["seed=30"])


def test_json_has_the_run_and_exact_counts() -> None:
    found = json.loads(printed("show", "debug", "--json"))
    assert found["run"] == debug().model_dump(mode="json")
    assert found["count"]["parameters"] == size_of(debug().model, 256).parameters  # by the model itself
