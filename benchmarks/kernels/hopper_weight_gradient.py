"""Gradients of experts' weights on a Hopper: each launch of our own kernel for it, Triton's kernel and cuBLAS.

    python -m benchmarks.kernels.hopper_weight_gradient --output hopper-weight-gradient.json
    python -m benchmarks.kernels.hopper_weight_gradient --launches ring,ring_tall --only "V3" --rounds 12

First each launch is checked in a process of its own, all at the same time: against products in 64 bits, for uneven
experts, experts without rows, counts that end inside a block, and NaN behind the last row; and against Triton's kernel
for more tiles than there are programs. One that fails, or does not end within `--patience`, is named and left out. Then
launches take turns (`benchmarks.kernels.grouped_gemm`) on expert-parallel shares of DeepSeek-V2-Lite, DeepSeek-V3 and
Qwen3-30B-A3B, every expert with the same number of rows, or skewed. Results are added to sums in float32, or with
`--written` written in bfloat16. `mm` is cuBLAS' product of as many operations, one matrix for all rows in bfloat16.

What was measured is printed and written after each case, so an ended run keeps what it has.
"""

import argparse
import faulthandler
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.grouped_gemm import Contenders, burn, skewed_counts, take_turns
from benchmarks.kernels.launches_tried import RINGS
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.grouped_gemm import grouped_gemm_weight_gradient
from penstock.kernels.tile_table import TileTable, tile_table
from penstock.kernels.tuning import (
    GemmLaunch,
    GemmProduct,
    grouped_gemm_launch,
    in_triton,
    multiprocessors_of,
    target_of,
)

DEVICE = torch.device("cuda")

CHECKED_COUNTS = ([700, 0, 3, 1025, 256, 64], [0, 0, 0], [0, 128, 0], [9000, 1, 4000])
CHECKED_WIDTHS = ((720, 336), (336, 720))
"""Of dy and x: tiles reach beyond both, and lie in one and stand in the other."""
CHECKED_PROGRAMS = (2, 132)
TAIL = 77
"""Rows of NaN behind the last expert's."""
WORST_SUM = 1e-4
"""Norm of a sum's error over the norm of the sum; Hopper's matrix unit cuts its sums off."""
WORST_WRITTEN = 4e-3
"""The same of a result in bfloat16."""


@dataclass(frozen=True)
class Share:
    """The experts of one GPU, rows of each when balanced, and widths of dy and x for both projections."""

    name: str
    experts: int
    rows_each: int
    layers: tuple[tuple[str, int, int], ...]


SHARES = (
    Share("V2-Lite EP4", 16, 6144, (("gate-up", 2816, 2048), ("down", 2048, 1408))),
    Share("V2-Lite EP1", 64, 768, (("gate-up", 2816, 2048), ("down", 2048, 1408))),
    Share("V3 8 experts", 8, 4096, (("gate-up", 4096, 7168), ("down", 7168, 2048))),
    Share("Qwen3 EP4", 32, 4096, (("gate-up", 1536, 2048), ("down", 2048, 768))),
)


@dataclass(frozen=True)
class Case:
    """One set of operands."""

    name: str
    balanced: bool
    dy_RF: Tensor
    x_RD: Tensor
    counts_e: Tensor
    tiles: TileTable
    sum_eFD: Tensor

    @property
    def flops(self) -> int:
        """Of the product."""
        return 2 * len(self.x_RD) * self.sum_eFD[0].numel()

    def gradient(self, launch: GemmLaunch | None, *, written: bool) -> Tensor:
        """By a launch, or by Triton's kernel as the table has it."""
        if launch is None:
            product: GemmProduct = "weight_gradient" if written else "weight_gradient_accumulated"
            launch = grouped_gemm_launch(product, DEVICE, torch.bfloat16, self.sum_eFD[0].numel())
            launch = in_triton(launch, product)
        into = None if written else self.sum_eFD
        return grouped_gemm_weight_gradient(
            self.dy_RF, self.x_RD, self.counts_e, accumulate_into=into, tiles=self.tiles, launch=launch
        )


def main() -> None:
    options = parse_arguments()
    target = target_of(DEVICE) if torch.cuda.is_available() else "no GPU"
    if target != "sm_90" or not HAS_GLUON:
        print(f"the kernel is Hopper's and Gluon's, this is {target} with Triton {triton.__version__}", file=sys.stderr)
        sys.exit(1)
    if options.check:
        print(json.dumps(check_launch(RINGS[options.check])))
        return
    checks = check_all("benchmarks.kernels.hopper_weight_gradient", options.launches, options.patience)
    names = [name for name, found in checks.items() if "fault" not in found]
    burn(seconds=2.0)
    rows: list[dict] = []
    for case in draw_all(options.only):
        faulthandler.dump_traceback_later(options.patience, exit=True)
        rows.append(measure(case, names, options))
        faulthandler.cancel_dump_traceback_later()
        print(line(rows[-1]), flush=True)
        numbers = {"written": options.written, "checks": checks, "rows": rows, "summary": summarize(rows)}
        record.write(options, numbers, triton=triton.__version__)
    for load, figures in summarize(rows).items():
        print(f"{load}: over Triton's, " + ", ".join(f"{name} {one['mean']:.3f}" for name, one in figures.items()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each launch takes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--written", action="store_true", help="write results in bfloat16 instead of adding them")
    parser.add_argument("--patience", type=float, default=75.0, help="seconds that a check or a case may take")
    parser.add_argument(
        "--launches",
        type=lambda text: text.split(","),
        default=list(RINGS),
        help=f"which of these, by commas: {', '.join(RINGS)}",
    )
    parser.add_argument("--check", default="", choices=list(RINGS), help="check this launch only")
    record.add_arguments(parser)
    options = parser.parse_args()
    unknown = [name for name in options.launches if name not in RINGS]
    if unknown:
        parser.error(f"--launches: {', '.join(unknown)} is none of {', '.join(RINGS)}")
    return options


def check_all(module: str, names: Sequence[str], patience: float) -> dict[str, dict]:
    """What each launch's own process found, or why it found nothing; a process that takes too long is ended."""
    command = [sys.executable, "-m", module, "--check"]
    processes = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in names
    }
    end, found = time.monotonic() + patience, {}
    for name, process in processes.items():
        try:
            output, errors = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            last = errors.strip().splitlines()[-1:] or [""]
            found[name] = json.loads(output) if process.returncode == 0 else {"fault": last[0]}
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found[name] = {"fault": f"it did not end within {patience:g} s"}
        print(f"check of {name}: {found[name]}", flush=True)
    return found


def check_launch(launch: GemmLaunch) -> dict[str, float]:
    """Runs in a process of its own: the worst error of sums and of written results.

    Raises:
        AssertionError: an error is too large, an expert without rows was touched, or two runs differ.
    """
    worst = {"sum": 0.0, "written": 0.0}
    for counts in CHECKED_COUNTS:
        for widths in CHECKED_WIDTHS:
            case = draw(f"{counts} {widths}", counts, *widths, tail=TAIL)
            true_eFD = true_gradient(case, counts)
            for programs in CHECKED_PROGRAMS:
                one = replace(launch, idle_units=multiprocessors_of(DEVICE) - programs)
                for kind, error in errors_of(case, one, true_eFD).items():
                    worst[kind] = max(worst[kind], error)
    worst["against Triton"] = error_against_triton(launch)
    return worst


def errors_of(case: Case, launch: GemmLaunch, true_eFD: Tensor) -> dict[str, float]:
    """Of one launch, added and written."""
    before_eFD = torch.randn_like(case.sum_eFD)
    case.sum_eFD.copy_(before_eFD)
    case.gradient(launch, written=False)
    again = replace(case, sum_eFD=before_eFD.clone())
    again.gradient(launch, written=False)
    assert torch.equal(case.sum_eFD, again.sum_eFD), f"{case.name}: two runs differ"
    empty = case.counts_e == 0
    assert torch.equal(case.sum_eFD[empty], before_eFD[empty]), f"{case.name}: an expert without rows was touched"
    written_eFD = case.gradient(launch, written=True)
    assert not written_eFD[empty].any(), f"{case.name}: an expert without rows has a gradient"
    errors = {"sum": relative(case.sum_eFD, before_eFD + true_eFD), "written": relative(written_eFD, true_eFD)}
    assert errors["sum"] < WORST_SUM and errors["written"] < WORST_WRITTEN, f"{case.name}: {errors}"
    return errors


def error_against_triton(launch: GemmLaunch) -> float:
    """On a share with many tiles for each program."""
    case = draw("many tiles", skewed_counts(16, 16 * 768), 2816, 2048)
    case.gradient(None, written=False)
    other = replace(case, sum_eFD=torch.zeros_like(case.sum_eFD))
    other.gradient(launch, written=False)
    error = relative(other.sum_eFD, case.sum_eFD)
    assert error < WORST_SUM, f"{case.name}: {error}"
    return error


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of what is expected; NaN is infinite."""
    error = (got.double() - expected).norm() / expected.double().norm().clamp(min=1e-30)
    return error.nan_to_num(torch.inf).item()


def true_gradient(case: Case, counts: Sequence[int]) -> Tensor:
    """In 64 bits."""
    parts = [t.double().split([*counts, TAIL])[:-1] for t in (case.dy_RF, case.x_RD)]
    return torch.stack([dy.T @ x for dy, x in zip(*parts, strict=True)])


def draw_all(only: str) -> Iterator[Case]:
    """Every case whose name contains `only`."""
    for share in SHARES:
        rows = share.experts * share.rows_each
        for load in ("balanced", "skewed"):
            counts = [share.rows_each] * share.experts if load == "balanced" else skewed_counts(share.experts, rows)
            for layer, width, depth in share.layers:
                name = f"{share.name}, {layer}, {load}"
                if only in name:
                    yield draw(name, counts, width, depth, balanced=load == "balanced")


def draw(name: str, counts: Sequence[int], width: int, depth: int, *, balanced: bool = False, tail: int = 0) -> Case:
    """Operands, with `tail` rows of NaN behind the last expert's."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = sum(counts) + tail
    dy_RF, x_RD = (
        torch.randn(rows, columns, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for columns in (width, depth)
    )
    dy_RF[sum(counts) :] = x_RD[sum(counts) :] = torch.nan
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    sum_eFD = torch.zeros(len(counts), width, depth, device=DEVICE)
    return Case(name, balanced, dy_RF, x_RD, counts_e, tile_table(counts_e, rows), sum_eFD)


def measure(case: Case, names: Sequence[str], options: argparse.Namespace) -> dict[str, object]:
    """Milliseconds and TFLOP/s of each way."""
    ways: Contenders = {"triton": partial(case.gradient, None, written=options.written)}
    for name in names:
        ways[name] = partial(case.gradient, RINGS[name], written=options.written)
    ways["mm"] = lambda: case.dy_RF.T @ case.x_RD
    times = take_turns(ways, options.rounds)
    tflops = {name: case.flops / milliseconds / 1e9 for name, milliseconds in times.items()}
    return {"case": case.name, "balanced": case.balanced, "milliseconds": times, "tflops": tflops}


def summarize(rows: Sequence[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Speed of each way over Triton's, by load: geometric mean, least and most."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load, balanced in (("balanced", True), ("skewed", False)):
        times = [row["milliseconds"] for row in rows if row["balanced"] == balanced]
        for name in times[0] if times else ():
            ratios = [one["triton"] / one[name] for one in times]
            figures = {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
            found.setdefault(load, {})[name] = figures
    return found


def line(row: dict) -> str:
    """One case for the terminal, the fastest way first."""
    figures = sorted(row["tflops"].items(), key=lambda item: -item[1])
    return f"{row['case']:32} TFLOP/s: " + ", ".join(f"{name} {figure:.0f}" for name, figure in figures)


if __name__ == "__main__":
    main()
