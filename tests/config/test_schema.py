"""The schema as data. Small sections of its own, so that it is right for types that no run uses today."""

from typing import Annotated, Literal

import pytest
from pydantic import Discriminator, ValidationError

from penstock.config.presets.debug import debug
from penstock.config.run import Optimizer, Run, Training
from penstock.config.schema import (
    Difference,
    Section,
    alternative,
    as_toml,
    differences,
    every_field,
    fields_of,
    fields_under,
    find,
    kind_of,
    knob,
    leaves,
)
from tests.config.small import SMALL, unchecked_run


class Round(Section):
    """A round thing."""

    kind: Literal["round"] = knob("round", doc="Round.")
    radius: float = knob(doc="Radius.", unit="metres", low=0.0, high=2.5)  # both bounds
    colour: Literal["red", "blue"] = knob("red", doc="Colour.")


class Square(Section):
    """A square thing."""

    kind: Literal["square"] = knob("square", doc="Square.")
    side: float | None = knob(1.0, doc="Side.", unit="metres")  # a number or none
    colour: str = knob("red", doc="Colour.")


class Box(Section):
    """A box of things."""

    thing: Annotated[Round | Square, Discriminator("kind")] | None = knob(None, doc="What is in it.")
    labels: tuple[str, ...] = knob((), doc="What stands on it.")
    sealed: bool = knob(False, doc="Whether it is closed.")
    count: int = knob(1, doc="How many.", high=7)  # one bound


def test_a_field_says_its_type_range_and_unit() -> None:
    fields = {**fields_of(Round), **{f"box.{name}": field for name, field in fields_of(Box).items()}}
    assert fields_of(Run)["seed"].range_text == "0 to 4294967295", "a large bound is written in full"
    assert fields["radius"].allowed_text == "number 0 to 2.5 (metres)"
    assert fields["colour"].allowed_text == "red, blue"
    assert fields["box.labels"].allowed_text == "list of texts"
    assert fields["box.sealed"].allowed_text == "true or false"
    assert fields["box.count"].allowed_text == "whole number <= 7"
    assert fields["box.thing"].allowed_text == "section, or none"
    assert fields_of(Square)["side"].allowed_text == "number (metres), or none"


def test_a_field_without_default_is_required_and_so_is_a_kind() -> None:
    assert [name for name, field in fields_of(Round).items() if field.required] == ["kind", "radius"]


def test_only_fields_of_one_text_take_text() -> None:
    assert [name for name, field in fields_of(Square).items() if field.takes_text] == ["kind", "colour"]
    assert [name for name, field in fields_of(Box).items() if field.takes_list] == ["labels"]


def test_alternatives_are_told_apart_by_their_kind() -> None:
    assert fields_of(Box)["thing"].sections == (Round, Square)
    assert kind_of(Square) == "square"
    assert kind_of(Box) is None
    assert alternative((Round, Square), "square") is Square
    assert alternative((Round, Square), "oval") is None
    assert alternative((Box,), None) is Box


def test_fields_under_alternatives_are_all_there_and_the_first_wins() -> None:
    fields = fields_under((Round, Square))
    assert set(fields) == {"kind", "radius", "colour", "side"}
    assert fields["colour"].owner is Round


def test_every_field_is_listed_by_full_path_once_for_each_alternative() -> None:
    paths = [field.path for field in every_field(Box)]
    assert paths[:4] == ["thing", "thing.kind", "thing.radius", "thing.colour"]
    assert paths.count("thing.colour") == 2  # of Round and of Square
    assert [field.owner for field in find(Box, "thing.colour")] == [Round, Square]
    assert find(Box, "thing.weight") == ()


def test_values_are_shown_as_in_toml() -> None:
    shown = [as_toml(value) for value in (None, True, 3, 0.5, 'a"b', ("x", "y"), {"a": 1})]
    assert shown == ["none", "true", "3", "0.5", '"a\\"b"', '["x", "y"]', "{a = 1}"]


FIELDS = list(every_field(Run))


def test_a_loaded_run_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        debug().training.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_is_finite_and_no_type_is_guessed(number: float) -> None:
    with pytest.raises(ValidationError):
        Optimizer(learning_rate=number)
    with pytest.raises(ValidationError):
        Training(steps="10", sequence_length=8)  # type: ignore[arg-type]


def test_every_field_has_a_sentence_every_number_a_range_and_every_section_a_doc() -> None:
    assert [field.path for field in FIELDS if not field.doc.endswith(".") or not field.doc.isascii()] == []
    # Lists of numbers name layers and stages; rules compare them with the model.
    numbers = [field for field in FIELDS if "number" in field.type_text and not field.takes_list]
    assert len(numbers) > 40  # the test would pass on an empty list
    assert [field.path for field in numbers if field.low is None] == []
    assert [field.path for field in FIELDS for section in field.sections if not section.__doc__] == []


def test_leaves_are_values_by_full_path_in_the_order_of_the_schema() -> None:
    values = leaves(SMALL)
    assert list(values)[:4] == ["name", "seed", "device", "model.family"]
    assert values["model.moe.router.scoring_func"] == "sigmoid"
    assert values["model.attention.rope.yarn"] is None


def test_fields_that_differ_are_shown_as_in_toml() -> None:
    assert differences(SMALL, SMALL) == []
    other = unchecked_run(["training.precision=bf16", "data.shuffle=false", "seed=1"])
    assert differences(SMALL, other) == [
        Difference("seed", "0", "1"),
        Difference("training.precision", '"fp32"', '"bf16"'),
        Difference("data.shuffle", "true", "false"),
    ]


def test_fields_that_one_run_does_not_have_are_none_there() -> None:
    found = differences(SMALL, unchecked_run(["model.moe=none"]))
    assert Difference("model.moe.experts", "8", None) in found
    assert Difference("model.moe", None, "none") in found  # a section that is none is a value
