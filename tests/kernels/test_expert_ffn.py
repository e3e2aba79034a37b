"""The experts' autograd function against its definition, on every backend, and the tensors that it saves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import operators, reference
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE, TORCH, TRITON, ExpertKernels
from penstock.kernels.mxfp4 import BLOCK, to_mxfp4
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.plan.meta_rank import separate_expert_ffn
from penstock.plan.op_recorder import WAIT, OpRecorder
from tests.kernels.expert_batch import Batch, assert_host_does_not_wait, draw_batch, refuse, saved_tensors
from tests.kernels.parity import assert_near, assert_parity

BACKENDS = {
    "reference": REFERENCE,
    "torch": TORCH,
    "triton": TRITON,
    "mixed": replace(TRITON, input_gradient=TORCH.input_gradient, weight_gradient=REFERENCE.weight_gradient),
}

HIDDEN, WIDTH = 32, 24


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


def draw(routing: str, device: torch.device, experts: int = 5, hidden: int = HIDDEN, width: int = WIDTH) -> Batch:
    return draw_batch(ROUTINGS[routing](), experts, hidden, width, device)


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def kernels(request: pytest.FixtureRequest) -> ExpertKernels:
    return request.param


@pytest.mark.parametrize("recompute", [False, True])
def test_only_x_and_the_pre_activation_are_saved(recompute: bool, kernels: ExpertKernels, device: torch.device) -> None:
    batch = draw("random", device)
    parameters = [batch.gate_up_eFD.requires_grad_(), batch.down_eDF.requires_grad_()]
    options = {"places_TK": batch.order.places_TK, "recompute": recompute, "kernels": kernels}
    with saved_tensors() as saved:
        expert_ffn(batch.x_TD, *parameters, *batch.rest, **options)
    known = {t.data_ptr() for t in batch.inputs}
    made = [tuple(t.shape) for t in saved if t.data_ptr() not in known and t.shape != batch.weights_R.shape]
    assert made == ([] if recompute else [(33, 2 * WIDTH)]), "gate_up_RF is the only new tensor that is saved"


def test_gradients_that_are_not_needed_are_not_computed(device: torch.device) -> None:
    batch = draw("random", device)
    batch.x_TD.requires_grad_()
    kernels = replace(REFERENCE, weight_gradient=refuse)
    expert_ffn(batch.x_TD, batch.gate_up_eFD, batch.down_eDF, *batch.rest, kernels=kernels).sum().backward()
    assert batch.x_TD.grad is not None


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device(device: torch.device) -> None:
    batch = draw("dropped slots", device)
    leaves = [leaf.requires_grad_() for leaf in (batch.x_TD, batch.gate_up_eFD, batch.down_eDF)]

    def step() -> None:
        expert_ffn(*leaves, *batch.rest, places_TK=batch.order.places_TK).sum().backward()

    assert_host_does_not_wait(step)
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: {"inputs": [*batch.inputs[:2], batch.down_eDF[:, 1:], *batch.rest]}, "D x F"),
        (lambda batch: {"inputs": [batch.x_TD[:, 1:], *batch.inputs[1:]]}, "N x D"),
        (lambda batch: {"inputs": batch.inputs[:5], "places_TK": batch.order.places_TK}, "index_R missing"),
        (lambda batch: {"inputs": batch.inputs, "biases": batch.biases, "rule": LLAMA4}, "weighted"),
    ],
)
def test_misfits_are_refused(change: Callable[[Batch], dict[str, Any]], message: str, device: torch.device) -> None:
    given = change(draw("random", device))
    with pytest.raises(KernelError, match=message):
        expert_ffn(*given.pop("inputs"), **given)


GPT_OSS = ExpertRule(limit=1.5, alpha=1.702)
LLAMA4 = ExpertRule(weighs_input=True)

Ffn = Callable[..., Tensor]


def _one_function(kernels: ExpertKernels) -> Ffn:
    return lambda *inputs, **options: expert_ffn(*inputs, kernels=kernels, **options)


FORMS: dict[str, Ffn] = {
    **{f"one function, {name}": _one_function(kernels) for name, kernels in BACKENDS.items()},
    "operators, reference": reference.expert_ffn,
    "operators, torch": operators.torch_expert_ffn,
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def ffn(request: pytest.FixtureRequest) -> Ffn:
    return request.param


def with_biases(ffn: Ffn, **options: Any) -> Ffn:
    """Biases behind the other inputs, and weights in the dtype of the other tensors."""

    def run(*inputs: Any) -> Tensor:
        *before, weights_R, index_R, gate_up_bias_eF, down_bias_eD = inputs
        weights_R = None if weights_R is None else weights_R.float()
        biases = None if gate_up_bias_eF is None else (gate_up_bias_eF, down_bias_eD)
        return ffn(*before, weights_R, index_R, biases=biases, **options)

    return run


def compare(ffn: Ffn, inputs: list[Tensor | None], rule: ExpertRule, **options: Any) -> None:
    assert_parity(with_biases(ffn, rule=rule, **options), with_biases(reference.expert_ffn, rule=rule), inputs)


@pytest.mark.often("*-dropped slots-swiglu", "one function, triton-*", "*-skewed-*", "operators, torch-one token-*")
@pytest.mark.parametrize("rule", [SWIGLU, GPT_OSS, LLAMA4], ids=["swiglu", "biases and clamps", "weighted inputs"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_gradients_equal_the_reference(
    routing: str, rule: ExpertRule, ffn: Ffn, device: torch.device
) -> None:
    batch = draw(routing, device)
    biases = batch.biases if rule == GPT_OSS else (None, None)
    compare(ffn, [*batch.inputs, *biases], rule, places_TK=batch.order.places_TK)


@pytest.mark.parametrize("form", ["one function, torch", "operators, torch"])
@pytest.mark.parametrize(("hidden", "width"), [(HIDDEN, 5), (7, WIDTH), (9, 5)])
def test_rows_of_a_width_that_torch_refuses_are_padded(
    form: str, hidden: int, width: int, device: torch.device
) -> None:
    """A part of an expert on one of several ranks need not be a multiple of 16 bytes."""
    batch = draw("dropped slots", device, hidden=hidden, width=width)
    compare(FORMS[form], [*batch.inputs, *batch.biases], GPT_OSS, places_TK=batch.order.places_TK)


@pytest.mark.often("*-both, without weights", "*-index", "one function, triton-*")
@pytest.mark.parametrize("given", ["gate and up", "both, without weights", "rows in order", "neither", "index"])
def test_a_part_of_the_inputs_may_be_missing(given: str, ffn: Ffn, device: torch.device) -> None:
    """The down projection's bias where another rank adds it; both biases; weights; the index."""
    batch = draw("dropped slots", device)
    inputs = [*batch.inputs, *(batch.biases if given not in ("neither", "index") else (None, None))]
    if given == "gate and up":
        inputs[7] = None
    if given in ("both, without weights", "neither", "index"):
        inputs[4] = None
    if given in ("rows in order", "neither"):
        inputs[0], inputs[5] = reference.permute(batch.x_TD, batch.order), None
    compare(ffn, inputs, SWIGLU)


@pytest.mark.parametrize("rule", [GPT_OSS, LLAMA4], ids=["gpt-oss", "llama4"])
def test_a_plan_of_separate_operators_computes_the_same(rule: ExpertRule, device: torch.device) -> None:
    batch = draw("dropped slots", device)
    biases = (None, None) if rule.weighs_input else batch.biases
    compare(separate_expert_ffn, [*batch.inputs, *biases], rule)


@pytest.mark.parametrize("has_biases", [False, True], ids=["plain", "biases"])
def test_nan_in_rows_past_the_last_expert_stays_there(has_biases: bool, ffn: Ffn, device: torch.device) -> None:
    """NaN in rows of dropped slots: in x, in the weights and in the incoming gradient."""
    batch = draw("dropped slots", device)
    used = batch.used
    assert used < len(batch.weights_R), "this routing must drop slots"
    x_RD, weights_R = reference.permute(batch.x_TD, batch.order), batch.weights_R
    x_RD[used:] = weights_R[used:] = torch.nan
    leaves = [leaf.requires_grad_() for leaf in (x_RD, batch.gate_up_eFD, batch.down_eDF, weights_R)]
    biases = tuple(bias.requires_grad_() for bias in batch.biases) if has_biases else ()
    options = {"biases": biases, "rule": GPT_OSS} if has_biases else {}
    y_RD = ffn(*leaves[:3], batch.order.counts_E, weights_R, None, **options)
    dy_RD = torch.ones_like(y_RD)
    dy_RD[used:] = torch.nan
    dx_RD, dgate_up_eFD, ddown_eDF, dweights_R, *dbiases = torch.autograd.grad(y_RD, [*leaves, *biases], dy_RD)
    assert not y_RD[used:].any(), "rows past the last expert's are zero"
    assert not dx_RD[used:].any(), "and so are their gradients"
    for result in (y_RD, dx_RD, dgate_up_eFD, ddown_eDF, dweights_R[:used], *dbiases):
        assert result.isfinite().all()


@pytest.mark.parametrize("form", [operators.REFERENCE, operators.TORCH], ids=["reference", "torch"])
@pytest.mark.usefixtures("poisoned_memory")
def test_rows_that_torch_leaves_unwritten_take_no_part_in_outputs_and_gradients(form: operators.Operators) -> None:
    used, counts_e = 5, torch.tensor([2, 3], dtype=torch.int32)
    shapes = (8, HIDDEN), (2, 2 * WIDTH, HIDDEN), (2, HIDDEN, WIDTH), (8,)
    x_RD, gate_up_eFD, down_eDF, weights_R = leaves = [torch.rand(shape).requires_grad_() for shape in shapes]
    y_RD = form.expert_ffn(x_RD, gate_up_eFD, down_eDF, counts_e, weights_R)
    dx_RD, *dmatrices, dweights_R = torch.autograd.grad(y_RD.sum(), leaves)
    assert all(not rows[used:].any() for rows in (y_RD, dx_RD, dweights_R))
    assert all(gradient.isfinite().all() for gradient in (dx_RD, *dmatrices, dweights_R))


def test_matrices_in_mxfp4_give_the_output_and_gradients_of_rounded_ones(
    kernels: ExpertKernels, device: torch.device
) -> None:
    """Rows that carry gradients of matrices, straight through the rounding; recomputed and not."""
    batch = draw("dropped slots", device, width=BLOCK)

    def of_rounded(x_TD: Tensor, gate_up_eFD: Tensor, down_eDF: Tensor, *rest: Any, **options: Any) -> Tensor:
        # In the dtype that the fast operator rounds; the difference that is added has no gradient.
        matrices = [w + (to_mxfp4(w.to(batch.x_TD)).float() - w).detach() for w in (gate_up_eFD, down_eDF)]
        return reference.expert_ffn(x_TD, *matrices, *rest, **options)

    for recompute in (False, True):
        options = {"in_mxfp4": True, "recompute": recompute, "places_TK": batch.order.places_TK}
        fast = with_biases(_one_function(kernels), rule=GPT_OSS, **options)
        assert_parity(fast, with_biases(of_rounded, rule=GPT_OSS), [*batch.inputs, *batch.biases])


def test_gradients_of_two_micro_batches_are_added_to_float32_sums(kernels: ExpertKernels, device: torch.device) -> None:
    batch = draw("random", device)
    parameters = [one.requires_grad_() for one in (batch.gate_up_eFD, batch.down_eDF, *batch.biases)]
    sums = tuple(torch.zeros_like(one, dtype=torch.float32) for one in parameters)
    expected = [torch.zeros_like(one) for one in sums]
    for scale in (1.0, 0.25):
        x_TD = batch.x_TD * scale
        options = {"accumulate_into": sums, "biases": batch.biases, "rule": GPT_OSS, "kernels": kernels}
        y_RD = expert_ffn(x_TD, *parameters[:2], *batch.rest, **options)
        dy_RD = torch.randn_like(y_RD)
        y_RD.backward(dy_RD)
        wide = [one.detach().float().requires_grad_() for one in parameters]
        y_RD = reference.expert_ffn(x_TD.float(), *wide[:2], *batch.rest, biases=(wide[2], wide[3]), rule=GPT_OSS)
        for total, gradient in zip(expected, torch.autograd.grad(y_RD, wide, dy_RD.float()), strict=True):
            total += gradient
    assert all(one.grad is None for one in parameters), "the sums take the gradients' place"
    for total, right in zip(sums, expected, strict=True):
        assert_near(total.to(batch.x_TD.dtype), right, "sum of gradients")


@pytest.mark.often("triton-*", "*-dropped slots")
@pytest.mark.parametrize("routing", ["random", "dropped slots", "all slots dropped"])
@pytest.mark.parametrize("rule", [SWIGLU, GPT_OSS, LLAMA4], ids=["swiglu", "gpt-oss", "llama4"])
def test_a_recomputed_pre_activation_gives_the_same_bits(
    kernels: ExpertKernels, rule: ExpertRule, routing: str, device: torch.device
) -> None:
    batch, products = draw(routing, device), []
    biases = batch.biases if rule == GPT_OSS else ()

    def counted(*arguments: Any, **options: Any) -> Tensor:
        products.append(arguments)
        return kernels.forward(*arguments, **options)

    def run(*, recompute: bool) -> list[Tensor]:
        inputs = batch.x_TD, batch.gate_up_eFD, batch.down_eDF, batch.weights_R, *biases
        leaves = [leaf.detach().clone().requires_grad_() for leaf in inputs]
        options = {"recompute": recompute, "places_TK": batch.order.places_TK, "rule": rule}
        given = (leaves[4], leaves[5]) if biases else None
        rest = batch.order.counts_E, leaves[3], batch.index_R
        y_RD = expert_ffn(*leaves[:3], *rest, biases=given, kernels=replace(kernels, forward=counted), **options)
        return [y_RD.detach(), *torch.autograd.grad(y_RD, leaves, torch.ones_like(y_RD))]

    plain = run(recompute=False)
    assert len(products) == 2
    for found, expected in zip(run(recompute=True), plain, strict=True):
        assert torch.equal(found, expected)
    assert len(products) == 5, "the first product runs once more, the second does not"


def launches_of(rule: ExpertRule, *, has_biases: bool) -> list[str]:
    """Launches of both passes on the meta device."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x_TD = torch.empty(64, HIDDEN, **meta, requires_grad=True)
    parameters = [torch.empty(4, 2 * WIDTH, HIDDEN, **meta), torch.empty(4, HIDDEN, WIDTH, **meta)]
    parameters += [torch.empty(4, 2 * WIDTH, **meta), torch.empty(4, HIDDEN, **meta)] if has_biases else []
    leaves = [parameter.requires_grad_() for parameter in parameters]
    sums = tuple(torch.empty_like(leaf, dtype=torch.float32) for leaf in leaves)
    weights_R = torch.empty(64, device="meta", requires_grad=True)
    counts_e = torch.empty(4, device="meta", dtype=torch.int32)
    biases = (leaves[2], leaves[3]) if has_biases else None
    with OpRecorder(8) as tape:
        options = {"biases": biases, "rule": rule, "accumulate_into": sums}
        expert_ffn(x_TD, leaves[0], leaves[1], counts_e, weights_R, **options).sum().backward()
    return [operator.name for operator in tape.cut() if operator.name.endswith("_kernel") or operator.name == WAIT]


def test_biases_add_two_launches_each_and_clamps_and_weighted_inputs_none() -> None:
    plain = ["tile_table_kernel", "rows_kernel", "swiglu_kernel", "rows_kernel"]
    plain += ["rows_kernel", "swiglu_backward_kernel", "weights_kernel", "rows_kernel", "weights_kernel"]
    for rule in (SWIGLU, LLAMA4, GPT_OSS):
        assert launches_of(rule, has_biases=False) == plain
    of_biases = ["bias_parts_kernel", "bias_sums_kernel"] * 2
    assert launches_of(GPT_OSS, has_biases=True) == [*plain[:-2], *of_biases, *plain[-2:]]
