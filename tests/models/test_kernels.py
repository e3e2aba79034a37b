"""From a run to its kernels."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import KernelError
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.kernels.choose import NOT_THERE
from penstock.kernels.operators import REFERENCE, TORCH
from penstock.kernels.tuning import device_facts, named_device
from penstock.models.build import build_model
from penstock.models.kernels import choose_operators, kernel_choices, shapes_of
from penstock.moe.experts import GroupedExperts
from tests.config.small import SMALL

CPU = torch.device("cpu")
H200 = named_device("H200", "bf16")


def test_shapes_are_those_of_a_micro_batch() -> None:
    shapes = shapes_of(load_run("deepseek-v2-lite", ["training.micro_batch=2"]))
    assert (shapes.tokens, shapes.hidden, shapes.experts, shapes.top_k, shapes.ffn) == (8192, 2048, 64, 6, 1408)
    of_attention = shapes.attention, shapes.heads, shapes.head_dim, shapes.rotary_dim, shapes.value_dim
    assert of_attention == ("mla", 16, 192, 64, 128)
    assert (shapes.dense_ffn, shapes.expert_groups) == (2816, 1)
    assert shapes_of(load_run("deepseek-v3")).expert_groups == 8
    dense = shapes_of(SMALL.model_copy(update={"model": SMALL.model.model_copy(update={"moe": None})}))
    assert (dense.experts, dense.top_k, dense.ffn, dense.dense_ffn) == (0, 0, 0, SMALL.model.intermediate_size)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_choice_on_every_kind_of_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    run = load_run(name)
    for device in ("H200", "B200", "MI300X", "MI355X"):
        choices = kernel_choices(run, named_device(device, run.training.precision))
        routes = {choice.backend for choice in choices if choice.op == "route"}
        assert routes == ({"reference"} if run.model.moe is None else {"triton"}), "a dense model routes nothing"
    assert choose_operators(run, CPU).rms_norm is TORCH.rms_norm


def test_the_h200_that_was_measured_runs_our_kernels_but_not_our_products_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    run = load_run("deepseek-v2-lite", ["training.micro_batch=2"])
    choices = [choice for choice in kernel_choices(run, H200) if choice.reason != NOT_THERE]
    assert {choice.backend for choice in choices} == {"triton", "auto"}
    told = re.compile(
        r"measured \d+\.\d\dx faster than (torch|reference) on NVIDIA H200 at (8192 tokens|64 experts x 768 rows)"
    )
    assert [choice.op for choice in choices if not told.fullmatch(choice.reason)] == [
        "attention",
        "masked attention",
        "loss",
    ]
    in_float32 = {choice.op: choice.backend for choice in kernel_choices(run, replace(H200, dtype="fp32"))}
    assert (in_float32["experts"], in_float32["norm"]) == ("reference", "triton")


def test_a_model_is_built_on_what_the_run_asks_for() -> None:
    kernels = SMALL.kernels.model_copy(update={"all": "reference"})
    for run, expected in ((SMALL, TORCH), (SMALL.model_copy(update={"kernels": kernels}), REFERENCE)):
        model = build_model(run, CPU)
        experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
        assert {module.operators.expert_ffn for module in experts} == {expected.expert_ffn}


def test_sparse_attention_gathers_the_chosen_keys_where_sums_may_be_in_any_order() -> None:
    def backend(*overrides: str) -> tuple[str, str]:
        found = next(one for one in kernel_choices(load_run("deepseek-v3.2", overrides), H200) if one.op == "sparse")
        return found.backend, found.reason

    assert backend() == ("triton", "no squares of positions")
    assert backend("kernels.all=reference")[0] == "reference"
    assert backend("training.deterministic=true")[0] == "reference"
    assert backend("model.attention.kv_lora_rank=1024") == ("reference", "a latent of 1024 + 64 numbers does not fit")
    with pytest.raises(KernelError, match="kernels.sparse=triton sums gradients of keys in any order"):
        backend("training.deterministic=true", "kernels.sparse=triton")
    with pytest.raises(KernelError, match="do not fit into shared memory"):
        kernel_choices(load_run("deepseek-v3.2", ["kernels.sparse=triton"]), replace(H200, dtype="fp32"))


def test_cudnns_attention_is_refused_where_sums_must_have_an_order() -> None:
    words = ["kernels.attention=cudnn", "training.deterministic=true"]
    with pytest.raises(KernelError, match="kernels.attention=cudnn sums gradients in any order; got training.determ"):
        kernel_choices(load_run("debug", words), H200)
    for word in words:
        assert kernel_choices(load_run("debug", [word]), H200)


@pytest.mark.parametrize(("op", "stage", "allowed"), [("permute", 1, "0"), ("experts", 3, "0, 1")])
def test_kernels_that_wait_for_a_gpu_are_refused_from_the_stage_on_that_leaves_them_out(
    op: str, stage: int, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    run = load_run("deepseek-v2-lite", (f"dispatch.sync_free={stage}", f"kernels.{op}=reference"))
    with pytest.raises(KernelError) as raised:
        kernel_choices(run, H200)
    assert str(raised.value) == (
        f"dispatch.sync_free={stage} cannot be had: the reference form of {op} waits for the device; "
        f"allowed: {allowed}; fix: leave kernels.{op} and kernels.all at auto where Triton is installed, "
        f"or set dispatch.sync_free={allowed[-1]}"
    )
    assert kernel_choices(run, device_facts(CPU, "bf16")), "a CPU never waits"
    assert kernel_choices(load_run("deepseek-v2-lite", ("dispatch.sync_free=1", "kernels.experts=reference")), H200)
