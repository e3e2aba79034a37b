"""Products of experts' rows on a Hopper: each launch of our own kernel for them, Triton's kernel and cuBLAS.

    python -m benchmarks.kernels.hopper_expert_rows --output hopper-expert-rows.json
    python -m benchmarks.kernels.hopper_expert_rows --launches ring,ring_tall --only "V3" --rounds 12

First each launch is checked in a process of its own, all at the same time: against products in 64 bits, for uneven
experts, experts without rows, counts that end inside a block, and NaN behind the last row; rows in place, gathered ones
and results that are kept in a buffer of several layers must be the same bits; and against Triton's kernel for more
tiles than there are programs. One that fails, or does not end within `--patience`, is named and left out. Then launches
take turns (`benchmarks.kernels.grouped_gemm`) on the shares of `benchmarks.kernels.hopper_weight_gradient`, every
expert with the same number of rows, or skewed: forward, forward of gathered rows, which our kernel has in a copy first
and Triton's gathers while it loads them, and the gradient of the input. `mm` is cuBLAS' product of as many operations,
one matrix for all rows, in place.

What was measured is printed and written after each case, so an ended run keeps what it has.
"""

import argparse
import faulthandler
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.grouped_gemm import Contenders, burn, skewed_counts, take_turns
from benchmarks.kernels.hopper_weight_gradient import (
    CHECKED_COUNTS,
    CHECKED_PROGRAMS,
    CHECKED_WIDTHS,
    DEVICE,
    SHARES,
    TAIL,
    WORST_WRITTEN,
    check_all,
    line,
    relative,
    summarize,
)
from benchmarks.kernels.launches_tried import ROWS_RINGS
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.grouped_gemm import grouped_gemm_forward, grouped_gemm_input_gradient
from penstock.kernels.tile_table import TileTable, tile_table
from penstock.kernels.tuning import (
    GemmLaunch,
    GemmProduct,
    grouped_gemm_launch,
    in_triton,
    multiprocessors_of,
    target_of,
)

MEASURED = ("V2-Lite EP4", "V3 8 experts", "Qwen3 EP4")
"""Of the shares."""

PRODUCTS = tuple(product for product in get_args(GemmProduct) if not product.startswith("weight"))

BEFORE = 37
"""Rows of another layer before the kept ones."""


@dataclass(frozen=True)
class Case:
    """One set of operands; index_R gathers rows of x."""

    name: str
    balanced: bool
    x_RD: Tensor
    dy_RF: Tensor
    w_eFD: Tensor
    counts_e: Tensor
    index_R: Tensor
    tiles: TileTable

    @property
    def flops(self) -> int:
        """Of any of the products."""
        return 2 * len(self.x_RD) * self.w_eFD[0].numel()

    def multiply(self, product: GemmProduct, launch: GemmLaunch | None, keep: SavedRows | None = None) -> Tensor:
        """By a launch, or by Triton's kernel as the table has it. As in training the tail of a gradient is not read."""
        if launch is None:
            matrix = self.w_eFD[0].numel()
            launch = in_triton(grouped_gemm_launch(product, DEVICE, torch.bfloat16, matrix), product, matrix)
        if product == "input_gradient":
            tiles = replace(self.tiles, only_last=True)
            return grouped_gemm_input_gradient(self.dy_RF, self.w_eFD, self.counts_e, tiles=tiles, launch=launch)
        index_R = self.index_R if product == "forward_gathered" else None
        given = (self.x_RD, self.w_eFD, self.counts_e, index_R)
        return grouped_gemm_forward(*given, tiles=self.tiles, keep=keep, launch=launch)

    def by_cublas(self, product: GemmProduct) -> Tensor:
        """As many operations, one matrix for all rows."""
        return self.dy_RF @ self.w_eFD[0] if product == "input_gradient" else self.x_RD @ self.w_eFD[0].T


def main() -> None:
    options = parse_arguments()
    target = target_of(DEVICE) if torch.cuda.is_available() else "no GPU"
    if target != "sm_90" or not HAS_GLUON:
        print(f"the kernel is Hopper's and Gluon's, this is {target} with Triton {triton.__version__}", file=sys.stderr)
        sys.exit(1)
    if options.check:
        print(json.dumps(check_launch(ROWS_RINGS[options.check])))
        return
    checks = check_all("benchmarks.kernels.hopper_expert_rows", options.launches, options.patience)
    names = [name for name, found in checks.items() if "fault" not in found]
    burn(seconds=2.0)
    rows: list[dict] = []
    for case in draw_all(options.only):
        faulthandler.dump_traceback_later(options.patience, exit=True)
        for product in PRODUCTS:
            rows.append(measure(case, product, names, options.rounds))
            print(line(rows[-1]), flush=True)
        faulthandler.cancel_dump_traceback_later()
        summary = summarize_products(rows)
        record.write(options, {"checks": checks, "rows": rows, "summary": summary}, triton=triton.__version__)
    for product, loads in summarize_products(rows).items():
        for load, figures in loads.items():
            means = ", ".join(f"{name} {one['mean']:.3f} ({one['least']:.3f})" for name, one in figures.items())
            print(f"{product}, {load}: over Triton's, geometric mean (least): {means}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each launch takes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--patience", type=float, default=75.0, help="seconds that a check or a case may take")
    parser.add_argument(
        "--launches",
        type=lambda text: text.split(","),
        default=list(ROWS_RINGS),
        help=f"which of these, by commas: {', '.join(ROWS_RINGS)}",
    )
    parser.add_argument("--check", default="", choices=list(ROWS_RINGS), help="check this launch only")
    record.add_arguments(parser)
    options = parser.parse_args()
    unknown = [name for name in options.launches if name not in ROWS_RINGS]
    if unknown:
        parser.error(f"--launches: {', '.join(unknown)} is none of {', '.join(ROWS_RINGS)}")
    return options


def check_launch(launch: GemmLaunch) -> dict[str, float]:
    """Runs in a process of its own: the worst error of each product.

    Raises:
        AssertionError: an error is too large, something was written that is not the experts', or two ways differ.
    """
    worst: dict[str, float] = dict.fromkeys(("forward", "input_gradient"), 0.0)
    for counts in CHECKED_COUNTS:
        for widths in CHECKED_WIDTHS:
            case = draw(f"{counts} {widths}", counts, *widths, tail=TAIL)
            for programs in CHECKED_PROGRAMS:
                one = replace(launch, idle_units=multiprocessors_of(DEVICE) - programs)
                check_same_bits(case, one, sum(counts))
                for product, error in errors_of(case, one, counts).items():
                    worst[product] = max(worst[product], error)
    worst["against Triton"] = error_against_triton(launch)
    return worst


def errors_of(case: Case, launch: GemmLaunch, counts: Sequence[int]) -> dict[str, float]:
    """Of both products against 64 bits, and whether the tail is what it must be."""
    used = sum(counts)
    y_RF, dx_RD = (case.multiply(product, launch) for product in ("forward", "input_gradient"))
    assert not y_RF[used:].any(), f"{case.name}: rows of the tail must be zero"
    assert not dx_RD[-1].any(), f"{case.name}: the last row must be zero"
    w_eFD = case.w_eFD.double()
    true_RF = true_rows(case.x_RD, w_eFD.transpose(1, 2), counts)
    true_RD = true_rows(case.dy_RF, w_eFD, counts)
    errors = {"forward": relative(y_RF[:used], true_RF), "input_gradient": relative(dx_RD[:used], true_RD)}
    assert max(errors.values()) < WORST_WRITTEN, f"{case.name}: {errors}"
    return errors


def check_same_bits(case: Case, launch: GemmLaunch, used: int) -> None:
    """Twice, of rows that are gathered, and in a buffer of several layers."""
    y_RF = case.multiply("forward", launch)
    assert torch.equal(y_RF, case.multiply("forward", launch)), f"{case.name}: two runs differ"
    gathered = case.multiply("forward_gathered", launch)
    in_place = replace(case, x_RD=case.x_RD[case.index_R]).multiply("forward", launch)
    assert torch.equal(gathered, in_place), f"{case.name}: gathered rows differ from rows in place"
    kept_SF = y_RF.new_full((BEFORE + len(y_RF) + TAIL, y_RF.shape[1]), 5.0)
    case.multiply("forward", launch, SavedRows(kept_SF, torch.tensor([BEFORE], device=DEVICE), len(y_RF)))
    end = BEFORE + used
    assert torch.equal(kept_SF[BEFORE:end], y_RF[:used]), f"{case.name}: kept rows differ"
    assert kept_SF[:BEFORE].eq(5).all() and kept_SF[end:].eq(5).all(), f"{case.name}: other layers' rows were touched"


def error_against_triton(launch: GemmLaunch) -> float:
    """On a share with many tiles for each program."""
    case = draw("many tiles", skewed_counts(16, 16 * 768), 2816, 2048)
    worst = max(relative(case.multiply(one, launch), case.multiply(one, None)) for one in PRODUCTS)
    assert worst < WORST_WRITTEN, f"{case.name}: {worst}"
    return worst


def true_rows(x_RD: Tensor, w_eDF: Tensor, counts: Sequence[int]) -> Tensor:
    """In 64 bits, without the tail."""
    parts = x_RD.double().split([*counts, TAIL])[:-1]
    return torch.cat([x @ w for x, w in zip(parts, w_eDF, strict=True)])


def draw_all(only: str) -> Iterator[Case]:
    """Every case whose name contains `only`."""
    for share in SHARES:
        rows = share.experts * share.rows_each
        for load in ("balanced", "skewed"):
            counts = [share.rows_each] * share.experts if load == "balanced" else skewed_counts(share.experts, rows)
            for layer, width, depth in share.layers:
                name = f"{share.name}, {layer}, {load}"
                if share.name in MEASURED and only in name:
                    yield draw(name, counts, width, depth, balanced=load == "balanced")


def draw(name: str, counts: Sequence[int], width: int, depth: int, *, balanced: bool = False, tail: int = 0) -> Case:
    """Operands, with `tail` rows of NaN behind the last expert's; a gather reads rows of experts only."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    used, given = sum(counts), {"generator": generator, "device": DEVICE}
    x_RD, dy_RF = (torch.randn(used + tail, one, dtype=torch.bfloat16, **given) for one in (depth, width))
    x_RD[used:] = dy_RF[used:] = torch.nan
    w_eFD = torch.randn(len(counts), width, depth, dtype=torch.bfloat16, **given)
    index_R = torch.randint(max(used, 1), (used + tail,), **given)
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return Case(name, balanced, x_RD, dy_RF, w_eFD, counts_e, index_R, tile_table(counts_e, used + tail))


def measure(case: Case, product: GemmProduct, names: Sequence[str], rounds: int) -> dict[str, object]:
    """Milliseconds and TFLOP/s of each way."""
    ways: Contenders = {"triton": partial(case.multiply, product, None)}
    ways |= {name: partial(case.multiply, product, ROWS_RINGS[name]) for name in names}
    ways["mm"] = partial(case.by_cublas, product)
    times = take_turns(ways, rounds)
    tflops = {name: case.flops / milliseconds / 1e9 for name, milliseconds in times.items()}
    return {
        "case": f"{case.name}, {product}",
        "product": product,
        "balanced": case.balanced,
        "milliseconds": times,
        "tflops": tflops,
    }


def summarize_products(rows: Sequence[dict]) -> dict[str, dict]:
    """Speed of each way over Triton's, by product and load."""
    return {product: summarize([row for row in rows if row["product"] == product]) for product in PRODUCTS}


if __name__ == "__main__":
    main()
