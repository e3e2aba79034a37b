"""Two runs side by side."""

from penstock.config.schema import Difference, differences, leaves
from tests.config.small import SMALL, unchecked_run


def test_leaves_are_values_by_full_path_in_the_order_of_the_schema() -> None:
    values = leaves(SMALL)
    assert list(values)[:4] == ["name", "seed", "device", "model.family"]
    assert values["model.moe.router.scoring_func"] == "sigmoid"
    assert values["model.attention.rope.yarn"] is None


def test_a_run_does_not_differ_from_itself() -> None:
    assert differences(SMALL, SMALL) == []


def test_fields_that_differ_are_shown_as_in_toml() -> None:
    other = unchecked_run(["training.precision=bf16", "data.shuffle=false", "seed=1"])
    assert differences(SMALL, other) == [
        Difference("seed", "0", "1"),
        Difference("training.precision", '"fp32"', '"bf16"'),
        Difference("data.shuffle", "true", "false"),
    ]


def test_fields_that_one_run_does_not_have_are_none_there() -> None:
    found = differences(SMALL, unchecked_run(["model.moe=none"]))
    assert Difference("model.moe.experts", "8", None) in found
    assert Difference("model.moe", None, "none") in found
