"""Penstock's steps equal those of plain PyTorch and `transformers`, and planted faults are seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.data import loader
from penstock.moe import router
from penstock.moe.balance import LayerLoad
from penstock.train import adamw, muon, optimizer, passes, step
from tests.closeness import assert_within
from tests.models.huggingface.family_models import VARIANTS
from tests.oracle.draws import BOUNDS, PREDICTING, Draw, drawn, worst
from tests.oracle.reference import Recipe

CHOSEN = (2, 76, 59, 73, 3, 29, 11, 46, 10, 74, 8, 47, 14, 21, 38, 55, 32, 81, 4, 0)
"""Of 82 draws those with the most settings, of equal ones the most new pairs, and both families that predict."""

MUON_ON_JOINED_PROJECTIONS = (20, 35, 96, 191)
OFTEN = (*CHOSEN, *MUON_ON_JOINED_PROJECTIONS)


@pytest.mark.parametrize("seed", sorted({*range(82), *MUON_ON_JOINED_PROJECTIONS}))
@pytest.mark.often(*map(str, OFTEN))
def test_steps_equal_those_of_plain_pytorch(seed: int) -> None:
    draw = drawn(seed)
    assert_within(worst(draw), BOUNDS, what=str(draw))


def test_every_test_run_meets_all_settings_and_most_families() -> None:
    draws = [drawn(seed) for seed in CHOSEN]
    recipes = [draw.recipe for draw in draws]
    assert {recipe.balance for recipe in recipes} == {"none", "micro-batch", "sequence", "global-batch"}
    assert {recipe.method for recipe in recipes} == {"adamw", "muon"}
    assert {recipe.decay for recipe in recipes} == {"constant", "cosine", "linear", "wsd"}
    assert {recipe.capacity for recipe in recipes} == {0.0, 0.5, 1.0, 1.25}
    assert {draw.model.mtp_layers for draw in draws} == {0, 1, 2}
    assert {recipe.document_mask for recipe in recipes} == {True, False}
    assert len({draw.model.family for draw in draws}) >= 12
    assert set(PREDICTING) <= {draw.model.family for draw in draws if draw.model.mtp_layers}


EVERYTHING = Draw(
    name="deepseek-v3",
    model=VARIANTS["deepseek-v3"].model_copy(update={"mtp_layers": 1}),
    recipe=Recipe(
        micro_rows=2,
        document_mask=True,
        z_loss=0.01,
        clip_norm=0.05,
        balance="sequence",
        balance_coef=0.3,
        router_z=0.01,
        capacity=0.5,
        bias_rate=0.05,
        method="muon",
        warmup=2,
        decay="cosine",
        steps=6,
    ),
    micro_batches=2,
    positions=16,
    seed=1,
)


def _scaled(function: Callable[..., float], factor: float) -> Callable[..., float]:
    return lambda *args, **named: factor * function(*args, **named)


def _across_documents(whole: loader.Batch, depth: int) -> torch.Tensor:
    labels_BS = torch.full_like(whole.labels_BS, -100)
    labels_BS[:, : labels_BS.shape[1] - depth] = whole.labels_BS[:, depth:]
    return labels_BS


def _bias_towards_load(modules: Any, loads: Any) -> None:
    turned = [LayerLoad(load.layer, -load.slots_E, load.dropped, load.auxiliary_loss) for load in loads]
    update_expert_bias(modules, turned)


update_expert_bias, capacity = router.update_expert_bias, router.capacity
PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a rate one thousandth too high": (optimizer, "learning_rate", _scaled(optimizer.learning_rate, 1.001), "weights"),
    "clipping one thousandth too strong": (step, "clip_divisor", _scaled(step.clip_divisor, 1.001), "weights"),
    "norms decay": (adamw, "is_decayed", lambda name, parameter: True, "weights"),
    "Muon's scale by the shorter side": (
        muon,
        "update_scale",
        lambda matrices, rms: rms * min(matrices.rows, matrices.columns) ** 0.5,
        "weights",
    ),
    "capacity of one token more": (router, "capacity", lambda *args: 1 + capacity(*args), "dropped"),
    "a prediction of another document": (passes, "labels_at_depth", _across_documents, "loss"),
    "the bias follows the load": (step, "update_expert_bias", _bias_towards_load, "loss"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, wrong, figure = PLANTED[name]
    monkeypatch.setattr(module, function, wrong)
    figures = worst(EVERYTHING)
    assert figures[figure] > max(1e3 * BOUNDS[figure], 1e-7), figures


def test_the_run_with_planted_faults_has_none_by_itself() -> None:
    assert_within(worst(EVERYTHING), BOUNDS)
