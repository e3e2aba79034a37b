"""Seconds of operators: exact at measured points, a roofline far from them, and sane between."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import HardwareError
from penstock.kernels.tuning import GemmProduct
from penstock.plan.hardware import AttentionPoint, ComputePoint, GroupedPoint, MeasuredPoint, ProductPoint
from penstock.plan.hardware_file import known_hardware, load_hardware
from penstock.plan.rates import NEAR, Estimate, GroupedProduct, MeasuredRatio, Rates, corrected, pairs
from tests.examples import examples

H200 = load_hardware("H200")
RATES = Rates(H200)
SIZE = st.integers(1, 2**17)


def estimate_and_flops(operator: str, point: MeasuredPoint) -> tuple[Estimate, float]:
    """The estimate at a measured point, and its FLOPs."""
    if isinstance(point, ProductPoint):
        return RATES.product(point.m, point.n, point.k), 2 * point.m * point.n * point.k
    if isinstance(point, GroupedPoint):
        sizes = point.groups, point.rows, point.n, point.k
        return RATES.grouped(operator.removeprefix("grouped_"), *sizes), 2 * math.prod(sizes)  # type: ignore[arg-type]
    assert isinstance(point, AttentionPoint)
    direction, widths = operator.removeprefix("attention_"), (point.width, point.value_width)
    products = sum(widths) if direction == "forward" else 3 * widths[0] + 2 * widths[1]
    found = RATES.attention(direction, point.heads, point.queries, point.keys, widths)  # type: ignore[arg-type]
    return found, point.heads * point.queries**2 * products


def test_an_operator_takes_its_measured_time_at_a_measured_point() -> None:
    for measured in H200.measured:
        for point in measured.points:
            if isinstance(point, ComputePoint):
                found, flops = estimate_and_flops(measured.operator, point)
                assert found.seconds == pytest.approx(flops / point.flops_per_second)
                assert (found.basis, found.source) == ("measured", measured.source)


def test_a_product_far_from_all_points_is_a_roofline_at_the_stated_share() -> None:
    found = RATES.product(10**6, 10**6, 10**6)
    assert found.basis == "roofline"
    assert found.source == H200.efficiency.source
    assert found.seconds == pytest.approx(2e18 / (H200.peaks.bf16 * H200.efficiency.product), rel=0.02)
    without_points = load_hardware("MI300X")
    found = Rates(without_points).product(8192, 8192, 8192)
    assert found.basis == "roofline" and found.source.startswith("reported:")
    assert found.seconds == pytest.approx(2 * 8192**3 / (1307e12 * without_points.efficiency.product))


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "teraflops"),
    [
        *((8, 512, 2816, 2048, 349), (8, 1024, 2816, 2048, 339), (8, 2048, 2816, 2048, 447)),
        *((5, 1024, 5120, 1536, 366), (5, 2048, 5120, 1536, 467), (20, 1024, 3072, 5120, 443)),
        *((8, 1024, 4096, 7168, 491), (8, 4096, 4096, 7168, 548), (8, 4096, 7168, 2048, 519)),
        *((1, 4096, 4096, 4096, 615), (1, 8192, 28672, 4096, 629), (1, 1024, 4096, 14336, 490)),
    ],
)
def test_products_with_few_tiles_are_slower_as_amds_own_benchmarks_say(
    groups: int, rows: int, n: int, k: int, teraflops: int
) -> None:
    rates = Rates(load_hardware("MI300X"))  # Primus-Turbo, benchmark/baselines: gemm.json and grouped_gemm.json
    found = rates.product(rows, n, k) if groups == 1 else rates.grouped("forward", groups, rows, n, k)
    assert 2e-12 * groups * rows * n * k / found.seconds == pytest.approx(teraflops, rel=0.26)


def test_a_thin_product_takes_the_time_of_its_bytes_and_an_empty_kernel_its_least() -> None:
    bandwidth = H200.peaks.memory_bytes_per_second * H200.efficiency.memory
    thin = Rates(load_hardware("H100")).product(1, 8192, 8192)
    assert thin.seconds > 2 * 8192**2 / (3.35e12 * 0.9)
    assert RATES.memory_bound(0).seconds == H200.host.kernel_seconds
    assert RATES.memory_bound(1e9).seconds == pytest.approx(1e9 / bandwidth, rel=0.02)


def test_a_kernel_that_moves_bytes_takes_what_ours_took() -> None:
    rows = json.loads(Path("benchmarks/results/kernels-h200.json").read_text())["numbers"]["pointwise"]["rows"]
    moving = [row for row in rows if row["operator"] in ("rms_norm", "add_rms_norm", "rotate", "swiglu with weights")]
    errors = [RATES.memory_bound(row["bytes"]).seconds * 1e6 / row["us"] - 1 for row in moving]
    assert len(errors) > 20
    assert max(map(abs, errors)) < 0.2
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.06


def test_a_gradient_that_is_added_to_a_sum_costs_what_the_sum_moves() -> None:
    plain, summed = (
        RATES.grouped(product, 64, 16, 2816, 2048).seconds
        for product in ("weight_gradient", "weight_gradient_accumulated")
    )
    moved = 6 * 64 * 2816 * 2048
    least = moved / (H200.peaks.memory_bytes_per_second * H200.efficiency.memory)
    assert summed > plain + 0.9 * least


def test_fp8_is_a_roofline_where_only_bf16_was_measured_and_a_type_without_a_peak_is_refused() -> None:
    found = RATES.product(8192, 8192, 8192, "fp8")
    share = H200.efficiency.product * H200.efficiency.float8
    assert found == (pytest.approx(2 * 8192**3 / (1979e12 * share)), "roofline", H200.efficiency.source)
    unknown = Rates(replace(H200, peaks=H200.peaks.model_copy(update={"fp32": None})))
    with pytest.raises(HardwareError, match=r"nothing is known of fp32 products on H200; fix: write peaks\.fp32"):
        unknown.product(8, 8, 8, "fp32")


def test_attention_counts_the_triangle_that_it_computes() -> None:
    assert pairs(4096, 4096, causal=True) == 4096**2 / 2
    assert pairs(512, 4096, causal=True) == 512 * (4096 - 256)
    assert pairs(512, 4096, causal=False) == 512 * 4096
    whole = RATES.attention("forward", 4, 65536, 65536, (128, 128), causal=False).seconds
    half = RATES.attention("forward", 4, 65536, 65536, (128, 128)).seconds
    assert whole == pytest.approx(2 * half, rel=0.01)


def test_points_count_by_nearness_and_the_roofline_as_one_a_factor_of_4_away() -> None:
    at = MeasuredRatio((math.log(100),), math.log(2), "here")
    exact, near, far = (corrected(1.0, (size,), [at], "stated") for size in (100, 110, 10**9))
    assert exact == (pytest.approx(2.0), "measured", "here")
    assert near.seconds == pytest.approx(2.0, rel=0.01)
    assert near.basis == "measured"
    assert far.seconds == pytest.approx(1.0, rel=0.01)
    assert (far.basis, far.source) == ("roofline", "stated")
    border = corrected(1.0, (400,), [at], "stated")
    assert border.seconds == pytest.approx(math.sqrt(2))
    assert math.log(4) == NEAR


@cache
def rates_of_every_chip() -> list[Rates]:
    return [Rates(load_hardware(name)) for name in known_hardware()]


@examples(60, deadline=None)
@given(m=SIZE, n=SIZE, k=SIZE)
def test_a_product_never_beats_the_peak(m: int, n: int, k: int) -> None:
    for rates in rates_of_every_chip():
        assert rates.product(m, n, k).seconds >= 2 * m * n * k / rates.hardware.peaks.bf16


@examples(60, deadline=None)
@given(groups=st.integers(1, 128), rows=st.integers(1, 8192), n=st.integers(64, 8192), k=st.integers(64, 8192))
def test_twice_the_rows_never_take_less_time(groups: int, rows: int, n: int, k: int) -> None:
    few, many = (RATES.grouped("forward", groups, count, n, k).seconds for count in (rows, 2 * rows))
    assert few <= many * 1.02


def test_products_of_experts_have_the_names_of_the_kernels() -> None:
    assert GroupedProduct.__args__ == GemmProduct.__args__  # type: ignore[attr-defined]
