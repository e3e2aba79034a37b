"""Totals and FLOPs come from the meta model and agree with the published figures and with hand counts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.config.load import load_run
from penstock.config.model import GroupedQueryAttention, Model
from penstock.config.presets.deepseek import deepseek_v2, deepseek_v2_lite, deepseek_v3, deepseek_v3_2
from penstock.config.presets.ernie_minimax import ernie_4_5_21b_a3b, ernie_4_5_300b_a47b, minimax_m2
from penstock.config.presets.glm import glm_4_5, glm_4_5_air, glm_5
from penstock.config.presets.moonshot import kimi_k2, kimi_linear_48b_a3b, moonlight_16b_a3b
from penstock.config.presets.proxies import moe_1t, moe_2t, moe_515b
from penstock.config.presets.qwen3_next import qwen3_5_35b_a3b, qwen3_next_80b_a3b
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.size import size_of
from penstock.kernels.operators import REFERENCE
from penstock.models.count import count
from tests.models.families import ATTENTIONS, tiny_decoder, tiny_model


def test_v2_lite_costs_16_4_gflop_per_token_at_4096() -> None:
    config = deepseek_v2_lite().model
    assert count(config, 4096).flops_per_token == pytest.approx(16.4e9, rel=2e-3)
    assert _attention_flops(config, 4096) == 3 * 27 * 16 * (192 + 128) * 4096


def test_the_mtp_layer_of_v3_is_counted_beside_the_total() -> None:
    config = deepseek_v3().model
    with_mtp, without = count(config, 4096), count(config.model_copy(update={"mtp_layers": 0}), 4096)
    assert with_mtp.parameters == without.parameters
    assert with_mtp.mtp_parameters > 11e9 and without.mtp_parameters == 0
    assert with_mtp.flops_per_token > without.flops_per_token


@pytest.mark.parametrize(("family", "local"), [("gpt-oss", 5**2 / 2 + 11 * 4.5), ("llama4", 2 * 6**2 / 2 + 4**2 / 2)])
def test_of_layers_that_see_a_part_of_the_row_only_that_part_is_counted(family: str, local: float) -> None:
    attention = ATTENTIONS[family]
    config = tiny_model(family="plain", attention=attention, layers=4)
    everywhere = config.model_copy(update={"attention": attention.model_copy(update={"local": None})})
    spared = count(everywhere, 16).flops_per_token - count(config, 16).flops_per_token
    pairs = 2 * (16**2 / 2 - local)
    per_pair = 3 * 2 * 2 * attention.heads * attention.head_dim
    assert spared == pytest.approx(per_pair * pairs / 16)


@pytest.mark.parametrize(
    "changes", [{}, {"attention": ATTENTIONS["gpt-oss"]}, {"tie_word_embeddings": True}, {"mtp_layers": 2}]
)
def test_the_count_equals_the_weights_of_the_built_model(changes: dict[str, object]) -> None:
    config = tiny_model(**changes)
    counted = count(config, 16)
    built = sum(parameter.numel() for parameter in tiny_decoder(config).parameters())
    assert counted.parameters + counted.mtp_parameters == built


def test_products_are_those_that_torch_counts_when_the_dense_model_runs() -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    config = tiny_model(family="plain", moe=None, dense_layers=3, attention=attention)
    # by plain products: torch does not count its fused attention on the CPU
    decoder = tiny_decoder(config, replace(REFERENCE, attention_backend="math"))
    tokens_BS = torch.randint(61, (2, 16))
    with FlopCounterMode(display=False) as counter:
        decoder.logits(tokens_BS, torch.arange(16).expand(2, -1))
    forward = counter.get_total_flops() / tokens_BS.numel()
    # torch counts the full square of attention, we count half of it
    expected = count(config, 16).flops_per_token + _attention_flops(config, 16)
    assert expected / 3 == pytest.approx(forward)


def _attention_flops(config: Model, sequence_length: int) -> float:
    """The part of a token's FLOPs that grows with the row, of a model whose layers all see the whole row."""
    return count(config, 2 * sequence_length).flops_per_token - count(config, sequence_length).flops_per_token


@pytest.mark.parametrize(
    ("preset", "total", "active", "advertised"),
    [
        (deepseek_v2_lite, 15.7e9, 2.66e9, None),
        (deepseek_v2, 235.7e9, 21.4e9, None),
        (deepseek_v3, 671.0e9, 37.6e9, None),
        (deepseek_v3_2, 671.9e9, 38.4e9, None),
        (moonlight_16b_a3b, 15.96e9, 2.91e9, None),
        (kimi_k2, 1026e9, 32.9e9, None),
        (glm_4_5, 352.8e9, 33.6e9, None),
        (glm_4_5_air, 106.9e9, 13.4e9, None),
        (glm_5, 743.9e9, 41.8e9, None),
        (kimi_linear_48b_a3b, 49.1e9, 3.48e9, None),
        (ernie_4_5_21b_a3b, 21.8e9, 3.35e9, None),
        (ernie_4_5_300b_a47b, 299.5e9, 47.9e9, None),
        (minimax_m2, 228.7e9, 11.0e9, None),
        (qwen3_next_80b_a3b, 79.7e9, 3.87e9, None),
        (qwen3_5_35b_a3b, 34.66e9, 3.45e9, None),
        # The advertised active sizes leave out projections of attention heads.
        (moe_515b, 528e9, 57.0e9, 44e9),
        (moe_1t, 1036e9, 57.1e9, 44e9),
        (moe_2t, 2050e9, 93.5e9, 80e9),
    ],
)
def test_presets_have_their_published_sizes(
    preset: Callable[[], Run], total: float, active: float, advertised: float | None
) -> None:
    model = preset().model
    counted = count(model, 4096)
    assert counted.parameters == pytest.approx(total, rel=2e-3 if advertised is None else 1e-3)
    assert counted.active_parameters == pytest.approx(active, rel=3e-3 if advertised is None else 1e-3)
    if advertised is not None:
        projections = 2 * model.layers * model.hidden_size * model.attention.heads * model.attention.head_dim
        assert counted.active_parameters - projections == pytest.approx(advertised, rel=0.02)


SMALL = (
    "model.layers=5",
    "model.attention.heads=8",
    "training.sequence_length=100",
    "model.mtp_layers=2",
    "model.tie_word_embeddings=true",
    "model.hidden_size=96",
)
OF_EXPERTS = (
    "model.moe.experts=12",
    "model.moe.top_k=3",
    "model.moe.shared_expert_intermediate_size=0",
    "model.moe.shared_expert_intermediate_size=64",
    "model.moe.bias=true",
    "model.moe.router.logit_bias=true",
    "model.moe.moe_layer_freq=2",
    "model.dense_layers=2",
)
OF_GROUPED = (
    "model.attention.bias=true",
    "model.attention.qkv_bias=true",
    "model.attention.sinks=true",
    *(f"model.attention.qk_norm={norm}" for norm in ("none", "head", "projection", "rotated-head")),
    *(f"model.attention.local={{kind='{kind}', size=48, global_every=2}}" for kind in ("window", "chunk")),
)


def _needs(override: str, model: Model) -> list[str]:
    """What the rules ask for beside an override."""
    if override == "model.moe.experts=12":
        return ["model.moe.top_k=4"]
    makes_dense = override in ("model.moe.moe_layer_freq=2", "model.dense_layers=2")
    return ["model.intermediate_size=128"] if makes_dense and model.intermediate_size == 0 else []


@pytest.mark.parametrize("name", PRESETS)
def test_arithmetic_counts_what_the_walk_over_the_model_counts(name: str) -> None:
    whole = PRESETS[name]()
    overrides = SMALL if whole.model.moe is None else (*SMALL, *OF_EXPERTS)
    if isinstance(whole.model.attention, GroupedQueryAttention):
        overrides = (*overrides, *OF_GROUPED)
    chosen = overrides if name in ("debug", "gpt-oss-20b") else overrides[len(name) % len(overrides) :][:1]
    small = f"{name}-6l" if whole.model.layers > 6 else name
    runs = [whole, *(load_run(small, [override, *_needs(override, whole.model)]) for override in chosen)]
    for run in runs:
        size = size_of(run.model, run.training.sequence_length)
        walked = count(run.model, run.training.sequence_length)
        assert size == replace(walked, flops_per_token=pytest.approx(walked.flops_per_token, rel=1e-12))
