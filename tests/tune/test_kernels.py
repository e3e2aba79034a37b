"""The logic of tuning, with a clock that only counts; the real clock needs a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from penstock.config.load import load_run
from penstock.kernels.choose import choose
from penstock.kernels.device_facts import device_facts, installed
from penstock.kernels.measured import Measurements, OperatorTimes
from penstock.tune.kernels import Call, GpuCallTimer, cases, environment, measure, merged, winner, workload_of
from tests.tune.test_cases import AS_GPU, work


class CountingClock:
    """Says 10, 20, 30 ... microseconds, and remembers how many sets of inputs it was given."""

    def __init__(self, rotation: int = 1) -> None:
        self.rotation = rotation
        self.copies: list[int] = []

    def __call__(self, calls: Sequence[Call]) -> float:
        self.copies.append(len(calls))
        return 10.0 * len(self.copies)


def entry(**changes: object) -> OperatorTimes:
    fields = {
        "op": "swiglu",
        "direction": "forward",
        "dtype": "bf16",
        "skew": 0.0,
        "shape": {"tokens": 4, "dense_ffn": 8},
        "microseconds": {"torch": 2.0, "triton": 1.0},
    }
    return OperatorTimes(**(fields | changes))  # type: ignore[arg-type]


def test_every_case_becomes_an_entry_with_a_time_for_each_backend() -> None:
    workload, clock = work(), CountingClock()
    found = list(measure(workload, AS_GPU, clock))
    expected = list(cases(workload, AS_GPU))
    assert [(one.op, one.direction, one.skew) for one in found] == [
        (case.part.op, case.part.direction, case.skew) for case in expected
    ]
    assert [tuple(one.microseconds) for one in found] == [case.backends for case in expected]
    assert [time for one in found for time in one.microseconds.values()] == [
        10.0 * count for count in range(1, len(clock.copies) + 1)
    ]
    assert {one.dtype for one in found} == {"bf16"}


@pytest.mark.parametrize(("rotation", "copies"), [(1, 1), (3000, 3), (2**40, 16)])
def test_inputs_are_rotated_over_some_bytes_and_not_without_end(rotation: int, copies: int) -> None:
    clock = CountingClock(rotation)
    logits = next(measure(work(), AS_GPU, clock)).shape
    assert logits["tokens"] * logits["experts"] * 4 == 1024
    assert set(clock.copies) == {copies}


def test_what_does_not_fit_into_memory_has_no_time() -> None:
    class FullClock(CountingClock):
        def __call__(self, calls: Sequence[Call]) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    first = next(measure(work(), AS_GPU, FullClock()))
    assert first.microseconds == {}


def test_what_was_measured_decides_what_runs() -> None:
    workload = work()
    entries = tuple(
        replace(one, microseconds={name: 1.0 + (name != "reference") for name in one.microseconds})
        for one in measure(workload, AS_GPU, CountingClock())
    )
    known = Measurements(device=AS_GPU.name, environment={}, entries=entries)
    choices = choose({}, AS_GPU, workload.shapes, known)
    assert {one.backend for one in choices if one.op not in ("attention", "loss")} == {"reference"}


def test_other_shapes_stay_in_a_file_of_the_same_versions_only() -> None:
    old = Measurements(
        device="a", environment={"torch": "1"}, entries=(entry(), entry(shape={"tokens": 9, "dense_ffn": 8}))
    )
    new = Measurements(device="a", environment={"torch": "1"}, entries=(entry(microseconds={"torch": 5.0}),))
    assert merged(old, new).entries == (old.entries[1], new.entries[0])
    assert merged(None, new) == new
    assert merged(replace(old, environment={"torch": "0"}), new) == new
    assert merged(replace(old, device="b"), new) == new


def test_the_winner_is_the_fastest() -> None:
    assert winner(entry()) == "triton"


def test_the_environment_names_the_versions() -> None:
    assert environment()["torch"] == torch.__version__
    assert environment().keys() == {"torch", "triton"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_as_long_as_it_works() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    clock = GpuCallTimer(rounds=3)
    one, four = clock([lambda: x @ x]), clock([lambda: [x @ x for _ in range(4)]])
    assert 20 < one < 2000
    assert 3 < four / one < 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_case_runs_on_a_gpu() -> None:
    device = torch.device("cuda")
    run = load_run("debug", ["training.precision=bf16"])
    facts = device_facts(device, "bf16")
    found = list(measure(workload_of(run, device), facts, GpuCallTimer(rounds=1, least_ms=0.1)))
    assert all(one.microseconds for one in found)
    assert ("triton" in installed()) == any("triton" in one.microseconds for one in found)


def test_the_cpu_is_no_place_to_tune_but_its_cases_run() -> None:
    facts = device_facts(torch.device("cpu"), "fp32")
    assert all("triton" not in case.backends for case in cases(work(), facts))
