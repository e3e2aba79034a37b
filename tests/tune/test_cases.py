"""What is timed is what the model runs: every part, on every backend, with the results of the definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.config.load import load_run
from penstock.kernels.backends import CHOICE_POINTS, shape_of
from penstock.kernels.device_facts import DeviceFacts
from penstock.tune.kernels import SKEWS, Case, Workload, cases, draw_choices, workload_of
from tests.closeness import assert_close
from tests.config.small import SMALL

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
    """A tiny workload."""
    return workload_of(load_run("debug", [*TINY, "training.micro_batch=2", *overrides]), DEVICE)


def floats(found: object) -> list[Tensor]:
    outputs = [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]  # type: ignore[attr-defined]
    return [one.float() for one in outputs]


ALL = list(cases(work(), AS_GPU))


def name(case: Case) -> str:
    return f"{case.part.op} {case.part.direction} {case.skew:g}"


def test_every_part_that_the_model_has_is_a_case() -> None:
    parts = {part for question in CHOICE_POINTS for part in question.parts if part.op != "rotate"}
    assert {case.part for case in ALL} == parts
    assert {case.skew for case in ALL if case.part.op == "down"} == set(SKEWS)
    assert {case.skew for case in ALL if case.part.op == "swiglu"} == {0.0}


def test_grouped_query_attention_is_timed_by_its_rotation() -> None:
    run = SMALL.model_copy(
        update={"model": load_run("debug", ["model.attention={kind='gqa', heads=4, kv_heads=2, head_dim=16}"]).model}
    )
    found = {case.part.op for case in cases(workload_of(run, DEVICE), AS_GPU)}
    assert "rotate" in found
    assert "mla_heads" not in found


def test_a_dense_model_has_no_experts_to_time() -> None:
    dense = work()
    dense = replace(dense, rule=None, shapes=replace(dense.shapes, experts=0, top_k=0, ffn=0))
    assert {case.part.op for case in cases(dense, AS_GPU)} == {"swiglu", "rms_norm", "add_rms_norm", "mla_heads"}


def test_without_triton_the_products_cannot_be_mixed_and_are_not_timed() -> None:
    found = list(cases(work(), replace(AS_GPU, packages=frozenset())))
    assert "gate_up" not in {case.part.op for case in found}
    assert all("triton" not in case.backends for case in found)


@pytest.mark.parametrize("case", ALL, ids=name)
def test_every_backend_computes_the_same_on_the_same_inputs(case: Case) -> None:
    assert "reference" in case.backends
    results = {}
    for backend in case.backends:
        torch.manual_seed(3)
        results[backend] = floats(case.bind(backend, case.draw())())
    for backend, found in results.items():
        for one, expected in zip(found, results["reference"], strict=True):
            assert_close(one, expected, by="norm", tolerance=TOLERANCE, what=backend)


def test_a_call_can_be_repeated() -> None:
    for case in ALL:
        call = case.bind("reference", case.draw())
        for one, again in zip(floats(call()), floats(call()), strict=True):
            assert torch.equal(one, again), name(case)


def test_a_case_is_looked_up_by_the_sizes_of_its_part() -> None:
    assert all(case.shape == shape_of(case.part.op, work().shapes) for case in ALL)


def test_balanced_choices_give_every_expert_as_many_tokens() -> None:
    experts_TK = draw_choices(64, 8, 3, 0.0, DEVICE)
    assert torch.bincount(experts_TK.flatten(), minlength=8).tolist() == [24] * 8
    assert all(len(set(row)) == 3 for row in experts_TK.tolist())


def test_skewed_choices_favour_some_experts_and_never_one_twice() -> None:
    experts_TK = draw_choices(4096, 64, 6, 0.6, DEVICE)
    assert all(len(set(row)) == 6 for row in experts_TK[:200].tolist())
    counts_E = torch.bincount(experts_TK.flatten(), minlength=64).float()
    assert 0.35 < counts_E.log().std() < 0.7
