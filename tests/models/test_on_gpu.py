"""What only a GPU can show: torch's fused operators and every attention backend equal the eager model. Skipped
without one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.config.model import GroupedQueryAttention, LatentAttention, LocalAttention, Model
from penstock.kernels.bounded_attention import bounded_attention
from penstock.kernels.operators import REFERENCE, TORCH, Operators
from tests.closeness import assert_close, relative_error
from tests.models.families import reading_of, tiny_decoder, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MLA = LatentAttention(heads=4, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, q_lora_rank=32)
GQA = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=32)
LOCAL = LocalAttention(kind="window", size=10, global_every=2)
WINDOWS = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=32, sinks=True, local=LOCAL)


def _model(attention: LatentAttention | GroupedQueryAttention) -> Model:
    return tiny_model(attention=attention, hidden_size=64, intermediate_size=96, mtp_layers=1)


def _gradients(config: Model, operators: Operators, precision: str, masked: bool) -> dict[str, Tensor]:
    decoder = tiny_decoder(config, operators, precision=precision).cuda()
    tokens_BS = torch.randint(61, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    positions_BS = torch.arange(64, device="cuda").expand(2, -1)
    documents_BS = (positions_BS // 24) if masked else None
    hidden = decoder(reading_of(tokens_BS, positions_BS, documents_BS, depths=1))
    generator = torch.Generator("cuda").manual_seed(2)
    direction_BSD = torch.randn(hidden.main_BSD.shape, generator=generator, device="cuda")
    (hidden.main_BSD.float() * direction_BSD).sum().backward()
    found = {"hidden": hidden.main_BSD.detach().float()}
    return found | {n: p.grad.float() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("attention", [MLA, GQA], ids=["mla", "gqa"])
def test_fused_operators_in_bf16_give_the_gradients_of_the_eager_fp32_model(
    attention: LatentAttention | GroupedQueryAttention, masked: bool
) -> None:
    config = _model(attention)
    _check_gradients(config, TORCH, masked)


@pytest.mark.parametrize("attention", [MLA, WINDOWS], ids=["mla", "windows"])
def test_attention_between_bounds_gives_the_gradients_of_the_eager_fp32_model(
    attention: LatentAttention | GroupedQueryAttention,
) -> None:
    # dense: where experts are near a tie, rounding alone sends a token elsewhere
    config = tiny_model(family="plain", attention=attention, hidden_size=64, dense_layers=3, moe=None, mtp_layers=1)
    _check_gradients(config, replace(TORCH, bounded_attention=bounded_attention), masked=True)


def _check_gradients(config: Model, operators: Operators, masked: bool) -> None:
    expected = _gradients(config, REFERENCE, "fp32", masked)
    eager = _gradients(config, REFERENCE, "bf16", masked)
    fused = _gradients(config, operators, "bf16", masked)
    assert fused.keys() == expected.keys()
    for name, gradient in fused.items():
        # a near tie may send a token elsewhere in bf16: the fused model may be as far off as the eager one, not further
        apart = relative_error(eager[name], expected[name], by="norm", least=1e-6)
        assert_close(gradient, expected[name], by="norm", least=1e-6, tolerance=max(0.05, 2 * apart), what=name)


@pytest.mark.parametrize("backend", ["default", "math", "efficient", "cudnn"])
def test_every_attention_backend_gives_the_same_hidden_states(backend: str) -> None:
    # dense: where experts are near a tie, rounding alone sends a token elsewhere
    config = tiny_model(family="plain", attention=MLA, hidden_size=64, dense_layers=3, intermediate_size=96, moe=None)
    expected = _gradients(config, REFERENCE, "fp32", masked=False)["hidden"]
    found = _gradients(config, replace(TORCH, attention_backend=backend), "bf16", masked=False)["hidden"]
    assert_close(found, expected, by="norm", tolerance=0.03)
