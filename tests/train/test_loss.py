"""Losses are averaged over the counted tokens of the global batch, and depths look further on."""

import pytest
import torch
import torch.nn.functional as F

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.decoder import Hidden
from penstock.train.global_batch import cut, labels_at_depth
from penstock.train.loss import LossRule, batch_loss
from tests.closeness import assert_close
from tests.train.tiny_run import cut_rule, random_batch


def batch_of(labels: list[list[int]], documents: list[list[int]] | None = None) -> Batch:
    labels_BS = torch.tensor(labels)
    documents_BS = None if documents is None else torch.tensor(documents)
    return Batch(tokens_BS=labels_BS, labels_BS=labels_BS, positions_BS=labels_BS, documents_BS=documents_BS)


def test_a_depth_looks_further_on_and_not_past_the_end_of_the_row() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert labels_at_depth(batch, 0).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert labels_at_depth(batch, 1).tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    assert labels_at_depth(batch, 2).tolist() == [[3, 4, -100, -100], [7, 8, -100, -100]]


def test_a_depth_does_not_look_into_another_document() -> None:
    batch = batch_of([[1, 2, -100, 4, 5]], documents=[[0, 0, 0, 1, 1]])
    assert labels_at_depth(batch, 1).tolist() == [[2, -100, -100, 5, -100]]


def test_labels_are_counted_over_the_global_batch_for_every_depth() -> None:
    whole = cut(batch_of([[1, 2, -100, 4], [-100, 6, 7, 8]]), cut_rule(1, depths=2))
    assert whole.counted.tolist() == [6, 5, 3]
    assert [part.reading.tokens_BS.shape[0] for part in whole.micro_batches] == [1, 1]
    assert [part.reading.share for part in whole.micro_batches] == [0.5, 0.5]


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


def test_the_mtp_weight_is_shared_by_the_depths() -> None:
    batch, head_VD = random_batch(1, 6), torch.randn(17, 8)
    hidden = Hidden(torch.randn(1, 6, 8), (torch.randn(1, 6, 8), torch.randn(1, 6, 8)))
    rule = LossRule(depths=2, mtp_weight=0.5, z_weight=0.0, chunk_tokens=None)
    whole = cut(batch, cut_rule(1, depths=2))
    loss = batch_loss(hidden, head_VD, whole.micro_batches[0].labels, whole.counted, rule)
    assert_close(loss.total, loss.parts[0] + 0.25 * (loss.parts[1] + loss.parts[2]))


def test_a_depth_that_no_row_is_long_enough_for_costs_nothing() -> None:
    batch, head_VD = random_batch(2, 2), torch.randn(17, 8)
    hidden = Hidden(torch.randn(2, 2, 8), (torch.randn(2, 2, 8), torch.randn(2, 2, 8)))
    rule = LossRule(depths=2, mtp_weight=1.0, z_weight=0.0, chunk_tokens=None)
    whole = cut(batch, cut_rule(2, depths=2))
    assert whole.counted[2] == 0
    assert batch_loss(hidden, head_VD, whole.micro_batches[0].labels, whole.counted, rule).parts[2] == 0


def test_the_z_loss_is_part_of_the_loss() -> None:
    batch, hidden_BSD, head_VD = random_batch(1, 6), torch.randn(1, 6, 8), torch.randn(17, 8)
    whole = cut(batch, cut_rule(1, depths=0))

    def loss(z_weight: float) -> torch.Tensor:
        rule = LossRule(depths=0, mtp_weight=0.0, z_weight=z_weight, chunk_tokens=None)
        return batch_loss(Hidden(hidden_BSD, ()), head_VD, whole.micro_batches[0].labels, whole.counted, rule).total

    z = (hidden_BSD @ head_VD.T).logsumexp(-1).square().mean()
    assert_close(loss(0.1) - loss(0.0), 0.1 * z)
