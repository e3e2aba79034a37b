"""Rows that are pushed into other ranks' memory: simulated ranks against one rank that holds everything."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.dispatch_cases import KINDS as ROUTINGS
from benchmarks.dispatch_cases import SMALL, Exact, choices, wrong_numbers
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.operators import REFERENCE
from penstock.kernels.symmetric import PersistentLaunch
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows, LocalDispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, SymmetricTransport, transport_of
from penstock.moe.routing import Routing
from penstock.parallel.axes import Axis
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.closeness import assert_close
from tests.examples import examples
from tests.parallel.symmetric_ranks import StuckError, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")

D, F, EXPERTS = 8, 4, 8


@dataclass(frozen=True)
class Layer:
    placement: ExpertPlacement
    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    gate_up_eFD: Tensor
    down_eDF: Tensor
    direction_TD: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        tensors = (self.x_TD, self.weights_TK, self.gate_up_eFD, self.down_eDF)
        return [tensor.clone().requires_grad_() for tensor in tensors]

    def of(self, place: int) -> "Layer":
        own, parts = self.placement.experts_of(place), self.placement.expert_tensor
        part = place % parts
        tokens = (
            tensor.chunk(self.placement.places)[place] for tensor in (self.x_TD, self.weights_TK, self.experts_TK)
        )
        gate_up = self.gate_up_eFD[own.start : own.stop].unflatten(1, (2, parts, -1))[:, :, part].flatten(1, 2)
        down = self.down_eDF[own.start : own.stop].chunk(parts, 2)[part]
        return Layer(self.placement, *tokens, gate_up, down, self.direction_TD.chunk(self.placement.places)[place])


def _layer(placement: ExpertPlacement, experts_TK: Tensor, dtype: torch.dtype = torch.float32) -> Layer:
    T, K = experts_TK.shape
    weights_TK = torch.rand(T, K).masked_fill(experts_TK == placement.experts, 0)
    matrices = torch.randn(placement.experts, 2 * F, D), torch.randn(placement.experts, D, F)
    tensors = (torch.randn(T, D), *matrices, torch.randn(T, D))
    x_TD, gate_up_eFD, down_eDF, direction_TD = (tensor.to(dtype) for tensor in tensors)
    return Layer(placement, x_TD, weights_TK, experts_TK, gate_up_eFD, down_eDF, direction_TD)


def _mix(dispatcher: Dispatcher, leaves: list[Tensor], experts_TK: Tensor) -> Tensor:
    return _finish(dispatcher, leaves, *dispatcher.dispatch(leaves[0], Routing(leaves[1], experts_TK)))


def _finish(dispatcher: Dispatcher, leaves: list[Tensor], rows: ExpertRows, metadata: DispatchMetadata) -> Tensor:
    y_RD = expert_ffn(
        rows.x_ND, leaves[2], leaves[3], rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
    )
    return dispatcher.combine(y_RD, metadata)


def _output_and_gradients(y_TD: Tensor, layer: Layer, leaves: list[Tensor]) -> list[Tensor]:
    return [y_TD.detach(), *torch.autograd.grad((y_TD * layer.direction_TD).sum(), leaves)]


def _in_large_tiles(transport: SymmetricTransport) -> SymmetricTransport:
    """The interpreter's time is that of the tiles, whatever is in them. Small ones are in tests/kernels."""
    launch = PersistentLaunch(block_rows=8, block_columns=64, warps=1, programs=3)
    return replace(transport, **dict.fromkeys(("push", "take", "take_all", "back", "sum", "sum_all"), launch))


def _all_layers(
    buffers: SymmetricBuffers, layers: list[Layer], bound: float = 0, chunks: int = 0, by_engines: bool = False
) -> list[list[Tensor]]:
    flying = []
    for whole in layers:
        layer = whole.of(buffers.peers.rank)
        row_capacity = RowCapacity(layer.placement, bound) if bound else None
        transport = replace(
            _in_large_tiles(transport_of(layer.placement, buffers, by_engines=by_engines)), chunks=chunks
        )
        dispatcher = SymmetricDispatcher(layer.placement, transport, row_capacity)
        leaves = layer.leaves
        flying.append((dispatcher, leaves, *dispatcher.dispatch(leaves[0], Routing(leaves[1], layer.experts_TK))))
    outputs = [_finish(*one) for one in flying]
    directions = [whole.of(buffers.peers.rank).direction_TD for whole in layers]
    leaves = [leaf for one in flying for leaf in one[1]]
    gradients = iter(torch.autograd.grad(outputs, leaves, directions))
    return [[y_TD.detach(), *(next(gradients) for _ in range(4))] for y_TD in outputs]


def _compare(layers: list[Layer], got: list[list[list[Tensor]]], tolerance: float = 1e-4) -> None:
    for number, layer in enumerate(layers):
        leaves = layer.leaves
        y_TD = _mix(LocalDispatcher(layer.placement.experts, REFERENCE), leaves, layer.experts_TK)
        y_TD, dx_TD, dweights_TK, d_gate_up, d_down = _output_and_gradients(y_TD, layer, leaves)
        dweights_TK = dweights_TK.masked_fill(layer.experts_TK == layer.placement.experts, 0)
        expected = Layer(layer.placement, dx_TD, dweights_TK, layer.experts_TK, d_gate_up, d_down, y_TD)
        for place in range(layer.placement.places):
            own = expected.of(place)
            wanted = (own.direction_TD, own.x_TD, own.weights_TK, own.gate_up_eFD, own.down_eDF)
            for name, one, other in zip(
                ("y", "x", "weights", "gate_up", "down"), got[place][number], wanted, strict=True
            ):
                assert_close(one, other, tolerance=tolerance, what=name)


def _sizes(placement: ExpertPlacement, layers: list[Layer], slots: int = 2) -> BufferSizes:
    T, K = layers[0].experts_TK.shape
    width = D * layers[0].x_TD.element_size()
    return BufferSizes(tokens=T // placement.places, top_k=K, row_bytes=width, ranks=placement.places, slots=slots)


def _choices(tokens: int, top_k: int, experts: int = EXPERTS) -> Tensor:
    return torch.rand(tokens, experts).topk(top_k).indices


def _adversarial(kind: str, tokens: int) -> Tensor:
    experts_TK = _choices(tokens, 2)
    is_first_T1 = (torch.arange(tokens) < tokens // 4)[:, None]
    return {
        "even": experts_TK,
        "skewed": torch.where(torch.arange(tokens)[:, None] % 5 == 0, experts_TK, torch.tensor([3, 4])),
        "all on the last rank": torch.tensor([7, 6]).repeat(tokens, 1),
        "one expert": torch.tensor([5, 8]).repeat(tokens, 1),
        "some dropped": experts_TK.masked_fill(torch.rand(tokens, 2) < 0.4, 8),
        "all dropped": torch.full((tokens, 2), 8),
        "one sender": experts_TK.masked_fill(~is_first_T1, 8),
    }[kind]


KINDS = ("even", "skewed", "all on the last rank", "one expert", "some dropped", "all dropped", "one sender")


@pytest.mark.often("4-1-*", "2-2-*")
@pytest.mark.parametrize(
    ("expert", "expert_tensor", "kinds"),
    [(1, 1, KINDS[:1]), (2, 1, KINDS[:3]), (4, 1, KINDS), (2, 2, KINDS[4:5]), (1, 2, KINDS[4:5])],
)
def test_rows_that_are_pushed_give_what_one_rank_gives(expert: int, expert_tensor: int, kinds: tuple[str, ...]) -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=expert, expert_tensor=expert_tensor)
    layers = [_layer(placement, _adversarial(kind, 20)) for kind in kinds]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers))


@pytest.mark.often("1-1-*", "2-2-*")
@pytest.mark.parametrize(("expert", "expert_tensor", "kinds"), [(1, 1, KINDS[:1]), (4, 1, KINDS), (2, 2, KINDS[4:5])])
def test_rows_that_copy_engines_send_give_what_one_rank_gives(
    expert: int, expert_tensor: int, kinds: tuple[str, ...]
) -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=expert, expert_tensor=expert_tensor)
    layers = [_layer(placement, _adversarial(kind, 20)) for kind in kinds]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers, 0, 0, True))


def _ways_of_sending(buffers: SymmetricBuffers, layers: list[Layer]) -> list[list[Tensor]]:
    return [_all_layers(buffers, [layer], by_engines=number % 2 == 1)[0] for number, layer in enumerate(layers)]


def test_kernels_and_copy_engines_may_take_turns() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial(kind, 12)) for kind in KINDS[:4]]
    _compare(layers, run_ranks(_ways_of_sending, _sizes(placement, layers), layers, seed=3))


@pytest.mark.parametrize("top_k", [1, 8])
def test_a_token_may_choose_one_expert_or_all(top_k: int) -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=4)
    layers = [_layer(placement, _choices(12, top_k))]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers))


def test_bfloat16_rows_arrive_too() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial("some dropped", 12), torch.bfloat16)]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers), tolerance=0.06)


@pytest.mark.parametrize("chunks", [3, 7])
def test_chunks_are_read_while_others_are_still_written(chunks: int) -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    # 9 tokens a rank: three chunks of 3; or seven of 2, of which the fifth is not full and two are empty.
    layers = [_layer(placement, _adversarial("some dropped", 18))]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers, 0, chunks, seed=chunks))


def _in_other_chunks(buffers: SymmetricBuffers, layers: list[Layer]) -> list[list[Tensor]]:
    return [_all_layers(buffers, [layer], chunks=chunks)[0] for layer, chunks in zip(layers, (3, 1, 2), strict=True)]


def test_transfers_may_differ_in_their_number_of_chunks() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial(kind, 12)) for kind in KINDS[:3]]
    _compare(layers, run_ranks(_in_other_chunks, _sizes(placement, layers), layers))


def _first_matrix_aside(
    buffers: SymmetricBuffers, layers: list[Layer], log: dict[int, list[str]]
) -> list[list[Tensor]]:
    """As `_all_layers`, with a task in each layer's backward pass that is left aside; says in which order all came."""
    return [_left_aside(buffers, whole.of(buffers.peers.rank), log[buffers.peers.rank]) for whole in layers]


def _left_aside(buffers: SymmetricBuffers, layer: Layer, log: list[str]) -> list[Tensor]:
    def logged(name: str) -> None:
        own = getattr(buffers, name)

        def call(*arguments: Any) -> None:
            log.append(name)
            own(*arguments)

        setattr(buffers, name, call)

    transport = _in_large_tiles(transport_of(layer.placement, buffers))
    dispatcher, leaves = SymmetricDispatcher(layer.placement, transport, overlaps_backward=True), layer.leaves
    rows, metadata = dispatcher.dispatch(leaves[0], Routing(leaves[1], layer.experts_TK))
    deferred = rows.deferred
    assert deferred is not None
    rows.x_ND.register_hook(lambda gradient: deferred.add(lambda: log.append("task")))
    y_TD = _finish(dispatcher, leaves, rows, metadata)
    for name in ("_send", "hold", "read"):
        logged(name)
    found = _output_and_gradients(y_TD, layer, leaves)
    for name in ("_send", "hold", "read"):
        delattr(buffers, name)
    assert deferred.is_empty
    return found


def test_what_is_left_aside_is_done_while_gradients_of_rows_travel_by_copy_engines() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial(kind, 12)) for kind in ("skewed", "some dropped")]
    log: dict[int, list[str]] = {0: [], 1: []}
    _compare(layers, run_ranks(_first_matrix_aside, _sizes(placement, layers), layers, log, seed=1))
    of_gradients_out, of_gradients_home = ["_send", "read"], ["_send", "task", "hold", "read"]
    assert log[0] == log[1] == 2 * [*of_gradients_out, *of_gradients_home]


def test_how_many_programs_run_can_be_chosen() -> None:
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=2)
    assert run_ranks(_programs, sizes, 5) == [{5}] * 2


def _programs(buffers: SymmetricBuffers, programs: int) -> set[int]:
    transport = transport_of(ExpertPlacement(experts=EXPERTS, expert=2), buffers, programs)
    return {
        launch.programs
        for launch in (
            transport.push,
            transport.take,
            transport.take_all,
            transport.back,
            transport.sum,
            transport.sum_all,
        )
    }


@examples(8)
@given(
    ranks=st.sampled_from([2, 4]),
    tokens=st.integers(1, 5),
    per_rank=st.integers(1, 3),
    top_k=st.integers(1, 4),
    slots=st.integers(2, 3),
    seed=st.integers(0, 1000),
)
def test_layers_in_flight_never_mix_whoever_is_ahead(
    ranks: int, tokens: int, per_rank: int, top_k: int, slots: int, seed: int
) -> None:
    torch.manual_seed(seed)
    placement = ExpertPlacement(experts=per_rank * ranks, expert=ranks)
    top_k = min(top_k, placement.experts)
    layers = [_layer(placement, _choices(ranks * tokens, top_k, placement.experts)) for _ in range(2)]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers, slots), layers, seed=seed))


def test_ranks_that_use_one_slot_for_two_transfers_in_a_row_overwrite_it() -> None:
    placement = ExpertPlacement(experts=4, expert=2)
    layers = [_layer(placement, _choices(4, 2, 4)) for _ in range(3)]
    wrong = 0
    for seed in range(4):
        try:
            _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers, seed=seed, careless=True))
        except (AssertionError, IndexError):
            wrong += 1
    assert wrong, "the simulation sees no hazard where there is one"


def test_one_slot_is_refused_where_it_does_not_do() -> None:
    placement = ExpertPlacement(experts=4, expert=2)
    layers = [_layer(placement, _choices(4, 2, 4)) for _ in range(2)]
    with pytest.raises(AssertionError, match="two transfers in a row"):
        run_ranks(_all_layers, _sizes(placement, layers, 1), layers)


def test_rows_that_find_no_room_are_counted_and_the_others_are_right() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial("even", 64))]
    _compare(layers, run_ranks(_all_layers, _sizes(placement, layers), layers, 1.5))
    counts = run_ranks(
        _left_out, _sizes(placement, layers), _layer(placement, _adversarial("all on the last rank", 64))
    )
    # Of 128 rows the even share is 64; 1.2 times that is rounded up to 80, of which one is for dropped slots.
    assert counts == [0, 128 - 79]


def _left_out(buffers: SymmetricBuffers, whole: Layer) -> int:
    layer = whole.of(buffers.peers.rank)
    row_capacity = RowCapacity(layer.placement, 1.2)
    dispatcher = SymmetricDispatcher(layer.placement, transport_of(layer.placement, buffers), row_capacity)
    _mix(dispatcher, layer.leaves, layer.experts_TK)
    return int(row_capacity.left_out)


def test_a_rank_that_never_comes_is_noticed() -> None:
    placement = ExpertPlacement(experts=EXPERTS, expert=2)
    layers = [_layer(placement, _adversarial("even", 8))]
    with pytest.raises(StuckError):
        run_ranks(_only_the_first, _sizes(placement, layers), layers)


def _only_the_first(buffers: SymmetricBuffers, layers: list[Layer]) -> None:
    if buffers.peers.rank == 0:
        _all_layers(buffers, layers)


def test_the_benchmarks_whole_numbers_are_right_and_a_wrong_one_is_counted() -> None:
    shape = replace(SMALL, D=4)
    sizes = BufferSizes(tokens=6, top_k=shape.K, row_bytes=16, ranks=2)
    assert run_ranks(_wrong_in_whole_numbers, sizes) == [0, 0]
    layer = Exact.draw(shape, torch.tensor([[0, 1, 2, 3]]))
    assert int(layer.wrong(layer.x_TD, layer.direction_TD, layer.weights_TK)) > 0


def _wrong_in_whole_numbers(buffers: SymmetricBuffers) -> int:
    shape, axis = replace(SMALL, D=4), Axis(name="expert", ranks=(0, 1), rank=buffers.peers.rank)
    placement = ExpertPlacement(experts=shape.E, expert=2)
    dispatcher = SymmetricDispatcher(placement, _in_large_tiles(transport_of(placement, buffers)))
    drawn = [choices(kind, shape, 6, axis, torch.device("cpu"), seed) for seed, kind in enumerate(ROUTINGS)]
    return int(wrong_numbers(dispatcher, [Exact.draw(shape, experts_TK) for experts_TK in drawn]))
