"""Totals and FLOPs agree with the published figures, with hand counts, and with the modules of the built model."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.config.load import load_run
from penstock.config.model import GroupedQueryAttention, Model
from penstock.config.presets.by_sizes import dots_llm1, glm_4_7_flash, hy3, k_exaone_236b_a23b, solar_open_100b
from penstock.config.presets.deepseek import (
    deepseek_v2,
    deepseek_v2_lite,
    deepseek_v3,
    deepseek_v3_2,
    glm_4_5,
    glm_4_5_air,
    glm_5,
    kimi_k2,
    kimi_linear_48b_a3b,
    moonlight_16b_a3b,
)
from penstock.config.presets.grouped_query import (
    ernie_4_5_21b_a3b,
    ernie_4_5_300b_a47b,
    minimax_m2,
    moe_1t,
    moe_2t,
    moe_515b,
)
from penstock.config.presets.qwen3 import qwen3_5_35b_a3b, qwen3_next_80b_a3b
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.size import Count, size_of
from penstock.kernels.operators import REFERENCE
from penstock.models.attention import DeltaLayer
from penstock.models.build import meta_model
from penstock.models.residual import StreamMixer
from penstock.moe.layer import MoE
from tests.models.families import ATTENTIONS, tiny_decoder, tiny_model


def test_v2_lite_costs_16_4_gflop_per_token_at_4096() -> None:
    config = deepseek_v2_lite().model
    assert size_of(config, 4096).flops_per_token == pytest.approx(16.4e9, rel=2e-3)
    assert _attention_flops(config, 4096) == 3 * 27 * 16 * (192 + 128) * 4096


def test_sparse_attention_reads_the_chosen_keys_and_scores_all_of_them() -> None:
    config = deepseek_v3_2().model
    heads, chosen, row = 128, 2048, 8192
    pairs = chosen**2 / 2 + (row - chosen) * chosen  # of the queries with fewer keys, and of the others
    without = config.model_copy(update={"attention": config.attention.model_copy(update={"indexer": None})})
    of_layer = (_flops(config, row) - _flops(without, row)) / (3 * (config.layers + config.mtp_layers))
    of_indexer = 2 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64) + 64 * 128 * row
    assert of_layer == pytest.approx(heads * 2 * (192 + 128) * (pairs / row - row / 2) + of_indexer)


def test_the_mtp_layer_of_v3_is_counted_beside_the_total() -> None:
    config = deepseek_v3().model
    with_mtp, without = size_of(config, 4096), size_of(config.model_copy(update={"mtp_layers": 0}), 4096)
    assert with_mtp.parameters == without.parameters
    assert with_mtp.mtp_parameters > 11e9 and without.mtp_parameters == 0
    assert with_mtp.flops_per_token > without.flops_per_token


@pytest.mark.parametrize(("family", "local"), [("gpt-oss", 5**2 / 2 + 11 * 4.5), ("llama4", 2 * 6**2 / 2 + 4**2 / 2)])
def test_of_layers_that_see_a_part_of_the_row_only_that_part_is_counted(family: str, local: float) -> None:
    attention = ATTENTIONS[family]
    config = tiny_model(family="plain", attention=attention, layers=4)
    everywhere = config.model_copy(update={"attention": attention.model_copy(update={"local": None})})
    spared = size_of(everywhere, 16).flops_per_token - size_of(config, 16).flops_per_token
    pairs = 2 * (16**2 / 2 - local)
    per_pair = 3 * 2 * 2 * attention.heads * attention.head_dim
    assert spared == pytest.approx(per_pair * pairs / 16)


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
    expected = size_of(config, 16).flops_per_token + _attention_flops(config, 16)
    assert expected / 3 == pytest.approx(forward)


def _attention_flops(config: Model, sequence_length: int) -> float:
    """The part of a token's FLOPs that grows with the row, of a model whose layers all see the whole row."""
    return _flops(config, 2 * sequence_length) - _flops(config, sequence_length)


def _flops(config: Model, sequence_length: int) -> float:
    return size_of(config, sequence_length).flops_per_token


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
        (dots_llm1, 142.8e9, 14.0e9, None),
        (solar_open_100b, 102.6e9, 12.05e9, None),
        (k_exaone_236b_a23b, 236.6e9, 23.67e9, None),
        (hy3, 295.0e9, 20.7e9, None),
        (glm_4_7_flash, 29.94e9, 3.9e9, None),
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
    counted = size_of(model, 4096)
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
    "model.norm_position=post",
    "model.norm_position=sandwich",
    "model.hyper_connections={streams=3}",
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
    if "hyper_connections" in override:
        return ["model.mtp_layers=0"]
    if override == "model.moe.experts=12":
        return ["model.moe.top_k=4"]
    if override == "model.moe.bias=true":
        return ["model.moe.router.apply_probs_on_input=false"]
    makes_dense = override in ("model.moe.moe_layer_freq=2", "model.dense_layers=2")
    return ["model.intermediate_size=128"] if makes_dense and model.intermediate_size == 0 else []


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_counts_the_weights_and_products_of_the_built_model(name: str) -> None:
    whole = PRESETS[name]()
    overrides = SMALL if whole.model.moe is None else (*SMALL, *OF_EXPERTS)
    if isinstance(whole.model.attention, GroupedQueryAttention):
        overrides = (*overrides, *OF_GROUPED)
    chosen = overrides if name in ("debug", "gpt-oss-20b") else overrides[len(name) % len(overrides) :][:1]
    small = f"{name}-6l" if whole.model.layers > 6 else name
    for run in (whole, *(load_run(small, [override, *_needs(override, whole.model)]) for override in chosen)):
        decoder = meta_model(run.model)
        mtp = sum(parameter.numel() for parameter in decoder.mtp.parameters())
        total = sum(parameter.numel() for parameter in decoder.parameters()) - mtp
        idle = 0
        products = decoder.head_VD.numel() * (1 + run.model.mtp_layers - (decoder.head is not None))  # tied, and depths
        for path, layer in decoder.named_modules():
            if isinstance(layer, torch.nn.Linear):
                products += layer.weight.numel()
            if isinstance(layer, DeltaLayer):  # a state is read for the key, written, and read for the query
                config = layer.config
                products += 3 * config.value_heads * config.key_head_dim * config.value_head_dim
            if isinstance(layer, StreamMixer):
                products += layer.weight.numel() * (1 + 1 / layer.streams)  # weights, and each mix of a stream
            if isinstance(layer, MoE):
                unused = 1 - run.model.moe.top_k / run.model.moe.experts
                matrices = layer.experts.gate_up_eFD.numel() + layer.experts.down_eDF.numel()
                products += layer.router.weight_ED.numel() + matrices * (1 - unused)
                if path.startswith("blocks"):
                    idle += round(sum(parameter.numel() for parameter in layer.experts.parameters()) * unused)
        counted = size_of(run.model, 4096)
        assert counted == Count(total, total - idle, mtp, counted.flops_per_token)
        # Of rows of one and two positions attention costs in proportion to the row, in every kind.
        flops = 2 * size_of(run.model, 1).flops_per_token - size_of(run.model, 2).flops_per_token
        assert flops == pytest.approx(3 * 2 * products, rel=1e-12)
