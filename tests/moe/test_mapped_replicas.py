"""Replicas in mapped memory, of ranks that are simulated in Triton's interpreter: in whole numbers, so right is equal.

The memory of slots and gradients starts as NaN, so a slot that is read without being written shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.kernels import replica_kernels
from penstock.kernels.backends import TRITON
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, Recipe
from penstock.kernels.float8.triton_operators import TRITON as TRITON_IN_8_BITS
from penstock.kernels.replica_plan import ReplicaRule, plan_replicas
from penstock.layout.grid import ExpertPlacement
from penstock.moe.dispatch.balanced import BalancedDispatcher, ReplicaMeter
from penstock.moe.dispatch.contract import LocalDispatcher, wire_format_of
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.parallel import replicas
from penstock.parallel.replicas import MappedSlots, ReplicaMemory, ReplicaSizes
from penstock.parallel.symmetric import BufferSizes, Channel, SymmetricBuffers
from tests.closeness import assert_equal
from tests.moe.mixture import in_large_tiles, parts_of
from tests.moe.test_balanced import D, F, K, Whole, mix, mixed, rule_of, workload
from tests.parallel.symmetric_ranks import SimulatedBuffers, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")

Layer = tuple[Whole, ReplicaRule]

PAIR = ReplicaRule(experts=4, groups=2, slots=1)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert is one tile here: of 264 programs all but the first would be interpreted to find no work."""
    for module in (replica_kernels, replicas):
        monkeypatch.setattr(module, "PUSH_PROGRAMS", 2)
        monkeypatch.setattr(module, "PULL_PROGRAMS", 3)


class LateSlots(MappedSlots):
    """Slots of which an early push runs as late as on a stream of its own: after rows have travelled."""

    def _push(self, own: Sequence[Tensor], *, between_barriers: bool = False) -> None:
        assert isinstance(self.memory.buffers, SimulatedBuffers)
        if between_barriers:
            super()._push(own, between_barriers=True)
        else:
            self.memory.buffers.aside = partial(super()._push, own)


def _shapes(expert_tensor: int) -> tuple[tuple[int, ...], ...]:
    width = F // expert_tensor
    return (2 * width, D), (D, width), (2 * width,), (D,)


def _solve(
    buffers: SimulatedBuffers, layers: Sequence[Layer], expert_tensor: int, sums: bool, early: bool, recompute: bool
) -> list[list[Tensor]]:
    """Results of a rank, whose layers share one memory: forward passes, then backward passes in the other order."""
    rank = buffers.peers.rank
    sizes = ReplicaSizes(layers[0][1], _shapes(expert_tensor), itemsize=4)
    memory = ReplicaMemory(buffers, sizes, torch.float32)
    for place in range(len(sizes.shapes)):
        memory.weights(place).fill_(torch.nan)
        memory.gradients(place).fill_(torch.nan)
    backward = []
    for whole, rule in layers:
        homes = ExpertPlacement(experts=whole.experts, expert=rule.groups, expert_tensor=expert_tensor)
        physical = replace(homes, experts=rule.groups * rule.places)
        transport = in_large_tiles(transport_of(physical, buffers))
        room, wire_format = RowCapacity(physical, 1.0), wire_format_of(whole.float8)
        inner = SymmetricDispatcher(physical, transport, room, wire_format=wire_format)
        slots_of, meter = partial(LateSlots if recompute else MappedSlots, memory), ReplicaMeter()
        own = parts_of(whole.parameters, rank, homes)
        dispatcher = BalancedDispatcher(rule, rank, inner, TRITON, buffers.gather, slots_of, meter)
        if early:
            dispatcher = replace(dispatcher, resident_weights=partial(tuple, own))
        backward.append(mixed(dispatcher, whole.of(rank), own, sums=sums, recompute=recompute))
        assert not inner.row_capacity.left_out, "a plan with slots enough keeps its bound"
    results = [one() for one in reversed(backward)][::-1]
    assert buffers.unawaited(Channel.REPLICAS) == buffers.unawaited(Channel.GRADIENTS) == 0
    return results


def _check(
    layers: Sequence[Layer],
    ranks: int,
    expert_tensor: int = 1,
    *,
    sums: bool = False,
    early: bool = True,
    recompute: bool = False,
    seed: int = 0,
) -> None:
    tokens = max(max(whole.sizes) for whole, _ in layers)
    replicas = ReplicaSizes(layers[0][1], _shapes(expert_tensor), itemsize=4)
    sizes = BufferSizes(
        tokens=tokens,
        top_k=K * expert_tensor,
        row_bytes=4 * D,
        ranks=ranks,
        numbers=layers[0][0].experts,
        replica_bytes=replicas.total_bytes,
    )
    by_rank = run_ranks(_solve, sizes, layers, expert_tensor, sums, early, recompute, seed=seed)
    for number, (whole, rule) in enumerate(layers):
        local = LocalDispatcher(whole.experts, TRITON, wire_format_of(whole.float8))
        y_TD, dx_TD, dweights_TK, *gradients = mix(local, whole, whole.parameters, sums=sums)
        found = [results[number] for results in by_rank]
        for index, expected in enumerate((y_TD, dx_TD, dweights_TK)):
            assert_equal(torch.cat([one[index] for one in found]), expected, what=f"layer {number}, result {index}")
        homes = ExpertPlacement(experts=whole.experts, expert=rule.groups, expert_tensor=expert_tensor)
        for rank, one in enumerate(found):
            own = parts_of(gradients, rank, homes)
            assert_equal(one[3:], own, what=f"layer {number}, parameters of rank {rank}")


def _layers(names: Sequence[str], ranks: int, expert_tensor: int = 1) -> list[Layer]:
    groups = ranks // expert_tensor
    wholes = [workload(name, groups, 8) for name in names]
    wholes = [replace(one, sizes=(len(one.ids_TK) // ranks,) * ranks) for one in wholes]
    wholes = [replace(one, seed=number) for number, one in enumerate(wholes)]  # no layer has another one's weights
    return [(whole, rule_of(whole, groups)) for whole in wholes]


@pytest.mark.often("False-2-1-*", "True-4-1-*")
@pytest.mark.parametrize(
    ("ranks", "expert_tensor", "names"), [(2, 1, ("W2",)), (4, 1, ("W2", "W0", "W5")), (4, 2, ("W8",))]
)
@pytest.mark.parametrize("sums", [False, True])
def test_layers_that_share_slots_give_what_one_process_gives(
    sums: bool, ranks: int, expert_tensor: int, names: tuple[str, ...]
) -> None:
    _check(_layers(names, ranks, expert_tensor), ranks, expert_tensor, sums=sums)


@pytest.mark.slow
def test_a_fetch_may_begin_when_the_experts_run() -> None:
    _check(_layers(("W2", "W0", "W5"), 4), 4, sums=True, early=False)


def test_a_layer_that_is_recomputed_fetches_again() -> None:
    """Backward begins a fetch, recomputation makes one of its own, and the experts' backward pass makes a third."""
    _check(_layers(("W2", "W1"), 2), 2, sums=True, recompute=True)


def test_gradients_may_come_home_until_the_layers_backward_pass_ends() -> None:
    sizes = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=2)
    assert run_ranks(_inside, sizes) == [[True], [True]]


def _inside(buffers: SymmetricBuffers) -> list[bool]:
    memory, found = ReplicaMemory(buffers, ReplicaSizes(PAIR, _shapes(1), itemsize=4), torch.float32), []

    def layer(x_TD: Tensor) -> Tensor:
        h_TD = 2 * x_TD
        if h_TD.requires_grad:
            h_TD.register_hook(lambda _: found.append(memory.in_layer))
        return 3 * h_TD

    x_TD = torch.ones(2, 3, requires_grad=True)
    memory.backward_of_layer(layer, x_TD).sum().backward()
    assert not memory.in_layer
    assert x_TD.grad is not None
    assert_equal(x_TD.grad, torch.full((2, 3), 6.0))
    assert not memory.backward_of_layer(layer, x_TD.detach()).requires_grad
    return found


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_wait_for_all_layers_go_home_one_layer_after_another(seed: int) -> None:
    """A pipeline's weight gradients follow each other without transfers; the second layer has no replicas."""
    sizes = ReplicaSizes(PAIR, _shapes(1), itemsize=4)
    memory = BufferSizes(tokens=1, top_k=1, row_bytes=16, ranks=2, replica_bytes=sizes.total_bytes)
    assert run_ranks(_one_after_another, memory, seed=seed) == [[2.0, 0.0, 6.0], [0.0, 0.0, 0.0]]


def _one_after_another(buffers: SymmetricBuffers) -> list[float]:
    """What comes home to expert 0 of three layers, whose replicas are on rank 1."""
    rank, memory = buffers.peers.rank, ReplicaMemory(buffers, ReplicaSizes(PAIR, _shapes(1), itemsize=4), torch.float32)
    found = []
    for layer, rows in enumerate((8, 2, 8)):
        plan = plan_replicas(torch.tensor([[rows, 2, 2, 2]] * 2, dtype=torch.int32), PAIR, rank)
        total_e = torch.zeros(2, *_shapes(1)[0])
        slots = MappedSlots(memory, plan)
        sums = slots.gradient_sums(0, total_e)
        sums += 2.0 * (layer + 1)
        slots.give_back(0, [sums], [total_e])
        found.append(float(total_e[0].max()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [None, BLOCKWISE], ids=["rows in 16 bits", "rows in 8 bits"])
@pytest.mark.parametrize("sums", [False, True])
def test_replicas_in_8_bits_are_exact(sums: bool, dispatch: Recipe | None) -> None:
    float8 = Float8Rule(experts=BLOCKWISE, dispatch=dispatch, operators=TRITON_IN_8_BITS)
    _check([(replace(whole, float8=float8), rule) for whole, rule in _layers(("W2", "W8"), 4)], 4, sums=sums)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_any_order_of_the_ranks_is_right(seed: int) -> None:
    _check(_layers(("W1", "W6"), 4), 4, sums=True, seed=seed)
