"""The parts of experts that ranks share are numbered as penstock/layout/experts.py says."""

import torch
from hypothesis import given
from torch import Tensor

from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.all_to_all import each_part
from penstock.moe.routing import Routing
from tests.layout.test_experts import placements


def _numbers(placement: ExpertPlacement) -> Tensor:
    """Those of every expert's parts, a row for each expert."""
    experts_TK = torch.arange(placement.experts)[:, None]
    return each_part(Routing(torch.ones(experts_TK.shape), experts_TK), placement).experts_TK


@given(placement=placements())
def test_virtual_experts_of_a_place_are_consecutive_and_in_the_order_of_its_experts(placement: ExpertPlacement) -> None:
    numbers = _numbers(placement)
    for place in range(placement.places):
        own = [numbers[expert, place % placement.expert_tensor].item() for expert in placement.experts_of(place)]
        assert own == list(range(place * placement.per_place, (place + 1) * placement.per_place))


def test_whole_experts_keep_their_numbers() -> None:
    assert _numbers(ExpertPlacement(experts=8, expert=4)).flatten().tolist() == list(range(8))


def test_the_example_of_the_file() -> None:
    assert _numbers(ExpertPlacement(experts=8, expert=2, expert_tensor=2))[5].tolist() == [9, 13]


@given(placement=placements())
def test_each_part_has_the_weight_of_its_slot_and_a_dropped_one_the_number_past_the_last(
    placement: ExpertPlacement,
) -> None:
    routing = Routing(torch.tensor([[0.25, 0.0]]), torch.tensor([[0, placement.experts]]))
    parts = each_part(routing, placement)
    assert parts.weights_TK.tolist() == [[0.25] * placement.expert_tensor + [0.0] * placement.expert_tensor]
    dropped = parts.experts_TK[0, placement.expert_tensor :]
    assert dropped.tolist() == [placement.virtual_experts] * placement.expert_tensor
