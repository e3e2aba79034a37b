"""A step: the same gradients however the batch is cut, and nothing changed when they are not finite."""

import math
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.config.model import Balance, ClampedSwiglu, Router
from penstock.config.parallel import Recompute
from penstock.config.run import Run
from penstock.data.evaluation import EvaluationRows
from penstock.data.loader import Batch
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards
from penstock.models.rank_model import RankModel
from penstock.moe.layer import moe_loads
from penstock.parallel.launch.process import peak_memory_bytes
from penstock.parallel.symmetric import BufferSizes, Channel, SymmetricBuffers
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import LossRule
from penstock.train.step import StepResult, StepRule, StopRequest, evaluate, step_rule, train_step
from penstock.train.stragglers import RankPulse
from tests.closeness import assert_close, assert_equal
from tests.distributed.one_loss import layout, start_session
from tests.distributed.pool import Pool
from tests.train.tiny_run import CPU, TRAINING, cut_rule, one_rank, random_batch, tiny_model, tiny_moe, tiny_run

Snapshot = dict[str, Tensor]


def fresh(run: Run) -> tuple[RankModel, MasterAdamW, StepRule]:
    model = one_rank(run)
    optimizer = MasterAdamW(param_shards(model.modules, model.axes), run.optimizer)
    return model, optimizer, step_rule(run, model, CPU)


def cut_into(rule: StepRule, rows: int) -> StepRule:
    return replace(rule, cut=replace(rule.cut, micro_batch=rows))


def snapshot(model: RankModel, optimizer: MasterAdamW) -> Snapshot:
    tensors = {**model.whole.state_dict(), **{name: part.tensor for name, part in optimizer.parts().items()}}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def gradients_of(run: Run, batch: Batch, rows: int, *, adds: bool = False) -> tuple[dict[str, Tensor], StepResult]:
    model, optimizer, rule = fresh(run)
    if adds:
        fuse_wgrad_accumulation(model.modules, optimizer.gradient_of)
    rule = replace(cut_into(rule, rows), clip_norm=0.0)
    result = train_step(model, optimizer, batch, rule, learning_rate=0.0)
    return first_gradients(optimizer, run), result


def first_gradients(optimizer: MasterAdamW, run: Run) -> dict[str, Tensor]:
    """Gradients of the first update, which has set them to zero, from the first moments."""
    moments = {name: part.tensor for name, part in optimizer.parts().items() if name.startswith("moment1.")}
    return {name.removeprefix("moment1."): one / (1.0 - run.optimizer.beta1) for name, one in moments.items()}


@pytest.mark.parametrize("documents", [False, True])
def test_one_micro_batch_of_eight_rows_and_eight_of_one_give_the_same_gradients(
    documents: bool, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path)
    batch = random_batch(8, 12, documents=documents)
    whole, result = gradients_of(run, batch, 8)
    for rows in (1, 2):
        parts, parts_result = gradients_of(run, batch, rows)
        assert_close(parts, whole, tolerance=1e-4)
        assert_close(parts_result.loss, result.loss)
        assert_close(parts_result.gradient_norm, result.gradient_norm, tolerance=1e-5)
        assert [layer.slots for layer in parts_result.layers] == [layer.slots for layer in result.layers]
    means = [gradients_of(run, part, 1)[1].loss for part in batch.micro_batches(1)]
    assert not math.isclose(sum(means) / len(means), result.loss, rel_tol=1e-4), "the average of means differs"


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("recompute", [(), ("layer",), ("moe", "dense", "latent-up")])
def test_products_that_add_to_the_sums_give_the_gradients_of_autograd(
    is_tied: bool, recompute: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_model(tie_word_embeddings=is_tied)
    run = tiny_run(tmp_path, model=model, recompute=Recompute(modules=recompute))
    batch = random_batch(8, 12)
    expected, expected_result = gradients_of(run, batch, 2)
    found, result = gradients_of(run, batch, 2, adds=True)
    assert_close(result.loss, expected_result.loss)
    assert_close(found, expected, tolerance=1e-4)


def test_in_bf16_products_that_add_lose_less_than_gradients_that_are_rounded_first(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, training=TRAINING.model_copy(update={"precision": "bf16"}))
    batch = random_batch(8, 12)
    one_pass, _ = gradients_of(run, batch, 8, adds=True)
    errors = []
    for adds in (False, True):
        found, _ = gradients_of(run, batch, 1, adds=adds)
        errors.append(float((found["head.weight"] - one_pass["head.weight"]).norm()))
    assert errors[1] < errors[0]


def test_a_step_reports_losses_layers_memory_and_a_request_to_stop(tmp_path: Path) -> None:
    model, optimizer, rule = fresh(tiny_run(tmp_path))
    stop, before = StopRequest(), peak_memory_bytes(CPU)
    pulse = RankPulse(0.1, 0.2, 0.3, 1700.0)
    result = train_step(model, optimizer, random_batch(4, 12), rule, 1e-2, stop, pulse=pulse)
    assert result.is_finite and not result.wants_stop and result.pulses == (pulse,)
    assert 1.0 < result.loss < 10.0
    assert len(result.mtp_losses) == 1
    assert [layer.layer for layer in result.layers] == [1, 2]
    assert all(sum(layer.slots) == 4 * 12 * 2 and layer.auxiliary_loss > 0 for layer in result.layers)
    assert before <= result.peak_memory_bytes <= peak_memory_bytes(CPU)
    stop.signal = signal.SIGTERM
    second = train_step(model, optimizer, random_batch(4, 12), rule, 1e-2, stop)
    assert second.wants_stop
    loads = [tuple(load.slots_E.tolist()) for load in moe_loads(model.modules)]
    assert loads == [layer.slots for layer in second.layers], "loads are those of one step"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_learns(precision: str, tmp_path: Path) -> None:
    training = TRAINING.model_copy(update={"precision": precision})
    model, optimizer, rule = fresh(tiny_run(tmp_path, training=training))
    losses = [train_step(model, optimizer, random_batch(4, 12), rule, 1e-2).loss for _ in range(10)]
    assert (model.whole.head_VD.dtype == torch.bfloat16) == (precision == "bf16")
    assert losses[-1] < losses[0] - 0.3


def _told(asked: int) -> tuple[tuple[bool, int], ...]:
    """Stop request and peak memory in three steps; rank `asked` gets a signal in the second."""
    session, stop = start_session(layout("expert=2", "model.layers=2", "evaluation.rows=0")), StopRequest()
    heard = []
    for step in range(3):
        if step == 1 and session.axes.rank == asked:
            stop.signal = signal.SIGINT
        batch = session.state.batches.next_batch()
        result = train_step(session.model, session.state.optimizer, batch, session.rule, 1e-4, stop)
        heard.append((result.wants_stop, result.peak_memory_bytes))
    session.state.batches.close()
    return tuple(heard)


def test_all_ranks_hear_the_same_in_the_step_that_one_was_asked_in(ranks: Pool) -> None:
    first, second = ranks.run(2, _told, 1)
    assert first == second
    assert [wants_stop for wants_stop, _ in first] == [False, True, True]
    assert all(peak > 1 << 20 for _, peak in first)


def _one_is_late(late: int, evaluates: bool) -> str:
    """Error of a rank in a step, or an evaluation, in which rank `late` timed out waiting for other GPUs."""
    session = start_session(layout("expert=2", "model.layers=2", f"evaluation.rows={2 if evaluates else 0}"))
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=1)
    memory = torch.zeros(sizes.total_bytes, dtype=torch.uint8)
    buffers = SymmetricBuffers(sizes, memory, [memory.data_ptr()], 0)
    buffers.late.fill_(1 + Channel.ROWS if session.axes.rank == late else 0)  # as the kernel does after a timeout
    batch = session.state.batches.next_batch()
    session.state.batches.close()
    model = replace(session.model, buffers=buffers)
    step = partial(train_step, model, session.state.optimizer, batch, session.rule, 1e-4)
    if session.held_out is not None:
        step = partial(evaluate, model, session.held_out, session.rule.cut, session.rule.loss)
    with pytest.raises(DeviceError) as raised:
        step()
    return str(raised.value)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_timeout_of_a_rank_ends_the_step_and_the_evaluation_of_every_rank(ranks: Pool, evaluates: bool) -> None:
    first, second = ranks.run(2, _one_is_late, 1, evaluates)
    assert "no signal ROWS" in second
    assert first == "another rank timed out waiting for the GPUs of its node; fix: read the message of that rank"


def test_the_expert_bias_moves_once_a_global_batch(tmp_path: Path) -> None:
    model, optimizer, rule = fresh(tiny_run(tmp_path))
    train_step(model, optimizer, random_batch(4, 12), cut_into(rule, 1), 0.0)
    biases = [tensor for name, tensor in model.whole.state_dict().items() if name.endswith("expert_bias_E")]
    assert biases
    for bias_E in biases:
        assert set(bias_E.abs().tolist()) <= {0.0, torch.tensor(1e-2).item()}
        assert bias_E.abs().sum() > 0


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    model, optimizer, rule = fresh(run)
    result = train_step(model, optimizer, random_batch(4, 12), replace(rule, clip_norm=1e-2), 0.0)
    assert result.gradient_norm > 1e-2
    gradients = torch.cat([one.flatten() for one in first_gradients(optimizer, run).values()])
    assert_close(gradients.norm(), 1e-2, tolerance=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value: float, tmp_path: Path) -> None:
    model, optimizer, rule = fresh(tiny_run(tmp_path))
    train_step(model, optimizer, random_batch(4, 12), rule, 1e-2)
    with torch.no_grad():
        model.whole.norm.weight_D[0] = value
    before = snapshot(model, optimizer)
    result = train_step(model, optimizer, random_batch(4, 12, seed=1), rule, 1e-2)
    assert not result.is_finite
    assert_equal(snapshot(model, optimizer), before)


def test_dropped_slots_are_reported(tmp_path: Path) -> None:
    model, optimizer, rule = fresh(tiny_run(tmp_path, model=tiny_moe(balance=Balance(capacity_factor=0.5))))
    result = train_step(model, optimizer, random_batch(4, 12), rule, 1e-2)
    assert all(layer.dropped >= 48 for layer in result.layers)  # half of 4 rows x 12 tokens x 2 choices, or more


def test_layers_with_experts_are_reported_by_their_numbers(tmp_path: Path) -> None:
    every_second = tiny_moe(moe_layer_freq=2).model_copy(update={"layers": 6})
    for changed, layers in ((every_second, (2, 4, 6)), (tiny_model(moe=None, dense_layers=2, mtp_layers=0), ())):
        model, optimizer, rule = fresh(tiny_run(tmp_path, model=changed))
        result = train_step(model, optimizer, random_batch(4, 12), rule, 1e-2)
        assert tuple(layer.layer for layer in result.layers) == rule.moe_layers == layers


def test_bf16_parameters_of_experts_with_biases_train(tmp_path: Path) -> None:
    router = Router(softmax_after_top_k=True, logit_bias=True)
    changed = tiny_moe(bias=True, clamped=ClampedSwiglu(limit=0.5), router=router)
    training = TRAINING.model_copy(update={"precision": "bf16"})
    model, optimizer, rule = fresh(tiny_run(tmp_path, training=training, model=changed))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "bias" in name}
    assert len(before) == 2 * 3 and all(not one.any() for name, one in before.items() if "experts" in name)
    losses = [train_step(model, optimizer, random_batch(4, 12), rule, 1e-2).loss for _ in range(10)]
    assert losses[-1] < losses[0] - 0.3
    for name, parameter in model.named_parameters():
        assert name not in before or not torch.equal(parameter, before[name]), f"{name} is not trained"


RULE = LossRule(depths=1, mtp_weight=0.3, z_weight=0.1, chunk_tokens=None)


@pytest.fixture
def model(tmp_path: Path) -> RankModel:
    return one_rank(tiny_run(tmp_path))


def rows_of(size: int) -> EvaluationRows:
    batch = random_batch(4, 12)
    counted = int((batch.labels_BS != -100).sum())
    return EvaluationRows(batches=tuple(batch.micro_batches(size)), tokens=counted, text_bytes=3 * counted)


def test_the_held_out_loss_is_the_mean_over_counted_tokens_however_they_are_cut(model: RankModel) -> None:
    batch = random_batch(4, 12)
    logits_BSV = model.whole.logits(batch.tokens_BS, batch.positions_BS)
    expected = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten()).item()
    for size in (1, 2, 4):
        held_out = evaluate(model, rows_of(size), cut_rule(1), RULE)
        assert_close(held_out.loss, expected)
        assert held_out.tokens == rows_of(2).tokens
        assert math.isclose(held_out.bits_per_byte, held_out.loss / math.log(2) / 3, rel_tol=1e-12)


def test_measuring_leaves_weights_loads_gradients_and_mode_alone(model: RankModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.whole.state_dict().items()}
    evaluate(model, rows_of(2), cut_rule(1), RULE)
    assert model.whole.training
    assert all(int(load.slots_E.sum()) == 0 for load in moe_loads(model.modules))
    assert all(parameter.grad is None for parameter in model.whole.parameters())
    assert_equal(model.whole.state_dict(), before)
