"""GPUs, by what PyTorch would say of them."""

from dataclasses import replace

from penstock.plan.hardware_file import load_hardware
from penstock.tune.preflight.check import PreflightCheck
from penstock.tune.preflight.gpus import Gpu, judge_gpus, read_gpus

H200 = load_hardware("H200")
TOTAL = H200.memory.capacity_bytes
EIGHT = tuple(
    Gpu(
        name="NVIDIA H200",
        total_bytes=TOTAL,
        free_bytes=TOTAL - 10**9,
        reaches=frozenset(range(8)) - {number},
    )
    for number in range(8)
)


def wrong(gpus: tuple[Gpu, ...]) -> list[PreflightCheck]:
    return [one for one in judge_gpus(gpus, "nvidia", H200) if one.status != "ok"]


def test_a_good_node_passes() -> None:
    assert wrong(EIGHT) == []
    shown = {one.name: one.got for one in judge_gpus(EIGHT, "nvidia", H200)}
    assert shown["GPUs"] == "8 x NVIDIA H200"
    assert shown["peer access"] == "all 56 ways between 8 GPUs"


def test_a_machine_without_gpus_passes_and_one_that_hides_them_does_not() -> None:
    assert [one.status for one in judge_gpus((), "cpu", None)] == ["ok"]
    assert [one.status for one in judge_gpus((), "amd", None)] == ["failed"]
    assert read_gpus() == [] or read_gpus()[0].total_bytes > 0


def test_one_gpu_has_nobody_to_reach() -> None:
    one = (replace(EIGHT[0], reaches=frozenset()),)
    assert wrong(one) == []
    assert "peer access" not in {check.name for check in judge_gpus(one, "nvidia", H200)}


def test_gpus_of_different_kinds_are_a_warning() -> None:
    (check,) = wrong((*EIGHT[:7], replace(EIGHT[7], name="NVIDIA H100 80GB HBM3")))
    assert (check.status, check.got) == ("warning", "7 x NVIDIA H200, 1 x NVIDIA H100 80GB HBM3")


def test_another_process_is_seen_by_its_memory() -> None:
    half, some = replace(EIGHT[2], free_bytes=TOTAL // 3), replace(EIGHT[5], free_bytes=TOTAL - 5 * 2**30)
    found = wrong((*EIGHT[:2], half, *EIGHT[3:5], some, *EIGHT[6:]))
    assert [(one.name, one.status) for one in found] == [("GPU 2", "failed"), ("GPU 5", "warning")]


def test_a_part_of_a_chip_is_seen_by_its_memory() -> None:
    part = replace(EIGHT[0], total_bytes=TOTAL // 2, free_bytes=TOTAL // 2)
    (check,) = wrong((part, *EIGHT[1:]))
    assert (check.name, check.status) == ("GPU 0", "warning")
    assert check.expected.endswith("this is a part of an H200")


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    alone = replace(EIGHT[3], reaches=frozenset())
    (check,) = wrong((*EIGHT[:3], alone, *EIGHT[4:]))
    assert check.got == "none from GPU 3 to 0, 3 to 1, 3 to 2, 3 to 4 and 3 more"


def test_a_chip_that_nobody_knows_is_told() -> None:
    gpus = tuple(replace(gpu, name="ACME One") for gpu in EIGHT)
    found = [one for one in judge_gpus(gpus, "nvidia", None) if one.status != "ok"]
    assert [(one.name, one.status) for one in found] == [("chip", "warning")]
    assert "penstock calibrate" in found[0].fix
