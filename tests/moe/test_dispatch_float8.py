"""Rows that travel in 8 bits: the bytes that arrive are those that left, and gradients come back as they always do."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.dispatch_cases import SMALL, Exact
from penstock.config.load import load_run
from penstock.kernels.float8 import quantize
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, Recipe, as_quantized, row_bytes
from penstock.kernels.float8.reference import pack_rows, unpack_rows
from penstock.kernels.operators import REFERENCE as PLAIN
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import Routing, Scope
from penstock.moe.dispatch.build import make_dispatcher
from penstock.moe.dispatch.collective import AllGatherDispatcher
from penstock.moe.dispatch.contract import UNQUANTIZED, Dispatcher, LocalDispatcher, WireFormat, wire_format_of
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.replicas import widest_row
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.closeness import assert_close, assert_equal, relative_error
from tests.distributed.one_loss import trace
from tests.distributed.pool import Pool
from tests.moe.mixture import (
    OVER_GLOO,
    D,
    Gloo,
    Problem,
    Way,
    dispatchers_on_a_rank,
    make_layer,
    plain_moe,
    problem,
    random_routing,
    solve,
    with_room,
)
from tests.moe.test_dispatch import adversarial
from tests.moe.test_host_waits import HostWaits
from tests.parallel.symmetric_ranks import run_ranks

OPENED = WireFormat(recipe=BLOCKWISE, dequantizes=True)
READ = WireFormat(recipe=BLOCKWISE)
TRITON: Float8Operators = replace(REFERENCE, pack_rows=quantize.pack_rows, unpack_rows=quantize.unpack_rows)
EP4 = ExpertPlacement(experts=8, expert=4)
KINDS = ("skewed", "some dropped", "one sender", "all experts")
SIMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")


def _representable(whole: Problem, wire_format: WireFormat) -> Problem:
    packed, (_, width), dtype = wire_format.encode(whole.x_TD).packed, whole.x_TD.shape, whole.x_TD.dtype
    return replace(whole, x_TD=unpack_rows(packed, width, wire_format.recipe, wire_format.form, dtype))


@pytest.mark.often("sent-*", "gathered, bounded-blockwise", "by node, worst case-blockwise", "padded-blockwise")
@pytest.mark.parametrize(
    ("way", "recipe"),
    [*((way, BLOCKWISE) for way in OVER_GLOO), ("sent", MXFP8), ("by node, bounded", MXFP8)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_8_bits_hold_gives_the_bits_that_16_bits_give(ranks: Pool, way: Way, recipe: Recipe) -> None:
    """Outputs and all gradients, whether rows are opened where they arrive or read as they came."""
    wire_format = WireFormat(recipe=recipe)
    problems = [_representable(problem(EP4, adversarial(kind, 16)), wire_format) for kind in KINDS]
    plain = solve(ranks, way, [problems])
    for packed in (replace(wire_format, dequantizes=True), wire_format):
        assert_equal(solve(ranks, way, [problems], wire_format=packed), plain)


@SIMULATED
@pytest.mark.parametrize(("way", "expert"), [("pushed", 2), ("by node, pushed", 4)])
def test_what_8_bits_hold_is_pushed_with_the_bits_of_16(ranks: Pool, way: Way, expert: int) -> None:
    placement = ExpertPlacement(experts=8, expert=expert)
    problems = [_representable(problem(placement, adversarial("some dropped", 8)), READ)]
    assert_equal(solve(ranks, way, [problems], wire_format=READ), solve(ranks, way, [problems]))


@pytest.mark.parametrize("way", OVER_GLOO)
def test_rows_are_rounded_once_and_the_same_whichever_way_they_go(ranks: Pool, way: Way) -> None:
    whole = problem(ExpertPlacement(experts=8, expert=2, expert_tensor=2), adversarial("some dropped", 16))
    alone = replace(whole, placement=ExpertPlacement(experts=8))
    found = solve(ranks, way, [[whole]], wire_format=OPENED)
    (((y_TD, *_),),) = solve(ranks, "alone", [[alone]], wire_format=OPENED)
    (((exact_TD, *_),),) = solve(ranks, "alone", [[alone]])
    assert_close(torch.cat([one[0][0] for one in found]), y_TD, tolerance=1e-4)
    assert relative_error(y_TD, exact_TD, by="norm") > 0.01, "nothing was rounded"


# What arrives, row by row.

WIDE = 384
Arrived = Counter[tuple[int, bytes]]
"""How often an expert reads a row of these bytes."""


def _arrived(dispatcher: Dispatcher, x_TD: Tensor, routing: Routing, own: range) -> Arrived:
    """On a rank."""
    rows, _ = dispatcher.dispatch(x_TD, routing)
    quantized, places = rows.quantized, int(rows.counts_e.sum())
    assert rows.x_ND.shape == quantized.values.shape
    experts = torch.tensor(own).repeat_interleave(rows.counts_e.long()).tolist()
    is_padding = rows.weights_R[:places] == 0
    return Counter(
        (expert, _bytes_of(quantized.values[row]) + _bytes_of(quantized.scales[row]))
        for expert, row, empty in zip(experts, rows.index_R[:places].tolist(), is_padding.tolist(), strict=True)
        if not empty
    )


def _bytes_of(values: Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).tolist())


def _expected(x_TD: Tensor, experts_TK: Tensor, own: range, wire_format: WireFormat) -> Arrived:
    recipe, form = wire_format.recipe, wire_format.form
    rows = as_quantized(pack_rows(x_TD, recipe, form), x_TD.shape[1], recipe, form)
    by_token = [_bytes_of(values) + _bytes_of(scales) for values, scales in zip(rows.values, rows.scales, strict=True)]
    chosen = [(expert, token) for token, choices in enumerate(experts_TK.tolist()) for expert in choices]
    return Counter((expert, by_token[token]) for expert, token in chosen if expert in own)


def _arrives_over_gloo(way: Gloo, x_TD: Tensor, experts_TK: Tensor, wire_format: WireFormat) -> bool:
    (dispatcher,), place = dispatchers_on_a_rank(way, [with_room(EP4)], wire_format=wire_format)
    return _arrives(dispatcher, EP4, place, x_TD, experts_TK)


def _arrives(dispatcher: Dispatcher, placement: ExpertPlacement, place: int, x_TD: Tensor, experts_TK: Tensor) -> bool:
    own_TK, own = experts_TK.chunk(placement.places)[place], placement.experts_of(place)
    routing = Routing(torch.ones(own_TK.shape).masked_fill(own_TK == 8, 0), own_TK)
    found = _arrived(dispatcher, x_TD.chunk(placement.places)[place], routing, own)
    return found == _expected(x_TD, experts_TK, own, dispatcher.wire_format)


@pytest.mark.often("sent-*", "gathered, bounded-blockwise", "by node, worst case-mxfp8", "padded-blockwise")
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("way", OVER_GLOO)
def test_experts_read_the_bytes_that_were_packed(ranks: Pool, way: Gloo, recipe: Recipe) -> None:
    x_TD, experts_TK = torch.randn(16, WIDE).bfloat16(), adversarial("some dropped", 16).experts_TK
    wire_format = WireFormat(recipe=recipe, operators=TRITON)
    assert all(ranks.run(4, _arrives_over_gloo, way, x_TD, experts_TK, wire_format))


@SIMULATED
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_pushed_bytes_take_half_the_memory_on_their_way(recipe: Recipe) -> None:
    x_TD, experts_TK = torch.randn(8, WIDE).bfloat16(), adversarial("some dropped", 8).experts_TK
    size = row_bytes(WIDE, recipe)
    assert size == WIDE + 32
    sizes = BufferSizes(tokens=4, top_k=2, row_bytes=size, ranks=2)
    assert run_ranks(_arrives_pushed, sizes, x_TD, experts_TK, WireFormat(recipe=recipe)) == [True, True]
    with pytest.raises(AssertionError, match="OUT_ROWS"):
        run_ranks(_arrives_pushed, sizes, x_TD, experts_TK, UNQUANTIZED)


def _arrives_pushed(buffers: SymmetricBuffers, x_TD: Tensor, experts_TK: Tensor, wire_format: WireFormat) -> bool:
    placement = ExpertPlacement(experts=8, expert=2)
    transport = transport_of(placement, buffers)
    dispatcher = SymmetricDispatcher(placement, transport, with_room(placement), wire_format=wire_format)
    return _arrives(dispatcher, placement, buffers.peers.rank, x_TD, experts_TK)


# What is sent.


SENDING = {
    torch.ops.c10d.alltoall_base_.default,
    torch.ops.c10d._allgather_base_.default,
    torch.ops.c10d._reduce_scatter_base_.default,
}


class _Sent(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in SENDING:
            self.bytes[args[1].dtype] += args[1].nbytes
        return function(*args, **(kwargs or {}))


def _sent(way: Gloo, x_TD: Tensor, experts_TK: Tensor, wire_format: WireFormat) -> tuple[Counter[torch.dtype], ...]:
    """On a rank: bytes sent by dispatch, and by its backward."""
    (dispatcher,), place = dispatchers_on_a_rank(way, [with_room(EP4)], wire_format=wire_format)
    own_TD, own_TK = x_TD.chunk(4)[place].requires_grad_(), experts_TK.chunk(4)[place]
    with _Sent() as out:
        rows, _ = dispatcher.dispatch(own_TD, Routing(torch.ones(own_TK.shape), own_TK))
    gradient_ND = torch.ones(rows.x_ND.shape, dtype=torch.bfloat16)
    with _Sent() as back:
        torch.autograd.grad(rows.x_ND, own_TD, gradient_ND)
    return out.bytes, back.bytes


@pytest.mark.parametrize("way", OVER_GLOO)
def test_half_the_bytes_go_out_and_all_of_them_come_back(ranks: Pool, way: Gloo) -> None:
    x_TD, experts_TK = torch.randn(16, WIDE).bfloat16(), adversarial("even", 16).experts_TK
    plain = ranks.run(4, _sent, way, x_TD, experts_TK, UNQUANTIZED)
    packed = ranks.run(4, _sent, way, x_TD, experts_TK, READ)
    for (out, back), (out_8, back_8) in zip(plain, packed, strict=True):
        others = out.total() - out[torch.bfloat16]
        assert out_8[torch.bfloat16] == 0 and out[torch.bfloat16] > 0
        assert (out_8.total() - others) * 2 * WIDE == out[torch.bfloat16] * (WIDE + 32)
        assert back == back_8 and back[torch.bfloat16] > 0


# What stands behind the contract.


def test_the_carrier_has_one_number_of_memory_and_takes_the_gradient() -> None:
    x_TD = torch.randn(6, D, requires_grad=True)
    payload = READ.encode(x_TD).move(lambda rows: rows[:4], lambda gradient: torch.cat((gradient, gradient[:2])))
    assert payload.packed is not None and payload.packed.shape[0] == 4
    assert payload.x_ND.shape == (4, D) and payload.x_ND.untyped_storage().nbytes() == 4
    direction_ND = torch.randn(4, D)
    (gradient_TD,) = torch.autograd.grad(payload.x_ND, x_TD, direction_ND)
    assert torch.equal(gradient_TD, torch.cat((direction_ND, direction_ND[:2])))
    assert READ.encode(payload) is payload


@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_the_benchmarks_whole_numbers_are_whole_in_8_bits(recipe: Recipe) -> None:
    layer = Exact.draw(SMALL, adversarial("some dropped", 12).experts_TK)
    layer = replace(layer, experts_TK=layer.experts_TK.masked_fill(layer.experts_TK == 8, SMALL.E))
    dispatcher = LocalDispatcher(SMALL.E, PLAIN, WireFormat(recipe=recipe, operators=TRITON, dequantizes=True))
    y_TD = layer.begin(dispatcher, 0)()
    gradients = torch.autograd.grad((y_TD * layer.direction_TD).sum(), (layer.x_TD, layer.weights_TK))
    assert int(layer.wrong(y_TD, *gradients)) == 0


@pytest.mark.parametrize(("precision", "width", "size"), [("bf16", 2048, 4096), ("fp32", 2048, 8192), ("bf16", 8, 32)])
def test_slots_hold_the_widest_row_that_goes_through_them(precision: str, width: int, size: int) -> None:
    run = load_run("deepseek-v2-lite", ("float8.dispatch=blockwise", f"training.precision={precision}"))
    narrow = run.model_copy(update={"model": run.model.model_copy(update={"hidden_size": width})})
    assert widest_row(narrow) == size


@pytest.mark.parametrize(
    ("experts", "dequantizes"),
    [(BLOCKWISE, False), (BLOCKWISE_SQUARE, False), (MXFP8, True), (None, True)],
    ids=["same", "squares of the same rows", "other", "none"],
)
def test_rows_stay_in_8_bits_where_experts_read_them_in_the_same_blocks(
    experts: Recipe | None, dequantizes: bool
) -> None:
    rule = Float8Rule(dispatch=BLOCKWISE, experts=experts)
    assert wire_format_of(rule) == WireFormat(recipe=BLOCKWISE, dequantizes=dequantizes)
    dispatcher, _ = make_dispatcher(plain_moe(8, 16), LayerContext(float8=rule))
    rows, _ = dispatcher.dispatch(torch.randn(4, D), random_routing(4, 8, 2, seed=0))
    assert (rows.quantized is None) == dequantizes
    assert wire_format_of(Float8Rule(experts=experts)).recipe is None


def test_nothing_of_8_bits_makes_the_host_wait() -> None:
    waits, placement = HostWaits(), ExpertPlacement(experts=8)
    x_TD, routing = torch.randn(8, D, requires_grad=True), random_routing(8, 8, 2, seed=1)
    counts = []
    for wire_format in (UNQUANTIZED, OPENED, READ):
        room = RowCapacity(placement, 1.0)
        dispatcher = AllGatherDispatcher(placement, ALONE.expert, PLAIN, room, wire_format=wire_format)
        waits.counts.clear()
        with waits.watching():
            rows, _ = dispatcher.dispatch(x_TD, routing)
            rows.x_ND.backward(torch.ones(rows.x_ND.shape))
        counts.append(dict(waits.counts))
    assert counts[0] == counts[1] == counts[2], "8 bits wait where 16 do not"


@pytest.mark.parametrize("experts", [None, BLOCKWISE], ids=["opened", "read"])
def test_rows_in_8_bits_leave_beside_other_work_too(experts: Recipe | None) -> None:
    rule, results = Float8Rule(dispatch=BLOCKWISE, experts=experts), []
    for transfers in (None, TransferStream(torch.device("cpu"))):
        layer = make_layer(plain_moe(8, 16), LayerContext(float8=rule, transfers=transfers), D)
        x_TD = torch.randn(12, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (y_TD,) = layer(x_TD, Scope())
        y_TD.square().sum().backward()
        results.append([y_TD.detach(), x_TD.grad, *(parameter.grad for parameter in layer.parameters())])
    assert_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "way"),
    [
        ("none", ("dispatch.method=all-to-all",)),
        ("blockwise-square", ("dispatch.method=all-gather", "dispatch.sync_free=3", "dispatch.overlap=shared")),
    ],
    ids=["opened", "read"],
)
def test_a_small_model_has_one_loss_however_its_rows_travel_in_8_bits(
    ranks: Pool, experts: str, way: tuple[str, ...]
) -> None:
    settings = ("float8.dispatch=blockwise", f"float8.experts={experts}")
    alone = trace(ranks, 1, settings, steps=1)
    found = trace(ranks, 2, (*settings, "parallel.expert=2", *way), steps=1)
    assert_close(found.losses, alone.losses, tolerance=1e-5, what="losses")
    assert_close(found.norms, alone.norms, tolerance=1e-3, what="norms")
