"""The promises of a dispatcher, kept by every one of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.operators import REFERENCE, TORCH
from penstock.kernels.reference import expert_ffn
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.local import LocalDispatcher, PaddedDispatcher
from penstock.moe.routing import Routing

D, F = 8, 6


def _routing(tokens: int, experts: int, top_k: int, seed: int, dropped: float = 0.0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, experts, generator=generator)
    experts_TK = scores_TE.topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    drop_TK = torch.rand(tokens, top_k, generator=generator) < dropped
    return Routing(weights_TK.masked_fill(drop_TK, 0).requires_grad_(), experts_TK.masked_fill(drop_TK, experts))


def _weights(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    gate_up_eFD = torch.randn(experts, 2 * F, D, generator=generator, requires_grad=True)
    return gate_up_eFD, torch.randn(experts, D, F, generator=generator, requires_grad=True)


def _token_by_token(x_TD: Tensor, routing: Routing, gate_up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
    """The mixture, written out: each token through each of its experts alone."""
    rows = []
    for token in range(x_TD.shape[0]):
        row = x_TD[token] * 0
        for expert, weight in zip(routing.experts_TK[token].tolist(), routing.weights_TK[token], strict=True):
            if expert < gate_up_eFD.shape[0]:
                gate, up = (gate_up_eFD[expert] @ x_TD[token]).chunk(2)
                row = row + weight * (down_eDF[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def _mix(dispatcher: Dispatcher, x_TD: Tensor, routing: Routing, gate_up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
    rows, receipt = dispatcher.dispatch(x_TD, routing)
    y_RD = expert_ffn(rows.x_ND, gate_up_eFD, down_eDF, rows.counts_e, rows.weights_R, rows.index_R)
    return dispatcher.combine(y_RD, receipt)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 7),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_meet_their_experts_and_return_with_the_right_gradients(
    tokens: int, experts: int, top_k: int, dropped: float, padded: bool, seed: int
) -> None:
    top_k = min(top_k, experts)
    routing = _routing(tokens, experts, top_k, seed, dropped)
    # a factor of E gives every expert room for all slots, so padding itself drops none
    dispatcher = PaddedDispatcher(experts, float(experts), TORCH) if padded else LocalDispatcher(experts, REFERENCE)
    x_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    leaves = (x_TD, routing.weights_TK, *_weights(experts))
    got_TD = _mix(dispatcher, x_TD, routing, *leaves[2:])
    expected_TD = _token_by_token(x_TD, routing, *leaves[2:])
    torch.testing.assert_close(got_TD, expected_TD, rtol=1e-4, atol=1e-4)
    direction_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed + 1))
    got = torch.autograd.grad((got_TD * direction_TD).sum(), leaves, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(
        (expected_TD * direction_TD).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    kept_TK = routing.experts_TK < experts
    for name, one, other in zip(("x", "weights", "gate_up", "down"), got, expected, strict=True):
        mine, theirs = (one[kept_TK], other[kept_TK]) if name == "weights" else (one, other)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, msg=f"gradient of {name}")


def test_rows_stand_expert_by_expert_with_their_counts() -> None:
    routing = _routing(30, 5, 2, seed=0)
    rows, _ = LocalDispatcher(5, REFERENCE).dispatch(torch.arange(30.0)[:, None].expand(-1, D), routing)
    assert rows.index_R is not None
    assert rows.counts_e.tolist() == torch.bincount(routing.experts_TK.flatten(), minlength=5).tolist()
    start = 0
    for expert, count in enumerate(rows.counts_e.tolist()):
        tokens = rows.index_R[start : start + count].tolist()
        assert tokens == (routing.experts_TK == expert).any(1).nonzero().flatten().tolist()
        start += count


def test_padding_gives_every_expert_the_same_number_of_rows() -> None:
    dispatcher = PaddedDispatcher(4, 2.0, REFERENCE)
    routing = _routing(10, 4, 2, seed=1)
    limit = 10  # 10 tokens x 2 choices / 4 experts x 2
    rows, _ = dispatcher.dispatch(torch.randn(10, D), routing)
    assert rows.counts_e.tolist() == [limit] * 4
    assert rows.weights_R.shape == (4 * limit + 1,), "and one place for what was dropped"
    assert (rows.weights_R != 0).sum().item() == 20


def test_a_token_all_of_whose_slots_were_dropped_gets_zero() -> None:
    routing = Routing(torch.zeros(3, 2), torch.full((3, 2), 4))
    y_TD = _mix(LocalDispatcher(4, REFERENCE), torch.randn(3, D), routing, *_weights(4))
    assert torch.equal(y_TD, torch.zeros(3, D))


def test_what_unused_rows_hold_never_reaches_a_token() -> None:
    routing = _routing(6, 3, 2, seed=2, dropped=0.5)
    dispatcher = LocalDispatcher(3, REFERENCE)
    rows, receipt = dispatcher.dispatch(torch.randn(6, D), routing)
    y_RD = torch.zeros(12, D)
    y_RD[int(rows.counts_e.sum()) :] = float("nan")
    assert torch.isfinite(dispatcher.combine(y_RD, receipt)).all()


@pytest.mark.parametrize("top_k", [1, 4])
def test_one_token_is_enough(top_k: int) -> None:
    routing = _routing(1, 4, top_k, seed=3)
    x_TD, weights = torch.randn(1, D), _weights(4)
    got = _mix(LocalDispatcher(4, REFERENCE), x_TD, routing, *weights)
    torch.testing.assert_close(got, _token_by_token(x_TD, routing, *weights), rtol=1e-4, atol=1e-5)
