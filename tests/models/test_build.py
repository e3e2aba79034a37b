"""Which dispatcher the layers of a run get, and how much room."""

import math
from typing import Any

import pytest

from penstock.config.model import Balance
from penstock.config.parallel import Dispatch
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import LocalDispatcher
from penstock.moe.layer import MoE
from tests.models.layouts import META, V3, every_rank_model, laid_out

PADDED = Balance(capacity_factor=1.0, pad_to_capacity=True)


def _layers(layout: str, balance: Balance | None = None, **dispatch: Any) -> list[MoE]:
    model = V3
    assert model.moe is not None
    if balance is not None:
        model = model.model_copy(update={"moe": model.moe.model_copy(update={"balance": balance})})
    run, world = laid_out(model, layout, "fp32")
    run = run.model_copy(update={"dispatch": Dispatch(**dispatch)})
    first = next(every_rank_model(run, world, META))
    return [module for decoder in first.modules for module in decoder.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize(
    ("dispatch", "kind", "bound"),
    [
        ({}, AllToAllDispatcher, None),
        ({"sync_free": 1}, AllToAllDispatcher, None),
        ({"sync_free": 2}, AllGatherDispatcher, 2.0),
        ({"sync_free": 3}, AllGatherDispatcher, math.inf),
        ({"method": "all-gather"}, AllGatherDispatcher, None),
        ({"method": "all-gather", "sync_free": 2, "row_capacity_factor": 1.25}, AllGatherDispatcher, 1.25),
        ({"method": "all-to-all", "sync_free": 1}, AllToAllDispatcher, None),
    ],
)
def test_the_stage_decides_who_brings_tokens_and_with_how_much_room(
    dispatch: dict[str, Any], kind: type, bound: float | None
) -> None:
    layers = _layers("expert", **dispatch)
    assert layers
    for layer in layers:
        assert isinstance(layer.dispatcher, kind)
        assert (None if layer.row_capacity is None else layer.row_capacity.factor) == bound
        if isinstance(layer.dispatcher, AllGatherDispatcher):
            assert layer.dispatcher.row_capacity is layer.row_capacity, "what a layer asks is what the step looks at"


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_and_padded_rows_need_no_gathering(stage: int) -> None:
    assert all(isinstance(one.dispatcher, LocalDispatcher) for one in _layers("one rank", sync_free=stage))
    padded = _layers("expert", PADDED, sync_free=stage)
    assert all(isinstance(one.dispatcher, PaddedAllToAllDispatcher) for one in padded)
