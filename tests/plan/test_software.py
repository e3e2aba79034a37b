"""Runs as other trainers run them: an assumption of a projection, never a part of the run."""

from dataclasses import replace
from functools import cache

import pytest

from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.plan.software import OWN, SOFTWARE, Software, as_run_by, parse_software

EP16 = ("parallel.expert=16", "training.micro_batch=2", "training.global_batch=64", "training.sequence_length=4096")


@cache
def projected(software: Software, *overrides: str, on: str = "16xH200", in_turn: bool = False) -> Projection:
    run = load_run("deepseek-v2-lite-2l", [*EP16, *overrides])
    return project(run, parse_cluster(on), Assumptions(imbalance=1.0, software=software, in_turn=in_turn))


def test_a_trainer_is_named_with_changes_and_says_what_differs_from_ours() -> None:
    found = parse_software("megatron, dispatch=all-to-all, captured=0.57, ring=false, gathers=2")
    changed = {"dispatch": "all-to-all", "captured": 0.57, "ring": False, "gathers": 2}
    assert found == replace(SOFTWARE["megatron"], **changed)
    assert "captured 0.57" in f"{found}" and "ring" not in f"{found}"
    assert all(one.source for one in SOFTWARE.values() if one != OWN)


@pytest.mark.parametrize(
    "text",
    [
        *("megatorn", "megatron,speed=2", "own,products=fast", "own,ring=1", "own,dispatch=mail", "own,name=x", "own,"),
        *("own,captured=2", "own,hidden=1.5", "own,tensor_hidden=2"),
    ],
)
def test_an_unknown_trainer_or_field_is_refused(text: str) -> None:
    with pytest.raises(PenstockError, match=r"--software (knows no such trainer|has no such field)"):
        parse_software(text)


@pytest.mark.parametrize("name", ["products", "experts", "attention", "moved", "launch"])
def test_slower_kernels_and_launches_take_longer(name: str) -> None:
    plain = replace(OWN, name="test", dispatch="all-to-all")
    slower = replace(plain, **{name: 20.0 if name == "launch" else 2.0})
    assert projected(slower).time.step_seconds > 1.01 * projected(plain).time.step_seconds
    if name == "launch":
        captured = projected(replace(slower, captured=0.95)).time.step_seconds
        assert captured == pytest.approx(projected(plain).time.step_seconds, rel=1e-12)


def test_gradient_sums_behind_the_passes_take_no_time_of_their_own() -> None:
    plain = replace(OWN, name="test", dispatch="all-to-all")
    assert projected(plain).time.ranks[0].terms["gradients"] > 0
    assert projected(replace(plain, sums_overlap=True)).time.ranks[0].terms.get("gradients", 0.0) == 0
    assert as_run_by(replace(plain, waits=False), projected(plain).run).dispatch.sync_free == 1


def test_a_layout_names_what_sends_tokens_in_the_trainer() -> None:
    for library, name in (("own", "hierarchical"), ("all-to-all", "all-to-all"), ("deep-ep", "deep-ep")):
        assert projected(replace(OWN, dispatch=library)).layout.dispatcher == name


def test_bytes_of_gradients_and_moments_count() -> None:
    plain, half = projected(OWN).memory, projected(replace(OWN, gradient_bytes=2, moment_bytes=2)).memory
    assert (2 * half.gradients, 2 * half.moments) == (plain.gradients, plain.moments)
    assert plain.total - half.total == half.gradients + half.moments


@pytest.mark.parametrize("overrides", [("optimizer.moment_dtype=bf16",), ("offload.optimizer=true",)], ids=str)
def test_moments_that_are_small_already_or_pass_through_buffers_stay(overrides: tuple[str, ...]) -> None:
    ours, theirs = (projected(one, *overrides).memory.moments for one in (OWN, replace(OWN, moment_bytes=2)))
    assert theirs == ours > 0


def test_single_rows_over_the_network_cost_less_than_each_choice_and_more_if_no_group_limits_nodes() -> None:
    rows, once = (replace(OWN, name="test", dispatch=name) for name in ("all-to-all", "deep-ep"))
    on = "64xH200"
    wide = ("parallel.expert=64", "training.global_batch=128")

    def exposed(software: Software, *more: str, in_turn: bool = False) -> float:
        return projected(software, *wide, *more, on=on, in_turn=in_turn).time.ranks[0].terms["dispatch"]

    assert exposed(once) < exposed(rows)
    limits = ("model.moe.router.n_group=8", "model.moe.router.topk_group=2")
    assert exposed(once, *limits) < 0.7 * exposed(once)
    assert exposed(rows, *limits) == pytest.approx(exposed(rows))
    assert exposed(once, in_turn=True) < 0.5 * exposed(once)


@pytest.mark.parametrize("preset", ["deepseek-v2-lite-2l", "qwen3-30b-a3b-2l"])
def test_ranks_that_pass_keys_around_keep_a_part_each_and_attend_over_all(preset: str) -> None:
    ring = replace(OWN, name="test", ring=True)
    found = {}
    for context in (1, 2, 8):
        overrides = [f"parallel.context={context}", "training.global_batch=8", "training.sequence_length=65536"]
        run = load_run(preset, overrides)
        found[context] = project(run, parse_cluster("8xH200"), Assumptions(imbalance=1.0, software=ring))
    one, *more = (projection.time.ranks[0].terms["attention"] for projection in found.values())
    # A part of each row on as many more ranks.
    assert more == [pytest.approx(one, rel=0.25)] * 2
    assert found[2].memory.activations < 0.6 * found[1].memory.activations


def test_forced_balance_is_even_whatever_is_assumed() -> None:
    forced = load_run("deepseek-v2-lite-2l", [*EP16, "model.moe.balance.force_load_balance=true"])
    cluster = parse_cluster("16xH200")
    times = {imbalance: project(forced, cluster, Assumptions(imbalance=imbalance)) for imbalance in (1.0, 1.5)}
    assert times[1.0].time == times[1.5].time and times[1.0].memory == times[1.5].memory


def test_experts_one_by_one_take_longer_with_few_rows_and_are_launched_each() -> None:
    plain = replace(OWN, name="test", dispatch="all-to-all")
    apart = replace(plain, one_by_one=True)
    ratios = []
    for rows in (1, 4):
        batch = f"training.micro_batch={rows}", f"training.global_batch={16 * rows}"
        ratios.append(
            projected(apart, *batch, on="16xMI355X").time.ranks[0].terms["experts"]
            / projected(plain, *batch, on="16xMI355X").time.ranks[0].terms["experts"]
        )
    assert ratios[0] > ratios[1] > 1


def test_other_trainers_hide_gathers_of_weights_and_exchanges() -> None:
    plain = replace(OWN, name="test", dispatch="all-to-all")
    for field, term, layout in (
        ("weights_hidden", "weights", "parallel.shard=full"),
        ("tensor_hidden", "exchange", "parallel.tensor=2"),
    ):
        slow, fast = (projected(replace(plain, **{field: share}), layout).time for share in (0.0, 0.9))
        assert fast.ranks[0].terms[term] < 0.5 * slow.ranks[0].terms[term]
        assert fast.step_seconds < slow.step_seconds
