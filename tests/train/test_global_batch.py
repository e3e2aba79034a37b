"""Each rank reads its part of the rows of a step; losses are averaged over the counted tokens of the global batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import DataError
from penstock.data.loader import Batch
from penstock.kernels.reference import IGNORED_LABEL
from penstock.layout.grid import Grid, Method, SequenceLayout
from penstock.models.decoder import Hidden
from penstock.models.model_inputs import attention_mask, shifted_tokens
from penstock.parallel.axes import Axis, make_axes
from penstock.train.passes import CutRule, LossRule, batch_loss, cut, labels_at_depth, read
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.train.tiny_run import cut_rule, random_batch

LENGTH, DEPTHS = 16, 2
META = torch.device("meta")


def _places(context: int, method: Method = "all-gather") -> list[tuple[int, ...]]:
    layout = SequenceLayout(length=LENGTH, context=context, method=method)
    return [layout.of_context(rank) for rank in range(context)]


def _of(places: tuple[int, ...], *, sees_row: bool = False) -> CutRule:
    return replace(cut_rule(1, DEPTHS), places=places, sees_row=sees_row)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
def test_a_rank_reads_its_positions_of_everything(method: Method, documents: bool) -> None:
    batch = random_batch(2, LENGTH, documents=documents)
    for places in _places(2, method):
        micro_batch = read(batch, _of(places, sees_row=method == "ulysses"))
        assert torch.equal(micro_batch.reading.tokens_BS, batch.tokens_BS[:, places])
        assert torch.equal(micro_batch.reading.positions_BS, batch.positions_BS[:, places])
        for depth, labels_BS in enumerate(micro_batch.labels):
            assert torch.equal(labels_BS, labels_at_depth(batch, depth)[:, places])


def test_tokens_ahead_are_those_of_the_whole_row() -> None:
    batch = random_batch(2, LENGTH)
    for places in [None, *_places(2)]:
        reading = read(batch, replace(cut_rule(1, DEPTHS), places=places)).reading
        assert len(reading.ahead) == DEPTHS
        for ahead_BS, whole_BS in zip(reading.ahead, shifted_tokens(batch.tokens_BS, DEPTHS), strict=True):
            assert torch.equal(ahead_BS, whole_BS if places is None else whole_BS[:, places])


@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
def test_borders_are_for_the_queries_of_a_rank_or_whole_where_ranks_divide_heads(method: Method) -> None:
    batch = random_batch(2, LENGTH, documents=True)
    whole_BSS = attention_mask(batch.documents_BS)
    assert whole_BSS is not None
    for places in _places(2, method):
        allowed_BSS = read(batch, _of(places, sees_row=method == "ulysses")).reading.allowed_BSS()
        assert allowed_BSS is not None
        assert torch.equal(allowed_BSS, whole_BSS if method == "ulysses" else whole_BSS[:, places])
    assert read(random_batch(1, LENGTH), cut_rule(1)).reading.allowed_BSS() is None


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
def test_what_is_copied_grows_with_the_row_and_not_its_square_and_the_host_does_not_wait(sees_row: bool) -> None:
    method: Method = "ulysses" if sees_row else "all-gather"
    for of in (cut_rule(1, DEPTHS), _of(_places(2, method)[1], sees_row=sees_row)):
        copies = _copied(of)
        assert len(copies) > 4 * 2 * (1 + DEPTHS)
        assert max(numbers for numbers, _ in copies) <= LENGTH  # a mask would have LENGTH ** 2
        assert all(goes_on for _, goes_on in copies)


@pytest.mark.gpu
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


def test_micro_batches_are_the_rows_in_order_with_their_share() -> None:
    batch = random_batch(6, LENGTH)
    whole = cut(batch, replace(cut_rule(2, DEPTHS), data=Axis(name="data", ranks=(0, 1, 2))))
    rows = [part.reading.tokens_BS for part in whole.micro_batches]
    assert torch.equal(torch.cat(rows), batch.tokens_BS)
    assert [part.reading.share for part in whole.micro_batches] == pytest.approx([1 / 9] * 3)  # 3 ranks of 3


def test_labels_are_counted_in_whole_rows_whatever_of_them_is_ours() -> None:
    batch = random_batch(4, LENGTH, documents=True)
    by_hand = [int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(DEPTHS + 1)]
    for rule in (cut_rule(1, DEPTHS), *map(_of, _places(2))):
        assert torch.equal(cut(batch, rule).counted, torch.tensor(by_hand, dtype=torch.float64))
    assert by_hand[0] > by_hand[1] > by_hand[2] > 0


def _counted(empty_rank: int | None) -> tuple[Tensor, Tensor]:
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


def batch_of(labels: list[list[int]], documents: list[list[int]] | None = None) -> Batch:
    labels_BS = torch.tensor(labels)
    documents_BS = None if documents is None else torch.tensor(documents)
    return Batch(tokens_BS=labels_BS, labels_BS=labels_BS, positions_BS=labels_BS, documents_BS=documents_BS)


def test_a_depth_looks_further_on_and_not_past_the_end_of_the_row_or_the_document() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert labels_at_depth(batch, 0).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert labels_at_depth(batch, 1).tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    assert labels_at_depth(batch, 2).tolist() == [[3, 4, -100, -100], [7, 8, -100, -100]]
    batch = batch_of([[1, 2, -100, 4, 5]], documents=[[0, 0, 0, 1, 1]])
    assert labels_at_depth(batch, 1).tolist() == [[2, -100, -100, 5, -100]]


def test_a_batch_without_a_counted_label_is_refused() -> None:
    with pytest.raises(DataError, match="no token of the global batch is counted"):
        cut(batch_of([[IGNORED_LABEL] * 4]), cut_rule(1, depths=0))


def test_parts_of_micro_batches_add_up_to_means_over_the_global_batch() -> None:
    batch, rule = random_batch(4, 6), LossRule(depths=1, mtp_weight=0.3, z_weight=0.0, chunk_tokens=None)
    whole = cut(batch, cut_rule(1))
    hidden_BSD, deeper_BSD, head_VD = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(17, 8)
    losses = [
        batch_loss(Hidden(hidden_BSD[[row]], (deeper_BSD[[row]],)), head_VD, part.labels, whole.counted, rule)
        for row, part in enumerate(whole.micro_batches)
    ]
    main = F.cross_entropy((hidden_BSD @ head_VD.T).flatten(0, 1), batch.labels_BS.flatten())
    deeper = F.cross_entropy((deeper_BSD @ head_VD.T).flatten(0, 1), labels_at_depth(batch, 1).flatten())
    assert_close(sum(loss.parts for loss in losses), torch.stack([main, deeper]))
    assert_close(sum(loss.total for loss in losses), main + 0.3 * deeper)


@pytest.mark.parametrize("length", [6, 2])
def test_depths_share_their_weight_and_one_that_no_row_is_long_enough_for_costs_nothing(length: int) -> None:
    hidden = Hidden(torch.randn(2, length, 8), (torch.randn(2, length, 8), torch.randn(2, length, 8)))
    rule = LossRule(depths=2, mtp_weight=0.5, z_weight=0.0, chunk_tokens=None)
    whole = cut(random_batch(2, length), cut_rule(2, depths=2))
    loss = batch_loss(hidden, torch.randn(17, 8), whole.micro_batches[0].labels, whole.counted, rule)
    assert_close(loss.total, loss.parts[0] + 0.25 * (loss.parts[1] + loss.parts[2]))
    assert (whole.counted[2] == 0) == (loss.parts[2] == 0) == (length == 2)


def test_the_z_loss_is_part_of_the_loss() -> None:
    batch, hidden_BSD, head_VD = random_batch(1, 6), torch.randn(1, 6, 8), torch.randn(17, 8)
    whole = cut(batch, cut_rule(1, depths=0))

    def loss(z_weight: float) -> torch.Tensor:
        rule = LossRule(depths=0, mtp_weight=0.0, z_weight=z_weight, chunk_tokens=None)
        return batch_loss(Hidden(hidden_BSD, ()), head_VD, whole.micro_batches[0].labels, whole.counted, rule).total

    z = (hidden_BSD @ head_VD.T).logsumexp(-1).square().mean()
    assert_close(loss(0.1) - loss(0.0), 0.1 * z)
