"""Matrix products of 8-bit numbers in Triton, dense and grouped by expert; counts stay on the device.

Every product is a @ b^T of operands whose contracted dim is the last one:

    multiply           M x K, N x K -> M x N      a dense product, or the gradient of a dense weight added to its sum
    multiply_groups    R x K, e x N x K -> R x N  experts' rows, gathered while they are loaded if there is an index
    multiply_columns   M x R, N x R -> e x M x N  gradients of experts' weights, each over its expert's columns

They equal those of the same name in `reference` but for the order of float32 sums. Recipes are recognized by the depth
of their blocks. A launch may name the Hopper kernels for the recipe blockwise (`penstock.kernels.gluon`).
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows, gradient_in_parts
from penstock.kernels.float8.launches import Product, ProductLaunch, dense_launch, in_triton, product_launch
from penstock.kernels.float8.product_kernels import float8_matrices_kernel, float8_rows_kernel
from penstock.kernels.float8.quantized import Quantized, scales_in_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH
from penstock.kernels.gluon import support
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, ragged_blocks_of
from penstock.kernels.grouped_gemm import GATHER_LIMIT, check_groups
from penstock.kernels.language import TensorDescriptor, create_ragged_descriptor
from penstock.kernels.launching import start_kernel
from penstock.kernels.permute import gather_columns, gather_rows
from penstock.kernels.replica_slots import SlottedWeight, weight_parts
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable, tile_table
from penstock.kernels.tuning import programs_of, target_of

if HAS_GLUON:
    from penstock.kernels.gluon import float8_gemm_kernels as hopper

WIDTH = 128  # columns of a Hopper tile
TRIOS_REGISTERS = 128  # as `REGISTERS`, for sixteen warps, where there are three consumers

Scaling = Literal["promoted", "behind", "inside"]  # when scales are applied; see `product_kernels`
_SCALING: dict[int, Scaling] = {DEPTH: "promoted", 0: "behind", 32: "inside"}  # by the columns of a block


def multiply(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate_into: Tensor | None = None,
    launch: ProductLaunch | None = None,
) -> Tensor:
    """`reference.multiply` of a weight or of rows; `launch` replaces the table's choice.

    This function and both below raise KernelError for operands that no launch accepts.
    """
    rows, depth = a.values.shape
    columns = len(b.values)
    scaling = _check("dense", a=(a, (rows, depth)), b=(b, (columns, depth)))
    result = accumulate_into if accumulate_into is not None else out
    if result is None:
        result = a.values.new_empty(rows, columns, dtype=dtype)
    expected = torch.float32 if accumulate_into is not None else dtype
    _check_result("dense", result, (rows, columns), expected)
    if result.numel():
        of_squares: Product = "dense" if accumulate_into is None else "dense_square"
        which: Product = "dense_gradient" if b.block[0] == 1 else of_squares
        launch = launch or dense_launch(which, rows, columns, a.values.device)
        _launch_matrices(a, b, result[None], None, launch, scaling, accumulate=accumulate_into is not None)
    return result


def multiply_groups(
    x: Quantized,
    w: Quantized | SlottedWeight,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: TileTable | None = None,
    keep: SavedRows | None = None,
    launch: ProductLaunch | None = None,
) -> Tensor:
    """`reference.multiply_groups`; with `keep` the rows are written into its buffer, which is returned.

    Rows past the last expert's are zero, or the last one is (`TileTable.only_last`).
    """
    stacks: tuple[Quantized, ...] = (w.own, w.slots) if isinstance(w, SlottedWeight) else (w,)
    experts, (_, columns, depth) = sum(len(stack.values) for stack in stacks), stacks[0].values.shape
    rows = len(x.values if index_R is None else index_R)
    for stack in stacks:
        scaling = _check("grouped", x=(x, (len(x.values), depth)), w=(stack, (len(stack.values), columns, depth)))
    check_groups("float8 product", counts_e, experts, index_R)
    y_RN = x.values.new_empty(rows, columns, dtype=dtype) if keep is None else keep.rows_SF
    _check_result("grouped", y_RN, (len(y_RN), columns), dtype)
    if rows and columns:
        launch = launch or product_launch("rows" if index_R is None else "rows_gathered", x.values.device)
        launch = launch if _is_hoppers(x, stacks[0], launch) else in_triton(launch)
        tiles = tiles or tile_table(counts_e, rows)
        x, index_R = _gather(x, index_R, tiles, launch)
        first = None if keep is None else keep.first
        for part in weight_parts(w, tiles):
            _launch_rows(x, part.weight, y_RN, index_R, part.tiles, launch, scaling, first)
    return y_RN


def multiply_columns(
    dy: Quantized,
    x: Quantized,
    counts_e: Tensor,
    *,
    dtype: torch.dtype,
    accumulate_into: Tensor | SlottedWeight | None = None,
    tiles: TileTable | None = None,
    launch: ProductLaunch | None = None,
) -> Any:
    """`reference.multiply_columns`; x may have a scale for 128 x 128 numbers."""
    (rows, depth), columns, experts = dy.values.shape, len(x.values), counts_e.numel()
    scaling = _check("gradient", dy=(dy, (rows, depth)), x=(x, (columns, depth)))
    check_groups("float8 product", counts_e, experts, None)
    if isinstance(accumulate_into, SlottedWeight):
        gradient = partial(multiply_columns, dy, x, dtype=dtype, launch=launch)
        return gradient_in_parts(gradient, counts_e, accumulate_into, tiles)
    shape = (experts, rows, columns)
    result = dy.values.new_empty(shape, dtype=dtype) if accumulate_into is None else accumulate_into
    _check_result("gradient", result, shape, dtype if accumulate_into is None else torch.float32)
    if result.numel():
        launch = launch or product_launch("columns_square" if x.block[0] == DEPTH else "columns", dy.values.device)
        starts_e = (tiles or tile_table(counts_e, depth)).aligned_e
        _launch_matrices(dy, x, result, starts_e, launch, scaling, accumulate=accumulate_into is not None)
    return result


def _gather(
    x: Quantized, index_R: Tensor | None, tiles: TileTable, launch: ProductLaunch
) -> tuple[Quantized, Tensor | None]:
    """Rows and index for the kernel: unchanged, or the rows copied first, also where 32 bits cannot count them."""
    if index_R is None:
        if x.scales.stride(0) * len(x.values) < GATHER_LIMIT:
            return x, None
        # Scales far apart, as in packed rows, are copied where 32 bits cannot count them.
        return x._replace(scales=scales_in_bytes(x.scales).T.contiguous().T.view(x.scales.dtype)), None
    if not launch.copy_gathered and len(x.values) * x.values.stride(0) < GATHER_LIMIT:
        return x, index_R
    # Two numbers at a time where there are as many: half as many words to move.
    units, scales = x.values.view(torch.int16 if x.values.shape[1] % 2 == 0 else torch.int8), x.scales
    values = gather_rows(units, index_R, tiles.used, multiple=16 // units.itemsize).view(x.values.dtype)
    if x.block[0]:  # else all rows share a scale
        memory = scales_in_bytes(scales).T.contiguous()
        scales = gather_columns(memory, index_R, tiles.used).T.view(scales.dtype)
    return Quantized(values, scales, x.block), None


def _check(product: str, **operands: tuple[Quantized, tuple[int, ...]]) -> Scaling:
    """Refuse operands that no launch accepts, each given with its expected shape; return how they are scaled."""
    depths = {operand.block[1] for operand, _ in operands.values()}
    first, second = (operand.block for operand, _ in operands.values())
    if len(depths) != 1 or first[1] not in _SCALING or first[0] > 1 or (first[1] and second[0] not in (1, DEPTH)):
        raise KernelError(
            f"float8 product ({product}): blocks do not fit",
            got=f"{first} and {second}",
            allowed="both operands quantized by one of the recipes tensorwise, rowwise, blockwise, mxfp8",
        )
    for name, (operand, shape) in operands.items():
        values = operand.values
        if values.shape != shape or values.itemsize != 1 or not values.is_floating_point():
            got = f"{values.dtype} {tuple(values.shape)}"
            raise KernelError(f"float8 product ({product}): {name} does not fit", got=got, allowed=f"float8 {shape}")
        apart = [stride for size, stride in zip(shape[:-1], values.stride()[:-1], strict=True) if size > 1]
        if values.stride(-1) != 1 or any(stride % 16 for stride in apart) or values.data_ptr() % 16:
            raise KernelError(
                f"float8 product ({product}): {name} cannot be copied in blocks",
                got=f"shape {tuple(values.shape)}, strides {values.stride()}",
                allowed="rows that are contiguous and lie a multiple of 16 bytes apart",
                fix="quantize it with penstock.kernels.float8.quantize, which leaves room behind each row",
            )
    return _SCALING[first[1]]


def _check_result(product: str, result: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if result.shape != shape or result.dtype != dtype or dtype not in (torch.bfloat16, torch.float32):
        got, allowed = f"{result.dtype} {tuple(result.shape)}", f"{dtype} {shape}, bfloat16 or float32"
        raise KernelError(f"float8 product ({product}): the result does not fit", got=got, allowed=allowed)
    if not result.is_contiguous() or shape[-1] * result.itemsize % 16 or result.data_ptr() % 16:
        raise KernelError(
            f"float8 product ({product}): the result cannot be written in blocks",
            got=f"shape {shape}, strides {result.stride()}",
            allowed="contiguous, rows that are multiples of 16 bytes",
            fix="pad the width of the layer to a multiple of 8",
        )


def _launch_rows(
    x: Quantized,
    w: Quantized,
    y: Tensor,
    index: Tensor | None,
    tiles: TileTable,
    launch: ProductLaunch,
    scaling: Scaling,
    first: Tensor | None,
) -> None:
    """Run `float8_rows_kernel` of Triton or of Hopper. `first` is the first row of y to write."""
    if index is None and _is_hoppers(x, w, launch):
        launch_hopper_rows(x, w, y, tiles, launch, first)
        return
    (rows, columns), (experts, _, depth) = y.shape, w.values.shape
    size = BLOCK_SIZES.index(launch.block_rows)
    x_source, w_source, y_target = x.values, w.values, y
    if launch.descriptors:
        w_source = TensorDescriptor.from_tensor(w.values, [1, launch.block_columns, DEPTH])
        y_target = create_ragged_descriptor(y, [launch.block_rows, launch.block_columns // launch.pieces])
        if index is None:
            x_source = TensorDescriptor.from_tensor(x.values, [launch.block_rows, DEPTH])
    start_kernel(
        float8_rows_kernel, (programs_of(launch, y.device),),
        x_source, w_source, y_target, y, scales_in_bytes(x.scales), scales_in_bytes(w.scales), index, tiles.tails,
        tiles.owners[size], tiles.block_counts[size:], first, rows, columns, depth, experts, x.values.stride(0),
        w.values.stride(0), w.values.stride(1), *_strides(x), w.scales.stride(0), *_strides(w),
        W_OUTER=w.block[0] if scaling == "promoted" else 1, GATHER=index is not None, WHOLE_DEPTH=depth % DEPTH == 0,
        ONLY_LAST=tiles.only_last, **_constants(launch, scaling),
    )  # fmt: skip


def _launch_matrices(
    a: Quantized,
    b: Quantized,
    c: Tensor,
    starts: Tensor | None,
    launch: ProductLaunch,
    scaling: Scaling,
    *,
    accumulate: bool,
) -> None:
    """Run `float8_matrices_kernel` of Triton or of Hopper; c is experts x rows x columns, one expert without starts."""
    if _is_hoppers(a, b, launch):
        if b.block[0] == DEPTH and starts is None and not accumulate:
            launch_hopper_rows(a, b, c[0], None, launch)
        else:
            _launch_hopper_matrices(a, b, c, starts, launch, accumulate=accumulate)
        return
    launch = in_triton(launch)
    experts, rows, columns = c.shape
    a_source, b_source, c_target = a.values, b.values, c
    if launch.descriptors:
        a_source = TensorDescriptor.from_tensor(a.values, [launch.block_rows, DEPTH])
        b_source = TensorDescriptor.from_tensor(b.values, [launch.block_columns, DEPTH])
        c_target = TensorDescriptor.from_tensor(c, [1, launch.block_rows, launch.block_columns // launch.pieces])
    start_kernel(
        float8_matrices_kernel, (programs_of(launch, c.device),),
        a_source, b_source, c_target, scales_in_bytes(a.scales), scales_in_bytes(b.scales), starts, rows, columns,
        a.values.shape[1], experts, a.values.stride(0), b.values.stride(0), *_strides(a), *_strides(b),
        B_OUTER=b.block[0] if scaling == "promoted" else 1,
        WHOLE=rows % launch.block_rows == 0 and columns % launch.block_columns == 0, ACCUMULATE=accumulate,
        **_constants(launch, scaling),
    )  # fmt: skip


def hopper_obstacle(a: Quantized, b: Quantized, target: str) -> str | None:
    """Why the Hopper kernels cannot multiply rows by rows or weights (b) that fit each other, or None."""
    if (reason := support.obstacle(target)) is not None:
        return reason
    if a.block != BLOCKWISE.rows or b.block not in (BLOCKWISE.rows, BLOCKWISE.weights):
        return f"scales of {a.block} and {b.block} are not those of the recipe {BLOCKWISE.name}"
    return None if a.values.shape[-1] else "nothing is contracted"


def _is_hoppers(a: Quantized, b: Quantized, launch: ProductLaunch) -> bool:
    return launch.engine == "gluon" and hopper_obstacle(a, b, target_of(a.values.device)) is None


def launch_hopper_rows(
    x: Quantized, w: Quantized, y: Tensor, tiles: TileTable | None, launch: ProductLaunch, first: Tensor | None = None
) -> None:
    """`_launch_rows` by the Hopper kernel; without `tiles` w is one matrix (N x K) for all rows."""
    (rows, depth), columns = x.values.shape, y.shape[1]
    values = w.values if tiles is not None else w.values[None]
    size = BLOCK_SIZES.index(launch.block_rows)
    table = (None,) * 3 if tiles is None else (tiles.tails, tiles.owners[size], tiles.block_counts[size:])
    # Results in float32 are written through pointers.
    pieces = ragged_blocks_of(y, PIECE_ROWS, WIDTH // launch.pieces) if y.dtype == torch.bfloat16 else None
    start_kernel(
        hopper.float8_rows_kernel, (programs_of(launch, y.device),),
        blocks_of(x.values, PIECE_ROWS, DEPTH), blocks_of(values, 1, WIDTH, DEPTH), pieces, y, x.scales, w.scales,
        *table, first, rows, columns, depth, len(values), *x.scales.stride(),
        w.scales.stride(0) if tiles is not None else 0, *w.scales.stride()[-2:],
        STAGES=launch.stages, STEPS=launch.steps, GROUP=launch.group, CONSUMERS=launch.block_rows // PIECE_ROWS,
        ONLY_LAST=tiles is not None and tiles.only_last, **_warps_of(launch),
    )  # fmt: skip


def _launch_hopper_matrices(
    a: Quantized, b: Quantized, c: Tensor, starts: Tensor | None, launch: ProductLaunch, *, accumulate: bool
) -> None:
    experts, rows, columns = c.shape
    is_square = b.block[0] == WIDTH
    start_kernel(
        hopper.float8_matrices_kernel, (programs_of(launch, c.device),),
        blocks_of(a.values, PIECE_ROWS, DEPTH), blocks_of(b.values, WIDTH, DEPTH),
        blocks_of(c, 1, PIECE_ROWS, WIDTH // launch.pieces) if accumulate else None, c, a.scales, b.scales, starts,
        rows, columns, a.values.shape[1], experts, *a.scales.stride(), *b.scales.stride(),
        STAGES=launch.stages, STEPS=launch.steps if is_square else 1, GROUP=launch.group,
        CONSUMERS=launch.block_rows // PIECE_ROWS, SQUARE=is_square,
        WHOLE=rows % launch.block_rows == 0 and columns % WIDTH == 0, **_warps_of(launch),
    )  # fmt: skip


def _warps_of(launch: ProductLaunch) -> dict[str, int]:
    """Warps of a consumer, and registers of a thread before warps exchange them."""
    return {"num_warps": launch.warps, "maxnreg": REGISTERS if launch.block_rows == 2 * PIECE_ROWS else TRIOS_REGISTERS}


def _strides(operand: Quantized) -> tuple[int, int]:
    """Strides of the scales along outer and depth; 0 along outer where all rows share one."""
    outer, depth = operand.scales.stride()[-2:]
    return (0 if operand.block[0] == 0 else outer), depth


def _constants(launch: ProductLaunch, scaling: Scaling) -> dict[str, Any]:
    scales = {"AHEAD": launch.ahead and scaling == "promoted", "SCALING": scaling}
    return {**launch.constants, **scales, "num_warps": launch.warps, "num_stages": launch.stages}
