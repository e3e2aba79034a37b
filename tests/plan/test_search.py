"""A search finds the fastest layout that fits, whatever guides say of it, and counts every other layout."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search_agrees import differences, draws, random_layouts
from penstock.base.errors import ConfigError, KernelError
from penstock.config.fit import grid_of
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Run
from penstock.plan import composer as composer_module
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, overheads_of, target_of
from penstock.plan.candidates import LayoutSet, Saving, SearchSpace, fixed_by, ladder_of, run_of
from penstock.plan.composed_run import ComposedRun, ComposedTimes, ProxyStage
from penstock.plan.composer import FEWEST_CORES, Composer, View, meta_workers
from penstock.plan.costs import HardwareTimes
from penstock.plan.hardware import Cluster
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.meta_rank import Target
from penstock.plan.project import project
from penstock.plan.projection import FAILED, MARGIN, MEMORY, SLOWER, Plan, memory_margin
from penstock.plan.rules import Sizes, config_refusal, illegal
from penstock.plan.search import TOLERANCE, search
from penstock.plan.search_request import SearchRequest, neutral_sizes
from penstock.plan.space_bounds import SpaceBounds
from tests.examples import examples

LITE = load_run("deepseek-v2-lite-6l", ["training.global_batch=64"])
LEGAL = (MEMORY, MARGIN, SLOWER)
GB = 10**9


def asked(devices: str, run: Run = LITE, top: int = 5, **fixed: str) -> SearchRequest:
    return SearchRequest(run=run, cluster=parse_cluster(devices), fixed=fixed, top=top)


@cache
def found(devices: str = "8xH200", top: int = 5, **fixed: str) -> Plan:
    return search(asked(devices, top=top, **fixed))


def space_of(request: SearchRequest) -> tuple[SearchSpace, tuple[LayoutSet, ...]]:
    space = SearchSpace(neutral_sizes(request, request.run), request.run, request.fixed)
    return space, tuple(space.families())


def test_the_best_come_first_and_each_is_what_its_run_projects() -> None:
    plan = found()
    rates = [one.time.tokens_per_second_per_device for one in plan.candidates]
    assert rates and rates == sorted(rates, reverse=True) and plan.model == LITE.name
    room = 1 - memory_margin(plan.cluster)
    assert all(one.memory.total <= room * one.capacity_bytes for one in plan.candidates)
    for one in plan.candidates[:2]:
        exact = project(one.run, one.cluster)
        assert (one.layout, one.memories) == (exact.layout, exact.memories)
        assert one.time.step_seconds == exact.time.step_seconds


@pytest.mark.often("12")
@pytest.mark.parametrize("count", [12, 36])
def test_layouts_that_a_search_composes_are_what_their_words_project(count: int) -> None:
    unequal = {}
    for number, drawn in enumerate(draws(count, seed=5, most=2048)):
        layouts = random_layouts(drawn.request, 1, number)
        if differing := differences(drawn.request, layouts):
            unequal[drawn.command] = differing
    assert not unequal


def test_rows_are_the_best_of_different_ways_to_divide_the_model_and_then_others() -> None:
    def ways(plan: Plan) -> list[tuple[bool, ...]]:
        layouts = [one.layout for one in plan.candidates]
        return [(one.ep > 1, one.etp > 1, one.pp > 1, one.recompute != "none") for one in layouts]

    few, many = ways(found()), ways(found(top=40))
    assert len(set(few)) == len(few) == 5
    assert {has_pipeline for *_, has_pipeline, _ in many} == {recomputes for *_, recomputes in many} == {False, True}
    assert {(False, False), (True, False), (False, True)} <= {way[:2] for way in many} and len(set(many)) < len(many)


@pytest.mark.parametrize("on", ["24xH100", "12xH200", "20xMI300X"])
def test_experts_over_uneven_parts_of_nodes_are_projected(on: str) -> None:
    experts = {"24xH100": 12, "12xH200": 3, "20xMI300X": 10}[on]
    for method in ("auto", "hierarchical", "all-to-all", "all-gather"):
        texts = ["model.moe.experts=60", f"parallel.expert={experts}", f"dispatch.method={method}"]
        run = load_run("deepseek-v2-lite-6l", [*texts, "training.global_batch=240"])
        assert project(run, parse_cluster(on)).time.step_seconds > 0


def test_a_layout_that_cannot_run_is_refused_with_its_reason_and_ends_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = composer_module.run_proxy

    def run_proxy(run: Run, view: View, target: Target, kinds: Sequence[str]) -> ProxyStage:
        if run.parallel.expert == 4:
            raise KernelError("four ranks have no kernel")
        return real(run, view, target, kinds)

    monkeypatch.setattr(composer_module, "run_proxy", run_proxy)
    plan = search(asked("8xH200", cp="1", tp="1", micro_batch="1", offload="none"))
    assert plan.candidates and all(one.layout.ep != 4 for one in plan.candidates)
    failed = [refusal for refusal in plan.refused if refusal.rule == FAILED]
    assert failed and all("four ranks have no kernel" in one.reason and one.layout["ep"] == 4 for one in failed)
    assert plan.considered == sum(one.count for one in plan.refused) + len(plan.candidates)


@pytest.mark.often("2xA100-*")
@pytest.mark.parametrize(
    ("devices", "fixed"),
    [
        (
            "4xH200",
            {"cp": "1", "etp": "1", "micro_batch": "2", "sync_free_stage": "0", "recompute": "none", "offload": "none"},
        ),
        # Little memory: what is recomputed and what the host keeps decides.
        ("2xA100", {"cp": "1", "etp": "1", "tp": "1", "micro_batch": "8"}),
    ],
)
def test_no_layout_of_a_whole_space_is_faster_than_the_best(devices: str, fixed: dict[str, str]) -> None:
    request = asked(devices, **fixed)
    cluster = request.cluster
    composer = Composer(LITE, target_of(LITE, cluster, DEFAULT_ASSUMPTIONS), overheads_of(cluster.hardware))
    times = ComposedTimes(cluster)
    limit = cluster.hardware.memory.capacity_bytes * (1 - memory_margin(cluster))
    space, families = space_of(request)
    fastest, legal = float("inf"), 0
    for sizes in (one for family in families for one in space.layouts(family)):
        run, legal = run_of(LITE, sizes), legal + 1
        composed = composer.composed(run, grid_of(run, sizes.world))
        if max(map(composed.total, range(sizes.pp))) <= limit:
            fastest = min(fastest, times.seconds(composed))
    assert legal == space.count
    assert search(request).candidates[0].time.step_seconds <= fastest * (1 + TOLERANCE + 1e-3)


@cache
def bounded(name: str, devices: str) -> tuple[SearchSpace, SpaceBounds, Composer, ComposedTimes, tuple[LayoutSet, ...]]:
    run = load_run(name)
    on, _, network = devices.partition(" ")
    request = SearchRequest(run=run, cluster=parse_cluster(on, network or None))
    cluster, times = request.cluster, HardwareTimes.of(request.cluster.hardware)
    composer = Composer(run, target_of(run, cluster, DEFAULT_ASSUMPTIONS), overheads_of(cluster.hardware))
    space, families = space_of(request)
    imbalance = DEFAULT_ASSUMPTIONS.imbalance
    bounds = SpaceBounds(run, cluster, imbalance, composer, neutral_sizes(request, run), times)
    return space, bounds, composer, ComposedTimes(cluster, times=times), families


@pytest.mark.often("gpt-oss-*", "*pod_nodes*", "deepseek-v3-8l-*", "debug-*")
@examples(8)
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("deepseek-v2-lite", "16xH100"),
        ("gpt-oss-20b", "16xMI300X"),
        ("deepseek-v2-lite", "32xH100 pod_nodes=2,oversubscription=8,rails=true"),
        ("deepseek-v3-8l", "8xH100"),  # with a prediction depth
        ("debug", "4xH200"),  # each expert has operators of its own
    ],
)
@given(data=st.data())
def test_bounds_of_drawn_layouts_do_not_exceed_their_projection(name: str, devices: str, data: st.DataObject) -> None:
    space, *_, families = bounded(name, devices)
    family = data.draw(st.sampled_from(families))
    dense, shard, rows, shape = data.draw(st.sampled_from(np.argwhere(family.legal).tolist()))
    number = data.draw(st.integers(0, len(family.experts) - 1))
    assert_bounded(
        name, devices, family, (dense, number, shard, rows), shape, data.draw(st.sampled_from(space.savings))
    )


def test_tokens_go_to_nodes_first_only_where_a_node_has_several_of_the_ranks() -> None:
    request = SearchRequest(run=load_run("deepseek-v2-lite"), cluster=parse_cluster("42xH200"))  # six nodes of seven
    ways = {(way.ep * way.etp, way.dispatcher) for family in space_of(request)[1] for way in family.experts}
    assert ways == {(1, "local"), (2, "all-to-all"), (2, "all-gather")}


def test_copies_that_only_several_rows_need_are_in_no_bound() -> None:
    space, *_, families = bounded("qwen3-4b", "8xH100")
    family = next(one for one in families if one.pp == 1)
    for dense, shard, rows, shape in np.argwhere(family.legal).tolist():
        if family.rows[rows] == 1 and family.shards[shard] == "optimizer":
            assert_bounded("qwen3-4b", "8xH100", family, (dense, 0, shard, rows), shape, space.savings[0])


def test_rows_that_only_larger_micro_batches_cannot_gather_in_products_are_in_no_bound() -> None:
    name, devices = "qwen3-next-80b-a3b", "32xH100"
    space, *_, families = bounded(name, devices)
    family = next(one for one in families if one.pp == 1)
    number = next(
        number for number, one in enumerate(family.experts) if (one.etp, one.dispatcher) == (32, "all-gather")
    )
    place = (family.dense.index((1, 1)), number, family.shards.index("optimizer"), family.rows.index(2))
    assert_bounded(name, devices, family, place, 0, space.savings[0])


def assert_bounded(
    name: str, devices: str, family: LayoutSet, place: tuple[int, ...], shape: int, saving: Saving
) -> None:
    """`place` are indices of dense ranks, experts, shards and rows."""
    space, bounds, composer, times, _ = bounded(name, devices)
    number = place[1]
    divisions = bounds.divisions(family)
    one = divisions.where((divisions.places == place).all(1))
    sizes = space.sizes(family, place, shape, saving, family.experts[number].stages[0])
    run = run_of(load_run(name), sizes)
    composed: ComposedRun = composer.composed(run, grid_of(run, sizes.world))
    memory = max(map(composed.total, range(sizes.pp))) - composer.overheads.context
    seconds = times.seconds(composed)
    splits = "zb" in sizes.schedule or sizes.schedule in ("v-half", "v-min", "dualpipe-v")
    closer, closer_bytes = bounds.closer(bounds.scaled(one, saving.recompute, splits), shape, saving)
    ideal, least, closest = bounds.ideal_seconds(one)[0], bounds.seconds(one, shape, saving)[0], closer[0]
    by_experts = bounds.seconds(bounds.scaled(one, (), splits=False).divisions, shape, saving)[0]
    # Bounds that scale what other layouts take may be off by a little.
    assert by_experts <= 1.02 * seconds, f"{sizes}"
    assert ideal <= seconds and least <= min(seconds, closest) and closest <= 1.02 * seconds, f"{sizes}"
    host = parse_cluster(devices.partition(" ")[0]).hardware.host_link.memory_bytes
    if composed.most_host_bytes <= host:  # what the host lacks counts on the device
        assert bounds.bytes(one, shape, saving)[0] <= memory and closer_bytes[0] <= 1.02 * memory, f"{sizes}"


def test_the_winner_does_not_depend_on_how_many_are_shown_or_on_processes_that_help() -> None:
    with meta_workers(FEWEST_CORES) as workers:
        helped = search(asked("8xH200", top=1), workers=workers)
    assert helped.candidates[0].layout == found().candidates[0].layout
    assert helped.candidates[0].time == found().candidates[0].time


@pytest.mark.often("deepseek-v2-lite-*")
@pytest.mark.parametrize(
    ("preset", "devices", "fixed"),
    [
        # The fullest place is not the first of those that are alike.
        ("deepseek-v2-lite", "16xH100", {"schedule": "zb-1f1b", "pp": "8", "dispatcher": "local"}),
        # Stages without a layer hold a little more than pieces of others, and that is too much.
        ("deepseek-v3-16l", "64xH200", {"schedule": "zb-1f1b", "pp": "16", "ep": "2", "micro_batch": "1"}),
        # A stage without a layer, and context ranks; experts that all tokens of a rank may choose.
        ("qwen3-30b-a3b", "8xH100", {"cp": "2", "pp": "2", "vpp": "25", "ep": "4"}),
    ],
)
def test_found_layouts_fit_on_every_rank(preset: str, devices: str, fixed: dict[str, str]) -> None:
    plan = search(asked(devices, load_run(preset), **fixed))
    assert plan.candidates and all(one.fits for one in plan.candidates)


def test_every_layout_is_counted_once() -> None:
    plan = found()
    space, _ = space_of(asked("8xH200"))
    illegal_layouts = sum(one.count for one in plan.refused if one.rule not in LEGAL)
    assert illegal_layouts == sum(one.count for one in space.illegal.values())
    assert plan.considered == space.count + illegal_layouts
    assert plan.considered == len(plan.candidates) + sum(one.count for one in plan.refused)
    assert all(one.rule and one.reason and "\n" not in one.reason for one in plan.refused)


def test_advice_about_the_best_has_the_speed_of_the_best_without_it() -> None:
    run = load_run("deepseek-v2-lite")
    best, told = (plan := search(asked("8xH200", run))).candidates[0], {one.rule: one for one in plan.advice}
    assert best.layout.pp > 1
    without = told["small-model-without-pipeline"].without
    alone = search(asked("8xH200", run, pp="1")).candidates[0].time.tokens_per_second_per_device
    assert without is not None and 0.9 * alone < without < best.time.tokens_per_second_per_device


def test_a_search_that_ends_early_says_how_much_faster_another_layout_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found().gap == 0
    monkeypatch.setattr("penstock.plan.search.MOST_LOOKED", 16)
    plan = search(asked("8xH200"))
    assert plan.candidates and 0 < plan.gap < 1


def test_a_search_that_ends_early_looks_at_what_may_be_far_better(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"tp": "1", "cp": "1", "etp": "1", "offload": "none"}
    best = found("4xH200", **fixed).candidates[0]
    for name, value in {"MOST_LOOKED": 1, "FIRST_TRIES": 0, "MOST_SAVING": 1, "FINISHED": 12}.items():
        monkeypatch.setattr(f"penstock.plan.search.{name}", value)
    # The layout that saves most takes twice as long.
    plan = search(asked("4xH200", pp="1", **fixed))
    assert plan.candidates[0].time.step_seconds < 1.05 * best.time.step_seconds and plan.gap < 0.1


def test_a_search_that_ends_early_goes_from_the_best_to_faster_layouts_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"tp": "1", "cp": "1", "etp": "1", "offload": "none"}
    best = found("4xH200", **fixed).candidates[0]
    for name, value in {"MOST_LOOKED": 1, "FIRST_TRIES": 0, "MOST_SAVING": 1, "FINISHED": 0}.items():
        monkeypatch.setattr(f"penstock.plan.search.{name}", value)
    plan = search(asked("4xH200", **fixed))  # begins with the layout that saves most, and is far from the best
    assert plan.gap > 0
    assert plan.candidates[0].time.step_seconds < 1.01 * best.time.step_seconds


def test_where_nothing_fits_the_plan_has_the_nearest_layout_and_what_would_help() -> None:
    plan = search(asked("4xH100", load_run("deepseek-v3-8l"), top=3, tp="1", cp="1", etp="1", vpp="1", pp="4"))
    assert plan.candidates == () and plan.nearest is not None and plan.nearest.over_bytes > 0
    assert plan.nearest.layout.offload == "optimizer" and plan.nearest.layout.recompute == "layer"
    assert any("devices, such as" in one for one in plan.helps)


def test_where_memory_is_scarce_layouts_that_save_most_are_a_best_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    run, hardware = load_run("deepseek-v2-lite-3l"), parse_cluster("2xH200").hardware

    def plan_with(capacity: float) -> Plan:
        memory = hardware.memory.model_copy(update={"capacity_bytes": int(capacity)})
        there = Cluster(devices=2, hardware=replace(hardware, memory=memory))
        return search(SearchRequest(run=run, cluster=there, fixed={"tp": "1", "cp": "1", "pp": "1", "ep": "2"}))

    nothing = plan_with(2 * GB)
    assert not nothing.candidates and nothing.nearest is not None
    monkeypatch.setattr("penstock.plan.search.MOST_LOOKED", 0)  # the search ends with what it has at once
    scarce = plan_with(1.05 * nothing.nearest.memory.total / (1 - nothing.margin))
    assert scarce.gap > 0 and scarce.candidates[0].layout.recompute != "none"
    assert sum(one.count for one in scarce.refused) + len(scarce.candidates) == scarce.considered


def test_the_optimizer_is_offloaded_as_far_as_the_host_has_memory() -> None:
    run = load_run("deepseek-v2-lite")
    there = search(asked("1xH200", run)).candidates[0]
    (memory,) = there.memories
    assert there.run.offload.optimizer and there.fits and memory.host > 150 * GB

    def plan_with(host_bytes: int) -> Plan:
        host = there.cluster.hardware.host_link.model_copy(update={"memory_bytes": host_bytes})
        with_less = Cluster(devices=1, hardware=replace(there.cluster.hardware, host_link=host))
        return search(SearchRequest(run=run, cluster=with_less))

    assert plan_with(memory.host).candidates[0].layout == there.layout
    plan = plan_with(137 * GB)
    assert not plan.candidates and plan.nearest is not None and not plan.nearest.fits
    # Masters and moments take 12 bytes of a weight, and 7 or 8 with smaller moments.
    assert plan.nearest.over_bytes == plan.nearest.host_over_bytes == memory.host - 137 * GB
    assert any(one.startswith("optimizer.moment_dtype=bf16, such as") for one in plan.helps)
    assert sum(one.count for one in plan.refused) == plan.considered


def test_a_layout_that_only_the_error_of_the_projection_keeps_out_is_shown_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.plan.search.memory_margin", lambda _: 0.5)
    plan = search(asked("2xA100", micro_batch="8", pp="1"))
    (best, *_), room = plan.candidates, (1 - plan.margin) * plan.cluster.hardware.memory.capacity_bytes
    assert best.memory.total <= room and plan.close
    for one in plan.close:
        assert one.fits and one.memory.total > room and one.time.step_seconds < best.time.step_seconds
    assert any(one.rule == MARGIN and one.count >= len(plan.close) for one in plan.refused)


def test_a_written_layout_trains_and_reads_back(tmp_path: Path) -> None:
    for one in found().candidates:
        assert config_refusal(one.run, one.cluster.devices) is None
    best = found().candidates[0].run
    path = tmp_path / "best.toml"
    path.write_text(dump_toml(best))
    assert load_run(str(path)) == best


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({"pp": "2", "micro_batch": "2"}, marks=pytest.mark.slow),
        {"ep": "2", "etp": "2"},
        {"schedule": "none", "ep": "2"},
    ],
)
def test_a_fixed_size_is_kept(fixed: dict[str, str]) -> None:
    plan = found(**fixed)
    assert plan.candidates
    assert all(f"{vars(one.layout)[name]}" == value for one in plan.candidates for name, value in fixed.items())


def test_a_layout_with_every_part_fixed_is_one_candidate_even_if_it_does_not_fit() -> None:
    fixed = {"tp": "1", "cp": "1", "pp": "1", "vpp": "1", "ep": "1", "etp": "1", "schedule": "none"}
    fixed |= {"micro_batch": "8", "recompute": "none", "sync_free_stage": "0", "dispatcher": "local"}
    plan = search(asked("8xH100", load_run("deepseek-v2-lite"), **fixed))
    (only,) = plan.candidates
    assert not only.fits and only.over_bytes > 0 and plan.considered == 1


@pytest.mark.parametrize(
    "fixed", [{"pq": "2"}, {"pp": "two"}, {"pp": "0"}, {"schedule": "2f2b"}, {"dispatcher": "pigeon"}]
)
def test_a_fixed_value_that_is_none_is_refused(fixed: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        search(asked("8xH200", **fixed))


@cache
def every_layout(devices: str) -> list[Sizes]:
    space, families = space_of(asked(devices, cp="1"))
    return [sizes for family in families for sizes in space.layouts(family)]


@examples(60)
@given(devices=st.sampled_from(["8xH200", "12xMI300X"]), data=st.data())
def test_every_layout_of_a_space_is_a_legal_run(devices: str, data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from(every_layout(devices)))
    run = run_of(LITE, sizes)
    assert illegal(sizes) is None and config_refusal(run, sizes.world) is None
    grid = grid_of(run, sizes.world)
    axes = (grid.tensor, grid.context, grid.pipeline, grid.expert, grid.expert_tensor)
    assert axes == (sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp)


def test_a_ladder_ends_with_whole_layers() -> None:
    ladder = ladder_of(load_run("deepseek-v3").model)
    assert ladder[0] == () and ladder[-1] == ("layer",) and "latent-up" in ladder[2]
    assert not any("latent-up" in step for step in ladder_of(load_run("moe-1t").model))


def test_a_search_keeps_the_parts_that_overrides_fix() -> None:
    overrides = ["parallel.expert=8", "training.micro_batch=2", 'recompute.modules=["layer"]']
    run = load_run("deepseek-v2-lite-6l", ["training.global_batch=64", *overrides])
    plan = search(asked("8xH200", run, top=3, **fixed_by(run, overrides, {})))
    layouts = {(one.layout.ep, one.layout.micro_batch, one.layout.recompute) for one in plan.candidates}
    assert layouts == {(8, 2, "layer")}


def test_sizes_that_do_not_divide_the_devices_fit_nowhere() -> None:
    sizes = dict.fromkeys(("pp", "vpp", "etp", "cp", "tp", "micro_batch"), "1")
    choices = {"schedule": "none", "recompute": "none", "sync_free_stage": "0", "dispatcher": "symmetric"}
    for fixed in ({"ep": "16"}, {"ep": "16", **sizes, **choices}, {"pp": "2", "schedule": "none"}):
        plan = found(**fixed)
        assert (plan.candidates, plan.refused, plan.considered) == ((), (), 0)
