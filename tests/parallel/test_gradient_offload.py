"""Sums of gradients that pass through slots are the sums of all micro-batches."""

import pytest
import torch
from torch import Tensor

from penstock.parallel.offload import EMBEDDING, SLOTS, GradientOffload, layer_of_sums
from tests.closeness import assert_close, assert_equal

CPU = torch.device("cpu")


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Layers of unequal sizes, in no order."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in sorted(range(layers), key=lambda one: one % 3):
        found |= {f"blocks.{layer}.up": (3, 5 + layer), f"blocks.{layer}.norm": (7,)}
    return found


def _check(layers: int, device: torch.device) -> None:
    shapes = _shapes(layers)
    sums = GradientOffload(shapes, device)
    for step in range(3):
        expected = {name: torch.zeros(shape) for name, shape in shapes.items()}
        sums.start_step()
        for micro in range(3):
            for layer in reversed(range(layers)):
                sums.reached(layer)
                for name, shape in shapes.items():
                    if layer_of_sums(name) == layer:
                        more = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + 10 * micro))
                        sums.totals[name].add_(more.to(device))
                        expected[name] += more
            if micro < 2:
                sums.reached(EMBEDDING)  # the last pass is ended by `finish`
        norms = sums.norms()
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert_equal(sums.host, expected)
        assert_close({name: norms[name].cpu() for name in expected}, {name: e.norm() for name, e in expected.items()})


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_each_step_has_the_sums_of_its_micro_batches(layers: int) -> None:
    _check(layers, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_each_step_has_the_sums_of_its_micro_batches_on_a_gpu(layers: int) -> None:
    _check(layers, torch.device("cuda"))


def test_the_device_has_slots_of_the_largest_layer() -> None:
    sums = GradientOffload(_shapes(7), CPU)
    assert sums.device_bytes == SLOTS * 2 * 512  # each sum begins at a multiple of 512 bytes
    assert sums.host_bytes == 4 * sum(3 * (5 + layer) + 7 for layer in range(7))
    assert layer_of_sums("embed.weight") is None and layer_of_sums("blocks.12.norm.weight") == 12


def test_layers_that_no_pass_reached_have_no_norm() -> None:
    sums = GradientOffload(_shapes(4), CPU)
    sums.start_step()
    sums.reached(3)
    found: dict[str, Tensor] = sums.norms()
    assert found.keys() == {"blocks.3.up", "blocks.3.norm"}
