"""Latent attention in 8 bits: its heads hand their gradients over, and nothing else is another than without that."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.config.model import LatentAttention
from penstock.kernels import rope
from penstock.kernels.float8 import latent_heads
from penstock.kernels.float8.gradient_side_channel import GradientSideChannel
from penstock.kernels.float8.operators import REFERENCE, Float8Rule
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, ROWWISE, Recipe
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.operators import REFERENCE as PLAIN
from penstock.models.mla import LatentLayer
from penstock.models.model_inputs import ForwardContext
from penstock.moe.routing import Scope
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import RecomputeRule, discarding
from penstock.parallel.weight_grad_store import WeightGradStore
from tests.closeness import assert_equal

ROWS, LENGTH, D = 2, 64, 256
OURS = replace(PLAIN, mla_heads=rope.mla_heads, mla_heads_is_fused=True)
CONFIG = LatentAttention(
    heads=2, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
"""Of which every width fills tiles."""

queries = pytest.mark.parametrize("q_lora_rank", [128, 0], ids=["queries from a latent", "from hidden states"])


def layer_context_of(
    *, hands_over: bool, recipe: Recipe = BLOCKWISE, weight_grads: WeightGradStore | None = None, again: bool = False
) -> LayerContext:
    """Definitions, but for the heads."""
    operators = replace(REFERENCE, mla_heads=latent_heads.mla_heads if hands_over else None)
    recompute = RecomputeRule(kinds=frozenset({"latent-up"} if again else ()))
    rule = Float8Rule(dense=recipe, operators=operators)
    return LayerContext(operators=OURS, float8=rule, weight_grads=weight_grads, recompute=recompute)


def layer_of(layer_context: LayerContext, q_lora_rank: int = 128, config: LatentAttention = CONFIG) -> LatentLayer:
    layer = LatentLayer(config.model_copy(update={"q_lora_rank": q_lora_rank}), D, layer_context).bfloat16()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05 + (parameter.ndim == 1))
    return layer


def context() -> ForwardContext:
    angles_BSP = torch.arange(LENGTH)[None, :, None] * torch.logspace(0, -3, CONFIG.qk_rope_head_dim // 2)
    return ForwardContext(angles_BSP.cos(), angles_BSP.sin(), None, Scope())


def passes(layer: LatentLayer) -> list[Tensor]:
    """Output and all gradients."""
    draw = torch.Generator().manual_seed(2)
    x_BSD, dy_BSD = (torch.randn(ROWS, LENGTH, D, generator=draw).bfloat16() for _ in range(2))
    x_BSD.requires_grad_()
    with discarding():
        y_BSD = layer(x_BSD * 1, context())
    y_BSD.backward(dy_BSD)
    assert x_BSD.grad is not None
    return [y_BSD.detach(), x_BSD.grad]


def gradients_of(layer: LatentLayer) -> dict[str, Tensor]:
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Columns of the gradients that are handed over and taken."""
    found: list[int] = []
    take = GradientSideChannel.take

    def taking(handed: GradientSideChannel) -> RowColQuantized | None:
        both = take(handed)
        found.extend([] if both is None else [both.rows.values.shape[1]])
        return both

    with monkeypatch.context() as patch:
        patch.setattr(GradientSideChannel, "take", taking)
        yield found


@pytest.mark.often("blockwise-square-recomputed-queries from a latent")
@queries
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
def test_a_layer_that_hands_gradients_over_is_the_one_that_does_not(
    recipe: Recipe, again: bool, q_lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = layer_of(layer_context_of(hands_over=False, recipe=recipe), q_lora_rank)
    with counted(monkeypatch) as taken:
        expected = passes(plain)
    assert not taken
    layer = layer_of(layer_context_of(hands_over=True, recipe=recipe, again=again), q_lora_rank)
    with counted(monkeypatch) as taken:
        found = passes(layer)
    assert sorted(taken) == [2 * 192, 2 * 256], "queries, keys and values"
    assert_equal(found, expected)
    assert_equal(gradients_of(layer), gradients_of(plain))


@pytest.mark.slow
@queries
def test_weight_gradients_may_come_later(q_lora_rank: int) -> None:
    weight_grads = WeightGradStore()
    plain, layer = (
        layer_of(layer_context_of(hands_over=one, weight_grads=weight_grads), q_lora_rank) for one in (False, True)
    )
    expected = passes(plain)
    with weight_grads.collecting() as work:
        found = passes(layer)
    assert layer.kv_up.weight.grad is None
    for task in work:
        task()
    assert_equal(found, expected)
    assert_equal(gradients_of(layer), gradients_of(plain))


@pytest.mark.slow
def test_a_second_walk_through_one_graph_is_as_the_first() -> None:
    layer = layer_of(layer_context_of(hands_over=True))
    x_BSD = torch.randn(ROWS, LENGTH, D).bfloat16().requires_grad_()
    y_BSD = layer(x_BSD, context())
    walks = [torch.autograd.grad(y_BSD.float().sum(), x_BSD, retain_graph=True) for _ in range(2)]
    assert_equal(*walks)


@pytest.mark.slow
def test_heads_hand_over_only_where_kernels_and_widths_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken_by(layer_context: LayerContext, config: LatentAttention = CONFIG) -> int:
        with counted(monkeypatch) as taken:
            passes(layer_of(layer_context, config=config))
        return len(taken)

    layer_context = layer_context_of(hands_over=True)
    assert taken_by(layer_context) == 2
    assert taken_by(layer_context_of(hands_over=True, recipe=ROWWISE)) == 0
    assert taken_by(replace(layer_context, operators=PLAIN)) == 0, "the run asks for the reference"
    assert taken_by(replace(layer_context, float8=replace(layer_context.float8, dense=None))) == 0
    for change in ({"v_head_dim": 64}, {"heads": 1}):
        assert taken_by(layer_context, CONFIG.model_copy(update=change)) == 0
    odd = CONFIG.model_copy(update={"kv_lora_rank": 120})
    assert taken_by(layer_context, odd) == 0, "keys and values are in 16 bits"
    assert REFERENCE.mla_heads is None and TRITON.mla_heads is latent_heads.mla_heads
