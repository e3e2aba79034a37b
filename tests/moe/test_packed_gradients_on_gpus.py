"""Two GPUs that push gradients in 8 bits, beside the same that push 16 bits and quantize them on arrival."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, Recipe, format_on, obstacle
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.tuning import target_of
from penstock.layout.grid import Grid
from penstock.parallel.axes import make_axes
from penstock.parallel.symmetric import allocate
from tests.closeness import decibels
from tests.moe.packed_gradients import RANKS, Case, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs"),
]


def _on_a_gpu(rank: int, folder: Path, case: Case) -> None:
    """On a rank: gradients pushed as they are, then in 8 bits, the second time beside what leaves the stream."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=device)
    buffers = allocate(case.sizes, make_axes(Grid(world=RANKS, expert=RANKS)).expert, device)
    cases = replace(case, in_sixteen=True), case, replace(case, leaves=True)
    found = [results_of(buffers, one, device) for one in cases]
    buffers.check()
    torch.save([{name: tensor.cpu() for name, tensor in one.items()} for one in found], folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bound", [0.0, 2.0], ids=["counted", "bounded"])
def test_rows_of_gradients_are_those_that_are_quantized_on_arrival(
    tmp_path: Path, recipe: Recipe, gradient: str, bound: float
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
    # Not the tests' own ranks, which are forks: CUDA does not survive one.
    start_processes(_on_a_gpu, (tmp_path, case), nprocs=RANKS, start_method="spawn")
    for rank in range(RANKS):
        plain, *packed = torch.load(tmp_path / f"{rank}.pt")
        for found in packed:
            down = found.pop("experts.down_eDF")
            assert decibels(down, plain["experts.down_eDF"]) > 40
            assert not [name for name, one in found.items() if not torch.equal(one, plain[name])]
