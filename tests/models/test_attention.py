"""Attention between bounds, with masks and sinks; that of every family is compared in huggingface/test_weights.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.config.model import GroupedQueryAttention, LatentAttention
from penstock.kernels.bounded_attention import attention_by_mask
from penstock.kernels.operators import REFERENCE, Operators
from penstock.models.attention import LogitMeter, query_scale
from penstock.models.model_inputs import ForwardContext
from tests.closeness import assert_close
from tests.kernels.eager_attention import random_documents, seen_by, with_gradients
from tests.models.families import ATTENTIONS, reading_of, tiny_decoder, tiny_model

ROWS, LENGTH, HIDDEN, LAYERS = 2, 14, 32, 2
WITH_BOUNDS = replace(REFERENCE, bounded_attention=attention_by_mask)


def _attention(
    attention: GroupedQueryAttention | LatentAttention, layer: int, operators: Operators = REFERENCE
) -> tuple[Any, Any]:
    """A decoder, and one of its attentions with random weights."""
    sizes = {"hidden_size": HIDDEN, "layers": LAYERS, "dense_layers": LAYERS}
    decoder = tiny_decoder(tiny_model(family="plain", attention=attention, moe=None, **sizes), operators)
    module = decoder.blocks[str(layer)].attention
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return decoder, module


def _inputs(has_documents: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states, a direction, positions that begin again with each document, and documents."""
    generator = torch.Generator().manual_seed(4)
    x_BSD, direction_BSD = (torch.randn(ROWS, LENGTH, HIDDEN, generator=generator) for _ in range(2))
    places_BS = torch.arange(LENGTH).expand(ROWS, -1)
    if not has_documents:
        return x_BSD, direction_BSD, places_BS, None
    documents_BS = random_documents(ROWS, LENGTH)
    starts_BS = torch.where(documents_BS.diff(dim=1, prepend=documents_BS[:, :1] - 1) != 0, places_BS, 0)
    return x_BSD, direction_BSD, places_BS - starts_BS.cummax(dim=1).values, documents_BS


def _context(decoder: Any, positions_BS: Tensor, documents_BS: Tensor | None) -> ForwardContext:
    tokens_BS = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return decoder.forward_context(reading_of(tokens_BS, positions_BS, documents_BS))


@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("family", [*ATTENTIONS, "latent"])
def test_attention_between_bounds_equals_that_with_masks(family: str, has_documents: bool) -> None:
    """The output of all layers and every gradient, in float64."""
    attention = {} if family == "latent" else {"attention": ATTENTIONS[family]}
    config = tiny_model(family="plain", moe=None, layers=LAYERS, dense_layers=LAYERS, **attention)
    _, _, positions_BS, documents_BS = _inputs(has_documents)
    tokens_BS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % config.vocab_size
    found = []
    for operators in (REFERENCE, WITH_BOUNDS):
        decoder = tiny_decoder(config, operators).double()
        hidden = decoder(reading_of(tokens_BS, positions_BS, documents_BS)).main_BSD
        hidden.square().sum().backward()
        found.append((hidden.detach(), {name: one.grad for name, one in decoder.named_parameters()}))
    assert_close(found[1], found[0], tolerance=1e-6)


def test_a_mask_is_made_beside_bounds_only_for_qk_clip() -> None:
    decoder, ours = _attention(ATTENTIONS["gpt-oss"], 0, WITH_BOUNDS)
    _, _, positions_BS, documents_BS = _inputs(True)
    context = _context(decoder, positions_BS, documents_BS)
    assert context.allowed_BSS is None and context.bounds[0].most == LENGTH and context.nears[0].most == 5
    ours.logits = LogitMeter(4, torch.device("cpu"))
    assert _context(decoder, positions_BS, documents_BS).allowed_BSS is not None


@pytest.mark.parametrize("operators", [REFERENCE, WITH_BOUNDS], ids=["masks", "bounds"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
def test_a_sink_of_latent_attention_is_a_key_without_a_value(has_documents: bool, operators: Operators) -> None:
    """In float64, output and all gradients."""
    latent = LatentAttention(
        heads=4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=8, sinks=True
    )
    decoder, ours = _attention(latent, 0, operators)
    decoder.double()
    x_BSD, direction_BSD, positions_BS, documents_BS = _inputs(has_documents)
    context = _context(decoder, positions_BS, documents_BS)
    leaves = [x_BSD.double().requires_grad_(), *ours.parameters()]

    def by_definition(q_BSHN: Tensor, k_BSHN: Tensor, v_BSHM: Tensor, **_: Any) -> Tensor:
        scores_BHSS = torch.einsum("bshn,bthn->bhst", q_BSHN, k_BSHN) * ours.scale
        scores_BHSS = scores_BHSS.masked_fill(~seen_by(None, LENGTH, documents_BS)[:, None], -torch.inf)
        sinks_BHS1 = ours.sinks_H[None, :, None, None].expand(ROWS, 4, LENGTH, 1)
        weights_BHSS = torch.cat((scores_BHSS, sinks_BHS1), dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("bhst,bthm->bshm", weights_BHSS, v_BSHM)

    got = with_gradients(ours(leaves[0], context), direction_BSD.double(), leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.models.mla.attend", by_definition)
        expected = with_gradients(ours(leaves[0], context), direction_BSD.double(), leaves)
    names = ("output", "x", *(name for name, _ in ours.named_parameters()))
    for name, one, other in zip(names, got, expected, strict=True):
        assert_close(one, other, by="norm", tolerance=1e-10, what=name)


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_windows_as_long_as_the_row_are_plain_causal_attention(kind: str) -> None:
    fields = {"heads": 4, "kv_heads": 2, "head_dim": 8, "local": {"kind": kind, "size": LENGTH}}
    decoder, ours = _attention(GroupedQueryAttention.model_validate(fields), 0)
    x_BSD, _, positions_BS, documents_BS = _inputs(True)
    context = _context(decoder, positions_BS, documents_BS)
    assert context.nears == ()
    ours.reach, narrow = None, ours(x_BSD, context)
    assert torch.equal(ours(x_BSD, context), narrow)


def test_masks_and_temperatures_are_computed_only_for_layers_that_read_them() -> None:
    positions_BS = torch.arange(LENGTH).expand(ROWS, -1)
    (mask_BQK,) = _context(_attention(ATTENTIONS["gpt-oss"], 0)[0], positions_BS, None).nears
    assert isinstance(mask_BQK, Tensor) and mask_BQK.shape == (1, LENGTH, LENGTH)
    plain = _context(_attention(ATTENTIONS["qwen3"], 0)[0], positions_BS, None)
    assert plain.nears == () and plain.query_scale_S is None
    scale = query_scale(ATTENTIONS["llama4"].local, torch.tensor([0, 1, 2, 5, 8]))
    assert_close(scale, torch.tensor([1.0, 1.0, 1 + 0.3 * 0.693147, 1 + 0.3 * 1.098612, 1 + 0.3 * 1.386294]))
