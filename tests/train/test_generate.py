"""Text from weights: the tokens that evaluation's own model would choose, and text that is whole at every moment."""

from pathlib import Path

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.config.run import Run
from penstock.data.tokenizer import ByteTokenizer
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.train import saved_model
from penstock.train.saved_model import SamplingRule, generate, load_decoder, text_pieces
from penstock.train.saved_weights import open_saved
from tests.train.tiny_run import CPU, TRAINING, byte_run, random_model, save_run

PROMPT = list(b"def ")


def _loaded(run: Run) -> tuple[Decoder, Decoder]:
    """What sampling reads from the checkpoint of a run, and the model that was saved."""
    model = random_model(run)
    config, store = open_saved(save_run(run, model))
    return load_decoder(config, store, 1, CPU), model


def _tokens(decoder: Decoder, rule: SamplingRule = SamplingRule(), most: int = 12) -> list[int]:  # noqa: B008
    return list(generate(decoder, PROMPT, limit=most, end=256, vocabulary=257, rule=rule))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_greedy_tokens_are_those_with_the_largest_logit_of_the_evaluated_model(tmp_path: Path, precision: str) -> None:
    training = TRAINING.model_copy(update={"sequence_length": 32, "precision": precision})
    run = byte_run(tmp_path, training=training)
    decoder, saved = _loaded(run)
    judged = build_model(run, CPU)
    judged.load_state_dict(saved.state_dict())
    judged.eval()
    found = _tokens(decoder)
    tokens = torch.tensor([PROMPT + found])
    with torch.no_grad():
        for place in range(len(PROMPT), tokens.shape[1]):
            logits_BSV = judged.logits(tokens[:, :place], torch.arange(place)[None])
            assert int(logits_BSV[0, -1].argmax()) == tokens[0, place]
    assert len(set(found)) > 1


def test_text_ends_where_the_document_ends_and_ids_without_text_are_never_chosen(tmp_path: Path) -> None:
    decoder, _ = _loaded(byte_run(tmp_path))
    first, second, *_ = _tokens(decoder)
    rule = SamplingRule()
    assert list(generate(decoder, PROMPT, limit=9, end=first, vocabulary=257, rule=rule)) == []
    assert list(generate(decoder, PROMPT, limit=9, end=second, vocabulary=257, rule=rule)) == [first]
    assert max(generate(decoder, PROMPT, limit=9, end=256, vocabulary=first, rule=rule)) < first


def test_draws_follow_their_seed_and_a_small_share_is_the_largest_logit(tmp_path: Path) -> None:
    decoder, _ = _loaded(byte_run(tmp_path))
    drawn = {seed: _tokens(decoder, SamplingRule(temperature=5.0, seed=seed)) for seed in (0, 1)}
    assert drawn[0] == _tokens(decoder, SamplingRule(temperature=5.0))
    assert drawn[0] != drawn[1]
    assert _tokens(decoder, SamplingRule(temperature=5.0, top_p=1e-9)) == _tokens(decoder)


def test_draws_are_as_frequent_as_the_probabilities_of_the_logits() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    rule = SamplingRule(temperature=2.0, top_p=0.8)
    drawn = [saved_model._chosen(logits_V, rule, generator) for _ in range(4000)]
    kept = torch.tensor([0.0, 1.0, 2.0]).div(2).softmax(0)  # the first three reach 0.8
    found = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert found[3] == 0
    assert float((found[:3] - kept).abs().max()) < 0.03


def test_characters_come_whole_and_bytes_that_are_no_text_come_at_the_end() -> None:
    tokens = [*"a\u00e9\u20ac".encode(), 0xFF, *"\U0001f600b".encode(), 0xE2, 0x82]
    pieces = list(text_pieces(ByteTokenizer(), list(b"x"), tokens))
    assert pieces == ["a", "\u00e9", "\u20ac", "\ufffd\U0001f600", "b", "\ufffd"]


def test_a_model_that_is_too_large_is_refused_before_it_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = byte_run(tmp_path)
    config, store = open_saved(save_run(run, random_model(run)))
    monkeypatch.setattr(saved_model, "free_memory_bytes", lambda device: 1000)
    monkeypatch.setattr(Decoder, "to_empty", lambda self, **_: pytest.fail("memory was taken"))
    with pytest.raises(DeviceError, match="too large for the memory of this machine; got .* GB of weights; allowed"):
        load_decoder(config, store, 1, CPU)
