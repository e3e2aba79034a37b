"""The auxiliary losses' kernel against the definition, and what it becomes on every chip."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.operators import LinearLoss, reference_balance_loss
from penstock.kernels.topk import balance_loss, balance_loss_kernel
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_for


def _drawn(sequences: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    slots_BE = torch.randint(0, 2000, (sequences, experts))
    slots_BE[0, : experts // 2] = 0
    return tuple(one.to(device) for one in (torch.rand(sequences, experts), 9 * torch.rand(sequences), slots_BE))


def _compare(found: LinearLoss, wanted: LinearLoss) -> None:
    for mine, right in zip(found, wanted, strict=True):
        assert mine.shape == right.shape and mine.dtype == torch.float32
        assert_close(mine, right, tolerance=1e-5)


@pytest.mark.parametrize(("sequences", "experts"), [(1, 6), (4, 64), (3, 100)])
@pytest.mark.parametrize("together", [False, True], ids=["of each sequence", "of all"])
def test_losses_and_their_gradients_equal_the_definition(
    sequences: int, experts: int, together: bool, device: torch.device
) -> None:
    mass_BE, z_B, slots_BE = _drawn(sequences, experts, device)
    slots_BE = slots_BE.sum(0, keepdim=True) if together else slots_BE
    for factors in ((0.5, 0.25), (0.0, 0.25), (1e-4, 0.0)):
        given = mass_BE, z_B, slots_BE, *factors
        _compare(balance_loss(*given), reference_balance_loss(*given))


def test_the_definitions_gradients_are_its_gradients() -> None:
    mass_BE, z_B, slots_BE = (one.double() for one in _drawn(3, 8, torch.device("cpu")))

    def loss(mass_BE: Tensor, z_B: Tensor) -> Tensor:
        return reference_balance_loss(mass_BE, z_B, slots_BE, 0.5, 0.1).loss

    found = reference_balance_loss(mass_BE, z_B, slots_BE, 0.5, 0.1)
    known = torch.autograd.functional.jacobian(loss, (mass_BE, z_B))
    assert_close(known, (found.dmass_BE, found.dz_B))


def test_a_sequence_that_chose_nothing_has_no_loss(device: torch.device) -> None:
    mass_BE, z_B, slots_BE = torch.rand(2, 5, device=device), torch.zeros(2, device=device), torch.zeros(2, 5).long()
    found = balance_loss(mass_BE, z_B, slots_BE.to(device), 1.0, 1.0)
    assert found.loss.item() == 0 and not found.dmass_BE.any()


@pytest.mark.often("*sm_90*", "*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str) -> None:
    pointers = dict.fromkeys(("mass_ptr", "z_ptr", "loss_ptr", "dmass_ptr", "dz_ptr"), "*fp32:16")
    numbers = {"sequences": "i32", "slots_stride": "i32", "experts": "i32:16", "factor": "fp32", "z_factor": "fp32"}
    signature = {**pointers, "slots_ptr": "*i64:16", **numbers}
    compiled = compile_for(balance_loss_kernel, signature, {"BLOCK_E": 256}, TARGETS[target], num_warps=1)
    assert compiled.spills == 0, compiled.summary
