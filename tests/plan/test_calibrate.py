"""Measuring this machine gives a hardware file that rates read back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import HardwareError
from penstock.kernels.tuning import device_facts
from penstock.plan.calibrate import (
    BenchmarkSizes,
    DeviceFigures,
    fit,
    measure_device,
    measure_transfers,
    measured_hardware,
    rounded,
)
from penstock.plan.hardware import POINTS, GroupedPoint, Hardware, ProductPoint, RankGroup, TransferPoint
from penstock.plan.hardware_file import load_hardware, read_hardware, write_hardware
from penstock.plan.rates import Rates, TransferTimes
from tests.distributed.pool import Pool

CPU = torch.device("cpu")
TINY = BenchmarkSizes(
    products=((16, 8, 32), (32, 32, 32)),
    grouped=((2, 8, 16, 8),),
    attention=((1, 2, 16, 12, 8),),
    copy_bytes=2**16,
    round_seconds=1e-4,
)
WHERE = "1 x a test, torch 0"


def transfer(size: int, seconds: float, ranks: int = 4, node_ranks: int = 4) -> TransferPoint:
    return TransferPoint(ranks=ranks, node_ranks=node_ranks, leaving_bytes=size, seconds=seconds)


def findings() -> DeviceFigures:
    """Measurements of a GPU that does not exist."""
    real = measure_device(CPU, device_facts(CPU, "fp32"), replace(TINY, products=(), grouped=()))
    points = {
        "product": tuple(
            ProductPoint(m=size, n=size, k=size, flops_per_second=rate)
            for size, rate in ((4096, 700e12), (1024, 300e12))
        ),
        **{
            f"grouped_{name}": (GroupedPoint(groups=8, rows=512, n=2048, k=2048, flops_per_second=rate),)
            for name, rate in (("forward", 500e12), ("input_gradient", 400e12), ("weight_gradient", 300e12))
        },
        **{name: real.points[name] for name in ("attention_forward", "attention_backward")},
    }
    return DeviceFigures(
        points=points,
        capacity_bytes=150 * 10**9,
        context_bytes=10**9,
        memory_bytes_per_second=4e12,
        kernel_seconds=2e-6,
        launch_seconds=9e-6,
    )


def described(
    found: DeviceFigures, transfers: dict[str, tuple[TransferPoint, ...]], known: Hardware | None
) -> Hardware:
    return measured_hardware("Ours", "nvidia", found, transfers, known=known, where=WHERE)  # type: ignore[arg-type]


def test_a_cpu_is_measured_in_every_operator_that_runs_on_it() -> None:
    found = measure_device(CPU, device_facts(CPU, "fp32"), TINY)
    by_kernels_only = {"grouped_forward_gathered", "grouped_weight_gradient_gathered"}
    by_kernels_only |= {"grouped_weight_gradient_accumulated"}
    of_device = {name for name, point in POINTS.items() if point is not TransferPoint}
    assert found.points.keys() == of_device - by_kernels_only
    assert {point.dtype for point in found.points["product"]} == {"fp32", "bf16"}
    assert all(point.flops_per_second > 0 for points in found.points.values() for point in points)
    assert 0 < found.context_bytes < found.capacity_bytes
    assert min(found.memory_bytes_per_second, found.kernel_seconds, found.launch_seconds) > 0


def test_measurements_of_this_machine_are_a_file_that_rates_read(tmp_path: Path) -> None:
    found = measure_device(CPU, device_facts(CPU, "fp32"), TINY)
    hardware = rounded(measured_hardware("A CPU", "cpu", found, {}, known=None, where=WHERE))
    write_hardware(tmp_path / "cpu.toml", hardware)
    again = read_hardware(tmp_path / "cpu.toml")
    assert again == hardware
    rates = Rates(again)
    answer = rates.product(32, 32, 32, "fp32")
    point = next(point for point in found.points["product"] if point.sizes == (32, 32, 32))
    assert answer.seconds == pytest.approx(2 * 32**3 / point.flops_per_second, rel=1e-3)
    assert answer.source == f"measured: {WHERE}"
    assert rates.grouped("forward_gathered", 2, 8, 16, 8, "fp32").seconds > 0
    assert again.host_link.bytes_per_second == pytest.approx(found.memory_bytes_per_second / 4, rel=1e-3)
    with pytest.raises(HardwareError, match=r"nothing is known of all-to-all.*penstock calibrate --processes"):
        TransferTimes(again).collective("all-to-all", 1e6, RankGroup(2, 2))


def test_a_known_chip_keeps_its_peaks_and_what_was_not_measured() -> None:
    h200 = load_hardware("H200")
    point = transfer(10**8, 1e-3)
    mine = described(findings(), {"all-to-all": (point,)}, h200)
    assert (mine.peaks, mine.node) == (h200.peaks, h200.node)
    assert mine.efficiency.product == pytest.approx(500e12 / 989e12)
    assert mine.efficiency.grouped_forward_gathered == mine.efficiency.grouped_forward
    assert mine.efficiency.memory == pytest.approx(4 / 4.8)
    fresh = [one for one in mine.collectives if one.source.startswith(f"measured: {WHERE}")]
    assert [(one.kind, one.reach) for one in fresh] == [("all-to-all", "node")]
    assert len(mine.collectives) == len(h200.collectives)
    assert mine.overhead.reserve_share == h200.overhead.reserve_share


def test_the_fastest_product_of_an_unknown_chip_stands_for_its_peak() -> None:
    mine = described(findings(), {}, None)
    assert mine.peaks.bf16 == 700e12
    assert mine.peaks.memory_bytes_per_second == 4e12
    assert mine.efficiency.memory == 1
    assert (mine.node.devices, mine.node.link_bytes_per_second) == (1, None)
    assert "the fastest that was seen" in mine.peaks.source


def test_collectives_between_machines_say_nothing_of_links_and_those_of_a_mesh_count_the_links_used() -> None:
    points = tuple(transfer(size, 1e-4 + size / 5e9, node_ranks=2) for size in (10**6, 10**8))
    mine = described(findings(), {"all-gather": points}, None)
    assert (mine.node.devices, mine.node.link_bytes_per_second) == (2, None)
    assert mine.node.network_bytes_per_second == pytest.approx(5e9)
    assert [(one.kind, one.reach) for one in mine.collectives] == [("all-gather", "cluster")]
    point = transfer(10**9, 1e9 / (0.7 * 3 * 64e9))
    mesh = described(findings(), {"all-to-all": (point,)}, load_hardware("MI300X"))
    assert mesh.collectives[0].efficiency == pytest.approx(0.7)


def test_several_nodes_have_rates_of_their_links_and_of_the_network() -> None:
    between = tuple(transfer(size, 1e-4 + size / 5e9, node_ranks=2) for size in (10**6, 10**8))
    inside = tuple(transfer(size, 1e-5 + size / 50e9, 2, 2) for size in (10**6, 10**8))
    mine = measured_hardware(
        "Ours", "nvidia", findings(), {"all-gather": between}, in_node={"all-gather": inside}, known=None, where=WHERE
    )
    rates = (mine.node.link_bytes_per_second, mine.node.network_bytes_per_second)
    assert (mine.node.devices, rates) == (2, (pytest.approx(50e9), pytest.approx(5e9)))
    assert [(one.kind, one.reach) for one in mine.collectives] == [("all-gather", "node"), ("all-gather", "cluster")]
    times = TransferTimes(mine)
    one, two = (times.collective("all-gather", 1e8, RankGroup(ranks, 2)).seconds for ranks in (2, 4))
    assert one < two / 3


def test_a_fit_finds_latency_and_bandwidth_and_no_negative_latency() -> None:
    exact = [transfer(size, 30e-6 + size / 200e9, 2, 2) for size in (10**5, 10**6, 10**8)]
    assert fit(exact) == (pytest.approx(30e-6), pytest.approx(200e9))
    assert fit(exact[:1]) == (0, pytest.approx(10**5 / exact[0].seconds))
    steep = [transfer(10**6, 1e-6, 2, 2), transfer(10**7, 1e-4, 2, 2)]
    latency, bandwidth = fit(steep)
    assert latency == 0
    assert bandwidth > 0


def _transfers() -> list[tuple[str, tuple[int, ...], float]]:
    found = measure_transfers(CPU, 2, (2**12, 2**14))
    return [(kind, point.sizes, point.seconds) for kind, points in found.items() for point in points]


def test_processes_measure_every_collective_and_all_see_the_slowest(ranks: Pool) -> None:
    first, second = ranks.run(2, _transfers)
    assert first == second
    half = [(2, 1, 2**11), (2, 1, 2**13)]
    assert [sizes for _, sizes, _ in first] == [*half, *half, *half, (2, 1, 2**12), (2, 1, 2**14)]
    assert all(seconds > 0 for _, _, seconds in first)
