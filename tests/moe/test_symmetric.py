"""Rows that are pushed into other ranks' memory: simulated ranks against one rank that holds everything.

tests/moe/test_dispatch.py pushes every kind of routing with a limited number of rows; here the host counts them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.dispatch_cases import KINDS as ROUTINGS
from benchmarks.dispatch_cases import SMALL, Exact, choices, wrong_numbers
from penstock.layout.grid import ExpertPlacement
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, SymmetricTransport, transport_of
from penstock.parallel.axes import Axis
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.examples import examples
from tests.moe.mixture import Problem, buffer_sizes, compare, in_large_tiles, mix, problem, random_routing
from tests.moe.test_dispatch import adversarial
from tests.parallel.symmetric_ranks import StuckError, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")

Setting = tuple[int, bool]
"""Chunks of a transfer, 0 for the usual number; and whether copy engines send."""


def _problems(kinds: tuple[str, ...], tokens: int, expert: int = 2, expert_tensor: int = 1) -> list[Problem]:
    placement = ExpertPlacement(experts=8, expert=expert, expert_tensor=expert_tensor)
    return [problem(placement, adversarial(kind, tokens)) for kind in kinds]


def _transport(
    placement: ExpertPlacement, buffers: SymmetricBuffers, setting: Setting = (0, False)
) -> SymmetricTransport:
    return replace(in_large_tiles(transport_of(placement, buffers, by_engines=setting[1])), chunks=setting[0])


def _in_flight(
    buffers: SymmetricBuffers, layers: list[Problem], setting: Setting = (0, False), bound: float = 0
) -> list[list[Tensor]]:
    placement = layers[0].placement
    dispatcher = SymmetricDispatcher(
        placement, _transport(placement, buffers, setting), RowCapacity(placement, bound) if bound else None
    )
    return mix([dispatcher] * len(layers), layers, buffers.peers.rank)


def _one_after_the_other(
    buffers: SymmetricBuffers, layers: list[Problem], settings: tuple[Setting, ...]
) -> list[list[Tensor]]:
    return [_in_flight(buffers, [one], setting)[0] for one, setting in zip(layers, settings, strict=True)]


def _check(
    function: Any, layers: list[Problem], *args: Any, slots: int = 2, tolerance: float = 1e-4, **how: Any
) -> None:
    sizes = replace(buffer_sizes([layers], nodes=1), slots=slots)
    for layer, *got in zip(layers, *run_ranks(function, sizes, layers, *args, **how), strict=True):
        compare(layer, got, tolerance)


@pytest.mark.often("kernels-4-1-*", "kernels-2-2-*", "engines-1-1-*", "engines-2-2-*")
@pytest.mark.parametrize(
    ("expert", "expert_tensor", "kinds"),
    [(1, 1, ROUTINGS[:1]), (2, 1, ROUTINGS[:3]), (4, 1, ROUTINGS), (2, 2, ROUTINGS[4:5]), (1, 2, ROUTINGS[4:5])],
)
@pytest.mark.parametrize("by_engines", [False, True], ids=["kernels", "engines"])
def test_rows_that_are_pushed_give_what_one_rank_gives(
    by_engines: bool, expert: int, expert_tensor: int, kinds: tuple[str, ...]
) -> None:
    _check(_in_flight, _problems(kinds, 20, expert, expert_tensor), (0, by_engines))


@pytest.mark.parametrize("settings", [((0, False), (0, True)) * 2, ((3, False), (1, False), (2, False))])
def test_transfers_may_differ_in_their_senders_and_chunks(settings: tuple[Setting, ...]) -> None:
    _check(_one_after_the_other, _problems(ROUTINGS[: len(settings)], 12), settings, seed=3)


def test_bfloat16_rows_arrive_too() -> None:
    (layer,) = _problems(("some dropped",), 12)
    layer = replace(layer, x_TD=layer.x_TD.bfloat16(), direction_TD=layer.direction_TD.bfloat16())
    _check(_in_flight, [layer], tolerance=0.06)


@pytest.mark.parametrize("chunks", [3, 7])
def test_chunks_are_read_while_others_are_still_written(chunks: int) -> None:
    # 9 tokens a rank: three chunks of 3; or seven of 2, of which the fifth is not full and two are empty.
    _check(_in_flight, _problems(("some dropped",), 18), (chunks, False), seed=chunks)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_gather_each_others_numbers_again_and_again(seed: int) -> None:
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=3, numbers=5)
    for found in run_ranks(_gathers, sizes, seed=seed):
        for time, numbers_WN in enumerate(found):
            assert numbers_WN.tolist() == [[_number(time, rank, place) for place in range(5)] for rank in range(3)]


def _gathers(buffers: SymmetricBuffers) -> list[Tensor]:
    rank = buffers.peers.rank
    own = [torch.tensor([_number(time, rank, place) for place in range(5)]).int() for time in range(6)]
    return [buffers.gather(numbers_N) for numbers_N in own]


def _number(time: int, rank: int, place: int) -> int:
    return 100 * time + 10 * rank + place


def test_how_many_programs_run_can_be_chosen() -> None:
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=2)
    assert run_ranks(_programs, sizes, 5) == [{5}] * 2


def _programs(buffers: SymmetricBuffers, programs: int) -> set[int]:
    transport = transport_of(ExpertPlacement(experts=8, expert=2), buffers, programs)
    names = ("push", "take", "take_all", "back", "sum", "sum_all")
    return {getattr(transport, name).programs for name in names}


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
    routings = [random_routing(ranks * tokens, placement.experts, top_k, seed + layer) for layer in range(2)]
    _check(_in_flight, [problem(placement, one) for one in routings], slots=slots, seed=seed)


def test_ranks_that_use_one_slot_for_two_transfers_in_a_row_overwrite_it() -> None:
    wrong = 0
    for seed in range(4):
        try:
            _check(_in_flight, _problems(("even",) * 3, 4), seed=seed, careless=True)
        except (AssertionError, IndexError):
            wrong += 1
    assert wrong, "the simulation sees no hazard where there is one"


def test_one_slot_is_refused_where_it_does_not_do() -> None:
    with pytest.raises(AssertionError, match="two transfers in a row"):
        _check(_in_flight, _problems(("even", "even"), 4), slots=1)


def test_rows_that_find_no_room_are_counted_and_the_others_are_right() -> None:
    _check(_in_flight, _problems(("even",), 64), (0, False), 1.5)
    (layer,) = _problems(("all on the last rank",), 64)
    # Of 128 rows the even share is 64; 1.2 times that is rounded up to 80, of which one is for dropped slots.
    assert run_ranks(_left_out, buffer_sizes([[layer]], nodes=1), layer) == [0, 128 - 79]


def _left_out(buffers: SymmetricBuffers, layer: Problem) -> int:
    row_capacity = RowCapacity(layer.placement, 1.2)
    dispatcher = SymmetricDispatcher(layer.placement, _transport(layer.placement, buffers), row_capacity)
    mix([dispatcher], [layer], buffers.peers.rank)
    return int(row_capacity.left_out)


def test_a_rank_that_never_comes_is_noticed() -> None:
    layers = _problems(("even",), 8)
    with pytest.raises(StuckError):
        run_ranks(_only_the_first, buffer_sizes([layers], nodes=1), layers)


def _only_the_first(buffers: SymmetricBuffers, layers: list[Problem]) -> None:
    if buffers.peers.rank == 0:
        _in_flight(buffers, layers)


def test_the_benchmarks_whole_numbers_are_right_and_a_wrong_one_is_counted() -> None:
    shape = replace(SMALL, D=4)
    sizes = BufferSizes(tokens=6, top_k=shape.K, row_bytes=16, ranks=2)
    assert run_ranks(_wrong_in_whole_numbers, sizes) == [0, 0]
    layer = Exact.draw(shape, torch.tensor([[0, 1, 2, 3]]))
    assert int(layer.wrong(layer.x_TD, layer.direction_TD, layer.weights_TK)) > 0


def _wrong_in_whole_numbers(buffers: SymmetricBuffers) -> int:
    shape, axis = replace(SMALL, D=4), Axis(name="expert", ranks=(0, 1), rank=buffers.peers.rank)
    placement = ExpertPlacement(experts=shape.E, expert=2)
    drawn = [choices(kind, shape, 6, axis, torch.device("cpu"), seed) for seed, kind in enumerate(ROUTINGS)]
    dispatcher = SymmetricDispatcher(placement, _transport(placement, buffers))
    return int(wrong_numbers(dispatcher, [Exact.draw(shape, experts_TK) for experts_TK in drawn]))
