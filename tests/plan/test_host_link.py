"""Offloaded memory passes through the host link, and a plan counts the exposed time."""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tomli_w

from penstock.config.load import load_run
from penstock.plan.costs import HOST_LINK, OpCost
from penstock.plan.hardware import Cluster, HostLink
from penstock.plan.hardware_file import PACKAGED, hardware_text, known_hardware, load_hardware, parse_cluster
from penstock.plan.op_recorder import ARRIVE, FROM_HOST, TO_HOST, RecordedOp, RecordedOps
from penstock.plan.project import Assumptions, project
from penstock.plan.projection import Projection, candidate_json
from penstock.plan.streams import HostCopies, Streams, Timing, steady_state
from penstock.tune.doctor.evidence import Evidence, RunFacts
from penstock.tune.doctor.planned import with_projection

LITE = ("deepseek-v2-lite-2l", "training.global_batch=16", "training.micro_batch=2", "training.sequence_length=4096")
OPTIMIZER, ACTIVATIONS = "offload.optimizer=true", 'offload.activations=["layer"]'
LAYOUTS = {
    "alone": ("1xH200",),
    "divided": ("2xH200",),
    "whole": ("2xH200", "parallel.shard=none"),
    "FSDP": ("2xH200", "parallel.shard=full"),
    "experts and graphs": ("2xH200", "parallel.expert=2", "dispatch.sync_free=2", "graphs.capture=full"),
    "pipeline": ("2xH200", "parallel.pipeline=2"),
}


@cache
def projected(on: str, *overrides: str, link: float = 0.0) -> Projection:
    """On two H200, or with another link."""
    cluster = parse_cluster(on)
    if link:
        slower = HostLink(bytes_per_second=link, source="assumed: by a test")
        cluster = Cluster(devices=cluster.devices, hardware=replace(cluster.hardware, host_link=slower))
    preset, *others = LITE
    return project(load_run(preset, (*others, *overrides)), cluster, Assumptions(imbalance=1.0))


@pytest.mark.often("divided", "pipeline", "FSDP")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_takes_at_least_as_long_as_the_optimizer_passes_through_the_link(layout: str) -> None:
    plain, away = projected(*LAYOUTS[layout]), projected(*LAYOUTS[layout], OPTIMIZER)
    rate = away.cluster.hardware.host_link.bytes_per_second
    for memory, rank, before in zip(away.memories, away.time.ranks, plain.time.ranks, strict=True):
        assert memory.host > 0
        assert rank.update >= memory.host / rate
        # Kernels run beside it: nothing is paid for twice.
        assert rank.update < before.update * 1.2 + memory.host / rate
        assert rank.terms[HOST_LINK] == pytest.approx(rank.host_link)
        assert sum(rank.terms.values()) == pytest.approx(rank.passes + rank.waiting + rank.update)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_an_offloaded_optimizer_takes_time_of_the_link(layout: str) -> None:
    plain, away = projected(*LAYOUTS[layout]), projected(*LAYOUTS[layout], OPTIMIZER)
    assert all(HOST_LINK not in rank.terms and rank.host_link == 0 for rank in plain.time.ranks)
    assert projected(*LAYOUTS[layout], link=1e9).time.step_seconds == plain.time.step_seconds
    assert away.time.step_seconds > 1.2 * plain.time.step_seconds


def test_a_fast_link_costs_nothing_and_json_has_the_time_of_the_link() -> None:
    (fast,) = projected("1xH200", OPTIMIZER, link=1e15).time.ranks
    assert HOST_LINK not in fast.terms and fast.host_link == 0
    assert candidate_json(projected("1xH200"))["host_link_seconds"] == 0
    away = projected("1xH200", OPTIMIZER)
    assert candidate_json(away)["host_link_seconds"] == max(rank.host_link for rank in away.time.ranks) > 0


def test_offloaded_activations_cost_next_to_nothing_unless_the_link_is_slow() -> None:
    rows, rate = "training.micro_batch=4", 5e9
    plain, away = projected("1xH200", rows), projected("1xH200", rows, ACTIVATIONS, link=400e9)
    (here,), (there,) = plain.time.ranks, away.time.ranks
    assert there.passes < 1.03 * here.passes
    assert there.terms["elementwise"] == pytest.approx(here.terms["elementwise"])  # No copy on the device.
    (slow,) = projected("1xH200", rows, ACTIVATIONS, link=rate).time.ranks
    saved = 4 * (plain.memory.activations - away.memory.activations)  # Of four micro-batches.
    assert slow.passes > saved / rate
    assert slow.terms[HOST_LINK] == pytest.approx(slow.host_link)
    parts = slow.compute + slow.exposed_communication + slow.host + slow.host_link
    assert parts == pytest.approx(slow.passes + slow.update)


def test_a_doctor_without_a_trace_knows_the_time_of_the_link() -> None:
    away = project(load_run("debug", ("training.precision=bf16", OPTIMIZER)), parse_cluster("1xH200"))
    assert away.time.host_link_seconds > 0
    evidence = with_projection(Evidence(source="none", ranks=(), facts=RunFacts(run=away.run)), away)
    (rank,) = evidence.ranks
    assert rank.exposed_copies_us == pytest.approx(away.time.ranks[0].host_link * 1e6)
    parts = rank.compute_us + rank.exposed_communication_us + rank.exposed_copies_us + rank.idle_us
    assert parts == pytest.approx(rank.total_us)


@pytest.mark.parametrize("name", known_hardware())
def test_every_packaged_chip_has_a_link_that_is_not_called_measured(name: str) -> None:
    hardware = load_hardware(name)
    assert "host_link" in tomllib.loads((PACKAGED / f"{name.lower()}.toml").read_text())
    assert hardware.host_link.origin in ("datasheet", "assumed")
    assert hardware.host_link.bytes_per_second < hardware.peaks.memory_bytes_per_second / 10


def test_a_file_without_a_link_has_the_usual_one(tmp_path: Path) -> None:
    tree = tomllib.loads((PACKAGED / "h200.toml").read_text())
    del tree["host_link"]
    path = tmp_path / "old.toml"
    path.write_text(tomli_w.dumps(tree))
    old = load_hardware(str(path))
    assert old.host_link.bytes_per_second == 50e9 and old.host_link.origin == "assumed"
    assert "[host_link]" in hardware_text(old)


def compute(seconds: float) -> RecordedOp:
    return RecordedOp("compute", switches=(str(seconds),))


def out(number: int, bytes_: int) -> RecordedOp:
    return RecordedOp(TO_HOST, sizes=(bytes_,), switches=(str(number),))


def back(number: int, bytes_: int) -> RecordedOp:
    return RecordedOp(FROM_HOST, sizes=(bytes_,), switches=(str(number),))


def opened(number: int) -> RecordedOp:
    return RecordedOp(ARRIVE, switches=(str(number),))


def cost_of(operator: RecordedOp) -> OpCost:
    """A byte takes a second."""
    return OpCost(float(operator.switches[0]) if operator.name == "compute" else operator.sizes[0], operator.name)


def played(*work: RecordedOp, room: int = 0, launch: float = 0.0) -> Timing:
    streams = Streams(cost_of, launch, copies=HostCopies(room))
    streams.play(work)
    return streams.timing


def test_copies_beside_compute_cost_nothing() -> None:
    timing = played(out(1, 3), compute(4), out(2, 1), compute(4), back(1, 3), compute(5), opened(1), room=3)
    assert (timing.seconds, timing.compute, timing.host_link) == (13, 13, 0)


def test_compute_waits_for_room_and_for_a_storage_that_is_not_back() -> None:
    leaving = played(out(1, 5), compute(2), out(2, 5), compute(2), room=5)
    assert (leaving.seconds, leaving.host_link, leaving.terms[HOST_LINK]) == (5 + 2, 3, 3)
    coming = played(out(1, 5), compute(5), out(2, 5), back(1, 5), compute(2), opened(1), compute(1), room=5)
    assert (coming.seconds, coming.host_link) == (5 + 5 + 1, 3)


def test_copies_of_two_directions_run_at_once_and_of_one_direction_one_at_a_time() -> None:
    work = (out(1, 4), compute(4), out(2, 4), back(1, 4), opened(1))
    assert played(*work, room=4).seconds == 8
    one_way = (out(1, 4), out(2, 4), compute(8), out(3, 5), back(1, 4), back(2, 4), opened(2))
    assert played(*one_way, room=8).seconds == 8 + 8


def test_a_storage_that_has_not_left_is_still_there() -> None:
    work = (out(1, 4), compute(1), back(1, 4), opened(1), compute(1))
    assert played(*work, room=4).seconds == 2


def test_a_micro_batch_after_another_takes_as_long() -> None:
    work: RecordedOps = (out(1, 5), compute(6), out(2, 5), compute(6), back(1, 5), compute(2), opened(1), compute(2))
    (timing,) = steady_state([[work]], Streams(cost_of, 0.0, copies=HostCopies(5)))
    assert (timing.seconds, timing.host_link) == (16 + 3, 3)


def test_a_copy_takes_a_launch_of_the_host() -> None:
    assert played(out(1, 0), compute(0), launch=2.0).idle == 4
