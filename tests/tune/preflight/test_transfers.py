"""What ranks measure together, and how it is judged."""

from dataclasses import replace

import pytest
import torch

from penstock.plan.hardware import CollectiveKind, RankGroup, TransferPoint
from penstock.plan.hardware_file import load_hardware
from penstock.plan.rates import Rates
from penstock.plan.transfers import TransferTimes
from penstock.tune.preflight import gpus
from penstock.tune.preflight.gpus import (
    GPU_BUFFERS,
    GPU_SIDE,
    NodeMeasurements,
    judge_measured,
    measure,
    measured_json,
    parse_measured,
)
from tests.distributed.pool import Pool

H200 = load_hardware("H200")
RANKS = 8
KINDS: tuple[CollectiveKind, ...] = ("all-to-all", "all-gather", "reduce-scatter", "point-to-point")


def expected_point(kind: CollectiveKind, buffer: int) -> TransferPoint:
    """A point that took exactly what plans expect."""
    seconds = TransferTimes(H200).collective(kind, buffer, RankGroup(ranks=RANKS, node_ranks=RANKS)).seconds
    leaving = buffer if kind == "point-to-point" else buffer * (RANKS - 1) // RANKS
    return TransferPoint(ranks=RANKS, node_ranks=RANKS, leaving_bytes=leaving, seconds=seconds)


FLOPS = 2 * GPU_SIDE**3 / Rates(H200).product(GPU_SIDE, GPU_SIDE, GPU_SIDE).seconds
GOOD = NodeMeasurements(
    dtype="bf16",
    side=GPU_SIDE,
    flops=(FLOPS,) * RANKS,
    transfers={kind: tuple(expected_point(kind, buffer) for buffer in GPU_BUFFERS) for kind in KINDS},
    wrong_sums=(0,) * RANKS,
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


@pytest.mark.parametrize(("times", "status"), [(1.4, None), (2.0, "warning"), (4.0, "failed")])
def test_a_slow_link_is_told_with_what_was_expected(times: float, status: str | None) -> None:
    found = wrong_transfers(slower(GOOD, "all-to-all", times))
    assert found.get("all-to-all", (None,))[0] == status
    (check,) = (one for one in judge_measured(slower(GOOD, "all-to-all", times), H200) if one.name == "all-to-all")
    assert check.expected.endswith(f"which took up to {times:.1f} times that") is (status is not None)


def test_a_device_that_falls_behind_is_named() -> None:
    found = wrong_transfers(replace(GOOD, flops=(*GOOD.flops[:5], 0.8 * FLOPS, *GOOD.flops[6:])))
    assert found["products"][0] == "warning"
    assert found["products"][1].startswith("rank 5 below 90% of the fastest")


def test_devices_that_are_all_slow_are_told() -> None:
    found = wrong_transfers(replace(GOOD, flops=(FLOPS / 4,) * RANKS))
    assert found["products"][0] == "failed"


def test_a_wrong_sum_fails() -> None:
    assert wrong_transfers(replace(GOOD, wrong_sums=(0, 0, 17, 0, 0, 0, 0, 0)))["sums over ranks"] == (
        "failed",
        "17 of 1,048,576 wrong on rank 2",
    )


def test_without_knowledge_of_the_hardware_nothing_is_compared() -> None:
    late = slower(replace(GOOD, flops=(FLOPS, FLOPS / 9)), "all-gather", 50)
    assert [one.status for one in judge_measured(late, None) if one.status != "ok"] == []


def test_one_device_has_no_sums_and_no_links() -> None:
    alone = replace(GOOD, flops=(FLOPS,), transfers={}, wrong_sums=(0,))
    assert [one.name for one in judge_measured(alone, H200)] == ["products"]


def test_what_was_measured_survives_as_text() -> None:
    assert parse_measured(measured_json(GOOD)) == GOOD


def test_one_process_measures_its_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CPU_SIDE", 32)
    found = measure(torch.device("cpu"), 1)
    assert (len(found.flops), found.transfers, found.wrong_sums) == (1, {}, (0,))
    assert found.flops[0] > 0


def measure_two() -> str:
    return measured_json(measure(torch.device("cpu"), 2))


def test_two_processes_find_the_same(ranks: Pool) -> None:
    first, second = (parse_measured(text) for text in ranks.run(2, measure_two))
    assert first == second
    assert set(first.transfers) == set(KINDS)
    assert first.wrong_sums == (0, 0)
    assert min(first.flops) > 0
