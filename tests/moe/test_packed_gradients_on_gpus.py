"""Two GPUs that push gradients in 8 bits, beside the same that push 16 bits and quantize them on arrival."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.float8.formats import format_on
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, Recipe, obstacle
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.tuning import target_of
from penstock.layout.grid import Grid
from penstock.parallel.axes import make_axes
from penstock.parallel.symmetric import allocate
from tests.distributed.pool import Pool
from tests.moe.packed_gradients import RANKS, Case, decibels, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs"),
]


def _on_a_gpu(case: Case) -> list[dict[str, Tensor]]:
    """On a rank: gradients pushed as they are, then in 8 bits, the second time beside what leaves the stream."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    buffers = allocate(case.sizes, make_axes(Grid(world=RANKS, expert=RANKS)).expert, device)
    cases = replace(case, in_sixteen=True), case, replace(case, leaves=True)
    found = [results_of(buffers, one, device) for one in cases]
    buffers.check()
    return [{name: tensor.cpu() for name, tensor in one.items()} for one in found]


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bound", [0.0, 2.0], ids=["counted", "bounded"])
def test_rows_of_gradients_are_those_that_are_quantized_on_arrival(
    ranks: Pool, recipe: Recipe, gradient: str, bound: float
) -> None:
    target = target_of(torch.device("cuda", 0))
    problem = obstacle(recipe, target)
    if problem is not None:
        pytest.skip(problem)
    rule = Float8Rule(
        dispatch=BLOCKWISE if recipe is BLOCKWISE_SQUARE else recipe,
        experts=recipe,
        forward=format_on("e4m3", target),
        gradient=format_on(gradient, target),
        operators=TRITON,
    )
    case = Case(rule=rule, tokens=3000, dtype=torch.bfloat16, bound=bound)
    for plain, *packed in ranks.run(RANKS, _on_a_gpu, case):
        for found in packed:
            down = found.pop("experts.down_eDF")
            assert decibels(down, plain["experts.down_eDF"]) > 40
            assert not [name for name, one in found.items() if not torch.equal(one, plain[name])]
