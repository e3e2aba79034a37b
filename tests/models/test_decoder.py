"""The decoder's promises that no comparison with `transformers` shows: rounding, prediction of more tokens, weights."""

from copy import deepcopy

import torch
from torch import Tensor

from penstock.config.model import Router
from penstock.kernels.operators import TORCH
from penstock.models.decoder import Decoder
from tests.closeness import assert_close, relative_error
from tests.float64 import in_float64
from tests.models.families import moe_with, reading_of, tiny_decoder, tiny_model


def _tokens(rows: int = 2, positions: int = 12) -> tuple[Tensor, Tensor]:
    tokens_BS = torch.randint(61, (rows, positions), generator=torch.Generator().manual_seed(0))
    return tokens_BS, torch.arange(positions).expand(rows, -1)


def test_the_operators_of_torch_give_the_reference_in_bf16() -> None:
    # Every expert is chosen: where two scores tie but for rounding, the processor would decide.
    config = moe_with(tiny_model(), router=Router(), top_k=8)
    reference = tiny_decoder(config, precision="bf16")
    fused = tiny_decoder(config, TORCH, precision="bf16")
    with in_float64():
        exact = deepcopy(reference).double().logits(*_tokens())
    rounding = relative_error(reference.logits(*_tokens()), exact, by="norm")
    assert_close(fused.logits(*_tokens()), exact, by="norm", tolerance=2 * rounding, same_dtype=False)


def _mtp_input(decoder: Decoder, previous_BSD: Tensor, tokens_BS: Tensor, depth: int) -> Tensor:
    """What depth k joins, written out position by position."""
    layer = decoder.mtp[str(depth - 1)]
    rows = []
    for position in range(tokens_BS.shape[1] - depth):
        ahead = layer.embed_norm(decoder.embed(tokens_BS[:, position + depth]))
        rows.append(layer.join(torch.cat((ahead, layer.hidden_norm(previous_BSD[:, position])), dim=-1)))
    return torch.stack(rows, dim=1)


def test_each_mtp_depth_joins_the_depth_before_with_the_token_so_far_ahead() -> None:
    decoder = tiny_decoder(tiny_model(mtp_layers=2)).eval()
    tokens_BS, positions_BS = _tokens()
    reading = reading_of(tokens_BS, positions_BS, depths=2)
    hidden = decoder(reading)
    assert len(hidden.mtp) == 2
    context = decoder.forward_context(reading)
    joined_BSD = _mtp_input(decoder, hidden.main_BSD, tokens_BS, depth=1)
    short = decoder.forward_context(reading_of(tokens_BS[:, :-1], positions_BS[:, :-1]))
    expected = decoder.mtp["0"].norm(decoder.mtp["0"].block(joined_BSD, short))
    assert_close(hidden.mtp[0][:, :-1], expected)
    second = decoder.mtp["1"](hidden.mtp[0], decoder.embed(tokens_BS.roll(-2, dims=1)), context)
    assert_close(hidden.mtp[1], second)


def test_weights_depend_on_their_name_and_the_seed_only() -> None:
    long, short = tiny_decoder(tiny_model(layers=3)), tiny_decoder(tiny_model(layers=2))
    for name, tensor in short.state_dict().items():
        assert torch.equal(tensor, long.state_dict()[name]), f"{name} depends on other layers"
    other = tiny_decoder(tiny_model(layers=2), seed=4)
    assert not torch.equal(short.head_VD, other.head_VD), "another seed must give other weights"


def test_bf16_weights_are_the_fp32_weights_rounded_and_the_router_stays_fp32() -> None:
    rounded, exact = tiny_decoder(tiny_model(), precision="bf16"), tiny_decoder(tiny_model())
    for name, tensor in rounded.state_dict().items():
        assert tensor.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
        assert torch.equal(tensor, exact.state_dict()[name].to(tensor.dtype)), name


def test_tied_embeddings_have_one_weight() -> None:
    decoder = tiny_decoder(tiny_model(tie_word_embeddings=True), precision="bf16")
    assert decoder.head_VD is decoder.embed.weight
    assert "head.weight" not in decoder.state_dict()
