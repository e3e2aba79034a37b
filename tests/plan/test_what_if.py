"""What-ifs, asked of a planner that computes nothing."""

from dataclasses import replace
from typing import Literal

import pytest

from penstock.base.errors import ConfigError, HardwareError
from penstock.plan.memory import COMPONENTS, RankMemory, components
from penstock.plan.projection import Projection, Refusal
from penstock.plan.what_if import DISPATCHERS, SweepPoint, compare, scale, slowest, sweep
from tests.cli.made_plans import CLUSTER, GB, MadeUp, projection, rank_time, run_of


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


def test_devices_that_do_not_fill_their_nodes_are_an_error() -> None:
    with pytest.raises(HardwareError, match="do not fill nodes"):
        scale(run_of(), CLUSTER, (9,), MadeUp(), "weak")


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


def test_a_batch_that_does_not_divide_is_refused() -> None:
    (point,) = sweep(run_of(), CLUSTER, "global_batch", ("100",), MadeUp())
    assert "training.global_batch" in refused(point).reason


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


def test_any_field_can_be_swept_by_its_path() -> None:
    (point,) = sweep(run_of(), CLUSTER, "model.vocab_size", ("300",), MadeUp())
    assert projected(point).run.model.vocab_size == 300


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
