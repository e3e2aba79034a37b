"""Rearrangements between files and models: small integers by hand, and both directions for any size."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.huggingface.families import GridTransposed, Rearrangement, Transposed, interleaved, rotary_halves
from tests.models.huggingface.family_models import VARIANTS

FORMS = st.builds(GridTransposed, dim=st.integers(0, 1), rows=st.integers(1, 5), columns=st.integers(1, 5)) | st.just(
    Transposed()
)


def test_members_of_a_pair_become_neighbours() -> None:
    theirs = torch.tensor([10, 20, 30, 11, 21, 31, 40, 50, 60, 41, 51, 61])  # two heads of 6: halves of 3 pairs
    ours = GridTransposed(0, 2, 3).read(theirs)
    assert ours.tolist() == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61]


def test_rows_of_gate_and_up_are_told_apart() -> None:
    theirs = torch.tensor([[1, -1, 2, -2, 3, -3], [4, -4, 5, -5, 6, -6]])  # two experts
    ours = GridTransposed(1, 3, 2).read(theirs)
    assert ours.tolist() == [[1, 2, 3, -1, -2, -3], [4, 5, 6, -4, -5, -6]]


@given(form=FORMS, blocks=st.integers(1, 3))
def test_what_was_read_is_written_as_it_was(form: Rearrangement, blocks: int) -> None:
    length = blocks * (form.rows * form.columns if isinstance(form, GridTransposed) else 2)
    theirs = torch.arange(length * length * 2).view(length, length, 2)
    assert torch.equal(form.write(form.read(theirs)), theirs)
    assert torch.equal(form.read(form.write(theirs)), theirs)


def test_sizes_of_a_form_are_those_of_the_model() -> None:
    assert rotary_halves(VARIANTS["mixtral"]) == GridTransposed(0, 2, 4)
    assert interleaved(VARIANTS["gpt-oss"]) == GridTransposed(1, 16, 2)
