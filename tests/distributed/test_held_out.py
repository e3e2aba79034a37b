"""Held-out loss is dropless, on every dispatcher and layout, so it does not depend on the micro-batch either."""

from collections.abc import Sequence
from math import isclose

import pytest

from penstock.train.step import evaluate
from tests.distributed.case import layout, pipeline
from tests.distributed.one_loss import TOLERANCES, TWO_NODES, start_session
from tests.distributed.pool import Pool

NEAR = TOLERANCES["held-out loss"]
TINY = ("model.layers=2", "model.mtp_layers=0", "model.initializer_range=0.2", "model.moe.balance.aux_loss_coef=0")
DROPS, PADS = (f"model.moe.balance.{name}" for name in ("capacity_factor=0.25", "pad_to_capacity=true"))
FORCES = "model.moe.balance.force_load_balance=true"
TOGETHER, SYNC_FREE = "training.micro_batch=2", "dispatch.sync_free=2"
ALL_GATHER = ("dispatch.method=all-gather", SYNC_FREE)
CASES = {
    "one process": (1, [(), (TOGETHER, PADS), (FORCES,), ("training.micro_batch=8",)]),
    "two that share experts": (
        2,
        [
            (*layout("expert=2"), *words)
            for words in (
                (TOGETHER,),
                (PADS,),
                (PADS, "dispatch.overlap=shared"),
                ALL_GATHER,
                ("dispatch.balance=exact",),
            )
        ],
    ),
    "two that share rows": (
        2,
        [layout("tensor=2", "expert=2", PADS), layout("context=2", "expert_tensor=2", TOGETHER)],
    ),
    "two nodes": (4, [(*layout("expert=4"), TWO_NODES), (*layout("expert=4"), *ALL_GATHER, TWO_NODES)]),
    "a pipeline": (2, [pipeline("interleaved", 2), pipeline("1f1b", 2, PADS)]),
}


def losses(variants: Sequence[tuple[str, ...]]) -> list[float]:
    """The held-out loss of a model with each of several settings, on this rank."""
    found = []
    for overrides in variants:
        session = start_session((*TINY, *overrides))
        assert session.held_out is not None
        found.append(evaluate(session.model, session.held_out, session.rule.cut, session.rule.loss).loss)
        session.state.batches.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_held_out_loss_drops_no_token_in_any_micro_batch(case: str, ranks: Pool) -> None:
    count, variants = CASES[case]
    ((expected,),) = ranks.run(1, losses, [()])
    for found in ranks.run(count, losses, [(DROPS, *overrides) for overrides in variants]):
        far = {
            one: loss for one, loss in zip(variants, found, strict=True) if not isclose(loss, expected, rel_tol=NEAR)
        }
        assert not far, f"{expected} without drops"
