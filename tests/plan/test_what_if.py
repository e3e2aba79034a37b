"""What-ifs, asked of a planner that computes nothing, and layouts from a command line."""

from dataclasses import asdict, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.parallel import DISPATCHERS
from penstock.config.run import Run
from penstock.plan.asked_layout import rows_to_share, with_layout, with_overrides
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import parse_cluster, with_network
from penstock.plan.layout_names import parse_layout
from penstock.plan.memory import COMPONENTS, RankMemory, components
from penstock.plan.projection import Projection, Refusal, layout_of
from penstock.plan.what_if import (
    SweepPoint,
    compare,
    scale,
    slowest,
    sweep,
    usable_worlds,
    with_smallest_state,
    with_state_in_host_memory,
)
from tests.cli.made_plans import CLUSTER, GB, MadeUp, memory, projection, rank_time, run_of


def projected(point: SweepPoint) -> Projection:
    assert isinstance(point.answer, Projection)
    return point.answer


def refused(point: SweepPoint) -> Refusal:
    assert isinstance(point.answer, Refusal)
    return point.answer


def test_components_are_all_of_a_rank_s_memory() -> None:
    places = {name: 2**at for at, name in enumerate(COMPONENTS)}
    memory = RankMemory(rank=0, host=3, moment="update", **places)
    assert sum(components(memory).values()) == memory.total == 2 ** len(COMPONENTS) - 1


def test_the_slowest_place_is_the_one_that_waits_least() -> None:
    one = projection()
    time = replace(one.time, ranks=(rank_time(0, 9.0, 3.0), rank_time(8, 9.0, 0.5)))
    assert slowest(replace(one, time=time)).rank == 8


def test_a_comparison_says_which_terms_changed_and_adds_up() -> None:
    left, right = projection(), projection(run_of("training.micro_batch=2"), step=12.2, activations=40 * GB)
    found = compare(left, right)
    assert [(one.field, one.left, one.right) for one in found.fields] == [("training.micro_batch", "4", "2")]
    assert {one.name: one.more for one in found.memory if one.more} == {"activations": -10 * GB}
    assert {one.name: one.more for one in found.activations if one.more} == {"held": -10 * GB}
    assert sum(one.more for one in found.memory) == right.memory.total - left.memory.total
    assert sum(one.more for one in found.seconds) == pytest.approx(12.2 - 11.2)


def test_a_term_that_one_run_does_not_have_is_zero_there() -> None:
    left = projection()
    places = tuple(replace(one, terms={"dispatch": 11.2}) for one in left.time.ranks)
    found = compare(left, replace(left, time=replace(left.time, ranks=places)))
    assert {one.name: (one.left, one.right) for one in found.seconds}["dispatch"] == (0, 11.2)
    assert {one.name: one.right for one in found.seconds}["experts"] == 0


@pytest.mark.parametrize(("kind", "rows"), [("strong", [64, 64, 64]), ("weak", [32, 64, 128])])
def test_scaling_changes_data_parallel_ranks_and_weak_scaling_the_batch(
    kind: Literal["strong", "weak"], rows: list[int]
) -> None:
    points = [projected(one) for one in scale(run_of(), CLUSTER, (8, 16, 32), MadeUp(), kind)]
    assert [one.run.training.global_batch for one in points] == rows
    assert [one.cluster.devices for one in points] == [8, 16, 32]
    first, second, _ = (one.layout for one in points)
    assert replace(second, dp=4, edp=first.edp) == first and second.dp == 8


def test_efficiency_is_the_speed_of_a_device_over_that_of_the_first_point() -> None:
    points = scale(run_of(), CLUSTER, (8, 16), MadeUp(), "strong")
    # 64 rows in 17 s on 8 devices, and in 9 s on 16.
    assert [one.efficiency for one in points] == [1.0, pytest.approx((64 / 9 / 16) / (64 / 17 / 8))]


def test_a_world_that_a_layout_cannot_have_says_why_and_is_no_base_for_efficiency() -> None:
    small, enough = scale(run_of(), CLUSTER, (2, 8), MadeUp(), "weak")
    assert refused(small).rule == "ranks-fit-the-run"
    assert small.efficiency is None
    assert enough.efficiency == 1.0


RECOMPUTED = {"expert-activation": ["expert-activation", "norm", "latent-up"], "moe": ["moe", "norm", "latent-up"]}


@pytest.mark.parametrize(
    ("batch", "margin", "link_seconds", "rows", "modules"),
    [
        (32, 0.0, 9.0, 16, "layer"),
        (32, 0.0, 0.5, 8, "moe"),
        (32, 0.35, 0.5, 16, "layer"),
        (5, 0.0, 9.0, 5, "expert-activation"),
        (5, 0.1, 9.0, 5, "moe"),
    ],
)
def test_one_device_keeps_the_largest_state_in_host_memory_and_hides_transfers_or_recomputes_less(
    batch: int, margin: float, link_seconds: float, rows: int, modules: str
) -> None:
    of_a_row = {0: 60, 1: 35, 3: 30}  # GB of activations by the number of recomputed modules

    def plan(run: Run, cluster: Cluster) -> Projection:
        recomputed = run.recompute.modules
        held = 5 if "layer" in recomputed else 12 if "moe" in recomputed else of_a_row[len(recomputed)]
        state = {"fp32": 280, "bf16": 260, "int8": 220}[run.optimizer.moment_dtype]
        host = state if run.optimizer.store_param_remainders else 300
        place = memory(0, run.training.micro_batch * held * GB, host=host * GB)
        passes = batch / run.training.micro_batch
        step = 20 + 5 * ("moe" in recomputed) + 7 * ("layer" in recomputed) + link_seconds * passes
        return replace(projection(run, cluster, step), memories=(place,))

    one = cluster_of(1, CLUSTER.hardware)  # 206 GB, of which the other state takes 45, and 275 GB in the host
    run = load_run("debug", [f"training.global_batch={batch}"])
    found = with_state_in_host_memory(run, one, plan, margin)
    assert found is not None
    words, there = found
    assert (there.run.offload.optimizer, there.run.offload.gradients) == (True, True)
    assert (there.run.optimizer.store_param_remainders, there.run.optimizer.moment_dtype) == (True, "bf16")
    assert there.run.training.micro_batch == rows
    assert list(there.run.recompute.modules) == RECOMPUTED.get(modules, [modules])
    assert with_overrides(run, words, 1) == there.run
    smallest = with_smallest_state(run, one, plan, found)
    assert smallest is None, "no faster"
    muon = load_run("debug", ["optimizer.method=muon"])
    assert with_state_in_host_memory(muon, one, plan) is None, "its state stays on the device"


@pytest.mark.parametrize("saved", [0.4, 0.6])
def test_a_smaller_format_of_the_state_is_told_where_it_makes_a_step_a_twentieth_faster(saved: float) -> None:
    def plan(run: Run, cluster: Cluster) -> Projection:
        return projection(run, cluster, 10 - saved * (run.optimizer.moment_dtype == "int8"))

    run, one = load_run("debug"), cluster_of(1, CLUSTER.hardware)
    found = with_state_in_host_memory(run, one, plan)
    assert found is not None and found[1].run.optimizer.moment_dtype == "fp32"
    smallest = with_smallest_state(run, one, plan, found)
    assert (smallest is None) == (saved == 0.4)
    if smallest is not None:
        words, there = smallest
        changed = {"store_param_remainders": True, "moment_dtype": "int8"}
        assert there.run.optimizer == found[1].run.optimizer.model_copy(update=changed)
        assert with_overrides(run, words, 1) == there.run


SWEEPS = [
    ("sequence_length", ("64", "100"), [128, 96]),
    ("micro_batch", ("3",), [72]),
    ("global_batch", ("128",), [128]),
]


@pytest.mark.parametrize(("name", "values", "rows"), SWEEPS)
def test_a_sweep_keeps_about_the_tokens_of_a_step_unless_it_is_of_the_batch(
    name: str, values: tuple[str, ...], rows: list[int]
) -> None:
    points = sweep(run_of(), CLUSTER, name, values, MadeUp())
    assert [projected(one).run.training.global_batch for one in points] == rows
    assert [f"{vars(projected(one).run.training)[name]}" for one in points] == list(values)


def test_expert_ranks_are_swept_by_dispatcher() -> None:
    points = sweep(run_of(), CLUSTER, "ep", ("1", "4", "8"), MadeUp({"hierarchical": "one node"}))
    assert [dict(one.asked) for one in points[:3]] == [
        {"ep": "1"},
        {"ep": "4", "dispatcher": "all-to-all"},
        {"ep": "4", "dispatcher": "all-gather"},
    ]
    assert len(points) == 1 + 2 * len(DISPATCHERS)
    assert (refused(points[4]).rule, refused(points[4]).reason) == ("cannot-start", "one node")
    assert projected(points[6]).run.parallel.expert == 8


def test_a_part_of_the_network_is_swept_with_the_run_as_it_is() -> None:
    cluster = with_network(CLUSTER, "pod_nodes=1")
    points = sweep(run_of(), cluster, "oversubscription", ("1", "4"), MadeUp())
    assert [projected(one).cluster.hardware.node.oversubscription for one in points] == [1, 4]
    assert [projected(one).run for one in points] == [run_of(), run_of()]


@pytest.mark.parametrize(
    ("devices", "worlds"),
    [(1000, (1000, 992, 960, 896, 768)), (1024, (1024,)), (64, (64,)), (56, (56, 48)), (7, (7, 6)), (1, (1,))],
)
def test_numbers_of_devices_worth_a_search_have_more_factors_of_two(devices: int, worlds: tuple[int, ...]) -> None:
    assert usable_worlds(parse_cluster(f"{devices}xH200")) == worlds


def test_a_value_that_a_rule_refuses_is_told_with_the_rule_and_the_planner_is_not_asked() -> None:
    made_up = MadeUp()
    (point,) = sweep(run_of(), CLUSTER, "ep", ("3",), made_up)[:1]
    assert "ranks" in refused(point).rule
    assert refused(point).layout["ep"] == 3
    assert made_up.asked == []


@pytest.mark.parametrize(
    ("name", "told"),
    [("sequence_lenght", "did you mean sequence_length"), ("dp", "dp follows"), ("model.oven", "nothing of this name")],
)
def test_what_cannot_be_swept_is_told(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        sweep(run_of(), CLUSTER, name, ("1",), MadeUp())
    assert told in str(error.value)


V3 = load_run("deepseek-v3")


def test_every_choice_comes_out_as_it_went_in() -> None:
    sizes = "pp=4,vpp=2,ep=8,etp=1,cp=2,tp=2,dp=4,edp=2,micro_batch=2"
    choices = "schedule=zb-v,recompute=norm+moe,sync_free_stage=1,dispatcher=hierarchical,shard=full,offload=optimizer"
    asked = parse_layout(f"{sizes},{choices}")
    run = with_layout(V3, asked, 64)
    found = asdict(layout_of(run, grid_of(run, 64), run.dispatch.method, run.parallel.shard))
    assert {name: f"{value}" for name, value in found.items()} == asked


def test_parts_without_a_name_stay() -> None:
    run = with_layout(V3, parse_layout("ep=8"), 64)
    assert run == V3.model_copy(update={"parallel": V3.parallel.model_copy(update={"expert": 8})})
    assert with_layout(V3, {"dispatcher": "local"}, 1).dispatch.method == "auto"


@pytest.mark.parametrize(
    ("words", "schedule", "stages"),
    [
        ("pp=4,vpp=4", "interleaved", 4),
        ("pp=4", "1f1b", 1),
        ("pp=4,schedule=zb-v", "zb-v", 2),
        ("pp=4,schedule=interleaved", "interleaved", 2),
        ("pp=4,schedule=gpipe,vpp=3", "gpipe", 3),
        ("pp=4,schedule=1f1b,vpp=3", "1f1b", 3),  # Both are named; a rule refuses them.
    ],
)
def test_schedule_and_stages_that_are_not_both_said_are_made_to_fit(words: str, schedule: str, stages: int) -> None:
    pipeline = with_layout(V3, parse_layout(words), 64).pipeline
    assert (pipeline.schedule, pipeline.stages_per_rank) == (schedule, stages)


def test_stages_of_another_pipeline_lose_their_division() -> None:
    divided = with_overrides(V3, ["parallel.pipeline=2", "pipeline.layout=Et*31|t*30,mL"], 2)
    assert with_layout(divided, {"ep": "2"}, 2).pipeline.layout == "Et*31|t*30,mL"
    assert with_layout(divided, {"pp": "4"}, 4).pipeline.layout == ""


def test_another_recomputation_begins_with_all_layers() -> None:
    some = with_overrides(V3, ["recompute.modules=moe", "recompute.layers=3"], 1)
    assert with_layout(some, {"recompute": "none"}, 1).recompute == V3.recompute
    assert with_layout(some, {"recompute": "norm"}, 1).recompute.layers == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("pp", "got 'pp'"),
        ("pp=", "got 'pp='"),
        ("", "got ''"),
        ("eq=8", "a layout has no such part; got eq"),
        ("micro_bath=8", "did you mean micro_batch"),
        ("ep=x", "parallel.expert has the wrong type"),
        ("ep=0", "parallel.expert is out of range"),
        ("schedule=fast", "pipeline.schedule has an unknown value"),
        ("pp=4,dp=7", "dp follows from the other sizes; got 7; allowed: 16"),
    ],
)
def test_a_wrong_word_is_told(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_layout(V3, parse_layout(words), 64)
    assert told in str(error.value)


@given(
    data=st.integers(1, 64),
    micro_batch=st.integers(1, 8),
    tokens=st.integers(1, 10**9),
    length=st.sampled_from([512, 4096, 131072]),
)
def test_a_batch_of_about_so_many_tokens_is_one_that_ranks_can_share(
    data: int, micro_batch: int, tokens: int, length: int
) -> None:
    sizes = [f"training.micro_batch={micro_batch}", f"training.sequence_length={length}", "parallel.pipeline=2"]
    batch = with_overrides(V3, sizes, 2 * data, tokens).training.global_batch
    unit = data * micro_batch
    assert batch % unit == 0
    assert abs(batch * length - tokens) <= unit * length / 2 or batch == unit


@pytest.mark.parametrize(
    ("rows", "world", "shared"), [(15000, 512, 14848), (1000, 768, 768), (100, 512, 128), (0.3, 512, 1), (5, 1, 5)]
)
def test_a_batch_that_is_sought_for_suits_many_numbers_of_ranks(rows: float, world: int, shared: int) -> None:
    assert rows_to_share(rows, world) == shared
