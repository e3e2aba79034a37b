"""Projected steps of small models: nothing is lost between operators and the step, and knobs move what they should."""

from functools import cache

import pytest

from penstock.config.load import load_run
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import Assumptions, project
from penstock.plan.projection import Projection, StepTime

SMALL = ("training.precision=bf16", "training.global_batch=16", "training.micro_batch=2")


@cache
def projected(on: str, *overrides: str, imbalance: float = 1.0) -> Projection:
    run = load_run("debug", (*SMALL, *overrides))
    return project(run, parse_cluster(on), Assumptions(imbalance=imbalance))


def time_of(on: str, *overrides: str, imbalance: float = 1.0) -> StepTime:
    return projected(on, *overrides, imbalance=imbalance).time


EP2 = ("parallel.expert=2",)
PP2 = ("parallel.pipeline=2",)
LAYOUTS = {
    "one": ("1xH200",),
    "all-to-all": ("2xH200", *EP2, "dispatch.method=all-to-all"),
    "all-gather": ("2xH200", *EP2, "dispatch.method=all-gather", "dispatch.sync_free=2"),
    "symmetric": ("2xH200", *EP2, "dispatch.method=symmetric", "dispatch.sync_free=2"),
    "halves": ("2xH200", *EP2, "dispatch.method=symmetric", "dispatch.sync_free=2", "dispatch.overlap=halves"),
    "shared": ("2xH200", *EP2, "dispatch.overlap=shared"),
    "hierarchical": (
        "16xH200",
        "parallel.expert=16",
        "model.moe.experts=16",
        "dispatch.method=hierarchical",
        "dispatch.sync_free=2",
    ),
    "FSDP": ("2xH200", "parallel.shard=full"),
    "TP": ("2xH200", "parallel.tensor=2", "model.vocab_size=258"),
    "CP": ("2xH200", "parallel.context=2"),
    "1F1B": ("2xH200", *PP2),
    "zero bubble": ("2xH200", *PP2, "pipeline.schedule=zb-1f1b"),
    "graphs": ("1xH200", "graphs.capture=full"),
    "recompute": ("1xH200", 'recompute.modules=["layer"]'),
    "optimizer on the host": ("2xH200", "offload.optimizer=true"),
    "activations on the host": ("1xH200", 'offload.activations=["layer"]'),
}
WIDER = {"hierarchical": ("training.micro_batch=1", "training.global_batch=32")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_terms_of_every_place_add_up_to_its_step(layout: str) -> None:
    time = time_of(*LAYOUTS[layout], *WIDER.get(layout, ()))
    assert time.step_seconds > 0
    for rank in time.ranks:
        whole = rank.passes + rank.waiting + rank.update
        assert sum(rank.terms.values()) == pytest.approx(whole)
        still = rank.waiting + rank.host + rank.host_link
        assert rank.compute + rank.exposed_communication + still == pytest.approx(whole)
        assert rank.communication >= rank.exposed_communication >= 0
        assert whole <= time.step_seconds * (1 + 1e-9)
    assert 0 <= time.bubble < 1


def test_a_rate_is_tokens_over_seconds_and_devices_and_a_slower_chip_takes_longer() -> None:
    found = projected("2xH200")
    rate = found.run.tokens_per_step / found.time.step_seconds / 2
    assert found.time.tokens_per_second_per_device == pytest.approx(rate)
    captured = "graphs.capture=full"
    assert time_of("1xB200", captured).step_seconds < time_of("1xH100", captured).step_seconds


def test_a_small_model_waits_for_its_host_unless_it_is_captured() -> None:
    eager, captured = time_of("1xH200"), time_of("1xH200", "graphs.capture=full")
    assert eager.ranks[0].host > 0.5 * eager.step_seconds
    assert captured.step_seconds < eager.step_seconds
    assert captured.ranks[0].compute == pytest.approx(eager.ranks[0].compute)


def test_recomputation_costs_time() -> None:
    captured = "graphs.capture=full"
    plain, again = time_of("1xH200", captured), time_of("1xH200", captured, 'recompute.modules=["layer"]')
    assert again.ranks[0].compute > 1.1 * plain.ranks[0].compute


def test_uneven_experts_take_longer() -> None:
    layout = (*LAYOUTS["all-to-all"], "graphs.capture=none", "training.micro_batch=8")
    even, uneven = time_of(*layout), time_of(*layout, imbalance=2.0)
    assert uneven.ranks[0].terms["experts"] > even.ranks[0].terms["experts"]
    assert uneven.ranks[0].terms["dispatch"] > even.ranks[0].terms["dispatch"]


def test_more_micro_batches_and_put_off_weight_gradients_shrink_the_bubble() -> None:
    few, many = time_of("2xH200", *PP2), time_of("2xH200", *PP2, "training.global_batch=64")
    assert 0 < many.bubble < few.bubble
    assert few.playback is not None and len(few.ranks) == 2
    assert time_of("2xH200", *PP2, "pipeline.schedule=zb-1f1b").bubble < few.bubble


def test_the_layout_has_the_dispatcher_that_the_run_comes_down_to() -> None:
    assert projected("1xH200").layout.dispatcher == "local"
    assert projected(*LAYOUTS["symmetric"]).layout.dispatcher == "symmetric"
    assert projected("2xH200", *EP2).layout.dispatcher == "symmetric", "auto takes what the node can do"
    assert projected(*LAYOUTS["hierarchical"], *WIDER["hierarchical"]).layout.dispatcher == "hierarchical"
