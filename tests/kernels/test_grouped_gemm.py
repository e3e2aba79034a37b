"""The grouped GEMM against its reference, on counts of every kind, and compiled for every chip."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.base import devices
from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.grouped_gemm import (
    GATHER_LIMIT,
    _gather,
    grouped_gemm,
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable, tile_table
from penstock.kernels.tuning import GROUPED_GEMM, GemmLaunch, GemmProduct, in_triton, target_of
from tests.closeness import assert_close
from tests.examples import examples
from tests.kernels.ahead_of_time import CHIPS, TARGETS, Compiled, compile_launches, compile_without_spills, on_meta
from tests.kernels.parity import assert_near, assert_parity


def rows_of_blocks(table: TileTable, block_rows: int) -> list[tuple[int, range]]:
    """(expert, its rows) of every block, as a GEMM program reads them off the table."""
    size = BLOCK_SIZES.index(block_rows)
    owners = table.owners[size, : int(table.block_counts[size])].tolist()
    return [
        (expert, range(start + (block - first) * block_rows, min(start + (block - first + 1) * block_rows, end)))
        for block, (expert, start, end, first) in enumerate(owners)
    ]


@examples(20)
@given(counts=st.lists(st.integers(0, 600), min_size=1, max_size=9), tail=st.integers(0, 300))
def test_blocks_cover_the_rows_of_each_expert_once(device: torch.device, counts: list[int], tail: int) -> None:
    table = tile_table(torch.tensor(counts, dtype=torch.int32, device=device), sum(counts) + tail)
    for block_rows in BLOCK_SIZES:
        covered: dict[int, list[int]] = {expert: [] for expert in range(len(counts))}
        for expert, rows in rows_of_blocks(table, block_rows):
            assert 0 < len(rows) <= block_rows, f"a block of {expert} has {len(rows)} rows"
            covered[expert] += rows
        start = 0
        for expert, count in enumerate(counts):
            assert covered[expert] == list(range(start, start + count)), f"{expert=} {counts=} {block_rows=}"
            start += count


def test_starts_are_those_of_experts_and_tail_and_rows_past_the_buffer_are_ignored(device: torch.device) -> None:
    assert tile_table(torch.tensor([5, 0, 2], device=device), 9).starts_e.tolist() == [0, 5, 5, 7]
    aligned = tile_table(torch.tensor([5, 0, 130, 128], device=device), 300)
    assert aligned.aligned_e.tolist() == [0, 128, 128, 384, 512], "no block belongs to two experts"
    table = tile_table(torch.tensor([100, 100, 100], device=device), 130)
    assert table.starts_e.tolist() == [0, 100, 130, 130]
    assert rows_of_blocks(table, 64) == [(0, range(64)), (0, range(64, 100)), (1, range(100, 130))]


def test_misfits_are_refused(device: torch.device) -> None:
    with pytest.raises(KernelError, match="one count for each expert"):
        tile_table(torch.ones(2, 2, dtype=torch.int32, device=device), 4)
    with pytest.raises(KernelError, match="float32"):
        tile_table(torch.ones(2, device=device), 4)
    x_RD, w_eFD, dy_RF, counts_e = draw(COUNTS["balanced"], device, torch.float32)
    for bias, weights, says in (((2, 16), len(x_RD), "bias_eF does not fit"), ((3, 72), 4, "weights_R does not fit")):
        given = {"bias_eF": torch.zeros(bias, device=device), "weights_R": torch.zeros(weights, device=device)}
        with pytest.raises(KernelError, match=says):
            grouped_gemm_forward(x_RD, w_eFD, counts_e, **given)
    with pytest.raises(KernelError, match="accumulate_into does not fit"):
        grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, accumulate_into=torch.zeros_like(w_eFD).half())


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_table_kernel_compiles_without_spills(target: str) -> None:
    counts_e = on_meta(255, dtype=torch.int32)
    compile_without_spills(target, lambda: tile_table(counts_e, 40_001))


COUNTS = {
    "balanced": [64, 64, 64],
    "skewed": [5, 170, 1, 40],
    "empty experts": [0, 70, 0, 33, 0],
    "one hot expert": [0, 0, 150],
    "one row": [0, 1, 0],
    "no rows": [0, 0],
}
DEPTH, WIDTH, TAIL = 48, 72, 7  # neither fills blocks of 32 and 64

POINTERS = GemmLaunch(block_rows=64, block_columns=64, block_depth=32, stages=2, group=2, descriptors=False)
DESCRIPTORS = replace(POINTERS, block_columns=32, pieces=4, descriptors=True)
BOTH_WAYS = pytest.mark.parametrize("launch", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])


def draw(counts: list[int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows with a tail of NaN, matrices, gradient of the output with a tail of NaN, counts."""
    rows = sum(counts) + TAIL
    shapes = (rows, DEPTH), (len(counts), WIDTH, DEPTH), (rows, WIDTH)
    x_RD, w_eFD, dy_RF = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    x_RD[sum(counts) :] = dy_RF[sum(counts) :] = float("nan")
    return x_RD, w_eFD, dy_RF, torch.tensor(counts, dtype=torch.int32, device=device)


def true_weight_gradient(dy_RF: Tensor, x_RD: Tensor, counts_e: Tensor) -> Tensor:
    pieces = zip(dy_RF.float().split(rows := [*counts_e.tolist(), TAIL]), x_RD.float().split(rows), strict=True)
    return torch.stack([dy.T @ x for dy, x in pieces][:-1])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Of operands. Triton's interpreter multiplies the bits of a bfloat16 as if they were an integer."""
    if request.param == torch.bfloat16 and device.type == "cpu":
        pytest.skip("no bfloat16 products in Triton's interpreter")
    return request.param


@pytest.mark.often(
    "*-skewed-*",
    "*-empty experts-False",
    "float32-no rows-True",
    "bfloat16-one hot expert-True",
    "bfloat16-one row-False",
)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_output_and_gradients_equal_the_reference(
    counts: list[int], gathered: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x_RD, w_eFD, _, counts_e = draw(counts, device, dtype)
    rows = len(x_RD)
    x_RD = torch.randn(40 if gathered else rows, DEPTH, device=device, dtype=dtype)
    index_R = torch.randint(40, (rows,), device=device) if gathered else None
    assert_parity(grouped_gemm, reference.grouped_gemm, [x_RD, w_eFD, counts_e, index_R])


@pytest.mark.often("skewed-pointers", "empty experts-descriptors", "no rows-pointers")
@BOTH_WAYS
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_product_ignores_a_tail_of_nan(counts: list[int], launch: GemmLaunch, device: torch.device) -> None:
    x_RD, w_eFD, dy_RF, counts_e = draw(counts, device, torch.float32)
    y_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, launch=launch)
    assert_near(y_RF, reference.grouped_gemm(x_RD, w_eFD, counts_e), "forward")
    dx_RD = grouped_gemm_input_gradient(dy_RF, w_eFD, counts_e, launch=launch)
    assert_near(dx_RD, reference.grouped_gemm(dy_RF, w_eFD.transpose(1, 2), counts_e), "input gradient")
    dw_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, launch=launch)
    assert_near(dw_eFD, true_weight_gradient(dy_RF, x_RD, counts_e), "weight gradient")
    assert not y_RF[sum(counts) :].any() and not dx_RD[sum(counts) :].any(), "rows of the tail must be zero"


@pytest.mark.often("index_dtype0-fused-descriptors", "index_dtype1-fused-pointers", "index_dtype1-copied-pointers")
@BOTH_WAYS
@pytest.mark.parametrize("copy", [False, True], ids=["fused", "copied"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gathered_rows_are_multiplied_and_no_others(
    index_dtype: torch.dtype, copy: bool, launch: GemmLaunch, device: torch.device
) -> None:
    launch = replace(launch, copy_gathered=copy)
    _, w_eFD, dy_RF, counts_e = draw([5, 170, 0, 40], device, torch.float32)
    source_RD = torch.randn(30, DEPTH, device=device)
    source_RD[0] = torch.nan  # symmetric dispatch leaves rows without a place here as they are
    index_R = torch.randint(1, 30, (len(dy_RF),), device=device, dtype=index_dtype)
    index_R[int(counts_e.sum()) :] = 0
    y_RF = grouped_gemm_forward(source_RD, w_eFD, counts_e, index_R, launch=launch)
    assert_near(y_RF, reference.grouped_gemm(source_RD, w_eFD, counts_e, index_R), "forward")
    dw_eFD = grouped_gemm_weight_gradient(dy_RF, source_RD, counts_e, index_R, launch=launch)
    assert_near(dw_eFD, true_weight_gradient(dy_RF, source_RD[index_R], counts_e), "weight gradient")


@pytest.mark.parametrize("gathered", [False, True])
def test_a_weight_gradient_is_added_to_a_float32_buffer(
    gathered: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x_RD, w_eFD, dy_RF, counts_e = draw(COUNTS["empty experts"], device, dtype)
    index_R = torch.randint(int(counts_e.sum()), (len(dy_RF),), device=device) if gathered else None
    main_eFD = torch.randn(w_eFD.shape, device=device)
    gathered_RD = x_RD if index_R is None else x_RD[index_R]
    expected_eFD = main_eFD + true_weight_gradient(dy_RF, gathered_RD, counts_e)
    returned_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, index_R, accumulate_into=main_eFD)
    assert returned_eFD is main_eFD, "the buffer itself must come back"
    assert_close(main_eFD, expected_eFD, by="norm", tolerance=1e-5, what="products summed in float32")


@pytest.mark.often("skewed-*", "empty experts-True-pointers", "no rows-False-descriptors", "one row-True-descriptors")
@BOTH_WAYS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_bias_is_added_to_the_rows_of_its_expert(
    counts: list[int], weighted: bool, launch: GemmLaunch, device: torch.device
) -> None:
    x_RD, w_eFD, _, counts_e = draw(counts, device, torch.float32)
    bias_eF = torch.randn(len(counts), WIDTH, device=device)
    weights_R = torch.rand(len(x_RD), device=device) if weighted else None
    y_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, bias_eF=bias_eF, weights_R=weights_R, launch=launch)
    plain_RF = reference.grouped_gemm(x_RD, w_eFD, counts_e)
    assert_near(y_RF, reference.add_bias(plain_RF, bias_eF, counts_e, weights_R), "product and bias")
    assert not y_RF[sum(counts) :].any(), "rows of the tail have no expert, so no bias"


def test_one_tile_table_serves_all_products(device: torch.device) -> None:
    x_RD, w_eFD, dy_RF, counts_e = draw(COUNTS["skewed"], device, torch.float32)
    tiles = tile_table(counts_e, len(x_RD))
    for block_rows in (64, 128):
        launch = replace(POINTERS, block_rows=block_rows)
        y_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, tiles=tiles, launch=launch)
        assert_near(y_RF, reference.grouped_gemm(x_RD, w_eFD, counts_e), f"forward, blocks of {block_rows}")
    dw_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, tiles=tiles)
    assert_near(dw_eFD, true_weight_gradient(dy_RF, x_RD, counts_e), "weight gradient")


@pytest.mark.parametrize("launch", [POINTERS, DESCRIPTORS, replace(POINTERS, copy_gathered=True)])
def test_rows_are_copied_where_their_source_is_too_large_for_32_bits(launch: GemmLaunch) -> None:
    index_R = torch.empty(2, dtype=torch.int64, device="meta")
    small_ND = torch.empty(GATHER_LIMIT // 2048 - 1, 2048, device="meta")
    large_ND = torch.empty(GATHER_LIMIT // 2048, 2048, device="meta")
    tiles = tile_table(torch.empty(1, dtype=torch.int32, device="meta"), 2)
    assert (_gather(small_ND, index_R, tiles, launch)[1] is None) == launch.copy_gathered
    copy_RD, no_index = _gather(large_ND, index_R, tiles, launch)
    assert copy_RD.shape == (2, 2048) and no_index is None


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_memory")
@pytest.mark.parametrize("spare", [1, 0], ids=["just below", "at the limit"])
def test_the_last_rows_of_a_large_source_are_gathered(spare: int, device: torch.device) -> None:
    depth, width, rows = 2048, 256, 300
    source_ND = torch.zeros(GATHER_LIMIT // depth - spare, depth, device=device, dtype=torch.bfloat16)
    source_ND[-rows:].normal_()  # all other rows are zero
    w_eFD = torch.randn(1, width, depth, device=device, dtype=torch.bfloat16)
    index_R = torch.randperm(rows, device=device) + len(source_ND) - rows  # the last rows, in another order
    counts_e = torch.tensor([rows], device=device)
    expected_RF = grouped_gemm_forward(source_ND[index_R], w_eFD, counts_e)
    assert expected_RF.any(), "the rows must hold something"
    assert torch.equal(grouped_gemm_forward(source_ND, w_eFD, counts_e, index_R), expected_RF)


def test_an_empty_buffer_has_an_empty_output_and_zero_gradients(device: torch.device) -> None:
    x_RD = torch.randn(0, DEPTH, device=device, requires_grad=True)
    w_eFD = torch.randn(2, WIDTH, DEPTH, device=device, requires_grad=True)
    y_RF = grouped_gemm(x_RD, w_eFD, torch.zeros(2, dtype=torch.int32, device=device))
    y_RF.sum().backward()
    assert y_RF.shape == (0, WIDTH) and x_RD.grad is not None and w_eFD.grad is not None
    assert not w_eFD.grad.any(), "no rows, no gradient"


@pytest.mark.gpu
@pytest.mark.parametrize("product", ["rows", "weights"])
def test_every_launch_of_this_chip_computes_the_same(product: str, device: torch.device) -> None:
    counts = [700, 0, 3, 1025, 256]
    rows, width, depth = sum(counts) + TAIL, 712, 328
    counts_e = torch.tensor(counts, device=device)
    x_RD = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
    w_eFD = torch.randn(len(counts), width, depth, device=device, dtype=torch.bfloat16)
    dy_RF = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    y_RF = reference.grouped_gemm(x_RD.double(), w_eFD.double(), counts_e)
    dx_RD = reference.grouped_gemm(dy_RF.double(), w_eFD.double().transpose(1, 2), counts_e)
    dw_eFD = true_weight_gradient(dy_RF.double(), x_RD.double(), counts_e)
    identity_R = torch.arange(rows, device=device)
    table = GROUPED_GEMM[target_of(device)]
    named = [launches for name, launches in table.items() if name.startswith("weight") == (product == "weights")]
    for launch in {launch for launches in named for _, launch in launches}:
        for index_R in (None, identity_R):
            if product == "rows":
                got_RF = grouped_gemm_forward(x_RD, w_eFD, counts_e, index_R, launch=launch)
                assert_near(got_RF, y_RF, f"forward {launch}")
                assert_near(grouped_gemm_input_gradient(dy_RF, w_eFD, counts_e, launch=launch), dx_RD, f"{launch}")
            else:
                got_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, index_R, launch=launch)
                assert_near(got_eFD, dw_eFD, f"weight gradient {launch}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w_eFD": torch.zeros(2, 16, 24)}, "x_RD does not fit"),
        ({"w_eFD": torch.zeros(2, 16, 32, dtype=torch.bfloat16)}, "w_eFD does not fit"),
        ({"w_eFD": torch.zeros(2, 32, 16).transpose(1, 2)}, "w_eFD cannot be copied in blocks"),
        ({"counts_e": torch.zeros(3, dtype=torch.int32)}, "counts_e"),
        ({"index_R": torch.zeros(4)}, "index_R"),
        ({"x_RD": torch.zeros(4, 32, dtype=torch.int32)}, "bfloat16, float16 or float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(change: dict[str, Tensor], says: str) -> None:
    counts_e = torch.zeros(2, dtype=torch.int32)
    operands = {"x_RD": torch.zeros(4, 32), "w_eFD": torch.zeros(2, 16, 32), "counts_e": counts_e}
    with pytest.raises(KernelError, match=says):
        grouped_gemm_forward(**(operands | change))


def depths(product: GemmProduct, launch: GemmLaunch) -> tuple[bool, ...]:
    """Whether the block's depth divides the matrix's: both kernels exist where rows are loaded by pointers."""
    by_pointers = product == "forward_gathered" or not launch.descriptors
    return (True, False) if by_pointers and not product.startswith("weight") else (True,)


CHOICES = [
    pytest.param(target, product, launch, whole, id=f"{target}-{product}-{launch.block_columns}-{whole}")
    for target, products in GROUPED_GEMM.items()
    if target in CHIPS
    for product, launches in products.items()
    for launch in {in_triton(launch, product, matrix): None for _, launch in launches for matrix in (1 << 20, 1 << 24)}
    for whole in depths(product, launch)
]
FORWARDS = [
    pytest.param(
        *choice.values, id=choice.id, marks=[] if choice.values[0] in ("sm_90", "gfx942") else pytest.mark.slow
    )
    for choice in CHOICES
    # Of two forms the one that masks the depth holds more; the newer chip of each maker is left to the slow tests.
    if choice.values[1].startswith("forward") and choice.values[3] == depths(*choice.values[1:3])[-1]
]


@pytest.mark.often(
    "sm_90-forward-256-True", "sm_90-weight_gradient_accumulated-256-True", "gfx942-forward_gathered-256-False"
)
@pytest.mark.parametrize(("target", "product", "launch", "whole_depth"), CHOICES)
def test_no_launch_of_a_table_spills_or_lacks_matrix_instructions(
    target: str, product: GemmProduct, launch: GemmLaunch, whole_depth: bool
) -> None:
    assert_fits(compile_product(product, launch, target, whole_depth), launch, target)


@pytest.mark.often("sm_90-forward_gathered-128-False")
@pytest.mark.parametrize(("target", "product", "launch", "whole_depth"), FORWARDS)
def test_a_weighted_bias_makes_no_launch_of_a_table_spill(
    target: str, product: GemmProduct, launch: GemmLaunch, whole_depth: bool
) -> None:
    assert_fits(compile_product(product, launch, target, whole_depth, has_bias=True), launch, target)


def test_chips_of_one_kind_share_their_launches() -> None:
    assert GROUPED_GEMM["sm_103"] == GROUPED_GEMM["sm_100"]
    assert {chip.target for chip in devices.chips()} == GROUPED_GEMM.keys(), "a chip without launches would use a loop"


def assert_fits(compiled: Compiled, launch: GemmLaunch, target: str) -> None:
    assert compiled.matrix_instructions > 0, "the product must be made by matrix instructions"
    assert compiled.spills == 0, f"{launch} spills: {compiled.summary}"
    # NVIDIA's multiprocessors keep 1 KiB more for each program, beyond what one program can have.
    shared = (compiled.shared_bytes + 1024) * launch.residency
    assert shared <= CHIPS[target].shared_bytes + 1024, f"{launch} needs {shared} bytes of shared memory"


def test_gathered_rows_are_copied_by_16_bytes_while_earlier_ones_are_multiplied() -> None:
    (_, launch), *_ = GROUPED_GEMM["sm_90"]["forward_gathered"]
    compiled = compile_product("forward_gathered", launch, "sm_90")
    copies = re.findall(r"cp\.async\.cg\.shared\.global.* 0x10,", compiled.asm)
    each_stage = launch.block_rows * launch.block_depth * 2 // 16 // (32 * launch.warps)  # of one thread, 16 bytes each
    assert len(copies) == each_stage * launch.stages, f"{len(copies)} copies of 16 bytes in {launch.stages} stages"
    in_flight = [int(number) for number in re.findall(r"ttg\.async_wait .*num = (\d+)", compiled.ttgir)]
    assert in_flight[0] == launch.stages - 2, f"the loop leaves {in_flight[0]} steps' copies in flight"


def compile_product(
    product: GemmProduct,
    launch: GemmLaunch,
    target: str,
    whole_depth: bool = True,
    *,
    has_bias: bool = False,
    is_kept: bool = False,
) -> Compiled:
    """With `is_kept` the forward product is written among rows of other layers."""
    # 63 and 8001 are no multiples of 16, for which Triton would make a special kernel.
    experts, rows, width, depth = 63, 8001, 1408, 2048 if whole_depth else 2064
    counts_e, is_sum = on_meta(experts, dtype=torch.int32), product.endswith("_accumulated")
    # A sum is gathered or not with the same launch; gathered it needs more registers.
    is_gathered = not launch.copy_gathered and (is_sum or product.endswith("_gathered"))
    index_R = on_meta(rows, dtype=torch.int64) if is_gathered else None
    options = {"tiles": tile_table(counts_e, rows), "launch": launch}
    if product.startswith("weight"):
        options["accumulate_into"] = on_meta(experts, width, depth, dtype=torch.float32) if is_sum else None
        operands = on_meta(rows, width), on_meta(rows, depth), counts_e, index_R
        multiply = partial(grouped_gemm_weight_gradient, *operands, **options)
    elif product == "input_gradient":
        multiply = partial(
            grouped_gemm_input_gradient, on_meta(rows, depth), on_meta(experts, depth, width), counts_e, **options
        )
    else:
        bias = on_meta(experts, width), on_meta(rows, dtype=torch.float32)
        options |= dict(zip(("bias_eF", "weights_R"), bias, strict=True)) if has_bias else {}
        place = SavedRows(on_meta(99_999, width), on_meta(1, dtype=torch.int64), rows)
        options |= {"keep": place} if is_kept else {}
        operands = on_meta(rows, depth), on_meta(experts, width, depth), counts_e, index_R
        multiply = partial(grouped_gemm_forward, *operands, **options)
    (compiled,) = compile_launches(target, multiply)
    return compiled
