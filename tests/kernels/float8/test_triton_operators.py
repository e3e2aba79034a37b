"""Our kernels are a whole set: no operator of theirs is a definition that waits for the host."""

from dataclasses import fields

import pytest

from penstock.kernels.float8.operators import REFERENCE, Float8Operators
from penstock.kernels.float8.triton_operators import TRITON


@pytest.mark.parametrize("name", [field.name for field in fields(Float8Operators) if field.name != "saves_rows"])
def test_each_operator_has_a_kernel_of_the_same_name(name: str) -> None:
    ours = vars(TRITON)[name]
    assert ours is not vars(REFERENCE)[name]
    assert ours.__name__ == name


def test_rows_can_stand_where_only_the_device_knows() -> None:
    assert TRITON.saves_rows and not REFERENCE.saves_rows, "definitions read counts on the host"
