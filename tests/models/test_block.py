"""A layer adds what goes through it in as few passes over memory as there can be, and gives what plain sums give."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from penstock.config.model import Balance, HyperConnections, Model
from penstock.config.parallel import Dispatch, Overlap
from penstock.kernels import reference as norms
from penstock.kernels.backends import FIELDS, TRITON
from penstock.kernels.operators import REFERENCE, TORCH, Operators
from penstock.models.block import Block
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import PreNorm, RMSNorm
from penstock.models.parameters import initialize
from penstock.models.residual import StreamMixer
from penstock.moe.layer import MoE
from penstock.moe.router import TopKRouter
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.graphs import PartialGraphs
from penstock.parallel.layer_context import LayerContext, drain
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close, assert_equal
from tests.models.families import moe_with, reading_of, tiny_model
from tests.models.huggingface.family_models import deepseek_v4
from tests.models.test_residual import hyper_connection
from tests.parallel.alive import Alive
from tests.parallel.recorded import Recorded
from tests.parallel.recorded_graph import SameAddresses

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, POSITIONS, HIDDEN = 2, 6, 32
CSA = deepseek_v4().attention.model_copy(update={"first_layers": ("csa",)})
MODELS = {
    "dense": tiny_model(dense_layers=1, layers=1),
    "shared": tiny_model(dense_layers=0, layers=1),
    "routed": moe_with(tiny_model(dense_layers=0, layers=1), shared_expert_intermediate_size=0),
    "post": tiny_model(dense_layers=0, layers=1, norm_position="post"),
    "sandwich": tiny_model(dense_layers=1, layers=1, norm_position="sandwich", residual_scale=0.5),
    "compressed": deepseek_v4(layers=1, hyper_connections=None, attention=CSA),
    **{
        name: tiny_model(dense_layers=dense, layers=1, hidden_size=16, hyper_connections=HyperConnections(streams=2))
        for name, dense in (("streams", 0), ("dense streams", 1))
    },
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
    positions_BS = torch.arange(POSITIONS, device=device).expand(ROWS, -1)
    context = decoder.forward_context(reading_of(torch.zeros_like(positions_BS), positions_BS))
    return decoder.train().blocks["0"], context


def by_plain_sums(block: Block, x_BSD: Tensor, context: ForwardContext) -> Tensor:
    """A layer as papers write it."""

    def norm(norm: PreNorm | RMSNorm | None, x_BSD: Tensor) -> Tensor:
        return x_BSD if norm is None else norms.rms_norm(x_BSD, norm.weight_D, norm.epsilon)

    if block.attention_streams is not None and block.ffn_streams is not None:
        x_BSD = joined(
            block.attention_streams, x_BSD, lambda x: block.attention(norm(block.attention_norm, x), context, None)
        )
        return joined(block.ffn_streams, x_BSD, lambda x: fed(block, norm(block.ffn_norm, x), context))
    attended_BSD = block.attention(norm(block.attention_norm, x_BSD), context, None)
    x_BSD = x_BSD + block.residual_scale * norm(block.attention_post_norm, attended_BSD)
    y_BSD = fed(block, norm(block.ffn_norm, x_BSD), context)
    return x_BSD + block.residual_scale * norm(block.ffn_post_norm, y_BSD)


def joined(streams: StreamMixer, x_BSD: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
    """The streams behind a network, by the definition of `transformers`."""
    theirs = hyper_connection(streams)
    x_BSAD = x_BSD.unflatten(-1, (streams.streams, -1))
    post, comb, one_BSD = theirs(x_BSAD)
    y_BSD = network(one_BSD)
    return (post[..., None] * y_BSD[..., None, :] + comb.mT @ x_BSAD).flatten(-2)


def fed(block: Block, x_BSD: Tensor, context: ForwardContext) -> Tensor:
    x_TD = x_BSD.flatten(0, 1)
    if isinstance(block.ffn, MoE):
        y_TD = torch.stack(drain(block.ffn.after_routing(x_TD, x_TD, block.ffn.route(x_TD, context.scope)))).sum(0)
    else:
        y_TD = block.ffn(x_TD)
    return y_TD.view_as(x_BSD)


def trained(block: Block, y_BSD: Tensor, x_BSD: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    weights_BSD = torch.randn(y_BSD.shape, generator=torch.Generator().manual_seed(1)).to(y_BSD)
    (y_BSD * weights_BSD).sum().backward()
    return {"y": y_BSD.detach(), "x": x_BSD.grad, **{name: one.grad for name, one in block.named_parameters()}}


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
    *here("routed-triton-*", "shared-torch-norm+moe", "dense-reference-moe+dense", "dense-triton-layer"),
    *here("shared-reference-", "routed-torch-layer", "post-torch-norm+moe", "sandwich-triton-norm"),
)
@pytest.mark.parametrize("kinds", [(), ("norm",), ("moe", "dense"), ("norm", "moe"), ("layer",)], ids="+".join)
@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_a_layer_and_its_gradients_are_those_of_plain_sums(
    model: Model, operators: Operators, kinds: tuple[str, ...]
) -> None:
    block, context = a_block(model, LayerContext(operators=operators, recompute=frozenset(kinds)))
    x_BSD = an_input()
    assert_close(trained(block, block(x_BSD, context), x_BSD), expected(model), tolerance=1e-4)


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_so_are_a_layer_in_pieces_and_one_behind_a_graph(model: Model, operators: Operators) -> None:
    travelling = LayerContext(operators=operators, dispatch=Dispatch(overlap="shared"), transfers=TransferStream(CPU))
    found = []
    for layer_context in (travelling, replace(travelling, dispatch=Dispatch(overlap="passes"))):
        (block, context), x_BSD = a_block(model, layer_context), an_input()
        y_BSD = block(x_BSD, context) if layer_context is travelling else drain(block.steps(x_BSD, context))
        found.append(trained(block, y_BSD, x_BSD))
    (block, context), x_BSD = a_block(model, LayerContext(operators=operators)), an_input()
    with in_parts(context) as captured:
        found.append(trained(block, block(x_BSD, captured), x_BSD))
    assert_close(found, [expected(model)] * 3, tolerance=1e-4)


@pytest.mark.often(*here("routed-triton-*", "dense-reference-shared", "shared-torch-none", "shared-triton-shared"))
@pytest.mark.parametrize("overlap", ["none", "shared"])
@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
@BY_MODEL
def test_a_layer_behind_a_graph_rounds_where_an_eager_one_does(
    model: Model, operators: Operators, overlap: Literal["none", "shared"]
) -> None:
    transfers = None if overlap == "none" else TransferStream(CPU)
    layer_context = LayerContext(operators=operators, dispatch=Dispatch(overlap=overlap), transfers=transfers)
    found = []
    for is_captured in (False, True):
        block, context = a_block(model, layer_context)
        block.to(torch.bfloat16)
        for module in block.modules():
            if isinstance(module, (TopKRouter, StreamMixer)):
                module.float()
        x_BSD = an_input().detach().bfloat16().requires_grad_()
        with in_parts(context) if is_captured else nullcontext(context) as passing:
            found.append(trained(block, block(x_BSD, passing), x_BSD))
    assert_equal(*found)


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
        ("dense", {"add": 1}),  # the output to the stream
        ("routed", {"add": 2}),  # the same, and gradients of the router and of dispatch
        ("shared", {"add_three_kernel": 2}),  # the same, and the shared expert in both
    ],
)
def test_nothing_is_added_that_a_kernel_could_have_taken_up(model: str, sums: dict[str, int]) -> None:
    assert sums_of(MODELS[model]) - sums_of(MODELS[model], part="attention") == Counter(sums)


MODEL_ROWS, MODEL_POSITIONS = 4, 12
LAYERS = 2
"""With experts; a dense one stands before them."""

FINE = ("norm", "latent-up", "attention", "expert-activation", "shared-expert", "dense")


def _model(layer_context: LayerContext) -> Decoder:
    balance = Balance(aux_loss="sequence", aux_loss_coef=0.1, z_loss_coef=0.01)
    decoder = meta_model(moe_with(tiny_model(mtp_layers=1), balance=balance), layer_context)
    decoder.to_empty(device="cpu")
    initialize(decoder, 3, 0.2)
    return decoder.train()


def _layer_context(overlap: Overlap, kinds: tuple[str, ...] = ()) -> tuple[LayerContext, Recorded]:
    transfers = Recorded()
    rule = frozenset(kinds)
    travelling = None if overlap == "none" else transfers
    return LayerContext(dispatch=Dispatch(overlap=overlap), transfers=travelling, recompute=rule), transfers


def _loss(decoder: Decoder) -> Tensor:
    tokens_BS = torch.randint(61, (MODEL_ROWS, MODEL_POSITIONS), generator=torch.Generator().manual_seed(0))
    reading = reading_of(tokens_BS, torch.arange(MODEL_POSITIONS).expand(MODEL_ROWS, -1), depths=1)
    hidden = decoder(reading)
    return hidden.main_BSD.sin().sum() + sum(one_BSD.cos().sum() for one_BSD in hidden.mtp)


def _trained(decoder: Decoder) -> dict[str, Tensor]:
    """Loss, gradients, and what was counted on the way."""
    loss = _loss(decoder)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters() if not name.startswith("head")}
    assert None not in gradients.values(), "every parameter takes part"
    return {"loss": loss.detach(), **gradients, **dict(decoder.named_buffers())}


@pytest.mark.parametrize("kinds", [(), FINE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("overlap", ["shared", "passes"])
def test_every_overlap_gives_the_loss_the_gradients_and_the_counts_of_none(
    overlap: Overlap, kinds: tuple[str, ...]
) -> None:
    found, expected = (_trained(_model(_layer_context(*how)[0])) for how in ((overlap, kinds), ("none",)))
    assert_close(found, expected, tolerance=1e-4)


def _mark(decoder: Decoder, transfers: Recorded) -> None:
    """Note when the halves of each shared expert and the experts run, in both directions."""

    def marked(name: str, function: Callable[..., Tensor], *given: object) -> Tensor:
        return transfers.mark(name, function(*given))

    for layer in decoder.modules():
        if isinstance(layer, MoE):
            layer.shared.widen = partial(marked, "widen", layer.shared.widen)
            layer.shared.narrow = partial(marked, "narrow", layer.shared.narrow)
            layer.experts.forward = partial(marked, "experts", layer.experts.forward)


def test_the_shared_expert_runs_beside_both_transfers_in_both_directions() -> None:
    layer_context, transfers = _layer_context("shared")
    decoder = _model(layer_context)
    _mark(decoder, transfers)
    loss = _loss(decoder)
    dispatch, combine = (["dispatch 0 leaves", "widen", "dispatch 0 arrives"], ["combine 1 leaves", "narrow"])
    assert transfers.events[:7] == [*dispatch, "experts", *combine, "combine 1 arrives"]
    transfers.events.clear()
    loss.backward()
    combine_back = ["combine 1 back leaves", "narrow back", "combine 1 back arrives"]
    dispatch_back = ["dispatch 0 back leaves", "widen back", "dispatch 0 back arrives"]
    assert transfers.events[-7:] == [*combine_back, "experts back", *dispatch_back]


def test_an_overlapped_layer_frees_what_is_recomputed_as_another_does() -> None:
    def kept(overlap: Overlap, kinds: tuple[str, ...]) -> int:
        decoder = _model(_layer_context(overlap, kinds)[0])
        with Alive() as alive:
            loss = _loss(decoder)
            size = alive.bytes()
        loss.backward()
        return size

    for kind in ("norm", "shared-expert", "expert-activation"):
        freed = [kept(overlap, ()) - kept(overlap, (kind,)) for overlap in ("none", "shared")]
        assert freed[1] >= 0.95 * freed[0] > 0, kind
