"""Overrides, trees laid over one another, and each fault that pydantic can find, by the line that the user reads."""

from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.tree import Tree, build, merge, parse_overrides, settle
from tests.config.small import SMALL


def parsed(*overrides: str) -> dict[str, object]:
    return parse_overrides(Run, overrides)


@pytest.mark.parametrize(
    ("overrides", "tree"),
    [
        (
            ("training.steps=1_000", "optimizer.learning_rate = 3e-4", "data.shuffle=false"),
            {"training": {"steps": 1000}, "optimizer": {"learning_rate": 3e-4}, "data": {"shuffle": False}},
        ),
        (("training.precision=fp32",), {"training": {"precision": "fp32"}}),
        (("data.text_field=my text",), {"data": {"text_field": "my text"}}),
        (('data.text_field="a=b"', "record.folder='x'"), {"data": {"text_field": "a=b"}, "record": {"folder": "x"}}),
        # A field of texts takes a text that looks like another type, and an empty one.
        (("name=2024", "data.text_field=true"), {"name": "2024", "data": {"text_field": "true"}}),
        (("record.folder=2024-01-01",), {"record": {"folder": "2024-01-01"}}),
        (("data.end_of_document=",), {"data": {"end_of_document": ""}}),
        # A list becomes a tuple, and one text a list.
        (('data.files=["a", "b"]',), {"data": {"files": ("a", "b")}}),
        (("data.validation_files=c.txt",), {"data": {"validation_files": ("c.txt",)}}),
        # none clears only a field that may be none, and is a name where it is one of the choices.
        (("model.moe=none",), {"model": {"moe": None}}),
        (("model.attention.rope.yarn=none",), {"model": {"attention": {"rope": {"yarn": None}}}}),
        (("data.text_field=none",), {"data": {"text_field": "none"}}),
        (("model.moe.balance.aux_loss=none",), {"model": {"moe": {"balance": {"aux_loss": "none"}}}}),
        # The later of two wins, and a value holds no second assignment.
        (("seed=1", "seed=2"), {"seed": 2}),
        (("model.moe=none", "model.moe.experts=4"), {"model": {"moe": {"experts": 4}}}),
        (("model.moe.experts=4", "model.moe=none"), {"model": {"moe": None}}),
        (("training.steps=5\nseed = 3",), {"training": {"steps": "5\nseed = 3"}}),
    ],
)
def test_overrides_become_a_tree(overrides: tuple[str, ...], tree: dict[str, object]) -> None:
    assert parsed(*overrides) == tree


NO_ASSIGNMENT = r"is not an assignment; allowed: a\.b=c, such as training\.steps=100"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((text, NO_ASSIGNMENT) for text in ("training", "=3", "training..steps=3", ".steps=3", "")),
        ('data.files=["a"', r'override data\.files: \["a" is not a TOML value: .*mind the shell'),
        *((f'{field}="a\\u0000b"', f"{field} has a null character; got") for field in ("data.tokenizer", "name")),
        ('data.files=["a", "b\\u0000"]', r"data\.files has a null character; got \['a', 'b\\x00'\]"),
        ("data.files=a\udcff", r"override data\.files is not UTF-8 text; got 'a\\udcff'"),
    ],
    ids=ascii,
)
def test_what_is_no_override_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(override)


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
    restored = merged["model"]["moe"]["router"] | {"scoring_func": "sigmoid", "expert_bias": True}
    assert restored == SMALL.model_dump()["model"]["moe"]["router"]


def test_another_kind_keeps_what_both_kinds_know() -> None:
    merged = merge(Run, SMALL.model_dump(), parsed("model.attention.kv_heads=2", "model.attention.kind=gqa"))
    assert merged["model"]["attention"] == {
        "kind": "gqa",
        "heads": 4,
        "kv_heads": 2,
        "rope": {"theta": 10000.0, "yarn": None, "llama3": None, "linear": 1.0},
        "sinks": False,
        "query_temperature": 0.0,
        "temperature_floor": 8192,
    }


def test_a_field_of_the_old_kind_that_is_given_on_purpose_is_not_dropped() -> None:
    merged = merge(Run, SMALL.model_dump(), parsed("model.attention.kind=gqa", "model.attention.q_lora_rank=8"))
    assert merged["model"]["attention"]["q_lora_rank"] == 8


def test_the_same_kind_drops_nothing() -> None:
    base = SMALL.model_dump()
    assert merge(Run, base, parsed("model.attention.kind=mla")) == base


SOURCES = "standard-library, text, jsonl, parquet, packed, huggingface, synthetic-random, synthetic-learnable"

MESSAGES = {
    # Unknown keys: a like name beside it, the same name elsewhere, another kind's field, no idea.
    "training.stpes=3": "training.stpes is an unknown key; fix: did you mean training.steps?",
    "sede=3": "sede is an unknown key; fix: did you mean seed?",
    "model.moe.router.scoring_fnuc=softmax": (
        "model.moe.router.scoring_fnuc is an unknown key; fix: did you mean model.moe.router.scoring_func?"
    ),
    "training.learning_rate=3": ("training.learning_rate is an unknown key; fix: it is optimizer.learning_rate here"),
    "heads=3": "heads is an unknown key; fix: did you mean model.attention.heads?",
    "model.attention.kv_heads=2": (
        "model.attention.kv_heads is an unknown key; fix: leave it out: it belongs to model.attention.kind = gqa"
    ),
    "host.xyzzy=2": "host.xyzzy is an unknown key; allowed: numa, check_memory, timeout_minutes",
    "xyzzy.a.b=2": (
        "xyzzy is an unknown key; allowed: name, seed, device, model, training, optimizer, schedule, data, evaluation, "
        "checkpoint, kernels, float8, qat, record, profile, parallel, dispatch, pipeline, recompute, "
        "offload, graphs, host, elastic"
    ),
    # Wrong types.
    "training.steps=1e3": "training.steps has the wrong type; got 1000.0; allowed: whole number >= 1 (steps)",
    "training.steps=many": 'training.steps has the wrong type; got "many"; allowed: whole number >= 1 (steps)',
    "training.steps=true": "training.steps has the wrong type; got true; allowed: whole number >= 1 (steps)",
    "training.clip_norm=1979-05-27": "training.clip_norm has the wrong type; got 1979-05-27; allowed: number >= 0",
    "data.shuffle=1": "data.shuffle has the wrong type; got 1; allowed: true or false",
    "data.files=3": "data.files has the wrong type; got 3; allowed: list of texts",
    'data.files=["a", 3]': "data.files has the wrong type; got 3; allowed: list of texts",
    'name=["a"]': 'name has the wrong type; got ["a"]; allowed: text',
    "seed=[1, 2]": "seed has the wrong type; got [1, 2]; allowed: whole number 0 to 4294967295",
    # Out of range.
    "training.steps=0": "training.steps is out of range; got 0; allowed: whole number >= 1 (steps)",
    "optimizer.beta1=1.5": "optimizer.beta1 is out of range; got 1.5; allowed: number 0 to 1",
    "optimizer.learning_rate=nan": "optimizer.learning_rate is out of range; got nan; allowed: number >= 0",
    "training.clip_norm=inf": "training.clip_norm is out of range; got inf; allowed: number >= 0",
    "seed=-1": "seed is out of range; got -1; allowed: whole number 0 to 4294967295",
    # Names that are not among the choices.
    "training.precision=fp16": (
        'training.precision has an unknown value; got "fp16"; allowed: bf16, fp32; fix: did you mean bf16?'
    ),
    "data.source=wikipedia": f'data.source has an unknown value; got "wikipedia"; allowed: {SOURCES}',
    "model.attention.kind=mlp": (
        'model.attention.kind has an unknown value; got "mlp"; allowed: gqa, mla, compressed; fix: did you mean mla?'
    ),
    # Sections.
    "model=big": (
        'model is a section, not a value; got "big"; allowed: its fields; '
        "fix: set model.family, model.vocab_size, model.hidden_size, ..."
    ),
    "model.moe=8": (
        "model.moe is a section, not a value; got 8; allowed: its fields, or none; "
        "fix: set model.moe.experts, model.moe.top_k, model.moe.moe_intermediate_size, ..."
    ),
    "model.attention=mla": (
        'model.attention is a section, not a value; got "mla"; allowed: its fields; '
        "fix: set model.attention.kind, model.attention.heads, model.attention.head_dim, ..."
    ),
    "training.steps.x=3": "training.steps has the wrong type; got {x = 3}; allowed: whole number >= 1 (steps)",
    "model.attention.kind=gqa": (
        "model.attention.kv_heads is missing (also wrong: model.attention.head_dim); "
        "allowed: whole number 1 to 65536 (heads)"
    ),
}


def tree_with(*overrides: str) -> Tree:
    return merge(Run, SMALL.model_dump(), parse_overrides(Run, overrides))


def message_of(tree: Tree) -> str:
    with pytest.raises(ConfigError) as raised:
        build(Run, tree)
    return str(raised.value)


def test_a_whole_tree_becomes_a_run() -> None:
    assert build(Run, SMALL.model_dump()) == SMALL


@pytest.mark.parametrize("override", MESSAGES)
def test_a_fault_is_told_in_one_line(override: str) -> None:
    assert message_of(tree_with(override)) == MESSAGES[override]


def without(tree: Tree, *names: str) -> Tree:
    table: Any = tree
    for name in names[:-1]:
        table = table[name]
    del table[names[-1]]
    return tree


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("model.moe.top_k", "allowed: whole number 1 to 65536 (experts)"),
        ("model.attention.kind", "allowed: gqa, mla, compressed"),
        ("optimizer", 'allowed: section; fix: write its fields, or start the file with preset = "debug"'),
    ],
)
def test_what_is_missing_is_named_with_what_it_may_be(path: str, told: str) -> None:
    assert message_of(without(SMALL.model_dump(), *path.split("."))) == f"{path} is missing; {told}"


def test_a_misspelled_key_is_told_before_the_key_that_it_leaves_missing() -> None:
    tree = without(tree_with("model.moe.topk=2"), "model", "moe", "top_k")  # topk is written for top_k
    assert message_of(tree) == (
        "model.moe.topk is an unknown key (also wrong: model.moe.top_k); fix: did you mean model.moe.top_k?"
    )


def test_a_long_value_is_cut_short() -> None:
    message = message_of(tree_with(f"training.steps={'x' * 500}"))  # 500 characters of a value
    assert "x..." in message
    assert len(message) < 200
