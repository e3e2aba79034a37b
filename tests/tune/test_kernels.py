"""The logic of tuning, with a clock that only counts; the real clock needs a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.config.load import load_run
from penstock.kernels.backends import CHOICE_POINTS, shape_of
from penstock.kernels.choose import MASKED, Measurements, OperatorTimes, choose
from penstock.kernels.tuning import DeviceFacts, device_facts, installed
from penstock.tune.kernels import (
    SKEWS,
    Call,
    Case,
    GpuCallTimer,
    Workload,
    cases,
    draw_choices,
    measure,
    merged,
    winner,
    workload_of,
)
from tests.closeness import assert_close


class CountingClock:
    """Says 10, 20, 30 ... microseconds, and remembers how many sets of inputs it was given."""

    def __init__(self, rotation: int = 1) -> None:
        self.rotation = rotation
        self.copies: list[int] = []

    def __call__(self, calls: Sequence[Call]) -> float:
        self.copies.append(len(calls))
        return 10.0 * len(self.copies)


def entry(**changes: object) -> OperatorTimes:
    fields = {"op": "swiglu", "direction": "forward", "dtype": "bf16", "skew": 0.0}
    fields |= {"shape": {"tokens": 4, "dense_ffn": 8}, "microseconds": {"torch": 2.0, "triton": 1.0}}
    return OperatorTimes(**(fields | changes))  # type: ignore[arg-type]


def test_every_case_becomes_an_entry_with_a_time_for_each_backend() -> None:
    workload, clock = work(), CountingClock()
    found = list(measure(workload, AS_GPU, clock))
    expected = list(cases(workload, AS_GPU))
    for one, case in zip(found, expected, strict=True):
        assert (one.op, one.direction, one.skew) == (case.part.op, case.part.direction, case.skew)
        assert (tuple(one.microseconds), one.dtype) == (case.backends, "bf16")
    times = [time for one in found for time in one.microseconds.values()]
    assert times == [10.0 * count for count in range(1, len(clock.copies) + 1)]


@pytest.mark.parametrize(("rotation", "copies"), [(1, 1), (3000, 3), (2**40, 16)])  # bytes; 16 is the most
def test_inputs_are_rotated_over_some_bytes_and_not_without_end(rotation: int, copies: int) -> None:
    clock = CountingClock(rotation)
    logits = next(measure(work(), AS_GPU, clock)).shape
    assert logits["tokens"] * logits["experts"] * 4 == 1024  # bytes of one set of inputs
    assert set(clock.copies) == {copies}


def test_what_does_not_fit_into_memory_has_no_time() -> None:
    class FullClock(CountingClock):
        def __call__(self, calls: Sequence[Call]) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert next(measure(work(), AS_GPU, FullClock())).microseconds == {}


def test_what_was_measured_decides_what_runs() -> None:
    workload = work()
    entries = tuple(
        replace(one, microseconds={name: 1.0 + (name != "reference") for name in one.microseconds})
        for one in measure(workload, AS_GPU, CountingClock())
    )
    known = Measurements(device=AS_GPU.name, environment={}, entries=entries)
    choices = choose({}, AS_GPU, workload.shapes, known)
    assert {one.backend for one in choices if one.op not in ("attention", MASKED, "loss")} == {"reference"}


def test_other_shapes_stay_in_a_file_of_the_same_versions_only() -> None:
    other = entry(shape={"tokens": 9, "dense_ffn": 8})
    old = Measurements(device="a", environment={"torch": "1"}, entries=(entry(), other))
    new = replace(old, entries=(entry(microseconds={"torch": 5.0}),))
    assert merged(old, new).entries == (old.entries[1], new.entries[0])
    assert merged(None, new) == new
    assert winner(entry()) == "triton"
    assert merged(replace(old, environment={"torch": "0"}), new) == new
    assert merged(replace(old, device="b"), new) == new


@pytest.mark.gpu
def test_a_gpu_is_timed_as_long_as_it_works() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    clock = GpuCallTimer(rounds=3)
    one, four = clock([lambda: x @ x]), clock([lambda: [x @ x for _ in range(4)]])
    assert 20 < one < 2000  # microseconds of 137 GFLOP
    assert four > 3 * one  # four products in one call; other work on the GPU only adds to it


@pytest.mark.gpu
def test_every_case_runs_on_a_gpu() -> None:
    device = torch.device("cuda")
    run = load_run("debug", ["training.precision=bf16"])
    facts = device_facts(device, "bf16")
    found = list(measure(workload_of(run, device), facts, GpuCallTimer(rounds=1, least_ms=0.1)))
    assert all(one.microseconds for one in found)
    assert ("triton" in installed()) == any("triton" in one.microseconds for one in found)


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = 0.02 if ON_GPU else 1e-5
"""Of the norm. The interpreter's products know no bfloat16, and torch's no float32 on a GPU."""

TINY = (
    "model.hidden_size=32",
    "model.moe.moe_intermediate_size=16",
    "model.moe.shared_expert_intermediate_size=16",
    "training.sequence_length=16",
    f"training.precision={'bf16' if ON_GPU else 'fp32'}",
)
AS_GPU = DeviceFacts(kind="cuda", name="a GPU", target="sm_90", packages=frozenset({"triton"}), dtype="bf16")


def work(*overrides: str) -> Workload:
    return workload_of(load_run("debug", [*TINY, "training.micro_batch=2", *overrides]), DEVICE)


def floats(found: object) -> list[Tensor]:
    outputs = [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]  # type: ignore[attr-defined]
    return [one.float() for one in outputs]


ALL = list(cases(work(), AS_GPU))


def name(case: Case) -> str:
    return f"{case.part.op} {case.part.direction} {case.skew:g}"


def test_every_part_that_the_model_has_is_a_case() -> None:
    parts = {part for question in CHOICE_POINTS for part in question.parts if part.op not in ("rotate", "delta_rule")}
    assert {case.part for case in ALL} == parts
    assert {case.skew for case in ALL if case.part.op == "down"} == set(SKEWS)
    assert {case.skew for case in ALL if case.part.op == "swiglu"} == {0.0}


def test_grouped_query_attention_is_timed_by_its_rotation() -> None:
    found = {
        case.part.op for case in cases(work("model.attention={kind='gqa', heads=4, kv_heads=2, head_dim=16}"), AS_GPU)
    }
    assert "rotate" in found and "mla_heads" not in found


@pytest.mark.parametrize(("kind", "values", "decays"), [("gdn", 4, ()), ("kda", 2, (16,))])
def test_linear_attention_is_timed_where_the_model_has_it(kind: str, values: int, decays: tuple[int, ...]) -> None:
    heads = f"kind='{kind}', key_heads=2, value_heads={values}, key_head_dim=16, value_head_dim=16"
    linear = f"model.linear_attention={{{heads}}}"
    found = [case for case in cases(work(linear), AS_GPU) if case.part.op == "delta_rule"]
    assert {case.part.direction for case in found} == {"forward", "backward"}
    for case in found:
        assert set(case.backends) >= {"torch", "reference"}
        inputs = case.draw()
        assert inputs[3].shape[2:] == (values, *decays)
        case.bind("torch", inputs)()


def test_parts_that_the_model_lacks_or_that_need_triton_are_not_timed() -> None:
    dense = replace(work(), rule=None, shapes=replace(work().shapes, experts=0, top_k=0, ffn=0))
    assert {case.part.op for case in cases(dense, AS_GPU)} == {"swiglu", "rms_norm", "add_rms_norm", "mla_heads"}
    for facts in (replace(AS_GPU, packages=frozenset()), device_facts(torch.device("cpu"), "fp32")):
        found = list(cases(work(), facts))
        assert all("triton" not in case.backends for case in found)
    assert "gate_up" not in {case.part.op for case in cases(work(), replace(AS_GPU, packages=frozenset()))}


@pytest.mark.parametrize("case", ALL, ids=name)
def test_every_backend_computes_the_same_on_the_same_inputs(case: Case) -> None:
    assert "reference" in case.backends
    assert case.shape == shape_of(case.part.op, work().shapes)
    results = {}
    for backend in case.backends:
        torch.manual_seed(3)
        results[backend] = floats(case.bind(backend, case.draw())())
    for backend, found in results.items():
        for one, expected in zip(found, results["reference"], strict=True):
            assert_close(one, expected, by="norm", tolerance=TOLERANCE, what=backend)


def test_choices_are_balanced_or_favour_some_experts_and_never_one_twice() -> None:
    experts_TK = draw_choices(64, 8, 3, 0.0, DEVICE)
    assert torch.bincount(experts_TK.flatten(), minlength=8).tolist() == [24] * 8  # 64 tokens x 3 over 8
    skewed_TK = draw_choices(4096, 64, 6, 0.6, DEVICE)
    assert all(len(set(row)) == len(row) for row in [*experts_TK.tolist(), *skewed_TK[:200].tolist()])
    assert 0.35 < torch.bincount(skewed_TK.flatten(), minlength=64).float().log().std() < 0.7  # near the skew of 0.6
