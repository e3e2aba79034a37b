"""A matrix times its transpose equals the definition, and compiles for every chip."""

import pytest
import torch

from penstock.kernels.gram import LAUNCH, POINTERS, gram
from penstock.kernels.tuning import GemmLaunch
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

SMALL = GemmLaunch(block_rows=32, block_columns=32, block_depth=16, warps=4, descriptors=False)


@pytest.mark.parametrize(("shape", "launch"), [
    ((2, 72, 40), SMALL), ((3, 32, 50), SMALL), ((1, 33, 17), SMALL),
    ((2, 72, 40), GemmLaunch(block_rows=32, block_columns=32, block_depth=16, warps=4, pieces=2)),
])  # fmt: skip
def test_the_kernel_equals_the_definition(
    shape: tuple[int, int, int], launch: GemmLaunch, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kernels.gram._launch_for", lambda x: launch)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().to(device)
    plain = gram(x)
    assert_close(plain.float(), x.float() @ x.float().mT, tolerance=1e-3, by="norm")
    factor = gram(plain, addend_EFF=plain, scale=0.1, addend_scale=-4.7)
    exact = plain.float()
    assert_close(factor.float(), 0.1 * exact @ exact - 4.7 * exact, tolerance=1e-3, by="norm")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(11, 1408, 2048), (2, 2000, 72), (3, 130, 264)])
def test_large_matrices_equal_torchs_products_on_a_gpu(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    found = gram(x)
    assert_close(found.float(), x.float() @ x.float().mT, tolerance=4e-3, by="norm")
    again = gram(found, addend_EFF=found, scale=1e-3, addend_scale=-4.7)
    exact = found.float()
    assert_close(again.float(), 1e-3 * exact @ exact - 4.7 * exact, tolerance=4e-3, by="norm")
    assert torch.equal(found, found.mT) and torch.equal(again, again.mT)


@pytest.mark.often("sm_90")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = on_meta(11, 1408, 2048), on_meta(11, 1408, 1408)
    for launch in (LAUNCH, POINTERS) if target.startswith("sm_") else (POINTERS,):
        monkeypatch.setattr("penstock.kernels.gram._launch_for", lambda x, launch=launch: launch)
        found = compile_without_spills(target, lambda: (gram(x), gram(g, addend_EFF=g, scale=0.5, addend_scale=-1.0)))
        assert all(one.matrix_instructions for one in found)
