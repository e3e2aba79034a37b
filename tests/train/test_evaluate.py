"""Held-out loss is exact, and measuring changes nothing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from penstock.base.errors import DeviceError
from penstock.data.evaluation import EvaluationRows
from penstock.models.rank_model import RankModel
from penstock.moe.balance import layer_loads
from penstock.parallel.symmetric import BufferSizes, Channel, SymmetricBuffers
from penstock.train.loss import LossRule
from penstock.train.observer import HeldOutLoss
from penstock.train.step import evaluate
from tests.closeness import assert_close
from tests.distributed.one_loss import layout, start_session
from tests.distributed.pool import Pool
from tests.train.tiny_run import cut_rule, one_rank, random_batch, tiny_run

RULE = LossRule(depths=1, mtp_weight=0.3, z_weight=0.1, chunk_tokens=None)


@pytest.fixture
def model(tmp_path: Path) -> RankModel:
    return one_rank(tiny_run(tmp_path))


def rows_of(size: int) -> EvaluationRows:
    batch = random_batch(4, 12)
    counted = int((batch.labels_BS != -100).sum())
    return EvaluationRows(batches=tuple(batch.micro_batches(size)), tokens=counted, text_bytes=3 * counted)


def measure(model: RankModel, rows: EvaluationRows) -> HeldOutLoss:
    return evaluate(model, rows, cut_rule(1), RULE)


def test_the_loss_is_the_mean_over_counted_tokens(model: RankModel) -> None:
    batch = random_batch(4, 12)
    logits_BSV = model.whole.logits(batch.tokens_BS, batch.positions_BS)
    expected = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten()).item()
    held_out = measure(model, rows_of(2))
    assert_close(held_out.loss, expected)
    assert held_out.tokens == rows_of(2).tokens


def test_bits_per_byte_are_nats_over_ln_2_and_bytes(model: RankModel) -> None:
    held_out = measure(model, rows_of(4))
    assert math.isclose(held_out.bits_per_byte, held_out.loss / math.log(2) / 3, rel_tol=1e-12)


def test_the_loss_does_not_depend_on_the_cut(model: RankModel) -> None:
    losses = [measure(model, rows_of(size)).loss for size in (1, 2, 4)]
    assert_close(losses[1:], 2 * losses[:1])


def test_measuring_leaves_weights_loads_gradients_and_mode_alone(model: RankModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.whole.state_dict().items()}
    measure(model, rows_of(2))
    assert model.whole.training
    assert all(int(load.slots_E.sum()) == 0 for load in layer_loads(model.modules))
    assert all(parameter.grad is None for parameter in model.whole.parameters())
    for name, tensor in model.whole.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_untrained_model_costs_what_a_uniform_guess_costs(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run = run.model_copy(update={"model": run.model.model_copy(update={"initializer_range": 1e-4})})
    assert_close(measure(one_rank(run), rows_of(4)).loss, math.log(17), tolerance=1e-4)


def _one_is_late(late: int) -> str:
    """What a rank says of an evaluation in which rank `late` waited in vain for other GPUs."""
    session = start_session(layout("expert=2", "evaluation.rows=2"))
    session.state.batches.close()
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=1)
    memory = torch.zeros(sizes.total_bytes, dtype=torch.uint8)
    buffers = SymmetricBuffers(sizes, memory, [memory.data_ptr()], 0)
    buffers.late.fill_(1 + Channel.BACK if session.axes.rank == late else 0)
    assert session.held_out is not None
    with pytest.raises(DeviceError) as raised:
        evaluate(replace(session.model, buffers=buffers), session.held_out, session.rule.cut, session.rule.loss)
    return str(raised.value)


def test_a_wait_in_vain_for_other_gpus_ends_the_evaluation_of_every_rank(ranks: Pool) -> None:
    first, second = ranks.run(2, _one_is_late, 1)
    assert "no signal BACK" in second
    assert first == "another rank timed out waiting for the GPUs of its node; fix: read the message of that rank"
