"""The base of every section of a run's configuration, and `knob`, the one way to declare a field.

A section is frozen and strict: no field changes after loading, no unknown key passes, no type is guessed, no number is
infinite or NaN. A knob carries its doc, unit and range, from which the reference, the command line's `explain` and the
range check all come.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One part of a run's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def knob(default: Any = ..., *, doc: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """Declare a field of a section.

    Args:
        default: value when none is given; `...` makes the field required.
        doc: one or two sentences for the reference.
        unit: what the number counts, such as `rows` or `steps`; empty for names and switches.
        low: smallest allowed value.
        high: largest allowed value.

    Returns:
        A pydantic field.
    """
    return Field(default, description=doc, ge=low, le=high, json_schema_extra={"unit": unit})
