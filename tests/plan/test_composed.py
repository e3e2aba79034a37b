"""A run composed of pieces of a proxy model has the memory and the step time of the run itself."""

from dataclasses import replace

import pytest

from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels.tuning import named_device
from penstock.layout.schedules import SCHEDULES
from penstock.layout.stages import Stage
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, overheads_of, target_of
from penstock.plan.composed_run import ComposedTimes, contents_of
from penstock.plan.composer import Composer, is_composable
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.liveness import first_of_kinds, layers_in_order
from penstock.plan.memory import memory_of
from penstock.plan.meta_rank import Target
from penstock.plan.project import project_whole

TARGET = Target(device=named_device("H200", "bf16"))
LITE, V3 = "deepseek-v2-lite-6l", "deepseek-v3-8l"
EVERY = "model.moe.moe_layer_freq=2"
LOCAL = "model.attention.local.kind=window model.attention.local.size=1024 model.attention.local.global_every=3"
FLOAT8 = "float8.dense=blockwise float8.experts=blockwise float8.dispatch=blockwise parallel.expert=8"
FOUR_KINDS = f"{EVERY} {LOCAL} model.intermediate_size=4096 parallel.expert=8 parallel.pipeline=2"
BIASES = "model.moe.bias=true model.moe.clamped.limit=7 model.moe.router.logit_bias=true"
PLAIN = "model.moe=none model.dense_layers=4 model.layers=4 model.intermediate_size=256"
TWO_STAGES = "pipeline.stages_per_rank=2"

CASES = {
    "one rank": (LITE, 1, "training.micro_batch=2"),
    "experts by symmetric": (LITE, 8, "parallel.expert=4 dispatch.sync_free=2"),
    "state in fewer bits": (
        LITE, 8, "parallel.expert=4 optimizer.moment_dtype=int8 optimizer.store_param_remainders=true"
    ),
    "muon": (LITE, 16, "parallel.tensor=2 parallel.expert=4 optimizer.method=muon"),
    "muon, gathered weights": (
        LITE, 16, "parallel.expert=4 parallel.pipeline=2 parallel.shard=full optimizer.method=muon"
    ),
    "experts by all-to-all": (LITE, 8, "parallel.expert=4 dispatch.method=all-to-all"),
    "a context": (LITE, 16, "parallel.pipeline=2 parallel.context=2 parallel.expert=4"),
    "1f1b": (LITE, 16, "parallel.pipeline=4 parallel.expert=2"),
    "interleaved": (
        LITE, 8, "parallel.pipeline=2 parallel.expert=2 pipeline.schedule=interleaved pipeline.stages_per_rank=3"
    ),
    "zb-1f1b, a stage with the head alone": (
        LITE, 16, "parallel.pipeline=4 parallel.expert=2 pipeline.schedule=zb-1f1b"
    ),
    "zb-v, selective recompute": (
        LITE, 16,
        f"parallel.pipeline=2 parallel.expert=2 pipeline.schedule=zb-v {TWO_STAGES} "
        'recompute.modules=["expert-activation","norm"]'
    ),
    "v-half, tensor ranks, full recompute": (
        LITE, 16,
        f"parallel.pipeline=2 parallel.tensor=2 parallel.expert=4 pipeline.schedule=v-half {TWO_STAGES} "
        'recompute.modules=["layer"]'
    ),
    "gathered weights": (LITE, 16, "parallel.expert=8 parallel.shard=full"),
    "prediction layers": (V3, 32, "parallel.pipeline=4 parallel.expert=8"),
    "experts in halves": (
        V3, 32,
        "parallel.pipeline=4 parallel.expert=4 parallel.expert_tensor=2 parallel.tensor=2 "
        f"pipeline.schedule=dualpipe-v {TWO_STAGES}"
    ),
    "several copies": (V3, 64, "parallel.pipeline=8 parallel.expert=8 parallel.shard_size=2"),
    "grouped queries": ("moe-1t-4l", 32, "parallel.pipeline=2 parallel.expert=8 parallel.context=2"),
    "experts in every second layer": (LITE, 16, f"{EVERY} parallel.pipeline=4 parallel.expert=2"),
    "experts in every second layer, gathered weights": (LITE, 16, f"{EVERY} parallel.expert=8 parallel.shard=full"),
    "biases, experts in halves": (
        LITE, 16,
        f"{BIASES} parallel.pipeline=2 parallel.expert=2 parallel.expert_tensor=2 pipeline.schedule=zb-1f1b"
    ),
    "ranks divide an expert": ("mixtral-8x7b-2l", 16, "parallel.tensor=2 parallel.expert=8"),
    "the host has the optimizer": (LITE, 16, "parallel.pipeline=2 parallel.expert=4 offload.optimizer=true"),
    "ranks divide an expert, gathered weights": (
        "mixtral-8x7b-2l", 16, "parallel.tensor=2 parallel.expert=8 parallel.shard=full"
    ),
    "local layers": ("moe-1t-8l", 32, f"{LOCAL} parallel.pipeline=4 parallel.expert=8"),
    "four kinds, zb-v": ("moe-1t-8l", 32, f"{FOUR_KINDS} pipeline.schedule=zb-v {TWO_STAGES}"),
    "four kinds, interleaved": (
        "moe-1t-8l", 32, f"{FOUR_KINDS} pipeline.schedule=interleaved pipeline.stages_per_rank=4"
    ),
    "eight bits": (LITE, 16, f"{FLOAT8} parallel.expert=4 parallel.pipeline=2"),
    "eight bits, gathered in 16": (LITE, 16, f"{FLOAT8} parallel.shard=full"),
    "eight bits, gathered so": (LITE, 16, f"{FLOAT8} parallel.shard=full float8.gather=true"),
    "eight bits but for both ends": (
        LITE, 16, f"{FLOAT8} parallel.pipeline=2 float8.first_layers=2 float8.last_layers=1"
    ),
    "gathered weights, experts of one rank": (LITE, 16, "parallel.expert=16 parallel.shard=full"),
    "gathered weights, experts of one rank, a pipeline": (
        LITE, 16, "parallel.pipeline=2 parallel.expert=8 parallel.shard=full"
    ),
    "gathered weights, tensor ranks": (LITE, 8, "parallel.tensor=8 parallel.expert=4 parallel.shard=full"),
    "eight bits, a scale for each matrix": (
        LITE, 8, "parallel.expert=8 float8.dense=tensorwise float8.experts=tensorwise"
    ),
    "residual streams, interleaved, gathered weights": (
        LITE, 16,
        "model.hyper_connections.streams=4 parallel.shard=full "
        f"parallel.pipeline=2 pipeline.schedule=interleaved {TWO_STAGES}"
    ),
    "compressed attention": (
        "deepseek-v4-flash-8l", 32, "parallel.pipeline=2 parallel.expert=16 parallel.shard=full"
    ),
    "no experts": ("debug", 8, f"{PLAIN} parallel.pipeline=2")
}  # fmt: skip
OFTEN = ["one rank", "experts by all-to-all", "a context", "interleaved", "zb-v, selective recompute"]
OFTEN += [
    "gathered weights",
    "gathered weights, experts of one rank, a pipeline",
    "several copies",
    "experts in every second layer, gathered weights",
    "prediction layers",
]
OFTEN += ["biases, experts in halves", "four kinds, zb-v", "eight bits but for both ends", "no experts"]
OFTEN += ["residual streams, interleaved, gathered weights", "compressed attention"]
OFTEN += ["muon", "ranks divide an expert", "the host has the optimizer", "state in fewer bits"]


def run_of(name: str) -> tuple[Run, int]:
    preset, world, overrides = CASES[name]
    return load_run(preset, [*overrides.split(), "training.global_batch=256"]), world


@pytest.mark.often(*OFTEN)
@pytest.mark.parametrize("name", CASES)
def test_a_composed_run_needs_the_memory_of_the_run(name: str) -> None:
    run, world = run_of(name)
    composer = Composer(run, replace(TARGET, world=world))
    composed = composer.composed(run, grid_of(run, world))
    memories = map(composed.memory, range(run.parallel.pipeline))
    for memory, rank in zip(memories, range(0, world, world // run.parallel.pipeline), strict=True):
        exact = memory_of(run, world=world, rank=rank, target=TARGET)
        assert memory.rank == exact.rank
        assert memory.total == pytest.approx(exact.total, rel=5e-3)
        assert (memory.parameters, memory.gradients) == (exact.parameters, exact.gradients)
        assert memory.buffers == exact.buffers and memory.host == pytest.approx(exact.host, abs=4096)
        # Buffers of the host's state hold whole tensors.
        assert memory.moments == pytest.approx(exact.moments, abs=4096 if memory.host else 0)
        assert memory.master == pytest.approx(exact.master, abs=64)


TIMED = [
    "muon",
    "muon, gathered weights",
    "experts by symmetric",
    "state in fewer bits",
    "1f1b",
    "zb-v, selective recompute",
    "several copies",
]
TIMED += ["experts in every second layer", "local layers", "four kinds, zb-v", "eight bits", "eight bits, gathered so"]
TIMED += [
    "gathered weights, experts of one rank",
    "eight bits but for both ends",
    "eight bits, a scale for each matrix",
]


@pytest.mark.often("muon", "four kinds, zb-v", "several copies", "eight bits, gathered so", "1f1b")
@pytest.mark.parametrize("name", TIMED)
def test_a_composed_run_takes_as_long_as_the_run(name: str) -> None:
    run, world = run_of(name)
    cluster = parse_cluster(f"{world}xH200")
    composer = Composer(run, target_of(run, cluster, DEFAULT_ASSUMPTIONS), overheads_of(cluster.hardware))
    composed, times = composer.composed(run, grid_of(run, world)), ComposedTimes(cluster)
    exact = project_whole(run, cluster).time
    assert times.exact(composed).step_seconds == pytest.approx(exact.step_seconds, rel=5e-3)
    assert times.exact(composed).bubble == pytest.approx(exact.bubble, abs=1e-3)
    assert times.seconds(composed) == pytest.approx(exact.step_seconds, rel=1e-2)
    assert times.bound(composed, range(composed.grid.pipeline)) <= times.seconds(composed) * 1.001
    assert times.bound(composed, composed.inner_places) <= times.bound(composed, range(composed.grid.pipeline))


def test_a_proxy_stage_runs_once_for_all_runs_with_the_same_pieces() -> None:
    runs = [
        load_run(LITE, ["parallel.pipeline=2", f"training.global_batch={rows}", f"parallel.expert={experts}"])
        for rows, experts in ((64, 2), (128, 2), (64, 4))
    ]
    composer = Composer(runs[0], TARGET)
    done = []
    for run in runs:
        composed = composer.composed(run, grid_of(run, 8))
        assert composed.total(0) > 0
        done.append(composer.meta_runs)
    assert done[0] == done[1] < done[2]


@pytest.mark.parametrize(
    "texts",
    ["parallel.pipeline=8", "parallel.pipeline=2 parallel.shard=full", "parallel.pipeline=2 model.dense_layers=0"],
)
def test_pieces_of_usual_stages_approximate_those_of_rare_ones(texts: str) -> None:
    run = load_run(LITE, [*texts.split(), "parallel.expert=2", "training.global_batch=64"])
    nearly, closely = (
        Composer(run, TARGET).composed(run, grid_of(run, 16), closely=closely) for closely in (False, True)
    )
    places = range(run.parallel.pipeline)
    assert nearly.fullest_of(places) == pytest.approx(closely.fullest_of(places), rel=2e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1f1b"])
def test_recomputation_changes_nothing_before_the_first_layer_and_behind_the_last(schedule: str) -> None:
    texts = ["parallel.pipeline=2", f"pipeline.schedule={schedule}", "training.global_batch=8"]
    plain, again = (
        load_run("moe-1t-4l", [*texts, f"recompute.modules={modules}"]) for modules in ("[]", '["moe", "norm"]')
    )
    composer = Composer(plain, TARGET)
    for view, end in (("first", 0), ("last", -1)):
        one, other = (composer.proxy(run, view).stage.pieces[end] for run in (plain, again))
        # Labels say what held the memory of other layers.
        assert replace(one, at_backward={}) == replace(other, at_backward={})
    assert composer.meta_runs == 4


def test_gathered_gradients_of_other_ranks_experts_are_in_no_stage() -> None:
    texts = ["parallel.pipeline=2", "parallel.shard=full", "parallel.expert=8", "training.global_batch=64"]
    run = load_run("qwen3-30b-a3b-8l", texts)
    nearly, closely = (
        Composer(run, TARGET).composed(run, grid_of(run, 16), closely=closely) for closely in (False, True)
    )
    pieces, exact = (composed.stage_of(composed.contents[0]).pieces for composed in (nearly, closely))
    assert [piece.backward for piece in pieces] == [piece.backward for piece in exact]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_place_needs_the_most_memory(name: str) -> None:
    # Most places have equal stages, so the schedule decides.
    sizes = [f"pipeline.schedule={name}", f"pipeline.stages_per_rank={SCHEDULES[name].fewest}", "parallel.pipeline=8"]
    run = load_run("deepseek-v2-lite", ["parallel.expert=2", "training.global_batch=64", *sizes])
    composed = Composer(run, TARGET).composed(run, grid_of(run, 16))
    assert composed.fullest_of(range(8)) == max(map(composed.total, range(8)))


def test_a_later_place_may_be_the_fullest_if_weight_gradients_are_put_off() -> None:
    sizes = ["parallel.pipeline=8", "parallel.expert=2", "pipeline.schedule=zb-1f1b", "training.global_batch=256"]
    run = load_run("deepseek-v2-lite", sizes)
    composed = Composer(run, TARGET).composed(run, grid_of(run, 16))
    middle = range(3, 7)
    assert len({composed.contents[place] for place in middle}) == 1
    totals = [composed.total(place) for place in middle]
    assert totals == sorted(totals) and totals[-1] > 1.05 * totals[0]
    assert composed.fullest_of(range(8)) == max(totals)


def test_kinds_of_layers_follow_the_model() -> None:
    run = load_run("moe-1t-8l", [*FOUR_KINDS.split(), "model.dense_layers=1"])
    stage = Stage(layers=tuple(range(8)))
    assert contents_of(stage, run).layers == (
        ("local dense", 2),
        ("moe", 1),
        ("local dense", 1),
        ("local moe", 1),
        ("dense", 1),
        ("local moe", 1),
        ("local dense", 1),
    )
    assert first_of_kinds(run, range(8)) == {"local dense": 0, "moe": 2, "local moe": 4, "dense": 5}
    assert layers_in_order(run, ("dense", "local moe")) == (5, 6)
    mixed = load_run(LITE, ["float8.experts=blockwise", "float8.first_layers=2", "float8.last_layers=1"])
    assert first_of_kinds(mixed, range(6)) == {"16-bit dense": 0, "16-bit moe": 1, "moe": 2}
    assert layers_in_order(mixed, ("moe", "16-bit moe")) == (2, 5)


def test_settings_that_make_layers_differ_are_not_composed() -> None:
    assert is_composable(load_run(LITE))
    overlapped = ["parallel.pipeline=2", "pipeline.schedule=interleaved", "dispatch.overlap=passes"]
    for overrides in (['offload.activations=["layer"]'], overlapped):
        assert not is_composable(load_run(LITE, ["training.micro_batch=2", *overrides]))
