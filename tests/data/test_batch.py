"""Batches are cut without a copy and moved whole."""

import dataclasses

import pytest
import torch

from penstock.data.batch import Batch


def batch_of(rows: int, *, documents: bool) -> Batch:
    tokens_BS = torch.arange(rows * 3).reshape(rows, 3)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS + 1,
        positions_BS=tokens_BS % 3,
        documents_BS=torch.zeros_like(tokens_BS) if documents else None,
    )


@pytest.mark.parametrize("documents", [False, True])
def test_micro_batches_are_views_of_the_rows_in_order(documents: bool) -> None:
    batch = batch_of(6, documents=documents)
    parts = batch.micro_batches(2)
    assert [part.rows for part in parts] == [2, 2, 2]
    for field in dataclasses.fields(Batch):
        whole = vars(batch)[field.name]
        pieces = [vars(part)[field.name] for part in parts]
        if whole is None:
            assert pieces == [None, None, None]
        else:
            assert torch.equal(torch.cat(pieces), whole)
            assert pieces[0].data_ptr() == whole.data_ptr()


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(AssertionError, match="6 rows do not divide into micro-batches of 4"):
        batch_of(6, documents=False).micro_batches(4)


def test_a_batch_moves_with_all_its_tensors() -> None:
    moved = batch_of(2, documents=True).to("meta")
    assert all(x.device.type == "meta" for x in vars(moved).values())
    assert batch_of(2, documents=False).to(torch.device("cpu")).documents_BS is None


def test_a_batch_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch_of(1, documents=False).tokens_BS = torch.zeros(1, 3)  # type: ignore[misc]
