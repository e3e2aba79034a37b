"""A section is frozen and strict, and every field of the schema says what it is."""

import pytest
from pydantic import ValidationError

from penstock.config.presets.debug import debug
from penstock.config.run import Run
from penstock.config.schema import Field, every_field
from penstock.config.training import Optimizer, Training

FIELDS = list(every_field(Run))


def test_a_loaded_run_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        debug().training.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_is_finite(number: float) -> None:
    with pytest.raises(ValidationError):
        Optimizer(learning_rate=number)


def test_types_are_not_guessed() -> None:
    with pytest.raises(ValidationError):
        Training(steps="10", sequence_length=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.path}-{field.owner.__name__}")
def test_every_field_has_a_doc_that_is_a_sentence(field: Field) -> None:
    assert field.doc.endswith("."), field.path
    assert field.doc.isascii(), field.path


def test_every_number_has_a_range() -> None:
    # Lists of numbers name layers and stages; rules compare them with the model.
    numbers = [field for field in FIELDS if "number" in field.type_text and not field.takes_list]
    assert len(numbers) > 40
    assert [field.path for field in numbers if field.low is None] == []


def test_every_section_has_a_doc() -> None:
    assert [field.path for field in FIELDS for section in field.sections if not section.__doc__] == []
