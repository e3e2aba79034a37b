"""The schema as data. Small sections of its own, so that it is right for types that no run uses today."""

from typing import Annotated, Literal

from pydantic import Discriminator

from penstock.config.run import Run
from penstock.config.schema import (
    Section,
    alternative,
    as_toml,
    every_field,
    fields_of,
    fields_under,
    find,
    kind_of,
    knob,
)


class Round(Section):
    """A round thing."""

    kind: Literal["round"] = knob("round", doc="Round.")
    radius: float = knob(doc="Radius.", unit="metres", low=0.0, high=2.5)
    colour: Literal["red", "blue"] = knob("red", doc="Colour.")


class Square(Section):
    """A square thing."""

    kind: Literal["square"] = knob("square", doc="Square.")
    side: float | None = knob(1.0, doc="Side.", unit="metres")
    colour: str = knob("red", doc="Colour.")


class Box(Section):
    """A box of things."""

    thing: Annotated[Round | Square, Discriminator("kind")] | None = knob(None, doc="What is in it.")
    labels: tuple[str, ...] = knob((), doc="What stands on it.")
    sealed: bool = knob(False, doc="Whether it is closed.")
    count: int = knob(1, doc="How many.", high=7)


def test_a_field_says_its_type_range_and_unit() -> None:
    fields = {**fields_of(Round), **{f"box.{name}": field for name, field in fields_of(Box).items()}}
    assert fields["radius"].allowed_text == "number 0 to 2.5 (metres)"
    assert fields["colour"].allowed_text == "red, blue"
    assert fields["box.labels"].allowed_text == "list of texts"
    assert fields["box.sealed"].allowed_text == "true or false"
    assert fields["box.count"].allowed_text == "whole number <= 7"
    assert fields["box.thing"].allowed_text == "section, or none"
    assert fields_of(Square)["side"].allowed_text == "number (metres), or none"


def test_a_field_without_default_is_required_and_so_is_a_kind() -> None:
    assert [name for name, field in fields_of(Round).items() if field.required] == ["kind", "radius"]


def test_a_large_bound_is_written_in_full() -> None:
    assert fields_of(Run)["seed"].range_text == "0 to 4294967295"


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
    assert paths.count("thing.colour") == 2
    assert [field.owner for field in find(Box, "thing.colour")] == [Round, Square]
    assert find(Box, "thing.weight") == ()


def test_values_are_shown_as_in_toml() -> None:
    shown = [as_toml(value) for value in (None, True, 3, 0.5, 'a"b', ("x", "y"), {"a": 1})]
    assert shown == ["none", "true", "3", "0.5", '"a\\"b"', '["x", "y"]', "{a = 1}"]
