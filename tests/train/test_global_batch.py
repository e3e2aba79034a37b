"""What each rank reads of a step's rows is its part of what one rank reads of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import DataError
from penstock.kernels.reference import IGNORED_LABEL
from penstock.layout.grid import Grid
from penstock.layout.sequence import Method, SequenceLayout
from penstock.models.model_inputs import attention_mask, shifted_tokens
from penstock.parallel.axes import Axis, make_axes
from penstock.train.global_batch import CutRule, cut, labels_at_depth, read
from tests.distributed.pool import Pool
from tests.train.tiny_run import cut_rule, random_batch

LENGTH, DEPTHS = 16, 2
META = torch.device("meta")


def _places(context: int, method: Method = "all-gather") -> list[tuple[int, ...]]:
    layout = SequenceLayout(length=LENGTH, context=context, method=method)
    return [layout.of_context(rank) for rank in range(context)]


def _of(places: tuple[int, ...], *, sees_row: bool = False) -> CutRule:
    return replace(cut_rule(1, DEPTHS), places=places, sees_row=sees_row)


@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
def test_a_rank_reads_its_positions_of_everything(method: Method) -> None:
    batch = random_batch(2, LENGTH)
    for places in _places(2, method):
        micro_batch = read(batch, _of(places))
        assert torch.equal(micro_batch.reading.tokens_BS, batch.tokens_BS[:, places])
        assert torch.equal(micro_batch.reading.positions_BS, batch.positions_BS[:, places])
        for depth, labels_BS in enumerate(micro_batch.labels):
            assert torch.equal(labels_BS, labels_at_depth(batch, depth)[:, places])


def test_all_ranks_together_read_every_label_once() -> None:
    batch = random_batch(2, LENGTH)
    parts = [(places, read(batch, _of(places))) for places in _places(4)]
    for depth in range(DEPTHS + 1):
        labels_BS = torch.full_like(batch.labels_BS, -7)
        for places, part in parts:
            assert bool((labels_BS[:, places] == -7).all()), "a position is read twice"
            labels_BS[:, places] = part.labels[depth]
        assert torch.equal(labels_BS, labels_at_depth(batch, depth))


def test_labels_and_tokens_ahead_come_from_behind_the_border_of_a_chunk() -> None:
    batch = random_batch(1, LENGTH)
    places = _places(2)[0]
    assert places[:5] == (0, 1, 2, 3, 12), "the first chunk ends after position 3"
    micro_batch = read(batch, _of(places))
    for depth in range(1, DEPTHS + 1):
        # Position 3 + depth, and its label, belong to the other rank.
        assert micro_batch.reading.ahead[depth - 1][0, 3] == batch.tokens_BS[0, 3 + depth]
        assert micro_batch.labels[depth][0, 3] == batch.labels_BS[0, 3 + depth]
        assert micro_batch.labels[depth][0, -1] == IGNORED_LABEL, "behind the row is nothing"


def test_tokens_ahead_are_those_of_the_whole_row() -> None:
    batch = random_batch(2, LENGTH)
    for places in [None, *_places(2)]:
        reading = read(batch, replace(cut_rule(1, DEPTHS), places=places)).reading
        assert len(reading.ahead) == DEPTHS
        for ahead_BS, whole_BS in zip(reading.ahead, shifted_tokens(batch.tokens_BS, DEPTHS), strict=True):
            assert torch.equal(ahead_BS, whole_BS if places is None else whole_BS[:, places])


def test_labels_ahead_stop_at_a_document_even_where_that_is_another_ranks() -> None:
    batch = random_batch(1, LENGTH, documents=True)  # the second document begins at 8
    places = _places(2, "ulysses")[0]
    labels = read(batch, _of(places, sees_row=True)).labels
    assert labels[1][0, 7] == labels[2][0, 6] == labels[2][0, 7] == IGNORED_LABEL
    assert labels[1][0, 6] == batch.labels_BS[0, 7]


def test_borders_are_for_our_queries_and_all_keys() -> None:
    batch = random_batch(2, LENGTH, documents=True)
    whole_BSS = attention_mask(batch.documents_BS)
    assert whole_BSS is not None
    for places in _places(2):
        allowed_BSS = read(batch, _of(places)).reading.allowed_BSS()
        assert allowed_BSS is not None
        assert torch.equal(allowed_BSS, whole_BSS[:, places])


def test_borders_are_whole_where_ranks_divide_heads() -> None:
    batch = random_batch(2, LENGTH, documents=True)
    allowed_BSS = read(batch, _of(_places(2, "ulysses")[1], sees_row=True)).reading.allowed_BSS()
    whole_BSS = attention_mask(batch.documents_BS)
    assert allowed_BSS is not None and whole_BSS is not None
    assert torch.equal(allowed_BSS, whole_BSS)


def test_borders_are_causal_and_inside_a_document() -> None:
    documents_BS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    allowed_BSS = attention_mask(documents_BS)
    assert allowed_BSS is not None
    causal_SS = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(allowed_BSS, (documents_BS[:, :, None] == documents_BS[:, None, :]) & causal_SS)


def _copied(of: CutRule) -> list[tuple[int, bool]]:
    """What a cut copies to a device: numbers in each copy, and whether the host goes on at once."""
    copies: list[tuple[int, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.aten._to_copy.default and kwargs.get("device") == META:
                copies.append((args[0].numel(), bool(kwargs.get("non_blocking"))))
            return func(*args, **kwargs)

    with Watch():
        cut(random_batch(4, LENGTH, documents=True), replace(of, device=META))
    return copies


@pytest.mark.parametrize("sees_row", [False, True])
def test_what_is_copied_grows_with_the_row_and_not_its_square_and_nobody_waits(sees_row: bool) -> None:
    method: Method = "ulysses" if sees_row else "all-gather"
    for of in (cut_rule(1, DEPTHS), _of(_places(2, method)[1], sees_row=sees_row)):
        copies = _copied(of)
        assert len(copies) > 4 * 2 * (1 + DEPTHS)
        assert max(numbers for numbers, _ in copies) <= LENGTH
        assert all(goes_on for _, goes_on in copies)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_a_gpu() -> None:
    rule = replace(_of(_places(2)[1]), device=torch.device("cuda", torch.cuda.current_device()))
    batch = random_batch(2, LENGTH, documents=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        allowed_BSS = [part.reading.allowed_BSS() for part in cut(batch, rule).micro_batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole_BSS = attention_mask(batch.documents_BS)
    assert whole_BSS is not None
    found = [one.cpu() for one in allowed_BSS if one is not None]
    assert torch.equal(torch.cat(found), whole_BSS[:, _places(2)[1]])


def test_without_documents_there_are_no_borders() -> None:
    assert read(random_batch(1, LENGTH), cut_rule(1)).reading.allowed_BSS() is None


def test_micro_batches_are_the_rows_in_order_with_their_share() -> None:
    batch = random_batch(6, LENGTH)
    whole = cut(batch, replace(cut_rule(2, DEPTHS), data=Axis(name="data", ranks=(0, 1, 2))))
    rows = [part.reading.tokens_BS for part in whole.micro_batches]
    assert torch.equal(torch.cat(rows), batch.tokens_BS)
    assert [part.reading.share for part in whole.micro_batches] == pytest.approx([1 / 9] * 3)


def test_labels_are_counted_in_whole_rows_whatever_of_them_is_ours() -> None:
    batch = random_batch(4, LENGTH, documents=True)
    counted = cut(batch, cut_rule(1, DEPTHS)).counted
    assert counted.dtype == torch.float64
    assert all(torch.equal(cut(batch, _of(places)).counted, counted) for places in _places(2))
    by_hand = [int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(DEPTHS + 1)]
    assert counted.tolist() == by_hand
    assert by_hand[0] > by_hand[1] > by_hand[2] > 0


def _counted(empty_rank: int | None) -> tuple[Tensor, Tensor]:
    """Counts of the global batch, and of our own rows."""
    size = dist.get_world_size()
    batch = random_batch(4, LENGTH, seed=dist.get_rank())
    if dist.get_rank() == empty_rank:
        batch.labels_BS.fill_(IGNORED_LABEL)
    axes = make_axes(Grid(world=size))
    own = [int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(2)]
    return cut(batch, replace(cut_rule(2), data=axes.data)).counted, torch.tensor(own, dtype=torch.float64)


@pytest.mark.parametrize("empty_rank", [None, 1])
def test_labels_are_counted_over_all_ranks_even_if_one_has_none(empty_rank: int | None, ranks: Pool) -> None:
    results = ranks.run(3, _counted, empty_rank)
    expected = torch.stack([own for _, own in results]).sum(0)
    assert all(torch.equal(counted, expected) for counted, _ in results)


def test_a_batch_of_one_rank_without_a_label_is_refused() -> None:
    batch = random_batch(2, LENGTH)
    batch.labels_BS.fill_(IGNORED_LABEL)
    with pytest.raises(DataError, match="no token of the global batch is counted"):
        cut(batch, cut_rule(1))
