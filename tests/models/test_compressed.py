"""Compressed attention: windows of documents, blocks of queries, what is recomputed, and what the indexer learns.

Outputs and gradients beside `transformers` are in tests/models/huggingface/test_weights.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import Rope
from penstock.kernels.sparse_attention import best_keys, index_scores
from penstock.models import compressed
from penstock.models.compressed import CompressedLayer, windows_of
from penstock.models.decoder import Decoder
from tests.closeness import assert_close, assert_equal
from tests.float64 import EXACT, in_float64
from tests.models.families import reading_of, tiny_decoder
from tests.models.huggingface.family_models import deepseek_v4
from tests.models.huggingface.parity import unsettled

POSITIONS, LENGTHS = 17, (7, 10)
TOKENS_BS = torch.randint(61, (2, POSITIONS), generator=torch.Generator().manual_seed(2))
DOCUMENTS_BS = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
POSITIONS_BS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)


def with_loss(coefficient: float) -> Decoder:
    base = deepseek_v4().attention
    indexer = base.indexer.model_copy(update={"loss_coef": coefficient})
    return tiny_decoder(deepseek_v4(attention=base.model_copy(update={"indexer": indexer})))


def gradients(model: Decoder, *, share: float = 1.0) -> dict[str, Tensor | None]:
    """Of the usual loss times `share`; the indexer's own loss is whole."""
    unsettled(model.train())
    hidden = model(reading_of(TOKENS_BS, POSITIONS_BS, DOCUMENTS_BS)).main_BSD
    loss = F.cross_entropy(F.linear(hidden, model.head_VD).flatten(0, 1), TOKENS_BS.roll(-1, 1).flatten())
    (share * loss).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_windows_begin_with_a_document_and_end_inside_it() -> None:
    first_BS = torch.tensor([[0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5]])
    of_pairs = windows_of(first_BS, 2, Rope(), 4, overlap=True)
    none = 12  # beyond the row
    assert of_pairs.last_BI.tolist() == [[1, 3, 6, 8, 10, none]]
    assert of_pairs.rows_BIJ[0, 1].tolist() == [0, 1, 2, 3] and of_pairs.rows_BIJ[0, 3].tolist() == [5, 6, 7, 8]
    has_one_before = [row[0].item() for row in of_pairs.is_read_BIJ[0, :5]]
    assert has_one_before == [False, True, False, True, True] and of_pairs.is_read_BIJ[..., 2:].all()
    of_fours = windows_of(first_BS, 4, Rope(), 4, overlap=False)
    assert of_fours.last_BI.tolist() == [[3, 8, none]]
    assert of_fours.rows_BIJ[0, :2].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert_equal(of_fours.sin_BIP[:, 0], of_fours.sin_BIP[:, 1])  # both are the first of their documents


def test_a_row_that_is_shorter_than_a_window_has_none() -> None:
    windows = windows_of(torch.zeros(2, 3, dtype=torch.int32), 4, Rope(), 4, overlap=True)
    assert windows.last_BI.shape == (2, 0) and windows.rows_BIJ.shape == (2, 0, 8)


@pytest.mark.parametrize(("queries", "scores"), [(3, 1 << 27), (512, 1), (512, 2 * 4 * (5 + 512 + 8) * 6)])
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, queries: int, scores: int) -> None:
    with in_float64():
        expected = gradients(with_loss(1.0))
        monkeypatch.setattr(compressed, "QUERIES", queries)
        monkeypatch.setattr(compressed, "SCORES", scores)
        assert_close(gradients(with_loss(1.0)), expected, tolerance=EXACT)


@pytest.mark.parametrize("kinds", [("norm",), ("latent-up",), ("attention",), ("norm", "latent-up", "attention")])
def test_recomputed_parts_change_nothing(kinds: tuple[str, ...]) -> None:
    expected, model = gradients(with_loss(1.0)), with_loss(1.0)
    for layer in model.modules():
        if isinstance(layer, CompressedLayer):
            layer.layer_context = replace(layer.layer_context, recompute=frozenset(kinds))
    assert_equal(gradients(model), expected)


def test_only_the_indexer_learns_from_its_loss() -> None:
    taught, untaught = (gradients(with_loss(coefficient)) for coefficient in (1.0, 0.0))
    of_indexer = {name for name in taught if ".indexer." in name}
    assert of_indexer and all(taught[name].abs().sum() > 0 for name in of_indexer)
    assert all(untaught[name] is None for name in of_indexer)
    assert_equal(*({name: one for name, one in each.items() if name not in of_indexer} for each in (taught, untaught)))


def test_the_indexer_follows_the_attention_to_the_chosen_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside loops over queries, from what the layer gives attention."""
    seen: list[tuple[Tensor, ...]] = []
    attended = CompressedLayer._attended

    def watch(layer: CompressedLayer, q_BSHN: Tensor, kv_BSN: Tensor, context: object, *entries: Tensor) -> Tensor:
        seen.extend([(q_BSHN.detach(), *entries)] if layer.indexer is not None else [])
        return attended(layer, q_BSHN, kv_BSN, context, *entries)

    monkeypatch.setattr(CompressedLayer, "_attended", watch)
    with in_float64():
        model = with_loss(0.5)
        found = gradients(model, share=0.0)
        seen.clear()
        model(reading_of(TOKENS_BS, POSITIONS_BS, DOCUMENTS_BS))  # its graph is not used up yet
        ((q_BSHN, last_BI, entries_BIN, *index),) = seen
        scores_BSI, total = index_scores(*index), torch.zeros(())
        for row in range(2):
            for query in range(POSITIONS):
                first = 0 if query < LENGTHS[0] else LENGTHS[0]
                closed_I = (last_BI[row] <= query) & (last_BI[row] >= first)
                if closed_I.any():
                    best_I = best_keys(scores_BSI[row, query][None], closed_I[None], 4)[0]
                    logits_HI = q_BSHN[row, query] @ entries_BIN.detach()[row, best_I].T * 16**-0.5
                    mass_I = logits_HI.softmax(-1).mean(0)
                    logs_I = scores_BSI[row, query, best_I].log_softmax(0)
                    total = total + (mass_I * (mass_I.log() - logs_I)).sum()
        names = [name for name in found if ".indexer." in name]
        loss = 0.5 * total / (2 * POSITIONS)
        expected = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
        assert_close([found[name] for name in names], [*expected], tolerance=EXACT)
