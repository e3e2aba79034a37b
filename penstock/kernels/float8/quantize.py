"""Triton wrappers of quantization: `reference.quantize_rows`, `quantize_weight` and `quantize_groups` in one pass each.

All three give one kernel (`quantize_kernels`) a source and one or two copies to fill. Numbers are read from memory
once: a tile of 128 x 128 stays in registers while its rows and its columns are scaled. Only scales of whole rows or
matrices (`rowwise`, `tensorwise`) need a pass before, which finds the largest magnitudes.

The scales of a copy lie in memory as depth blocks x outer, so that a product reads those of neighbouring rows at once;
callers see them as outer x depth blocks. The stride of the rows of values is a multiple of 16 bytes.
`pack_rows` and `unpack_rows` make and read the messages that rows travel as, whose padding is not written;
`transpose_weight` makes the transposed copy of a gathered weight from its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.float8.quantize_kernels import (
    group_tiles_kernel,
    measure_kernel,
    pack_rows_kernel,
    quantize_kernel,
    transpose_kernel,
    unpack_rows_kernel,
)
from penstock.kernels.float8.quantized import (
    ALIGNMENT,
    BLOCKWISE_SQUARE,
    DEPTH,
    E4M3,
    E5M2,
    Block,
    Format,
    Quantized,
    Recipe,
    RowColQuantized,
    Scaling,
    WeightCopies,
    blocks_of,
    row_bytes,
    scale_dtype,
    scales_at,
    scales_in_bytes,
)
from penstock.kernels.float8.reference import aligned_rows
from penstock.kernels.gluon import support
from penstock.kernels.language import start_kernel, triton
from penstock.kernels.tuning import GemmLaunch, KernelLaunch, launch_tables, programs_of, section, target_of

# Kinds of products whose launches differ.
Product = Literal[
    "dense",  # with a weight
    "dense_gradient",  # of a dense weight: both operands have a scale for each row
    "dense_square",  # the same, added to a sum, where one operand has scales for squares
    "rows",  # of experts, in place
    "rows_gathered",
    "columns",  # contracted over experts' rows: both operands have a scale for each row
    "columns_square",  # or one has scales for squares
]


@dataclass(frozen=True, kw_only=True)
class ProductLaunch(GemmLaunch):
    """Tiles and order of a persistent product of 8-bit numbers."""

    block_depth: int = DEPTH
    steps: int = 1  # blocks in a turn of a Hopper kernel; with 2 a block's sum is scaled while the next is made
    ahead: bool = False  # Triton's kernels load scales of blocks of 128 one block ahead


def _by_product(target: str) -> dict[Product, ProductLaunch]:
    rows = section(target, "float8_products")
    return {product: ProductLaunch(**(rows.get(product) or rows["every"])) for product in get_args(Product)}


# By target and product.
PRODUCTS: Mapping[str, Mapping[Product, ProductLaunch]] = MappingProxyType(
    {target: _by_product(target) for target in launch_tables() if section(target, "float8_products")}
)
_SMALL = ProductLaunch(block_rows=64, block_columns=64, warps=4, stages=2, descriptors=False)

# Launches with tiles of 128 rows that replace those with tiles of 192.
_SMALLER: Mapping[ProductLaunch, ProductLaunch] = MappingProxyType(
    {
        launch: ProductLaunch(**section("sm_90", "float8_smaller_products")[product])
        for product, launch in PRODUCTS["sm_90"].items()
        if product in section("sm_90", "float8_smaller_products")
    }
)
TALLER_TILES_GAIN = 1.03  # speed of tiles of 192 rows over tiles of 128, where both fill the multiprocessors alike


def in_triton(launch: ProductLaunch) -> ProductLaunch:
    """The launch itself if it is Triton's, else one of Triton's on the same multiprocessors."""
    return launch if launch.engine == "triton" else replace(PRODUCTS["sm_90"]["columns"], idle_units=launch.idle_units)


def dense_launch(product: Product, rows: int, columns: int, device: torch.device) -> ProductLaunch:
    """The launch for a dense result: the table's, or one with smaller tiles if few tiles leave multiprocessors idle."""
    launch = product_launch(product, device)
    smaller = _SMALLER.get(launch)
    if smaller is None:
        return launch

    def rounds(candidate: ProductLaunch) -> int:
        """Rows of tiles that the busiest multiprocessor makes."""
        tiles = -(-rows // candidate.block_rows) * -(-columns // candidate.block_columns)
        return -(-tiles // programs_of(candidate, device)) * candidate.block_rows

    return launch if rounds(launch) <= rounds(smaller) * TALLER_TILES_GAIN else smaller


def product_launch(product: Product, device: torch.device) -> ProductLaunch:
    """The launch for a product: the table's, or a small one for launch_tables without a table."""
    launches = PRODUCTS.get(target_of(device))
    return _SMALL if launches is None else launches[product]


# Of quantization: 64 numbers a thread. Two such programs share a multiprocessor, so that one loads while the other
# computes. Without a limit the compiler can take more than 128 registers, which leaves room for only one.
TRANSPOSING = KernelLaunch(block_rows=ALIGNMENT, block_columns=ALIGNMENT, warps=8, registers=128)
# Where numbers are computed first, from angles of pairs of columns or labels of rows, which need registers too. The
# compiler takes fewer than 128, so as many threads share a multiprocessor.
FUSED = replace(TRANSPOSING, warps=16)
# Where nothing is transposed: a block of depth 128, four loads of 16 bytes a thread. On an H200 as fast as a copy.
ROWS_ONLY = KernelLaunch(block_rows=32, block_columns=128, warps=4)
# The launch of runs: five programs share a multiprocessor.
TRANSPOSING_DEFAULT = replace(TRANSPOSING, engine="gluon", warps=4, registers=96)
# The launch of runs where numbers are computed first: with 96 registers some are spilled.
FUSED_DEFAULT = replace(TRANSPOSING_DEFAULT, registers=128)


@dataclass(frozen=True, kw_only=True)
class BackwardLaunch(GemmLaunch):
    """Tiles of 128 x 128 of the gradients of the experts' activation."""

    block_rows: int = 128
    block_columns: int = 128
    warps: int = 8
    residency: int = 2
    registers: int = 128
    in_passes: bool = False  # make 16 bits and quantize them in passes of their own
    step: int = 16  # rows that Triton's kernel holds at a time


# Eight numbers a thread at a time. Two programs of 128 registers a thread share a multiprocessor; none is spilled, but
# some are with blocks of 32.
BACKWARD = BackwardLaunch()
BACKWARD_DEFAULT = BackwardLaunch(engine="gluon")  # the launch of runs


if support.HAS_GLUON:
    from penstock.kernels.gluon import float8_quantize_kernels as hopper

WAVE_FACTOR = 2  # AMD's waves have twice the threads of a warp, so half as many hold a tile in as many registers
TILES = 64  # of one program of `group_tiles_kernel`


def quantize_rows(
    x_RD: Tensor,
    recipe: Recipe,
    form: Format,
    *,
    columns: Block | None = None,
    counts_e: Tensor | None = None,
    launch: KernelLaunch | None = None,
) -> RowColQuantized:
    """`reference.quantize_rows`; rows may lie apart, but each must be contiguous, or a copy is made.

    Rows past the experts' are not written if there are `columns`, nor are the columns' places past the last expert's
    tiles, where scales fit into tiles. `launch` replaces the default, `TRANSPOSING_DEFAULT` or `ROWS_ONLY`; its tiles
    must hold whole blocks of both copies. Raises KernelError if x is no matrix.
    """
    # Counts matter to copies that are aligned by experts, and to scales over several rows.
    source = _source(x_RD, None, None if columns is None and recipe.rows[1] else counts_e)
    rows = empty_copy(source.values, (source.rows, source.width), recipe.rows, form, recipe.scaling)
    transposed = None
    if columns is not None:
        transposed = empty_copy(source.values, (source.width, source.places), columns, form, recipe.scaling)
    _quantize(source, (rows, transposed), form, recipe.scaling, launch)
    return RowColQuantized(rows, transposed)


def quantize_groups(
    x_RD: Tensor | Quantized,
    counts_e: Tensor,
    recipe: Recipe,
    form: Format,
    index_R: Tensor | None = None,
    *,
    block: Block | None = None,
    launch: KernelLaunch | None = None,
) -> Quantized:
    """`reference.quantize_groups` behind a small kernel; counts stay on the device.

    Places past the last expert's tiles are not written, where scales fit into tiles. Raises KernelError if x is no
    matrix, or has 8-bit numbers whose scales do not fit into tiles.
    """
    source = _source(x_RD, index_R, counts_e)
    block = block or recipe.columns
    columns = empty_copy(source.values, (source.width, source.places), block, form, recipe.scaling)
    _quantize(source, (None, columns), form, recipe.scaling, launch)
    return columns


def quantize_weight(
    w_FD: Tensor, recipe: Recipe, form: Format, into: WeightCopies | None = None, *, launch: KernelLaunch | None = None
) -> WeightCopies:
    """`reference.quantize_weight`; copies in `into` with this function's memory layout are written directly."""
    if w_FD.ndim not in (2, 3):
        raise KernelError("quantize_weight: takes a matrix or a stack of them", got=tuple(w_FD.shape))
    w_FD = w_FD.contiguous()
    *stack, outer, depth = w_FD.shape
    shapes = (*stack, outer, depth), (*stack, depth, outer)
    made = WeightCopies(*(empty_copy(w_FD, shape, recipe.weights, form, recipe.scaling) for shape in shapes))
    fits = into is not None and all(
        old.values.stride() == new.values.stride() and old.scales.stride() == new.scales.stride()
        for old, new in zip(into, made, strict=True)
    )
    filled = into if into is not None and fits else made
    source = _Source(w_FD, None, None, None, (0, 0), outer, outer, matrices=stack[0] if stack else 1)
    _quantize(source, filled, form, recipe.scaling, launch)
    return filled if into is None or fits else into.fill(filled)


def empty_copy(like: Tensor, shape: tuple[int, ...], block: Block, form: Format, scaling: Scaling) -> Quantized:
    """Memory for 8-bit numbers (... x outer x depth) and their scales, in the layout of the module's docstring."""
    *stack, outer, depth = shape
    apart = triton.cdiv(depth, 16) * 16  # bytes from row to row
    values = like.new_empty(*stack, outer, apart, dtype=form.dtype)[..., :depth]
    blocks = [triton.cdiv(size, side) if side else 1 for size, side in zip((outer, depth), block, strict=True)]
    scales = like.new_empty(*stack, blocks[1], blocks[0], dtype=scale_dtype(scaling)).transpose(-1, -2)
    return Quantized(values, scales, block)


def group_tiles(counts_e: Tensor, rows: int) -> Tensor:
    """The rows in each tile of `ALIGNMENT` slots of an aligned copy of `rows` rows: int32, (tiles + 1) x 2.

    Each tile has its first row and its number of rows; the last pair is (number of tiles that have rows, 0).
    """
    experts = counts_e.numel()
    tiles = aligned_rows(rows, experts) // ALIGNMENT
    table = counts_e.new_empty(tiles + 1, 2, dtype=torch.int32)
    constants = {"EXPERTS": experts, "BLOCK_E": triton.next_power_of_2(experts), "BLOCK_R": ALIGNMENT, "BLOCK_T": TILES}
    start_kernel(
        group_tiles_kernel, (triton.cdiv(tiles + 1, TILES),), counts_e.contiguous(), table, tiles, rows, **constants
    )
    return table


@dataclass(frozen=True)
class _Source:
    values: Tensor  # (e x) rows x width; with an index any number of rows
    scales: Tensor | None  # of 8-bit values
    index_R: Tensor | None  # source row of each row
    tiles: Tensor | None  # of `group_tiles`
    block: Block
    rows: int  # R, of one matrix
    places: int  # rows with the padding between experts
    matrices: int = 1

    @property
    def width(self) -> int:
        return self.values.shape[-1]


def _source(x_RD: Tensor | Quantized, index_R: Tensor | None, counts_e: Tensor | None) -> _Source:
    values, scales, block = x_RD if isinstance(x_RD, Quantized) else (x_RD, None, (0, 0))
    if values.ndim != 2:
        raise KernelError("quantize: takes a matrix of rows", got=tuple(values.shape))
    if block[1] not in (0, 16, 32, 64) and block[1] % TRANSPOSING.block_columns:
        what = "quantize: scales of the source must fit into tiles"
        raise KernelError(what, got=block, allowed="blocks of 32 or 128")
    if values.stride(1) != 1:
        values = values.contiguous()
    rows = values.shape[0] if index_R is None else index_R.numel()
    if counts_e is None:
        return _Source(values, scales, index_R, None, block, rows, rows)
    places = aligned_rows(rows, counts_e.numel())
    return _Source(values, scales, index_R, group_tiles(counts_e, rows), block, rows, places)


def _quantize(
    source: _Source,
    copies: tuple[Quantized | None, Quantized | None],
    form: Format,
    scaling: Scaling,
    launch: KernelLaunch | None = None,
) -> None:
    """Fill the copy by rows, the transposed one, or both, whose blocks are equally deep."""
    rows, columns = copies
    given = [copy.block for copy in copies if copy is not None]
    (outer, depth), (columns_outer, columns_depth) = given[0], given[-1]
    assert depth == columns_depth, f"blocks are equally deep, these are {given}"
    row_amax, column_amax = _measure(source, rows, columns) if depth == 0 else (None, None)  # scales of whole rows
    launch = launch or (ROWS_ONLY if columns is None and source.tiles is None else TRANSPOSING_DEFAULT)
    if launch.engine == "gluon":
        if columns is not None and _is_hoppers(source, (rows, columns), form, scaling):
            _launch_hopper(source, rows, columns, form, launch)
            return
        launch = TRANSPOSING
    power = scaling != "float32"
    start_kernel(
        quantize_kernel, _grid(source, launch),
        source.values, *_scales_of(source), source.index_R, source.tiles, *memories_of(rows), row_amax,
        *memories_of(columns), column_amax,
        source.rows, source.width, source.places, source.values.stride(-2), row_stride(rows), row_stride(columns),
        X_OUTER=source.block[0], X_DEPTH=source.block[1], OUTER=outer, COLUMNS_OUTER=columns_outer, DEPTH=depth,
        LARGEST=form.largest, POWER=power, BLOCK_R=launch.block_rows, BLOCK_D=launch.block_columns,
        RUN=1 if columns is None else run_of(launch), num_warps=warps_of(launch, source.values.device),
        # Divisions by other scales take more registers.
        **(register_limit(launch, source.values.device) if power else {}),
    )  # fmt: skip


def _launch_hopper(
    source: _Source, rows: Quantized | None, columns: Quantized, form: Format, launch: KernelLaunch
) -> None:
    eights = columns.values.view(torch.int64)  # 8 numbers at a time
    if eights.numel() == 0:
        return
    start_kernel(
        hopper.quantize_kernel, (source.width // ALIGNMENT, columns.values.shape[1] // ALIGNMENT),
        source.values, *_scales_of(source), source.index_R, source.tiles,
        None if rows is None else rows.values.view(torch.int8), None if rows is None else rows.scales.T,
        eights, columns.scales.T, source.rows, source.values.stride(0), row_stride(rows), eights.stride(0),
        source.width, LARGEST=form.largest, SQUARE=columns.block == BLOCKWISE_SQUARE.columns, num_warps=launch.warps,
        maxnreg=launch.registers,
    )  # fmt: skip


def hopper_obstacle(
    x_RD: Tensor, width: int, blocks: Sequence[Block], scaling: Scaling, forms: Sequence[Format]
) -> str | None:
    """Why the Hopper kernels cannot read x and write copies of `width` columns, or None.

    `blocks` are those of numbers by rows, written or read in 8 bits, if there are any; last, of transposed ones.
    """
    if (reason := support.obstacle(target_of(x_RD.device))) is not None:
        return reason
    *by_row, by_column = blocks
    fits = {*by_row} <= {BLOCKWISE_SQUARE.rows} and by_column in (BLOCKWISE_SQUARE.rows, BLOCKWISE_SQUARE.columns)
    if not fits or scaling != BLOCKWISE_SQUARE.scaling or not {*forms} <= {E4M3, E5M2}:
        return "copies are not those of a blockwise recipe"
    if x_RD.dtype != torch.bfloat16 and x_RD.itemsize > 1:
        return f"numbers are {x_RD.dtype}, not bfloat16"
    return f"a width of {width} is no multiple of {ALIGNMENT}" if width % ALIGNMENT else None


def _is_hoppers(source: _Source, copies: tuple[Quantized | None, Quantized], form: Format, scaling: Scaling) -> bool:
    values, (rows, columns) = source.values, copies
    by_row = [] if rows is None else [rows.block]
    if source.scales is not None:
        if source.scales.dtype != torch.float32 or rows is not None:
            return False
        by_row = [source.block]
    is_whole = source.tiles is not None or source.rows % ALIGNMENT == 0
    problem = hopper_obstacle(values, source.width, [*by_row, columns.block], scaling, [form])
    return is_whole and values.ndim == 2 and problem is None


def _measure(source: _Source, rows: Quantized | None, columns: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
    """Bits of the largest magnitudes from which the scales of both copies are made; a pass over the source."""
    target = rows if rows is not None else columns
    assert target is not None, "nothing to write"
    zeros = source.values.new_zeros
    by_row = by_column = whole = None
    if target.block[0] == 0:
        whole = zeros(source.matrices, dtype=torch.int32)
    else:
        by_row = None if rows is None else zeros(source.matrices * source.rows, dtype=torch.int32)
        by_column = None if columns is None else zeros(source.matrices * source.width, dtype=torch.int32)
    start_kernel(
        measure_kernel, _grid(source, TRANSPOSING),
        source.values, *_scales_of(source), source.index_R, source.tiles, by_row, by_column, whole,
        source.rows, source.width, source.values.stride(-2),
        X_OUTER=source.block[0], X_DEPTH=source.block[1], BLOCK_R=TRANSPOSING.block_rows,
        BLOCK_D=TRANSPOSING.block_columns, num_warps=warps_of(TRANSPOSING, source.values.device),
    )  # fmt: skip
    return (by_row, by_column) if whole is None else (whole, whole)


def _grid(source: _Source, launch: KernelLaunch) -> tuple[int, ...]:
    columns = triton.cdiv(source.width, launch.block_columns)
    return columns, triton.cdiv(source.places, launch.block_rows), source.matrices


def _scales_of(source: _Source) -> tuple[Tensor | None, int, int]:
    """Scales of an 8-bit source and their strides, as kernel arguments."""
    if source.scales is None:
        return None, 0, 0
    return scales_in_bytes(source.scales), source.scales.stride(0), source.scales.stride(1)


def memories_of(copy: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
    """Values and scales (depth blocks x outer) of a copy as kernel arguments; None for a copy that is not made."""
    return (None, None) if copy is None else (copy.values, scales_in_bytes(copy.scales.transpose(-1, -2)))


def row_stride(copy: Quantized | None) -> int:
    """Stride of the rows of a copy, 0 for one that is not made."""
    return 0 if copy is None else copy.values.stride(-2)


def warps_of(launch: KernelLaunch, device: torch.device) -> int:
    """Warps, or waves, of one program."""
    return launch.warps // (WAVE_FACTOR if target_of(device).startswith("gfx") else 1)


def run_of(launch: KernelLaunch) -> int:
    """Loads that a thread makes of a tile, which are rows that it has: it stores 16 bytes, so 16 numbers of each."""
    return max(1, launch.block_rows * launch.block_columns // (launch.warps * 32 * 16))


def register_limit(launch: KernelLaunch, device: torch.device) -> dict[str, int]:
    """A launch's registers as a kernel's option; other vendors' compilers have none."""
    if not launch.registers or not target_of(device).startswith("sm_"):
        return {}
    return {"maxnreg": launch.registers}


# Blocks of 128 numbers of one program; of smaller blocks as many more. Not measured yet.
PACKING = KernelLaunch(block_rows=32, block_columns=128, warps=4)


def pack_rows(x_TD: Tensor, recipe: Recipe, form: Format, *, launch: KernelLaunch = PACKING) -> Tensor:
    """`reference.pack_rows` in one kernel."""
    x_TD = x_TD.contiguous()
    packed = x_TD.new_empty(x_TD.shape[0], row_bytes(x_TD.shape[1], recipe), dtype=torch.uint8)
    options = {"LARGEST": form.largest, "POWER": recipe.scaling != "float32"}
    _start_packing(pack_rows_kernel, x_TD, packed, recipe, form, launch, **options)
    return packed


def unpack_rows(
    packed: Tensor, width: int, recipe: Recipe, form: Format, dtype: torch.dtype, *, launch: KernelLaunch = PACKING
) -> Tensor:
    """`reference.unpack_rows` in one kernel."""
    packed = packed.contiguous()
    x_ND = packed.new_empty(packed.shape[0], width, dtype=dtype)
    _start_packing(unpack_rows_kernel, x_ND, packed, recipe, form, launch)
    return x_ND


def _start_packing(
    kernel: triton.JITFunction,
    x_TD: Tensor,
    packed: Tensor,
    recipe: Recipe,
    form: Format,
    launch: KernelLaunch,
    **options: float,
) -> None:
    rows, width = x_TD.shape
    blocks, depth = blocks_of(width, recipe), recipe.rows[1]
    at_a_time = launch.block_rows * launch.block_columns // depth
    if rows == 0:
        return
    start_kernel(
        kernel, (triton.cdiv(rows * blocks, at_a_time),),
        x_TD, packed.view(form.dtype), rows,
        D=width, BLOCKS=blocks, BYTES=packed.shape[1], SCALES_AT=scales_at(width), E8M0=recipe.scaling == "e8m0",
        BLOCK_R=at_a_time, DEPTH=depth, num_warps=launch.warps, **options,
    )  # fmt: skip


TRANSPOSE_BLOCK = 128  # rows and columns of a tile
TRANSPOSE_WARPS = 8


def transpose_weight(weight: Quantized, into: Quantized) -> None:
    """`reference.transpose_weight` in one pass over bytes; to quantize the weight again would read twice as many."""
    if not (weight.values.is_contiguous() and into.values.is_contiguous()):
        raise KernelError("transpose_weight takes contiguous matrices", got=f"strides {weight.values.stride()}")
    rows, columns = weight.values.shape[-2:]
    matrices = weight.values[..., 0, 0].numel()
    grid = (triton.cdiv(columns, TRANSPOSE_BLOCK), triton.cdiv(rows, TRANSPOSE_BLOCK), matrices)
    source, target = weight.values.view(torch.uint8), into.values.view(torch.uint8)
    start_kernel(
        transpose_kernel, grid, source, target, rows, columns, BLOCK=TRANSPOSE_BLOCK, num_warps=TRANSPOSE_WARPS
    )
