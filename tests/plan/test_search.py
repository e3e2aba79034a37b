"""A search finds what fits, fastest first, and has a reason for everything else."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.load import dump_toml, load_run
from penstock.plan.candidates import GRID, SearchSpace, fixed_by, ladder_of, run_of, with_recompute
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Plan
from penstock.plan.rules.book import config_refusal, illegal, order_key
from penstock.plan.rules.rule import Sizes, facts_of, sizes_of
from penstock.plan.search import SearchRequest, search
from tests.examples import examples

LITE = load_run("deepseek-v2-lite-6l", ["training.global_batch=64"])


@cache
def found(devices: str = "8xH200", top: int = 5, **fixed: str) -> Plan:
    return search(SearchRequest(run=LITE, cluster=parse_cluster(devices), fixed=fixed, top=top))


def test_the_best_come_first_and_each_is_what_its_run_projects() -> None:
    plan = found()
    rates = [one.time.tokens_per_second_per_device for one in plan.candidates]
    assert len(rates) == 5 and rates == sorted(rates, reverse=True)
    assert all(one.fits for one in plan.candidates) and plan.model == LITE.name
    for one in plan.candidates[:2]:
        exact = project(one.run, one.cluster)
        assert one.memory.total == pytest.approx(exact.memory.total, rel=5e-3)
        assert one.time.step_seconds == pytest.approx(exact.time.step_seconds, rel=1e-2)
        assert one.layout == exact.layout


@pytest.mark.often("deepseek-v2-lite-*")
@pytest.mark.parametrize(
    ("preset", "devices", "fixed"),
    [
        # The fullest place is not the first of those that are alike.
        ("deepseek-v2-lite", "16xH100", {"schedule": "zb-1f1b", "pp": "8", "dispatcher": "local"}),
        # Stages without a layer hold a little more than pieces of others, and that is too much.
        ("deepseek-v3-16l", "64xH200", {"schedule": "zb-1f1b", "pp": "16", "ep": "2", "micro_batch": "1"}),
    ],
)
def test_found_layouts_fit_on_every_rank(preset: str, devices: str, fixed: dict[str, str]) -> None:
    plan = search(SearchRequest(run=load_run(preset), cluster=parse_cluster(devices), fixed=fixed))
    assert plan.candidates and all(one.fits for one in plan.candidates)


def test_every_layout_is_counted_once_and_refusals_are_few_with_reasons() -> None:
    plan = found()
    space = SearchSpace(neutral("8xH200"), LITE, {})
    assert plan.considered == sum(space.size_of_grid(grid) for grid in space.grids())
    assert plan.considered == len(plan.candidates) + sum(one.count for one in plan.refused)
    assert all(one.rule and one.reason and "\n" not in one.reason for one in plan.refused)
    assert len(plan.refused) < 60 < plan.considered


def test_a_refusal_for_memory_has_the_component_and_the_overflow() -> None:
    run = load_run("deepseek-v3-16l")
    plan = search(SearchRequest(run=run, cluster=parse_cluster("8xH100"), top=3))
    assert plan.candidates == ()
    reasons = [one.reason for one in plan.refused if one.rule == "memory"]
    assert reasons and all("overflow by" in reason and "GB" in reason for reason in reasons)


def test_a_written_layout_trains_and_reads_back(tmp_path: Path) -> None:
    for one in found().candidates:
        assert config_refusal(one.run, one.cluster.devices) is None
    best = found().candidates[0].run
    path = tmp_path / "best.toml"
    path.write_text(dump_toml(best))
    assert load_run(str(path)) == best


@pytest.mark.parametrize(
    "fixed", [pytest.param({"pp": "2", "micro_batch": "2"}, marks=pytest.mark.slow), {"ep": "2", "etp": "2"}]
)
def test_a_fixed_size_is_kept_even_if_rules_advise_against_it(fixed: dict[str, str]) -> None:
    plan = found(**fixed)
    assert plan.candidates
    assert all(f"{vars(one.layout)[name]}" == value for one in plan.candidates for name, value in fixed.items())


def test_a_layout_with_every_part_fixed_is_one_candidate_even_if_it_does_not_fit() -> None:
    fixed = {"tp": "1", "cp": "1", "pp": "1", "vpp": "1", "ep": "1", "etp": "1", "schedule": "none"}
    fixed |= {"micro_batch": "8", "recompute": "none", "sync_free_stage": "0", "dispatcher": "local"}
    plan = search(SearchRequest(run=load_run("deepseek-v2-lite"), cluster=parse_cluster("8xH100"), fixed=fixed))
    (only,) = plan.candidates
    assert not only.fits and only.over_bytes > 0 and plan.considered == 1


@pytest.mark.parametrize(
    "fixed", [{"pq": "2"}, {"pp": "two"}, {"pp": "0"}, {"schedule": "2f2b"}, {"dispatcher": "pigeon"}]
)
def test_a_fixed_value_that_is_none_is_refused(fixed: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        search(SearchRequest(run=LITE, cluster=parse_cluster("8xH200"), fixed=fixed))


def test_layouts_of_a_rank_in_the_order_are_looked_at_only_if_none_before_fits() -> None:
    plan = found()
    keys = {order_key(sizes_of(one.run, one.cluster, neutral("8xH200").model)) for one in plan.candidates}
    assert len(keys) == 1 and not any(one.layout.tp > 1 for one in plan.candidates)


def neutral(devices: str) -> Sizes:
    facts = facts_of(LITE.model, total_parameters=4_000_000_000, active_parameters=1_000_000_000)
    return sizes_of(LITE, parse_cluster(devices), facts)


@cache
def every_pipeline(devices: str) -> list[tuple[SearchSpace, Sizes]]:
    space = SearchSpace(neutral(devices), LITE, {})
    return [
        (space, pipeline) for grid in space.grids() for pipeline in space.pipelines(grid) if illegal(pipeline) is None
    ]


@examples(60)
@given(devices=st.sampled_from(["8xH200", "48xMI300X", "128xMI300X"]), data=st.data())
def test_every_layout_that_no_rule_calls_illegal_is_a_run(devices: str, data: st.DataObject) -> None:
    space, pipeline = data.draw(st.sampled_from(every_pipeline(devices)))
    dispatch = data.draw(st.sampled_from(list(space.with_dispatches(pipeline))))
    sizes = with_recompute(dispatch, data.draw(st.sampled_from(space.ladder)))
    if illegal(sizes) is None:
        run = run_of(LITE, sizes)
        assert config_refusal(run, sizes.world) is None
        grid = grid_of(run, sizes.world)
        axes = (grid.tensor, grid.context, grid.pipeline, grid.expert, grid.expert_tensor)
        assert axes == tuple(getattr(sizes, name) for name in GRID)


@examples(60)
@given(data=st.data())
def test_a_ladder_changes_the_order_alike_on_all_schedules(data: st.DataObject) -> None:
    pipelines = [pipeline for _, pipeline in every_pipeline("48xMI300X")]
    pipeline, other = data.draw(st.sampled_from(pipelines)), data.draw(st.sampled_from(pipelines))
    modules = data.draw(st.sampled_from(ladder_of(LITE.model)))

    def changed(sizes: Sizes) -> list[int | None]:
        keys = order_key(sizes), order_key(with_recompute(sizes, modules))
        return [after if before != after else None for before, after in zip(*keys, strict=True)]

    assert changed(pipeline) == changed(other)


def test_a_ladder_ends_with_whole_layers() -> None:
    ladder = ladder_of(load_run("deepseek-v3").model)
    assert ladder[0] == () and ladder[-1] == ("layer",) and "latent-up" in ladder[2]
    assert not any("latent-up" in step for step in ladder_of(load_run("moe-1t").model))


def test_a_search_keeps_the_parts_that_overrides_fix() -> None:
    overrides = ["parallel.expert=8", "training.micro_batch=2", 'recompute.modules=["layer"]']
    run = load_run("deepseek-v2-lite-6l", ["training.global_batch=64", *overrides])
    plan = search(SearchRequest(run=run, cluster=parse_cluster("8xH200"), fixed=fixed_by(run, overrides, {}), top=3))
    layouts = {(one.layout.ep, one.layout.micro_batch, one.layout.recompute) for one in plan.candidates}
    assert layouts == {(8, 2, "layer")}


def test_sizes_that_do_not_divide_the_devices_fit_nowhere() -> None:
    sizes = dict.fromkeys(("pp", "vpp", "etp", "cp", "tp", "micro_batch"), "1")
    choices = {"schedule": "none", "recompute": "none", "sync_free_stage": "0", "dispatcher": "symmetric"}
    for fixed in ({"ep": "16"}, {"ep": "16", **sizes, **choices}):
        plan = found(**fixed)
        assert (plan.candidates, plan.refused, plan.considered) == ((), (), 0)
