"""Grouped GEMM on one GPU: ours against grouped_mm, cuBLAS bmm on equal groups and cuBLAS mm of the same size.

    python -m benchmarks.kernels.grouped_gemm --output grouped_gemm.json
    python -m benchmarks.kernels.grouped_gemm --gather --output gather.json      # row gathers only, launch by launch

Rows of each case are an expert-parallel share of DeepSeek-V2-Lite, DeepSeek-V3 or Qwen3-30B-A3B; gate-up and down
projections; every expert the same number of rows, or skewed (log-normal, sigma 0.6). All in bfloat16 on random data.

What is compared takes turns, in another order each round, on a GPU that is kept warm before each set: a cold one runs a
fifth faster for a moment, which would favour the first kernel. Times are medians over all rounds. Ours is given its
tile table, as a layer shares one between its six products; what the table takes is measured by itself.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
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

Contenders = dict[str, Callable[[], Tensor]]


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


@dataclass(frozen=True)
class Case:
    """One set of operands; index_R gathers from source_ND what x_RD could hold."""

    name: str
    x_RD: Tensor
    w_eFD: Tensor
    dy_RF: Tensor
    counts_e: Tensor
    source_ND: Tensor
    index_R: Tensor
    balanced: bool

    @property
    def flops(self) -> int:
        """Of any of the three products."""
        return 2 * len(self.x_RD) * self.w_eFD[0].numel()


def main() -> None:
    options = parse_arguments()
    burn(seconds=2.0)
    if options.gather:
        gathers = [row for case in draw_all(options.only) for row in measure_gathers(case, options.rounds)]
        gather_summary = summarize_gathers(gathers)
        print_gathers(gathers, gather_summary)
        record.write(options, {"rows": gathers, "summary": gather_summary}, triton=triton.__version__)
        return
    products, extras = [], []
    for case in draw_all(options.only):
        products += [measure_product(case, product, options.rounds) for product in PRODUCTS]
        if case.balanced:
            extras.append(measure_extras(case, options.rounds))
    summary = summarize(products, extras)
    print_tables(products, extras, summary)
    numbers = {"tflops": products, "extras": extras, "summary": summary}
    record.write(options, numbers, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns that each contender takes")
    parser.add_argument("--only", default="", help="shares whose name contains this")
    parser.add_argument("--gather", action="store_true", help="row gathers only, with each launch")
    record.add_arguments(parser)
    return parser.parse_args()


def draw_all(only: str) -> Iterator[Case]:
    """Every case of the shares whose name contains `only`."""
    for share in SHARES:
        if only in share.name:
            yield from draw(share, balanced=True)
            yield from draw(share, balanced=False)


def draw(share: Share, balanced: bool) -> Iterator[Case]:
    """Gate-up and down projections of a share. A gather takes, for each expert, some tokens in their order."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows = share.experts * share.rows_each
    counts = [share.rows_each] * share.experts if balanced else skewed_counts(share.experts, rows)
    picks = [torch.randperm(share.tokens, generator=generator, device="cuda")[:count].sort().values for count in counts]
    for layer, width, depth in (("gate-up", 2 * share.ffn, share.hidden), ("down", share.hidden, share.ffn)):
        yield Case(
            name=f"{share.name}, {layer}, {'balanced' if balanced else 'skewed'}",
            x_RD=normal(rows, depth),
            w_eFD=normal(share.experts, width, depth),
            dy_RF=normal(rows, width),
            counts_e=torch.tensor(counts, dtype=torch.int32, device="cuda"),
            source_ND=normal(share.tokens, depth),
            index_R=torch.cat(picks),
            balanced=balanced,
        )


def skewed_counts(experts: int, rows: int) -> list[int]:
    """Log-normal shares of `rows`, the same on every run, no larger than half of them."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.exp(0.6 * torch.randn(experts, generator=generator, dtype=torch.float64))
    counts = (weights / weights.sum() * rows).long()
    counts[: rows - int(counts.sum())] += 1
    return counts.tolist()


def measure_product(case: Case, product: str, rounds: int) -> dict[str, object]:
    """TFLOP/s of every contender for one product of a case."""
    contenders = contenders_for(case, product)
    check_parity(contenders["ours"](), contenders["grouped_mm"](), f"{case.name}, {product}")
    return {"case": case.name, "product": product, "balanced": case.balanced} | {
        name: case.flops / milliseconds / 1e9 for name, milliseconds in take_turns(contenders, rounds).items()
    }


def contenders_for(case: Case, product: str) -> Contenders:
    """Ways to compute one product; cuBLAS bmm only where the groups are equal."""
    x_RD, w_eFD, dy_RF, counts_e = case.x_RD, case.w_eFD, case.dy_RF, case.counts_e
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    tiles = tile_table(counts_e, len(x_RD))
    experts = len(counts_e)
    # Rows of each expert; a view that only means something when the counts are equal.
    x_eRD, dy_eRF = (t.view(experts, -1, t.shape[1]) for t in (x_RD, dy_RF))
    contenders: Contenders
    if product == "forward":
        contenders = {
            "ours": lambda: grouped_gemm_forward(x_RD, w_eFD, counts_e, tiles=tiles),
            "grouped_mm": lambda: F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e),
            "bmm": lambda: torch.bmm(x_eRD, w_eFD.transpose(1, 2)),
            "mm": lambda: x_RD @ w_eFD[0].T,
        }
    elif product == "input gradient":
        contenders = {
            "ours": lambda: grouped_gemm_input_gradient(dy_RF, w_eFD, counts_e, tiles=tiles),
            "grouped_mm": lambda: F.grouped_mm(dy_RF, w_eFD, offs=ends_e),
            "bmm": lambda: torch.bmm(dy_eRF, w_eFD),
            "mm": lambda: dy_RF @ w_eFD[0],
        }
    else:
        contenders = {
            "ours": lambda: grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, tiles=tiles),
            "grouped_mm": lambda: F.grouped_mm(dy_RF.T, x_RD, offs=ends_e),
            "bmm": lambda: torch.bmm(dy_eRF.transpose(1, 2), x_eRD),
            "mm": lambda: dy_RF.T @ x_RD,
        }
    if not case.balanced:
        del contenders["bmm"]
    return contenders


def measure_extras(case: Case, rounds: int) -> dict[str, object]:
    """Milliseconds of what is fused into a product, beside the plain product and the separate way."""
    x_RD, w_eFD, dy_RF, counts_e, source_ND, index_R = (
        case.x_RD, case.w_eFD, case.dy_RF, case.counts_e, case.source_ND, case.index_R
    )  # fmt: skip
    tiles = tile_table(counts_e, len(x_RD))
    main_eFD = torch.zeros_like(w_eFD, dtype=torch.float32)

    def weight_gradient(x: Tensor, index: Tensor | None = None, main: Tensor | None = None) -> Tensor:
        return grouped_gemm_weight_gradient(dy_RF, x, counts_e, index, accumulate_into=main, tiles=tiles)

    forward: Contenders = {
        "forward": lambda: grouped_gemm_forward(x_RD, w_eFD, counts_e, tiles=tiles),
        "forward, gather fused": lambda: grouped_gemm_forward(source_ND, w_eFD, counts_e, index_R, tiles=tiles),
        "forward, gather apart": lambda: grouped_gemm_forward(source_ND[index_R], w_eFD, counts_e, tiles=tiles),
    }
    gathered: Contenders = {
        "weight gradient": lambda: weight_gradient(x_RD),
        "weight gradient, gather fused": lambda: weight_gradient(source_ND, index_R),
        "weight gradient, gather apart": lambda: weight_gradient(source_ND[index_R]),
    }
    summed: Contenders = {
        "weight gradient, sum fused": lambda: weight_gradient(x_RD, main=main_eFD),
        "weight gradient, sum apart": lambda: main_eFD.add_(weight_gradient(x_RD)),
    }
    check_parity(forward["forward, gather fused"](), forward["forward, gather apart"](), case.name)
    check_parity(gathered["weight gradient, gather fused"](), gathered["weight gradient, gather apart"](), case.name)
    table: Contenders = {"tile table": lambda: tile_table(counts_e, len(x_RD)).starts_e}
    times = {name: ms for turn in (forward, gathered, summed, table) for name, ms in take_turns(turn, rounds).items()}
    return {"case": case.name, "milliseconds": times}


def measure_gathers(case: Case, rounds: int) -> list[dict[str, object]]:
    """Milliseconds of both products that may gather: rows in place, copied first, gathered by each launch."""
    w_eFD, dy_RF, counts_e, source_ND, index_R = case.w_eFD, case.dy_RF, case.counts_e, case.source_ND, case.index_R
    tiles = tile_table(counts_e, len(case.x_RD))

    def forward(x: Tensor, index: Tensor | None = None, launch: GemmLaunch | None = None) -> Tensor:
        return grouped_gemm_forward(x, w_eFD, counts_e, index, tiles=tiles, launch=launch)

    def weight_gradient(x: Tensor, index: Tensor | None = None, launch: GemmLaunch | None = None) -> Tensor:
        return grouped_gemm_weight_gradient(dy_RF, x, counts_e, index, tiles=tiles, launch=launch)

    def copied(product: Callable[[Tensor], Tensor]) -> Tensor:
        return product(source_ND[index_R])

    rows: list[dict[str, object]] = []
    for name, product in (("forward", forward), ("weight_gradient", weight_gradient)):
        contenders: Contenders = {
            "in_place": partial(product, case.x_RD),
            "copied": partial(copied, product),
        }
        for launch_name, launch in GATHER_LAUNCHES.items():
            contenders[launch_name] = partial(product, source_ND, index_R, launch)
            check_parity(contenders[launch_name](), contenders["copied"](), f"{case.name}, {name}, {launch_name}")
        times = take_turns(contenders, rounds)
        rows.append({"case": case.name, "balanced": case.balanced, "product": name, "milliseconds": times})
    return rows


def check_parity(got: Tensor, expected: Tensor, what: str) -> None:
    """Two ways of one product in bfloat16 must agree."""
    noise = (got.float() - expected.float()).square().sum()
    decibels = 10 * torch.log10(expected.float().square().sum() / noise).item()
    assert decibels > BEST_DB, f"{what}: {decibels:.1f} dB apart, the bar is {BEST_DB}"


def take_turns(contenders: Contenders, rounds: int, calls: int = 4) -> dict[str, float]:
    """Median milliseconds of each contender; the first call of a turn is not counted."""
    burn(seconds=0.05)
    names = list(contenders)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contenders[name]()
            for _ in range(calls):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                contenders[name]()
                end.record()
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in events[name]) for name in names}


def burn(seconds: float) -> None:
    """Keep the matrix units busy, so that clocks are those of a long run."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(math.ceil(seconds / 0.0017)):
        square @ square


def summarize(products: list[dict], extras: list[dict]) -> dict[str, object]:
    """The ratios that the project has bars for: above 1 is faster than the other."""

    def ratio(other: str, **chosen: object) -> dict[str, float]:
        rows = [row for row in products if other in row and all(row[key] == value for key, value in chosen.items())]
        ratios = [row["ours"] / row[other] for row in rows]
        return {"geometric mean": statistics.geometric_mean(ratios), "least": min(ratios)}

    def extra(other: str, fused: str) -> dict[str, float]:
        ratios = [row["milliseconds"][other] / row["milliseconds"][fused] for row in extras]
        return {"geometric mean": statistics.geometric_mean(ratios), "least": min(ratios)}

    by_product = {
        product: {other: ratio(other, balanced=True, product=product) for other in ("bmm", "grouped_mm", "mm")}
        | {"grouped_mm, skewed": ratio("grouped_mm", balanced=False, product=product)}
        for product in PRODUCTS
    }
    return {
        "balanced, over bmm": ratio("bmm", balanced=True),
        "balanced, over grouped_mm": ratio("grouped_mm", balanced=True),
        "skewed, over grouped_mm": ratio("grouped_mm", balanced=False),
        "forward, gather fused over plain": extra("forward", "forward, gather fused"),
        "forward, gather fused over apart": extra("forward, gather apart", "forward, gather fused"),
        "weight gradient, gather fused over plain": extra("weight gradient", "weight gradient, gather fused"),
        "weight gradient, gather fused over apart": extra(
            "weight gradient, gather apart", "weight gradient, gather fused"
        ),
        "weight gradient, sum fused over apart": extra("weight gradient, sum apart", "weight gradient, sum fused"),
        "by product": by_product,
    }


def summarize_gathers(rows: list[dict]) -> dict[str, dict]:
    """Speed of each way to gather as a fraction of the product on rows in place, by product and load."""
    summary: dict[str, dict] = {}
    for product in ("forward", "weight_gradient"):
        for load, balanced in (("balanced", True), ("skewed", False)):
            times = [r["milliseconds"] for r in rows if r["product"] == product and r["balanced"] == balanced]
            for way in ("copied", *GATHER_LAUNCHES):
                ratios = [one["in_place"] / one[way] for one in times]
                figures = {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
                summary.setdefault(product, {}).setdefault(load, {})[way] = figures
    return summary


def print_gathers(rows: list[dict], summary: dict[str, dict]) -> None:
    ways = ("copied", *GATHER_LAUNCHES)
    print(f"{'speed over rows in place':36} {'product':16} " + " ".join(f"{way:>12}" for way in ways))
    for row in rows:
        times = row["milliseconds"]
        ratios = " ".join(f"{times['in_place'] / times[way]:12.3f}" for way in ways)
        print(f"{row['case']:36} {row['product']:16} {ratios}")
    for product, loads in summary.items():
        for load, figures in loads.items():
            means = " ".join(f"{one['mean']:.3f} ({one['least']:.3f})" for one in figures.values())
            print(f"{product:16} {load:9} geometric mean (least): {means}")


def print_tables(products: list[dict], extras: list[dict], summary: dict) -> None:
    print(f"{'TFLOP/s':36} {'product':16} {'ours':>6} {'grouped_mm':>10} {'bmm':>6} {'mm':>6}")
    for row in products:
        bmm = f"{row['bmm']:6.0f}" if row["balanced"] else "     -"
        print(
            f"{row['case']:36} {row['product']:16} {row['ours']:6.0f} {row['grouped_mm']:10.0f} {bmm} {row['mm']:6.0f}"
        )
    print("\nmilliseconds: " + ", ".join(extras[0]["milliseconds"]))
    for row in extras:
        print(f"{row['case']:36} " + " ".join(f"{ms:6.3f}" for ms in row["milliseconds"].values()))
    print()
    for name, value in summary.items():
        if name != "by product":
            print(f"{name:42} geometric mean {value['geometric mean']:.3f}, least {value['least']:.3f}")
    for product, others in summary["by product"].items():
        print(f"{product:16} " + ", ".join(f"{other} {value['geometric mean']:.3f}" for other, value in others.items()))


if __name__ == "__main__":
    main()
