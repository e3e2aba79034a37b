"""A layer adds what goes through it in as few passes over memory as there can be, and gives what plain sums give."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from penstock.config.model import Model
from penstock.config.parallel import Dispatch
from penstock.kernels.backends import FIELDS
from penstock.kernels.operators import REFERENCE, TORCH, Operators
from penstock.kernels.triton_operators import TRITON
from penstock.models.block import Block
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.init import initialize
from penstock.models.model_inputs import ForwardContext
from penstock.moe.layer import MoE
from penstock.parallel.async_transfer import TransferStream, drain
from penstock.parallel.graphs import PartialGraphs
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import RecomputeRule
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close
from tests.models.families import moe_with, reading_of, tiny_model
from tests.parallel.recorded_graph import SameAddresses

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, POSITIONS, HIDDEN = 2, 6, 32
MODELS = {
    "dense": tiny_model(dense_layers=1, layers=1),
    "shared": tiny_model(dense_layers=0, layers=1),
    "routed": moe_with(tiny_model(dense_layers=0, layers=1), shared_expert_intermediate_size=0),
}
NORMS = {field: vars(TRITON)[field] for field in FIELDS["norm"]}
OPERATORS = {"reference": REFERENCE, "torch": TORCH}
if not torch.cuda.is_available():  # with a GPU, Triton does not interpret kernels
    OPERATORS["triton"] = replace(REFERENCE, **NORMS)
BY_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def a_block(model: Model, layer_context: LayerContext, device: torch.device = CPU) -> tuple[Block, ForwardContext]:
    decoder = meta_model(model, layer_context)
    if device == CPU:
        decoder.to_empty(device=CPU)
        initialize(decoder, 3, 0.2)
    return decoder.train().blocks["0"], frame_of(decoder, device)  # type: ignore[return-value]


def frame_of(decoder: Decoder, device: torch.device) -> ForwardContext:
    positions_BS = torch.arange(POSITIONS, device=device).expand(ROWS, -1)
    return decoder.forward_context(
        reading_of(torch.zeros(ROWS, POSITIONS, dtype=torch.int64, device=device), positions_BS)
    )


def by_plain_sums(block: Block, x_BSD: Tensor, context: ForwardContext) -> Tensor:
    """A pre-norm layer as papers write it."""
    x_BSD = x_BSD + block.attention(block.attention_norm(x_BSD)[0], context, None)
    x_TD = block.ffn_norm(x_BSD)[0].flatten(0, 1)
    if isinstance(block.ffn, MoE):
        y_TD = torch.stack(block.ffn.mix(x_TD, x_TD, block.ffn.route(x_TD, context.scope))).sum(0)
    else:
        y_TD = block.ffn(x_TD)
    return x_BSD + y_TD.view_as(x_BSD)


def trained(block: Block, y_BSD: Tensor, x_BSD: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    weights_BSD = torch.randn(y_BSD.shape, generator=torch.Generator().manual_seed(1)).to(y_BSD)
    (y_BSD * weights_BSD).sum().backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"y": y_BSD.detach(), "x": x_BSD.grad, **gradients}  # type: ignore[dict-item]


def an_input() -> Tensor:
    return torch.randn(ROWS, POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()


def expected(model: Model) -> dict[str, Tensor]:
    block, context = a_block(model, LayerContext())
    x_BSD = an_input()
    return trained(block, by_plain_sums(block, x_BSD, context), x_BSD)


@contextmanager
def in_parts(context: ForwardContext) -> Iterator[ForwardContext]:
    parts = PartialGraphs(SameAddresses().capture)
    yield replace(context, parts=parts)
    parts.release()


def here(*patterns: str) -> tuple[str, ...]:
    """The patterns of cases that this machine has: on a CPU Triton's norms run only under the interpreter."""
    return tuple(pattern for pattern in patterns if "triton" in OPERATORS or "triton" not in pattern)


@pytest.mark.often(
    *here(
        "routed-triton-*",
        "shared-torch-norm+moe",
        "dense-reference-moe+dense",
        "dense-triton-layer",
        "shared-reference-",
        "routed-torch-layer",
    )
)
@pytest.mark.parametrize("kinds", [(), ("norm",), ("moe", "dense"), ("norm", "moe"), ("layer",)], ids="+".join)
@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_a_layer_and_its_gradients_are_those_of_plain_sums(
    model: Model, operators: Operators, kinds: tuple[str, ...]
) -> None:
    block, context = a_block(model, LayerContext(operators=operators, recompute=RecomputeRule(kinds=frozenset(kinds))))
    x_BSD = an_input()
    found = trained(block, block(x_BSD, context), x_BSD)
    for name, value in expected(model).items():
        assert_close(found[name], value, tolerance=1e-4, what=name)


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_so_are_a_layer_in_pieces_and_one_behind_a_graph(model: Model, operators: Operators) -> None:
    travelling = LayerContext(operators=operators, dispatch=Dispatch(overlap="shared"), transfers=TransferStream(CPU))
    found = []
    for layer_context in (travelling, replace(travelling, dispatch=Dispatch(overlap="halves"))):
        block, context = a_block(model, layer_context)
        x_BSD = an_input()
        y_BSD = block(x_BSD, context) if layer_context is travelling else drain(block.steps(x_BSD, context))
        found.append(trained(block, y_BSD, x_BSD))
    block, context = a_block(model, LayerContext(operators=operators))
    with in_parts(context) as captured:
        x_BSD = an_input()
        found.append(trained(block, block(x_BSD, captured), x_BSD))
    for name, value in expected(model).items():
        for one in found:
            assert_close(one[name], value, tolerance=1e-4, what=name)


@pytest.mark.often(*here("routed-triton-*", "dense-reference-shared", "shared-torch-none", "shared-triton-shared"))
@pytest.mark.parametrize("overlap", ["none", "shared"])
@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_a_layer_behind_a_graph_rounds_where_an_eager_one_does(
    model: Model, operators: Operators, overlap: Literal["none", "shared"]
) -> None:
    transfers = None if overlap == "none" else TransferStream(CPU)
    found = []
    for is_captured in (False, True):
        block, context = a_block(
            model, LayerContext(operators=operators, dispatch=Dispatch(overlap=overlap), transfers=transfers)
        )
        block.to(torch.bfloat16)
        if isinstance(block.ffn, MoE):
            block.ffn.router.float()
        x_BSD = an_input().detach().bfloat16().requires_grad_()
        with in_parts(context) if is_captured else nullcontext(context) as passing:
            found.append(trained(block, block(x_BSD, passing), x_BSD))
    eager, captured = found
    assert {name for name, value in eager.items() if not torch.equal(captured[name], value)} == set()


def sums_of(model: Model, *, part: str = "layer") -> Counter[str]:
    """How often which operator adds tensors of the residual stream's size, in both passes, if kernels are ours."""
    block, context = a_block(model, LayerContext(operators=TRITON), META)
    x_BSD = torch.empty(ROWS, POSITIONS, HIDDEN, device=META, requires_grad=True)
    tape = OpRecorder()
    with tape:
        y_BSD = block(x_BSD, context) if part == "layer" else block.attention(x_BSD, context, None)
        torch.autograd.backward(y_BSD, torch.empty_like(y_BSD))
    adding = (one for one in tape.cut() if one.name in ("add", "add_", "add_three_kernel"))
    return Counter(one.name for one in adding if torch.Size(one.shapes[0]).numel() == x_BSD.numel())


@pytest.mark.parametrize(
    ("model", "sums"),
    [
        ("dense", {"add": 1}),  # what it gives to the stream
        ("routed", {"add": 2}),  # the same, and gradients of the router and of dispatch
        ("shared", {"add_three_kernel": 2}),  # the same, and the shared expert in both
    ],
)
def test_nothing_is_added_that_a_kernel_could_have_taken_up(model: str, sums: dict[str, int]) -> None:
    of_attention = sums_of(MODELS[model], part="attention")
    assert sums_of(MODELS[model]) - of_attention == Counter(sums)
