"""Projected steps of small models: nothing is lost between operators and the step, and knobs move what they should."""

from dataclasses import replace
from functools import cache, partial

import pytest

from penstock.config.load import load_run
from penstock.plan.assumptions import PROCESS_BYTES, Assumptions
from penstock.plan.costs import HOST_LINK
from penstock.plan.hardware import HostLink
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection, StepTime, candidate_json
from penstock.tune.doctor.evidence import Evidence, RunFacts
from penstock.tune.doctor.planned import with_projection

SMALL = ("training.precision=bf16", "training.global_batch=16", "training.micro_batch=2")


LITE = ("training.global_batch=16", "training.micro_batch=2", "training.sequence_length=4096")


@cache
def projected(on: str, *overrides: str, imbalance: float = 1.0, preset: str = "debug", link: float = 0.0) -> Projection:
    run = load_run(preset, (*(SMALL if preset == "debug" else LITE), *overrides))
    cluster = parse_cluster(on)
    if link:
        slower = HostLink(bytes_per_second=link, source="assumed: by a test")
        cluster = replace(cluster, hardware=replace(cluster.hardware, host_link=slower))
    return project(run, cluster, Assumptions(imbalance=imbalance))


lite = partial(projected, preset="deepseek-v2-lite-2l")


def time_of(on: str, *overrides: str, imbalance: float = 1.0) -> StepTime:
    return projected(on, *overrides, imbalance=imbalance).time


EP2 = ("parallel.expert=2",)
PP2 = ("parallel.pipeline=2",)
LAYOUTS = {
    "one": ("1xH200",),
    "all-to-all": ("2xH200", *EP2, "dispatch.method=all-to-all"),
    "all-gather": ("2xH200", *EP2, "dispatch.method=all-gather", "dispatch.sync_free=2"),
    "symmetric": ("2xH200", *EP2, "dispatch.method=symmetric", "dispatch.sync_free=2"),
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


def test_a_small_model_waits_for_its_host_unless_it_is_captured_and_recomputation_costs_time() -> None:
    eager, captured = time_of("1xH200", "graphs.capture=none"), time_of("1xH200")
    assert eager.ranks[0].host > 0.5 * eager.step_seconds
    assert captured.step_seconds < eager.step_seconds
    assert captured.ranks[0].compute == pytest.approx(eager.ranks[0].compute)
    on_amd = [time_of("1xMI300X", f"graphs.capture={capture}").step_seconds for capture in ("auto", "none", "full")]
    assert on_amd[0] == on_amd[1] > on_amd[2], "auto captures nothing there"
    again = time_of("1xH200", "graphs.capture=full", 'recompute.modules=["layer"]')
    assert again.ranks[0].compute > 1.1 * captured.ranks[0].compute


def test_uneven_experts_take_longer() -> None:
    layout = (*LAYOUTS["all-to-all"], "graphs.capture=none", "training.micro_batch=8")
    even, uneven = time_of(*layout), time_of(*layout, imbalance=2.0)
    assert uneven.ranks[0].terms["experts"] > even.ranks[0].terms["experts"]
    assert uneven.ranks[0].terms["dispatch"] > even.ranks[0].terms["dispatch"]


def test_documents_need_no_square_of_the_row_in_our_kernel() -> None:
    kernels = ((), ("kernels.attention=cudnn",))
    ours, masked = (lite("1xH200", "data.document_mask=true", *more) for more in kernels)
    assert masked.memory.activations - ours.memory.activations > 2 * 4096**2  # rows of a micro-batch, a byte each
    assert ours.time.ranks[0].terms["attention"] < masked.time.ranks[0].terms["attention"]


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


OPTIMIZER, ACTIVATIONS = "offload.optimizer=true", 'offload.activations=["layer"]'
OFFLOADING = {
    "alone": ("1xH200",),
    "divided": ("2xH200",),
    "whole": ("2xH200", "parallel.shard=none"),
    "FSDP": ("2xH200", "parallel.shard=full"),
    "experts and graphs": ("2xH200", "parallel.expert=2", "dispatch.sync_free=2", "graphs.capture=full"),
    "pipeline": ("2xH200", "parallel.pipeline=2"),
}


@pytest.mark.often("divided", "pipeline", "FSDP")
@pytest.mark.parametrize("layout", OFFLOADING)
def test_an_update_takes_at_least_as_long_as_the_optimizer_passes_through_the_link(layout: str) -> None:
    plain, away = lite(*OFFLOADING[layout]), lite(*OFFLOADING[layout], OPTIMIZER)
    assert all(HOST_LINK not in rank.terms and rank.host_link == 0 for rank in plain.time.ranks)
    assert lite(*OFFLOADING[layout], link=1e9).time.step_seconds == plain.time.step_seconds
    assert away.time.step_seconds > 1.2 * plain.time.step_seconds
    rate = away.cluster.hardware.host_link.bytes_per_second
    for memory, rank, before in zip(away.memories, away.time.ranks, plain.time.ranks, strict=True):
        state = memory.host - PROCESS_BYTES
        assert state > 0
        assert rank.update >= state / rate
        # Kernels run beside it: nothing is paid for twice.
        assert rank.update < before.update * 1.2 + state / rate
        assert rank.terms[HOST_LINK] == pytest.approx(rank.host_link)
        assert sum(rank.terms.values()) == pytest.approx(rank.passes + rank.waiting + rank.update)


def test_a_fast_link_costs_nothing_and_json_has_the_time_of_the_link() -> None:
    (fast,) = lite("1xH200", OPTIMIZER, link=1e15).time.ranks
    assert HOST_LINK not in fast.terms and fast.host_link == 0
    assert candidate_json(lite("1xH200"))["host_link_seconds"] == 0
    away = lite("1xH200", OPTIMIZER)
    assert candidate_json(away)["host_link_seconds"] == max(rank.host_link for rank in away.time.ranks) > 0


def test_experts_in_mxfp4_cost_the_time_of_their_bytes_in_each_pass_and_no_memory_between() -> None:
    plain, rounded = lite("1xH200"), lite("1xH200", "qat.experts=mxfp4")
    (here,), (there,) = plain.time.ranks, rounded.time.ranks
    weights = 64 * 3 * 2048 * 1408  # of the one layer with experts
    moved = 8 * 2 * weights * (2 + 2)  # of 8 micro-batches forward and backward, read and written in bfloat16
    assert there.terms["quantize"] == pytest.approx(moved / parse_cluster("1xH200").hardware.bandwidth, rel=0.05)
    assert there.passes - here.passes == pytest.approx(there.terms["quantize"], rel=0.05)
    assert rounded.memory.parameters == plain.memory.parameters
    assert 0 <= rounded.memory.total - plain.memory.total < 1.05 * 2 * weights
    # What saves more activations computes these experts in the same function.
    other = project(rounded.run, parse_cluster("1xH200"), Assumptions(imbalance=1.0, saving="conventional"))
    assert other.time.ranks[0].terms["quantize"] == there.terms["quantize"]


def test_offloaded_activations_cost_next_to_nothing_unless_the_link_is_slow() -> None:
    rows, rate = "training.micro_batch=4", 5e9
    plain, away = lite("1xH200", rows), lite("1xH200", rows, ACTIVATIONS, link=400e9)
    (here,), (there,) = plain.time.ranks, away.time.ranks
    assert there.passes < 1.03 * here.passes
    # No copy on the device. The update of a composed run has one operator where the run itself has several.
    assert there.terms["elementwise"] == pytest.approx(here.terms["elementwise"], rel=1e-3)
    (slow,) = lite("1xH200", rows, ACTIVATIONS, link=rate).time.ranks
    saved = 4 * (plain.memory.activations - away.memory.activations)  # Of four micro-batches.
    assert slow.passes > saved / rate
    assert slow.terms[HOST_LINK] == pytest.approx(slow.host_link)
    parts = slow.compute + slow.exposed_communication + slow.host + slow.host_link
    assert parts == pytest.approx(slow.passes + slow.update)


def test_sums_of_gradients_pass_through_the_link_once_in_each_direction_for_each_micro_batch() -> None:
    rate, gradients = 5e9, (OPTIMIZER, "offload.gradients=true")
    plain, slow, fast = (
        projected("1xH200", "training.micro_batch=4", *words, preset="deepseek-v2-lite-5l", link=link)
        for words, link in (((OPTIMIZER,), rate), (gradients, rate), (gradients, 1e15))
    )
    (here,), (there,), (hidden,) = (one.time.ranks for one in (plain, slow, fast))
    assert hidden.passes == pytest.approx(here.passes, rel=0.03)
    # Of four micro-batches; both directions run at once, but for the way back of the last slots.
    sums = 4 * (slow.memory.host - plain.memory.host) / rate
    assert sums < there.passes < 1.4 * sums + here.passes


def test_a_doctor_without_a_trace_knows_the_time_of_the_link() -> None:
    away = projected("1xH200", OPTIMIZER)
    assert away.time.host_link_seconds > 0
    evidence = with_projection(Evidence(source="none", ranks=(), facts=RunFacts(run=away.run)), away)
    (rank,) = evidence.ranks
    assert rank.exposed_copies_us == pytest.approx(away.time.ranks[0].host_link * 1e6)
    parts = rank.compute_us + rank.exposed_communication_us + rank.exposed_copies_us + rank.idle_us
    assert parts == pytest.approx(rank.total_us)
