"""GPUs: what PyTorch says of them, and what ranks measure together."""

from dataclasses import replace

import pytest
import torch

from penstock.plan.hardware import CollectiveKind, RankGroup, TransferPoint
from penstock.plan.hardware_file import load_hardware
from penstock.plan.rates import Rates, TransferTimes
from penstock.tune.preflight import gpus
from penstock.tune.preflight.gpus import (
    GPU_BUFFERS,
    GPU_SIDE,
    MEASURED,
    Gpu,
    NodeMeasurements,
    judge_gpus,
    judge_measured,
    measure,
    read_gpus,
)
from penstock.tune.preflight.host import PreflightCheck
from tests.distributed.pool import Pool

H200 = load_hardware("H200")
TOTAL = H200.memory.capacity_bytes
EIGHT = tuple(
    Gpu(name="NVIDIA H200", total_bytes=TOTAL, free_bytes=TOTAL - 10**9, reaches=frozenset(range(8)) - {number})
    for number in range(8)
)


def wrong(gpus: tuple[Gpu, ...]) -> list[PreflightCheck]:
    return [one for one in judge_gpus(gpus, "nvidia", H200) if one.status != "ok"]


def test_a_good_node_passes() -> None:
    alone = (replace(EIGHT[0], reaches=frozenset()),)
    assert wrong(EIGHT) == wrong(alone) == []
    shown = {one.name: one.got for one in judge_gpus(EIGHT, "nvidia", H200)}
    assert (shown["GPUs"], shown["peer access"]) == ("8 x NVIDIA H200", "all 56 ways between 8 GPUs")
    assert "peer access" not in {check.name for check in judge_gpus(alone, "nvidia", H200)}


def test_a_machine_without_gpus_passes_and_one_that_hides_them_does_not() -> None:
    for vendor, status in (("cpu", "ok"), ("amd", "failed")):
        assert [one.status for one in judge_gpus((), vendor, None)] == [status]  # type: ignore[arg-type]
    assert read_gpus() == [] or read_gpus()[0].total_bytes > 0


def test_gpus_of_different_kinds_are_a_warning() -> None:
    (check,) = wrong((*EIGHT[:7], replace(EIGHT[7], name="NVIDIA H100 80GB HBM3")))
    assert (check.status, check.got) == ("warning", "7 x NVIDIA H200, 1 x NVIDIA H100 80GB HBM3")


def test_another_process_and_a_part_of_a_chip_are_seen_by_their_memory() -> None:
    half, some = replace(EIGHT[2], free_bytes=TOTAL // 3), replace(EIGHT[5], free_bytes=TOTAL - 5 * 2**30)
    found = wrong((*EIGHT[:2], half, *EIGHT[3:5], some, *EIGHT[6:]))
    assert [(one.name, one.status) for one in found] == [("GPU 2", "failed"), ("GPU 5", "warning")]
    part = replace(EIGHT[0], total_bytes=TOTAL // 2, free_bytes=TOTAL // 2)
    (check,) = wrong((part, *EIGHT[1:]))
    assert (check.name, check.status) == ("GPU 0", "warning")
    assert check.expected.endswith("this is a part of an H200")


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    alone = replace(EIGHT[3], reaches=frozenset())
    (check,) = wrong((*EIGHT[:3], alone, *EIGHT[4:]))
    assert check.got == "none from GPU 3 to 0, 3 to 1, 3 to 2, 3 to 4 and 3 more"


def test_an_unknown_chip_is_told() -> None:
    gpus = tuple(replace(gpu, name="ACME One") for gpu in EIGHT)
    found = [one for one in judge_gpus(gpus, "nvidia", None) if one.status != "ok"]
    assert [(one.name, one.status) for one in found] == [("chip", "warning")]
    assert "penstock calibrate" in found[0].fix


WORLD = 8
KINDS: tuple[CollectiveKind, ...] = ("all-to-all", "all-gather", "reduce-scatter", "point-to-point")


def expected_point(kind: CollectiveKind, buffer: int) -> TransferPoint:
    seconds = TransferTimes(H200).collective(kind, buffer, RankGroup(ranks=WORLD, node_ranks=WORLD)).seconds
    leaving = buffer if kind == "point-to-point" else buffer * (WORLD - 1) // WORLD  # without a rank's own part
    return TransferPoint(ranks=WORLD, node_ranks=WORLD, leaving_bytes=leaving, seconds=seconds)


FLOPS = 2 * GPU_SIDE**3 / Rates(H200).product(GPU_SIDE, GPU_SIDE, GPU_SIDE).seconds  # as planned
GOOD = NodeMeasurements(
    dtype="bf16",
    side=GPU_SIDE,
    flops=(FLOPS,) * WORLD,
    transfers={kind: tuple(expected_point(kind, buffer) for buffer in GPU_BUFFERS) for kind in KINDS},
    wrong_sums=(0,) * WORLD,
)


def wrong_transfers(found: NodeMeasurements) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.got) for one in judge_measured(found, H200) if one.status != "ok"}


def slower(found: NodeMeasurements, kind: CollectiveKind, times: float) -> NodeMeasurements:
    *others, last = found.transfers[kind]
    late = last.model_copy(update={"seconds": last.seconds * times})
    return replace(found, transfers={**found.transfers, kind: (*others, late)})


def test_what_plans_expect_passes() -> None:
    assert wrong_transfers(GOOD) == {}
    assert {one.name for one in judge_measured(GOOD, H200)} == {"products", "sums over ranks", *KINDS}
    assert MEASURED.validate_json(MEASURED.dump_json(GOOD)) == GOOD
    alone = replace(GOOD, flops=(FLOPS,), transfers={}, wrong_sums=(0,))
    assert [one.name for one in judge_measured(alone, H200)] == ["products"], "one device has no sums and no links"


@pytest.mark.parametrize(("times", "status"), [(1.4, "ok"), (2.0, "warning"), (4.0, "failed")])
def test_a_slow_link_is_told_with_what_was_expected(times: float, status: str) -> None:
    (check,) = (one for one in judge_measured(slower(GOOD, "all-to-all", times), H200) if one.name == "all-to-all")
    assert check.status == status
    assert check.expected.endswith(f"which took up to {times:.1f} times that") is (status != "ok")


def test_slow_devices_and_wrong_sums_are_told_with_their_rank() -> None:
    found = wrong_transfers(replace(GOOD, flops=(*GOOD.flops[:5], 0.8 * FLOPS, *GOOD.flops[6:])))
    assert found["products"][0] == "warning"
    assert found["products"][1].startswith("rank 5 below 90% of the fastest")
    assert wrong_transfers(replace(GOOD, flops=(FLOPS / 4,) * WORLD))["products"][0] == "failed"
    sums = wrong_transfers(replace(GOOD, wrong_sums=(0, 0, 17, 0, 0, 0, 0, 0)))["sums over ranks"]
    assert sums == ("failed", "17 of 1,048,576 wrong on rank 2")


def test_without_knowledge_of_the_hardware_nothing_is_compared() -> None:
    late = slower(replace(GOOD, flops=(FLOPS, FLOPS / 9)), "all-gather", 50)
    assert [one.status for one in judge_measured(late, None) if one.status != "ok"] == []


def test_one_process_measures_its_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CPU_SIDE", 32)  # a small product
    found = measure(torch.device("cpu"), 1)
    assert (len(found.flops), found.transfers, found.wrong_sums) == (1, {}, (0,))
    assert found.flops[0] > 0


def measure_two() -> NodeMeasurements:
    return measure(torch.device("cpu"), 2)


def test_two_processes_find_the_same(ranks: Pool) -> None:
    first, second = ranks.run(2, measure_two)
    assert first == second
    assert (set(first.transfers), first.wrong_sums) == (set(KINDS), (0, 0)) and min(first.flops) > 0
