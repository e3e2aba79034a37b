"""Sparse attention: the choice of keys, the loss that trains the indexer, and what does not learn from it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import Model
from penstock.kernels import sparse_attention, sparse_attention_launches
from penstock.kernels.bounded_attention import attention_by_mask
from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.sparse_attention import attach_loss, attention_mass, best_keys, index_loss, index_scores
from penstock.models import decoder, mla
from penstock.models.decoder import Decoder
from penstock.models.mla import LatentLayer
from tests.closeness import assert_close, assert_equal
from tests.models.families import reading_of, tiny_decoder
from tests.models.huggingface.family_models import INDEXER, V32
from tests.models.huggingface.parity import unsettled

TOKENS_BS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(2))
POSITIONS_BS = torch.arange(12).expand(2, -1)
GATHERING = replace(
    REFERENCE,
    choose_keys=sparse_attention_launches.choose_keys,
    sparse_attention=sparse_attention_launches.sparse_attention,
)


def with_indexer(**changes: object) -> Model:
    indexer = INDEXER.model_copy(update=changes)
    return V32.model_copy(update={"attention": V32.attention.model_copy(update={"indexer": indexer})})


def gradients(
    config: Model,
    *,
    with_loss: bool = True,
    operators: Operators = REFERENCE,
    documents_BS: Tensor | None = None,
    recomputed: tuple[str, ...] = (),
) -> tuple[Decoder, dict[str, Tensor | None]]:
    model = unsettled(tiny_decoder(config, operators).train())
    for layer in model.modules():
        if isinstance(layer, LatentLayer):
            layer.layer_context = replace(layer.layer_context, recompute=frozenset(recomputed))
    hidden = model(reading_of(TOKENS_BS, POSITIONS_BS, documents_BS)).main_BSD
    loss = F.cross_entropy(F.linear(hidden, model.head_VD).flatten(0, 1), TOKENS_BS.roll(-1, 1).flatten())
    (loss if with_loss else 0.0 * loss).backward()
    return model, {name: one.grad for name, one in model.named_parameters()}


def test_the_best_allowed_keys_are_chosen() -> None:
    scores_BSS = torch.tensor([[[9.0, 8.0, 7.0], [1.0, 2.0, 9.0], [3.0, 1.0, 2.0]]])
    causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    chosen = best_keys(scores_BSS, causal, 2)
    assert chosen[0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]


@pytest.fixture
def by_choice(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The sparse stage chooses keys also where a row has no more than it may choose."""
    for module in (decoder, mla):
        monkeypatch.setattr(module, "reads_all_keys", lambda config, positions: config.stage == "dense")
    return monkeypatch


@pytest.mark.usefixtures("by_choice")
def test_a_query_sees_all_keys_if_they_are_fewer_than_top_k() -> None:
    dense, sparse = (unsettled(tiny_decoder(with_indexer(index_topk=top_k))).eval() for top_k in (12, 100))
    without = unsettled(tiny_decoder(with_indexer(stage="dense"))).eval()
    expected = without.logits(TOKENS_BS, POSITIONS_BS)
    assert_close(dense.logits(TOKENS_BS, POSITIONS_BS), expected)
    assert_close(sparse.logits(TOKENS_BS, POSITIONS_BS), expected)


def test_documents_of_a_row_choose_their_own_keys() -> None:
    model = unsettled(tiny_decoder(with_indexer(index_topk=3))).eval()
    documents_BS = torch.tensor([[0] * 5 + [1] * 7] * 2)
    positions_BS = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    packed = model(reading_of(TOKENS_BS, positions_BS, documents_BS)).main_BSD
    alone = model(reading_of(TOKENS_BS[:, 5:], positions_BS[:, 5:])).main_BSD
    assert_close(packed[:, 5:], alone)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_the_loss_and_its_gradient_equal_float64(stage: str) -> None:
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    leaves = normal(2, 9, 3, 8), normal(2, 9, 8), normal(2, 9, 3)
    q_BSHN, k_BSHN = normal(2, 9, 4, 6), normal(2, 9, 4, 6)
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    inputs = [one.float().requires_grad_() for one in leaves]
    scores_BSS = index_scores(*inputs)
    keys_BSS = causal.expand(2, -1, -1) if stage == "dense" else best_keys(scores_BSS, causal, 4)
    loss = index_loss(scores_BSS, attention_mass(q_BSHN.float(), k_BSHN.float(), keys_BSS, 0.4), keys_BSS)
    found = torch.autograd.grad(loss, inputs)

    # The same by loops over queries, from the chosen keys alone.
    exact = [one.clone().requires_grad_() for one in leaves]
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for query in range(9):
            keys = keys_BSS[row, query].nonzero()[:, 0]
            score = sum(
                exact[2][row, query, h] * (exact[1][row, keys] @ exact[0][row, query, h]).relu() for h in range(3)
            )
            heads = [(k_BSHN[row, keys, h] @ q_BSHN[row, query, h] * 0.4).softmax(0) for h in range(4)]
            mass = sum(heads) / 4
            total = total + (mass * (mass.log() - score.log_softmax(0))).sum()
    assert_close(loss.double(), total, tolerance=1e-5)
    for got, expected in zip(found, torch.autograd.grad(total, exact), strict=True):
        assert_close(got.double(), expected, tolerance=1e-5)


@pytest.mark.parametrize("lengths", [None, (5, 7)])
def test_kernels_that_gather_the_chosen_keys_give_the_gradients_of_masks(lengths: tuple[int, ...] | None) -> None:
    documents_BS = None
    if lengths is not None:
        documents_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    config = with_indexer(index_topk=4, index_n_heads=16)  # of so many heads no two scores are zero
    _, expected = gradients(config, documents_BS=documents_BS)
    model, found = gradients(config, operators=GATHERING, documents_BS=documents_BS)
    assert all(layer.absorbs for layer in model.modules() if isinstance(layer, LatentLayer))
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            assert_close(found[name], gradient, tolerance=1e-5, by="norm", what=name)


@pytest.mark.parametrize("changes", [{"stage": "dense"}, {"index_topk": 12}], ids=["dense stage", "rows of top_k keys"])
def test_where_all_keys_are_read_bounds_of_documents_replace_mask_and_choice(
    changes: dict[str, Any], by_choice: pytest.MonkeyPatch
) -> None:
    documents_BS = torch.arange(2).repeat_interleave(torch.tensor((5, 7))).expand(2, -1)
    config = with_indexer(**changes)
    _, expected = gradients(config, documents_BS=documents_BS)
    by_choice.undo()
    bounded = replace(GATHERING, bounded_attention=attention_by_mask, choose_keys=None)
    model, found = gradients(config, operators=bounded, documents_BS=documents_BS)
    assert model.forward_context(reading_of(TOKENS_BS, POSITIONS_BS, documents_BS)).allowed_BSS is None
    for name, gradient in expected.items():
        assert_close(found[name], gradient, tolerance=1e-5, by="norm", what=name)


def test_recomputation_does_not_choose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config, choices = with_indexer(index_topk=4), []

    def choose_keys(*inputs: Any) -> Tensor:
        choices.append(inputs)
        return sparse_attention_launches.choose_keys(*inputs)

    counting = replace(GATHERING, choose_keys=choose_keys)
    _, expected = gradients(config, operators=GATHERING)
    model, found = gradients(config, operators=counting, recomputed=("latent-up", "attention"))
    assert len(choices) == sum(isinstance(layer, LatentLayer) for layer in model.modules())
    for name, gradient in expected.items():
        assert_equal(found[name], gradient, what=name)


def test_the_dense_loss_is_computed_for_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = gradients(with_indexer(stage="dense"))
    monkeypatch.setattr(sparse_attention, "FLOATS_AT_ONCE", 5 * 2 * 12 * 4)  # of 5 queries: 2 rows, 12 keys, 4 heads
    _, parts = gradients(with_indexer(stage="dense"))
    for name, gradient in whole.items():
        assert_close(parts[name], gradient, tolerance=1e-5, by="norm", what=name)


def test_an_attached_loss_counts_once_whatever_the_carrier_is_worth() -> None:
    carrier, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    (attach_loss(carrier, weight**2) * 5).sum().backward()
    assert_equal(weight.grad, torch.tensor(4.0))
    assert_equal(carrier.grad, torch.full((3,), 5.0))


def test_the_loss_trains_the_indexer_and_nothing_else() -> None:
    _, without = gradients(with_indexer(loss_coef=0.0))
    model, found = gradients(with_indexer())
    for name, gradient in found.items():
        if ".indexer." in name:
            assert gradient is not None and gradient.count_nonzero() > 0, name
            assert without[name] is None, name
        else:
            assert_equal(gradient, without[name], what=name)
    assert sum(".indexer." in name for name in found) == 5 * len(model.blocks)
    _, alone = gradients(with_indexer(), with_loss=False)
    for name, gradient in alone.items():
        if ".indexer." in name:
            assert_close(gradient, found[name], what=name)


def test_its_loss_falls_to_the_attention_that_it_imitates() -> None:
    model = unsettled(tiny_decoder(with_indexer(stage="dense")).train())
    indexers = [one for name, one in model.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexers, lr=0.02)
    norms = []
    for _ in range(60):
        optimizer.zero_grad()
        (0.0 * model(reading_of(TOKENS_BS, POSITIONS_BS)).main_BSD.sum()).backward()
        norms.append(float(sum(one.grad.square().sum() for one in indexers)))  # type: ignore[union-attr]
        optimizer.step()
    assert sum(norms[-5:]) < 0.2 * sum(norms[:5])
