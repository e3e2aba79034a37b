"""Grouped GEMM on one GPU: ours against grouped_mm, cuBLAS bmm on equal groups and cuBLAS mm of the same size.

    python -m benchmarks.kernels.grouped_gemm --output grouped_gemm.json
    python -m benchmarks.kernels.grouped_gemm --gather --output gather.json      # row gathers only, launch by launch

Rows of each case are an expert-parallel share of DeepSeek-V2-Lite, DeepSeek-V3 or Qwen3-30B-A3B; gate-up and down
projections; every expert the same number of rows, or skewed (log-normal, sigma 0.6). All in bfloat16 on random data.
Ours is given its tile table, as a layer shares one between its six products; what the table takes is measured apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.measure import Ways, burn, decibels, take_turns
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import GemmLaunch

GATHER_LAUNCHES = {
    "two_programs": GemmLaunch(
        block_rows=128, block_columns=128, block_depth=64, warps=4, stages=3, pieces=2, residency=2
    ),
    "one_program": GemmLaunch(block_rows=128, block_columns=256, block_depth=64, warps=8, stages=4, pieces=2),
}
"""Hopper's two ways to fill a multiprocessor, each tried for rows that are gathered while they are loaded."""

PRODUCTS = ("forward", "input gradient", "weight gradient")
BEST_DB = 45.0


@dataclass(frozen=True)
class Share:
    """The experts of one GPU, the rows of each when balanced, and the tokens that rows are gathered from."""

    name: str
    experts: int
    rows_each: int
    hidden: int
    ffn: int
    tokens: int


SHARES = (
    Share("V2-Lite EP1", 64, 768, 2048, 1408, 8192),
    Share("V2-Lite EP4", 16, 3072, 2048, 1408, 32768),
    Share("V3 8 experts", 8, 4096, 7168, 2048, 32768),
    Share("V3 32 experts", 32, 1024, 7168, 2048, 32768),
    Share("Qwen3 EP1", 128, 512, 2048, 768, 8192),
    Share("Qwen3 EP4", 32, 2048, 2048, 768, 32768),
)


class Case:
    """One set of operands; index_R gathers from source_ND what x_RD could hold: some tokens in their order."""

    def __init__(self, share: Share, layer: str, *, balanced: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        width, depth = (2 * share.ffn, share.hidden) if layer == "gate-up" else (share.hidden, share.ffn)
        rows, tokens = share.experts * share.rows_each, share.tokens
        counts = [share.rows_each] * share.experts if balanced else skewed_counts(share.experts, rows)
        chosen = (torch.randperm(tokens, generator=generator, device="cuda")[:count].sort().values for count in counts)
        self.name = f"{share.name}, {layer}, {'balanced' if balanced else 'skewed'}"
        self.balanced = balanced
        self.index_R = torch.cat(list(chosen))
        self.x_RD, self.w_eFD = normal(rows, depth), normal(share.experts, width, depth)
        self.dy_RF, self.source_ND = normal(rows, width), normal(tokens, depth)
        self.counts_e = torch.tensor(counts, dtype=torch.int32, device="cuda")
        self.flops = 2 * rows * width * depth  # of any of the three products
        self.tiles = tile_table(self.counts_e, rows)

    def forward(self, x: Tensor, index: Tensor | None = None, launch: GemmLaunch | None = None) -> Tensor:
        return grouped_gemm_forward(x, self.w_eFD, self.counts_e, index, tiles=self.tiles, launch=launch)

    def input_gradient(self) -> Tensor:
        return grouped_gemm_input_gradient(self.dy_RF, self.w_eFD, self.counts_e, tiles=self.tiles)

    def weight_gradient(self, x: Tensor, index: Tensor | None = None, **how: Any) -> Tensor:
        return grouped_gemm_weight_gradient(self.dy_RF, x, self.counts_e, index, tiles=self.tiles, **how)


def main() -> None:
    options = record.parser(
        __doc__,
        rounds=(6, "turns that each contender takes"),
        only=("", "shares whose name contains this"),
        gather=(False, "row gathers only, with each launch"),
    ).parse_args()
    burn(seconds=2.0)
    products: list[dict[str, Any]] = []
    extras: list[dict[str, Any]] = []
    for case in draw_all(options.only):
        if options.gather:
            products += gathers_of(case, options.rounds)
            continue
        products += [row_of(case, product, options.rounds) for product in PRODUCTS]
        if case.balanced:
            extras.append(extras_of(case, options.rounds))
    if options.gather:
        numbers: dict[str, Any] = {"rows": products, "summary": gather_summary(products)}
    else:
        numbers = {"tflops": products, "extras": extras, "summary": summarize(products, extras)}
    for name, figures in numbers["summary"].items():
        record.show({"": name, **figures})
    record.write(options, numbers, triton=triton.__version__)


def draw_all(only: str) -> Iterator[Case]:
    """Every case of the shares whose name contains `only`."""
    for share in (share for share in SHARES if only in share.name):
        for balanced in (True, False):
            for layer in ("gate-up", "down"):
                yield Case(share, layer, balanced=balanced)


def skewed_counts(experts: int, rows: int) -> list[int]:
    """Log-normal shares of `rows`, the same on every run, no larger than half of them."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.exp(0.6 * torch.randn(experts, generator=generator, dtype=torch.float64))
    counts = (weights / weights.sum() * rows).long()
    counts[: rows - int(counts.sum())] += 1
    return counts.tolist()


def row_of(case: Case, product: str, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every contender for one product of a case."""
    ways = ways_of(case, product)
    check_parity(ways, "ours", "grouped_mm", f"{case.name}, {product}")
    tflops = {name: case.flops / ms / 1e9 for name, ms in take_turns(ways, rounds).items()}
    record.show({"case": case.name, "product": product, **tflops})
    return {"case": case.name, "product": product, "balanced": case.balanced, **tflops}


def ways_of(case: Case, product: str) -> Ways:
    """Ways to compute one product; cuBLAS bmm only where the groups are equal."""
    x_RD, w_eFD, dy_RF = case.x_RD, case.w_eFD, case.dy_RF
    ends_e = case.counts_e.cumsum(0, dtype=torch.int32)
    # Rows of each expert; a view that only means something when the counts are equal.
    x_eRD, dy_eRF = (rows.view(len(ends_e), -1, rows.shape[1]) for rows in (x_RD, dy_RF))
    ways: Ways
    if product == "forward":
        ways = {
            "ours": lambda: case.forward(x_RD),
            "grouped_mm": lambda: F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e),
            "bmm": lambda: torch.bmm(x_eRD, w_eFD.transpose(1, 2)),
            "mm": lambda: x_RD @ w_eFD[0].T,
        }
    elif product == "input gradient":
        ways = {
            "ours": case.input_gradient,
            "grouped_mm": lambda: F.grouped_mm(dy_RF, w_eFD, offs=ends_e),
            "bmm": lambda: torch.bmm(dy_eRF, w_eFD),
            "mm": lambda: dy_RF @ w_eFD[0],
        }
    else:
        ways = {
            "ours": lambda: case.weight_gradient(x_RD),
            "grouped_mm": lambda: F.grouped_mm(dy_RF.T, x_RD, offs=ends_e),
            "bmm": lambda: torch.bmm(dy_eRF.transpose(1, 2), x_eRD),
            "mm": lambda: dy_RF.T @ x_RD,
        }
    return ways if case.balanced else {name: way for name, way in ways.items() if name != "bmm"}


def extras_of(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of what is fused into a product, beside the plain product and the separate way."""
    x_RD, source_ND, index_R = case.x_RD, case.source_ND, case.index_R
    main_eFD = torch.zeros_like(case.w_eFD, dtype=torch.float32)
    sets: tuple[Ways, ...] = (
        {
            "forward": lambda: case.forward(x_RD),
            "forward, gather fused": lambda: case.forward(source_ND, index_R),
            "forward, gather apart": lambda: case.forward(source_ND[index_R]),
        },
        {
            "weight gradient": lambda: case.weight_gradient(x_RD),
            "weight gradient, gather fused": lambda: case.weight_gradient(source_ND, index_R),
            "weight gradient, gather apart": lambda: case.weight_gradient(source_ND[index_R]),
        },
        {
            "weight gradient, sum fused": lambda: case.weight_gradient(x_RD, accumulate_into=main_eFD),
            "weight gradient, sum apart": lambda: main_eFD.add_(case.weight_gradient(x_RD)),
        },
        {"tile table": lambda: tile_table(case.counts_e, len(x_RD)).starts_e},
    )
    for name, ways in zip(("forward", "weight gradient"), sets, strict=False):
        check_parity(ways, f"{name}, gather fused", f"{name}, gather apart", case.name)
    times = {name: ms for ways in sets for name, ms in take_turns(ways, rounds).items()}
    record.show({"case": case.name, "ms": times})
    return {"case": case.name, "milliseconds": times}


def gathers_of(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of both products that may gather: rows in place, copied first, gathered by each launch."""
    x_RD, source_ND, index_R = case.x_RD, case.source_ND, case.index_R
    products: dict[str, Callable[..., Tensor]] = {"forward": case.forward, "weight_gradient": case.weight_gradient}
    for name, product in products.items():
        ways: Ways = {
            "in_place": partial(product, x_RD),
            "copied": lambda product=product: product(source_ND[index_R]),
            **{key: partial(product, source_ND, index_R, launch=given) for key, given in GATHER_LAUNCHES.items()},
        }
        for key in GATHER_LAUNCHES:
            check_parity(ways, key, "copied", f"{case.name}, {name}, {key}")
        times = take_turns(ways, rounds)
        record.show({"case": case.name, "product": name, "ms": times})
        yield {"case": case.name, "balanced": case.balanced, "product": name, "milliseconds": times}


def check_parity(ways: Ways, name: str, other: str, what: str) -> None:
    """Two ways of one product in bfloat16 must agree."""
    apart = decibels(ways[name](), ways[other]())
    assert apart > BEST_DB, f"{what}: {apart:.1f} dB apart, the bar is {BEST_DB}"


def _mean(ratios: list[float]) -> dict[str, float]:
    return {"geometric mean": geometric_mean(ratios), "least": min(ratios)}


def summarize(products: Iterable[Mapping[str, Any]], extras: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The ratios that the project has bars for: above 1 is faster than the other."""

    def ratio(other: str, **chosen: object) -> dict[str, float]:
        rows = [row for row in products if other in row and all(row[key] == value for key, value in chosen.items())]
        return _mean([row["ours"] / row[other] for row in rows])

    def fused(product: str, what: str, other: str) -> dict[str, float]:
        times = [row["milliseconds"] for row in extras]
        return _mean([row[other] / row[f"{product}, {what} fused"] for row in times])

    summary: dict[str, Any] = {
        "balanced, over bmm": ratio("bmm", balanced=True),
        "balanced, over grouped_mm": ratio("grouped_mm", balanced=True),
        "skewed, over grouped_mm": ratio("grouped_mm", balanced=False),
    }
    for name in ("forward", "weight gradient"):
        summary[f"{name}, gather fused over plain"] = fused(name, "gather", name)
        summary[f"{name}, gather fused over apart"] = fused(name, "gather", f"{name}, gather apart")
    summary["weight gradient, sum fused over apart"] = fused("weight gradient", "sum", "weight gradient, sum apart")
    summary["by product"] = {
        product: {other: ratio(other, balanced=True, product=product) for other in ("bmm", "grouped_mm", "mm")}
        | {"grouped_mm, skewed": ratio("grouped_mm", balanced=False, product=product)}
        for product in PRODUCTS
    }
    return summary


def gather_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed of each way to gather as a fraction of the product on rows in place, by product and load."""
    summary: dict[str, Any] = {}
    for product in ("forward", "weight_gradient"):
        for load, balanced in (("balanced", True), ("skewed", False)):
            times = [row["milliseconds"] for row in rows if (row["product"], row["balanced"]) == (product, balanced)]
            for way in ("copied", *GATHER_LAUNCHES):
                ratios = [row["in_place"] / row[way] for row in times]
                figures = {"mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
                summary.setdefault(product, {}).setdefault(load, {})[way] = figures
    return summary


if __name__ == "__main__":
    main()
