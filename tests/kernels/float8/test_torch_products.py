"""Torch's products of 8-bit numbers: that they are given scales as they ask for them, and say what they cannot do."""

import pytest
import torch

from penstock.kernels.float8 import reference, torch_products, triton_operators
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, MXFP8, ROWWISE, Recipe
from penstock.kernels.tuning import target_of
from penstock.plan.op_recorder import MemoryTracker, OpRecorder
from tests.closeness import assert_close
from tests.kernels.float8.draw_quantized import draw_rows, draw_weight, lay_out, without_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("depth", [128, 640, 1024])
@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_torch_is_given_scales_as_it_asks_for_them(recipe: Recipe, depth: int) -> None:
    # On the meta device torch checks shapes and strides of scales as it does on a GPU.
    a, b = without_memory(draw_rows(52, depth, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 384, depth))
    assert torch_products.shape_obstacle(a, b) is None
    assert torch_products.multiply(a, b, torch.bfloat16).shape == (52, 384)
    c = without_memory(draw_rows(64, depth, recipe, CPU))
    sums = torch.empty(52, 64, device="meta")
    assert torch_products.multiply(a, c, torch.bfloat16, accumulate_into=sums) is sums


def test_torch_takes_a_weights_gradient_whose_activation_has_squares() -> None:
    dy_RF, x_RD = torch.randn(384, 80), torch.randn(384, 256)
    dy = reference.quantize_rows(dy_RF, BLOCKWISE_SQUARE, E4M3, columns=BLOCKWISE_SQUARE.rows).columns
    x = reference.quantize_rows(x_RD, BLOCKWISE_SQUARE, E4M3, columns=BLOCKWISE_SQUARE.columns).columns
    assert dy is not None and x is not None
    a, b = (without_memory(lay_out(one)) for one in (dy, x))
    assert torch_products.shape_obstacle(a, b) is None
    sums = torch.empty(80, 256, device="meta")
    assert torch_products.multiply(a, b, torch.float32, accumulate_into=sums) is sums


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="PyTorch 2.11 has these products on GPUs alone",
)
def test_a_product_is_written_where_it_belongs() -> None:
    a, b = draw_rows(48, 256, ROWWISE, CPU), draw_rows(32, 256, ROWWISE, CPU)
    found = torch_products.multiply(a, b, torch.bfloat16)
    out = torch.zeros(48, 32, dtype=torch.bfloat16)
    assert torch_products.multiply(a, b, torch.bfloat16, out=out) is out
    apart = torch.zeros(48, 40, dtype=torch.bfloat16)[:, :32]
    assert torch_products.multiply(a, b, torch.bfloat16, out=apart) is apart
    assert torch.equal(out, found) and torch.equal(apart, found)


@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_a_rehearsed_product_with_a_place_is_one_product_and_no_copy(recipe: Recipe) -> None:
    a, b = without_memory(draw_rows(52, 512, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 384, 512))
    out, works = torch.empty(52, 384, dtype=torch.bfloat16, device="meta"), []
    for given in (None, out):
        tracker = MemoryTracker()
        tape = OpRecorder(tracker=tracker)
        with tape:
            torch_products.multiply(a, b, torch.bfloat16, out=given)
        works.append([one for one in tape.cut() if one.name == "_scaled_mm_v2" or one.name.startswith("copy")])
        passing = tracker.mark("product").passing
    assert [one.name for one in works[0]] == ["_scaled_mm_v2"] and works[1] == works[0]
    assert passing < out.nbytes, "no tensor of the result's size besides"


def test_torchs_products_say_what_they_cannot_do() -> None:
    for recipe in (BLOCKWISE, BLOCKWISE_SQUARE):
        assert torch_products.obstacle(recipe, "sm_90", "13.0") is None
    assert "12.9" in str(torch_products.obstacle(BLOCKWISE, "sm_90", "12.8"))
    for recipe, target in ((BLOCKWISE, "sm_100"), (BLOCKWISE, "gfx942"), (MXFP8, "sm_90")):
        assert recipe.name in str(torch_products.obstacle(recipe, target, "13.0"))
    w = draw_weight(BLOCKWISE, CPU, 128, 256)
    assert "4" in str(torch_products.shape_obstacle(draw_rows(5, 256, BLOCKWISE, CPU), w))
    wide = draw_weight(BLOCKWISE, CPU, 576, 256)
    assert "576" in str(torch_products.shape_obstacle(draw_rows(4, 256, BLOCKWISE, CPU), wide))
    assert "blocks" in str(torch_products.shape_obstacle(draw_rows(4, 256, ROWWISE, CPU), w))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", [BLOCKWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_torchs_products_equal_their_definition(recipe: Recipe, device: torch.device) -> None:
    problem = torch_products.obstacle(recipe, target_of(device), torch.version.cuda)
    if problem is not None:
        pytest.skip(problem)
    a = draw_rows(516, 896, recipe, device)
    for b in (draw_weight(recipe, device, 384, 896), draw_rows(272, 896, recipe, device)):
        got, expected = (one(a, b, torch.bfloat16) for one in (torch_products.multiply, reference.multiply))
        out = torch.full_like(got, torch.nan)
        assert torch_products.multiply(a, b, torch.bfloat16, out=out) is out and torch.equal(out, got)
        # A matrix unit that keeps 14 bits of a sum, and a result of 8 bits.
        assert_close(got, expected, by="norm", tolerance=5e-3)


def test_our_product_is_taken_where_torchs_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for module, name in ((triton_operators, "multiply"), (torch_products, "multiply")):
        monkeypatch.setattr(module, name, lambda *_, module=module, **__: taken.append(module.__name__))
    w = draw_weight(BLOCKWISE, CPU, 128, 256)
    for rows in (4, 5):
        triton_operators.multiply_with_torch(draw_rows(rows, 256, BLOCKWISE, CPU), w, torch.bfloat16)
    assert taken == [torch_products.__name__, triton_operators.__name__]
