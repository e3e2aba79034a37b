"""Overrides and trees laid over one another."""

import pytest

from penstock.base.errors import ConfigError
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.tree import merge, parse_overrides, settle
from tests.config.small import SMALL


def parsed(*overrides: str) -> dict[str, object]:
    return parse_overrides(Run, overrides)


def test_an_override_is_a_path_and_a_toml_value() -> None:
    assert parsed("training.steps=1_000", "optimizer.learning_rate = 3e-4", "data.shuffle=false") == {
        "training": {"steps": 1000},
        "optimizer": {"learning_rate": 3e-4},
        "data": {"shuffle": False},
    }


def test_a_bare_word_is_a_text() -> None:
    assert parsed("training.precision=fp32", "data.text_field=my text") == {
        "training": {"precision": "fp32"},
        "data": {"text_field": "my text"},
    }


def test_quotes_are_allowed_and_do_not_stay() -> None:
    assert parsed('data.text_field="a=b"', "record.folder='x'") == {
        "data": {"text_field": "a=b"},
        "record": {"folder": "x"},
    }


def test_a_field_of_texts_takes_what_looks_like_another_type() -> None:
    assert parsed("name=2024", "data.text_field=true", "record.folder=2024-01-01") == {
        "name": "2024",
        "data": {"text_field": "true"},
        "record": {"folder": "2024-01-01"},
    }


def test_a_text_may_be_empty() -> None:
    assert parsed("data.end_of_document=") == {"data": {"end_of_document": ""}}


def test_a_list_becomes_a_tuple_and_one_text_a_list() -> None:
    assert parsed('data.files=["a", "b"]', "data.validation_files=c.txt") == {
        "data": {"files": ("a", "b"), "validation_files": ("c.txt",)}
    }


def test_none_clears_only_what_may_be_none() -> None:
    assert parsed("model.moe=none", "model.attention.rope.yarn=none", "data.text_field=none") == {
        "model": {"moe": None, "attention": {"rope": {"yarn": None}}},
        "data": {"text_field": "none"},
    }


def test_none_is_a_name_where_it_is_one_of_the_choices() -> None:
    assert parsed("model.moe.balance.aux_loss=none") == {"model": {"moe": {"balance": {"aux_loss": "none"}}}}


def test_later_overrides_win() -> None:
    assert parsed("seed=1", "seed=2") == {"seed": 2}
    assert parsed("model.moe=none", "model.moe.experts=4") == {"model": {"moe": {"experts": 4}}}
    assert parsed("model.moe.experts=4", "model.moe=none") == {"model": {"moe": None}}


def test_a_value_cannot_smuggle_in_a_second_assignment() -> None:
    assert parsed("training.steps=5\nseed = 3") == {"training": {"steps": "5\nseed = 3"}}


@pytest.mark.parametrize("override", ["training", "=3", "training..steps=3", ".steps=3", ""])
def test_what_is_not_an_assignment_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an assignment; allowed: a\.b=c, such as training\.steps=100"):
        parsed(override)


def test_a_value_that_starts_like_toml_and_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'override data\.files: \["a" is not a TOML value: .*mind the shell'):
        parsed('data.files=["a"')


def test_a_value_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override data\.files is not UTF-8 text; got 'a\\udcff'"):
        parsed("data.files=a\udcff")


def test_settling_keeps_unknown_keys_for_the_error_that_names_them() -> None:
    assert settle(fields_of(Run), {"modle": {"layers": [3]}}) == {"modle": {"layers": [3]}}


def test_values_that_are_not_given_stay() -> None:
    base = SMALL.model_dump()
    merged = merge(Run, base, parsed("model.moe.experts=16"))
    assert merged["model"]["moe"]["experts"] == 16
    assert merged["model"]["moe"]["top_k"] == 2
    assert base["model"]["moe"]["experts"] == 8, "the base is not changed"


def test_an_inline_table_is_laid_over_a_section() -> None:
    merged = merge(Run, SMALL.model_dump(), parsed('model.moe.router={scoring_func="softmax", expert_bias=false}'))
    assert (
        merged["model"]["moe"]["router"] | {"scoring_func": "sigmoid", "expert_bias": True}
        == (SMALL.model_dump()["model"]["moe"]["router"])
    )


def test_another_kind_keeps_what_both_kinds_know() -> None:
    merged = merge(Run, SMALL.model_dump(), parsed("model.attention.kv_heads=2", "model.attention.kind=gqa"))
    assert merged["model"]["attention"] == {
        "kind": "gqa",
        "heads": 4,
        "kv_heads": 2,
        "rope": {"theta": 10000.0, "yarn": None, "llama3": None},
    }


def test_a_field_of_the_old_kind_that_is_given_on_purpose_is_not_dropped() -> None:
    merged = merge(Run, SMALL.model_dump(), parsed("model.attention.kind=gqa", "model.attention.q_lora_rank=8"))
    assert merged["model"]["attention"]["q_lora_rank"] == 8


def test_the_same_kind_drops_nothing() -> None:
    base = SMALL.model_dump()
    assert merge(Run, base, parsed("model.attention.kind=mla")) == base
