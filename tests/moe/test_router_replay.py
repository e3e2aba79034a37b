"""A router that is computed again in backward: nothing is counted twice, and gradients stay as they were."""

import pytest
import torch
from torch import Tensor

from penstock.config.model import Balance, Moe
from penstock.kernels.operators import REFERENCE
from penstock.moe.router import TopKRouter
from penstock.moe.routing import Scope
from penstock.parallel.recompute import recomputed

T, D, E = 24, 16, 8
SCOPE = Scope(sequences=2, share=0.5)


def _router(auxiliary: str, capacity_factor: float) -> TopKRouter:
    balance = Balance(aux_loss=auxiliary, aux_loss_coef=0.7, z_loss_coef=0.1, capacity_factor=capacity_factor)
    router = TopKRouter(Moe(experts=E, top_k=3, moe_intermediate_size=8, balance=balance), D, 0, REFERENCE)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight_ED.copy_(torch.randn(E, D, generator=generator))
        if router.expert_bias_E is not None:
            router.expert_bias_E.zero_()
    return router


def _train(router: TopKRouter, *, recompute: bool) -> list[Tensor]:
    """Two micro-batches forward, then both backward: gradients and what the meter says."""

    def mix(x_TD: Tensor) -> Tensor:
        routing = router(x_TD, SCOPE)
        return routing.weights_TK.sum(1, keepdim=True) * x_TD

    generator = torch.Generator().manual_seed(6)
    inputs = [torch.randn(T, D, generator=generator, requires_grad=True) for _ in range(2)]
    losses = [(recomputed(mix, x) if recompute else mix(x)).square().sum() for x in inputs]
    for loss in losses:
        loss.backward()
    meter = router.meter
    return [*(x.grad for x in inputs), router.weight_ED.grad, meter.slots_E, meter.dropped, meter.auxiliary_loss]


@pytest.mark.parametrize("capacity_factor", [0.0, 0.8])
@pytest.mark.parametrize("auxiliary", ["sequence", "global-batch"])
def test_a_replay_of_a_router_counts_nothing_and_changes_no_gradient(auxiliary: str, capacity_factor: float) -> None:
    expected = _train(_router(auxiliary, capacity_factor), recompute=False)
    found = _train(_router(auxiliary, capacity_factor), recompute=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert expected[3].sum() == 2 * T * 3 and (expected[4] > 0) == (capacity_factor > 0)
