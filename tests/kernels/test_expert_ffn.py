"""The experts' autograd function against its definition, on every backend, and the tensors that it saves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE, TORCH, TRITON, ExpertKernels
from penstock.kernels.expert_parts import DeferGradient
from penstock.kernels.permute import order_rows, unpermute
from penstock.kernels.reference import RouterRule, RowOrder
from penstock.kernels.topk import route
from tests.kernels.parity import assert_parity

BACKENDS = {
    "reference": REFERENCE,
    "torch": TORCH,
    "triton": TRITON,
    "mixed": replace(TRITON, input_gradient=TORCH.input_gradient, weight_gradient=REFERENCE.weight_gradient),
}

HIDDEN, WIDTH = 32, 24


@dataclass(frozen=True)
class Batch:
    """Arguments of `expert_ffn` for one routing, and the order that they were made from."""

    x_TD: Tensor
    gate_up_eFD: Tensor
    down_eDF: Tensor
    weights_R: Tensor
    index_R: Tensor
    order: RowOrder

    @property
    def rest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments behind the matrices, the weights in float32."""
        return self.order.counts_E, self.weights_R.float(), self.index_R

    @property
    def inputs(self) -> list[Tensor | None]:
        """In the order of the signature."""
        return [self.x_TD, self.gate_up_eFD, self.down_eDF, self.order.counts_E, self.weights_R, self.index_R]


def random(experts: int) -> Tensor:
    """11 tokens with 3 different experts each."""
    return torch.rand(11, experts).topk(3).indices


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: random(5),
    "skewed": lambda: torch.tensor([[0, 1]] * 20 + [[0, 4]] * 2),
    "one hot expert": lambda: torch.full((9, 1), 3),
    "one token": lambda: torch.tensor([[4, 2]]),
    # Expert 5 does not exist: such slots were dropped and have no row.
    "dropped slots": lambda: torch.where(torch.rand(11, 3) < 0.4, 5, random(5)),
    "all slots dropped": lambda: torch.full((4, 2), 5),
}


def draw(routing: str, device: torch.device, experts: int = 5) -> Batch:
    """In bfloat16 on a GPU; in float32 in the interpreter, whose products know no bfloat16.

    Numbers are drawn on the CPU, so they are the same everywhere: the fewer they are, the more their signal to noise
    depends on luck.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    experts_TK = ROUTINGS[routing]()
    tokens, top_k = experts_TK.shape
    order = reference.order_rows(experts_TK, experts)
    is_used_R = torch.arange(tokens * top_k) < order.counts_E.sum()
    x_TD = torch.randn(tokens, HIDDEN)
    gate_up_eFD = torch.randn(experts, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    down_eDF = torch.randn(experts, HIDDEN, WIDTH) / WIDTH**0.5
    weights_R = torch.rand(tokens * top_k) * is_used_R
    return Batch(
        *(tensor.to(device, dtype) for tensor in (x_TD, gate_up_eFD, down_eDF, weights_R)),
        (order.slots_R // top_k).to(device),
        RowOrder(*(tensor.to(device) for tensor in order)),
    )


def on_float32_weights(ffn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Weights come in the dtype of the other tensors, so that their gradient is held to that dtype's bar."""

    def run(*inputs: Any) -> Tensor:
        *before, weights_R, index_R = inputs
        return ffn(*before, None if weights_R is None else weights_R.float(), index_R, **options)

    return run


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def kernels(request: pytest.FixtureRequest) -> ExpertKernels:
    return request.param


@pytest.mark.often("triton-*", "*-dropped slots", "reference-skewed")
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gathered_rows_equal_the_reference(routing: str, kernels: ExpertKernels, device: torch.device) -> None:
    batch = draw(routing, device)
    fast = on_float32_weights(expert_ffn, places_TK=batch.order.places_TK, kernels=kernels)
    assert_parity(fast, on_float32_weights(reference.expert_ffn), batch.inputs)


@pytest.mark.often("triton-*", "mixed-neither", "reference-index")
@pytest.mark.parametrize("given", [[], ["index"], ["weights"]], ids=["neither", "index", "weights"])
def test_weights_index_and_places_may_be_missing(
    given: list[str], kernels: ExpertKernels, device: torch.device
) -> None:
    batch = draw("dropped slots", device)
    x = batch.x_TD if "index" in given else reference.permute(batch.x_TD, batch.order)
    weights_R = batch.weights_R if "weights" in given else None
    index_R = batch.index_R if "index" in given else None
    inputs = [x, batch.gate_up_eFD, batch.down_eDF, batch.order.counts_E, weights_R, index_R]
    fast = on_float32_weights(expert_ffn, kernels=kernels)
    assert_parity(fast, on_float32_weights(reference.expert_ffn), inputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_x_and_the_pre_activation_are_saved(recompute: bool, kernels: ExpertKernels, device: torch.device) -> None:
    batch = draw("random", device)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    parameters = [batch.gate_up_eFD.requires_grad_(), batch.down_eDF.requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        options = {"places_TK": batch.order.places_TK, "recompute": recompute, "kernels": kernels}
        expert_ffn(batch.x_TD, *parameters, *batch.rest, **options)
    known = {t.data_ptr() for t in batch.inputs}
    made = [tuple(t.shape) for t in kept if t.data_ptr() not in known and t.shape != batch.weights_R.shape]
    assert made == ([] if recompute else [(33, 2 * WIDTH)]), "gate_up_RF is the only new tensor that is saved"


def test_gradients_that_are_not_needed_are_not_computed(device: torch.device) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        pytest.fail("computed an unwanted gradient")

    batch = draw("random", device)
    batch.x_TD.requires_grad_()
    kernels = replace(REFERENCE, weight_gradient=refuse)
    expert_ffn(batch.x_TD, batch.gate_up_eFD, batch.down_eDF, *batch.rest, kernels=kernels).sum().backward()
    assert batch.x_TD.grad is not None


def run_block(
    order_of: Callable[..., RowOrder],
    route_of: Callable[..., reference.Routed],
    unpermute_of: Callable[..., Tensor],
    ffn: Callable[..., Tensor],
    x_TD: Tensor,
    router_ED: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
) -> Tensor:
    """Route, order, experts, combine."""
    rule = RouterRule(top_k=3, normalize=True)
    routed = route_of((x_TD @ router_ED.T).float(), None, rule, 1)
    order = order_of(routed.experts_TK, len(router_ED))
    weights_R = routed.weights_TK.flatten()[order.slots_R]
    return unpermute_of(ffn(x_TD, gate_up_eFD, down_eDF, order, weights_R, order.slots_R // rule.top_k), order)


def test_a_whole_expert_block_equals_the_reference(device: torch.device) -> None:
    def fast_ffn(x_TD: Tensor, *matrices: Any) -> Tensor:
        gate_up_eFD, down_eDF, order, weights_R, index_R = matrices
        arguments = (x_TD, gate_up_eFD, down_eDF, order.counts_E, weights_R, index_R)
        return expert_ffn(*arguments, places_TK=order.places_TK, kernels=TRITON)

    def true_ffn(x_TD: Tensor, *matrices: Any) -> Tensor:
        gate_up_eFD, down_eDF, order, weights_R, index_R = matrices
        return reference.expert_ffn(x_TD, gate_up_eFD, down_eDF, order.counts_E, weights_R, index_R)

    batch = draw("random", device)
    # Multiples of 1/8 whose products are exact in bfloat16's float32 sums, so that both choose the same experts.
    x_TD = (batch.x_TD * 8).round() / 8
    router_ED = (torch.randn(5, HIDDEN).to(device) * 8).round().to(x_TD.dtype) / 64
    assert_parity(
        partial(run_block, order_rows, route, unpermute, fast_ffn),
        partial(run_block, reference.order_rows, reference.route, reference.unpermute, true_ffn),
        [x_TD, router_ED, batch.gate_up_eFD, batch.down_eDF],
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_device(device: torch.device) -> None:
    batch = draw("dropped slots", device)
    leaves = [leaf.requires_grad_() for leaf in (batch.x_TD, batch.gate_up_eFD, batch.down_eDF)]

    def step() -> None:
        expert_ffn(*leaves, *batch.rest, places_TK=batch.order.places_TK).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: [*batch.inputs[:2], batch.down_eDF[:, 1:], *batch.rest], "D x F"),
        (lambda batch: [batch.x_TD[:, 1:], *batch.inputs[1:]], "N x D"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    change: Callable[[Batch], list[Tensor]], message: str, device: torch.device
) -> None:
    with pytest.raises(KernelError, match=message):
        expert_ffn(*change(draw("random", device)))


def test_places_without_an_index_are_refused(device: torch.device) -> None:
    batch = draw("random", device)
    with pytest.raises(KernelError, match="index_R missing"):
        expert_ffn(*batch.inputs[:5], places_TK=batch.order.places_TK)


@pytest.mark.parametrize("sums", [False, True])
def test_deferred_weight_gradients_are_the_same_and_are_computed_once(sums: bool) -> None:
    batch, made = draw("random", torch.device("cpu")), list[str]()

    def counted(name: str) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            made.append(name)
            product: Tensor = getattr(REFERENCE, name)(*arguments, **options)
            return product

        return call

    products = ("forward", "input_gradient", "weight_gradient")
    kernels = replace(REFERENCE, **{name: counted(name) for name in products})

    def gradients(put_off: DeferGradient | None) -> list[Tensor]:
        matrices = [one.detach().clone().requires_grad_() for one in (batch.gate_up_eFD, batch.down_eDF)]
        x_TD = batch.x_TD.detach().clone().requires_grad_()
        into = tuple(torch.zeros_like(one) for one in matrices) if sums else None
        y_RD = expert_ffn(x_TD, *matrices, *batch.rest, accumulate_into=into, put_off=put_off, kernels=kernels)
        made.clear()
        y_RD.square().sum().backward()
        found = into or [one.grad for one in matrices]
        if put_off is not None:
            assert made.count("weight_gradient") == 0 and made.count("input_gradient") == 2
            assert all(one is None or not one.any() for one in found)
            for task in tasks:
                task()
            found = into or [one.grad for one in matrices]
        assert sorted(made) == ["input_gradient"] * 2 + ["weight_gradient"] * 2
        return [x_TD.grad, *found]

    tasks: list[Callable[[], None]] = []
    late = gradients(lambda place, task: tasks.append(task) or True)
    for one, other in zip(gradients(None), late, strict=True):
        assert torch.equal(one, other)
    assert len(tasks) == 2
