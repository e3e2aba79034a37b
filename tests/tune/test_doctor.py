"""The verdict on evidence that is made by hand."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.rules import MANY_COPIES
from penstock.trace.launches import HostCalls
from penstock.tune.doctor import planned as doctor_planned
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose, diagnosis_json
from penstock.tune.doctor.evidence import (
    ALSO,
    STANDS,
    Evidence,
    KernelLaunches,
    LateRank,
    LayerLoads,
    PowerFacts,
    RankCosts,
    RunFacts,
    bottlenecks_of,
)
from penstock.tune.doctor.planned import with_changes
from penstock.tune.doctor.remedies import MUCH_POINTWISE, OVERLAP_GAINS, RULES, TOKENS
from penstock.tune.doctor.remedy import Remedy

TOTAL = 100_000.0  # microseconds of every step here


def costs(rank: int = 0, **spent: Any) -> RankCosts:
    """A rank of 100 ms; what nothing else takes is computing."""
    names = ("exposed_communication_us", "exposed_copies_us", "idle_us", "data_us")
    losses = {"computing_us": {"experts": 2_000.0}} | dict.fromkeys(names, 0.0) | spent  # an MoE model, by its phases
    compute = TOTAL - sum(losses[name] for name in names)
    return RankCosts(rank=rank, total_us=TOTAL, compute_us=compute, **losses)


def evidence(*ranks: RankCosts, **more: Any) -> Evidence:
    return Evidence(ranks=ranks or (costs(),), **{"source": "trace", "steps": 1} | more)


def run_of(*overrides: str) -> Run:
    return load_run("deepseek-v2-lite", ("training.global_batch=32", "parallel.expert=8", *overrides))


def with_run(found: Evidence, *overrides: str, world: int = 8) -> Evidence:
    return replace(found, facts=replace(found.facts, run=run_of(*overrides), world=world))


def remedy(verdict: Diagnosis, rule: str) -> Remedy:
    (one,) = [one for one in verdict.remedies if one.rule == rule]
    return one


def gain(found: Evidence, rule: str) -> float:
    return remedy(diagnose(found), rule).gain_us


def rules(found: Evidence) -> list[str]:
    return [one.rule for one in diagnose(found).remedies]


SENT = costs(exposed_communication_us=40_000.0, communication_us={"all-to-all": 40_000.0})  # nothing else is lost


@pytest.mark.parametrize(
    ("spent", "wall"),
    [
        ({"exposed_communication_us": 64_000.0}, "communication"),
        ({"idle_us": 55_000.0, "exposed_communication_us": 27_000.0}, "host"),
        ({"recompute_us": 31_000.0, "idle_us": 12_000.0}, "memory"),
        ({"exposed_copies_us": 24_000.0, "exposed_communication_us": 23_000.0}, "memory"),
        ({"idle_us": 19_000.0, "exposed_communication_us": 19_500.0}, "compute"),  # each below a fifth
    ],
)
def test_the_largest_loss_is_the_wall_if_it_is_large_enough(spent: dict[str, float], wall: str) -> None:
    verdict = diagnose(evidence(costs(**spent)))
    assert verdict.bottleneck == wall
    assert verdict.sentence.startswith(f"{wall}: ")


def test_losses_stand_or_are_told_beside_the_wall_from_their_thresholds_on() -> None:
    assert diagnose(evidence(costs(idle_us=STANDS * TOTAL))).bottleneck == "host"
    assert diagnose(evidence(costs(idle_us=STANDS * TOTAL - 1))).bottleneck == "compute"
    assert rules(evidence(costs(idle_us=300.0))) == [], "a gain below noise"
    with pytest.raises(TraceError, match="neither a trace nor a plan"):
        diagnose(Evidence(source="none", ranks=()))
    verdict = diagnose(evidence(costs(idle_us=55_000.0, exposed_communication_us=27_000.0)))
    assert verdict.others == ("communication",)
    assert "then communication 27.0%" in verdict.sentence
    small = diagnose(evidence(costs(idle_us=55_000.0, exposed_communication_us=ALSO * TOTAL - 1)))
    assert small.others == ()


def test_the_walls_add_up_to_the_step() -> None:
    late = (LateRank(rank=1, times_last=3, caused_wait_us=9_000.0, cause="host"),)
    ranks = (
        costs(0, exposed_communication_us=30_000.0, wait_us=18_000.0, idle_us=7_000.0, recompute_us=2_000.0),
        costs(1, exposed_communication_us=10_000.0, wait_us=0.0, idle_us=25_000.0, exposed_copies_us=1_500.0),
    )
    walls = bottlenecks_of(evidence(*ranks, late=late, facts=RunFacts(power=HELD)))
    assert walls.power_us > 0
    parts = sum(walls.losses.values()) + walls.compute_us
    assert parts == pytest.approx(walls.total_us)


def uneven(*loads: tuple[float, float], computing: float = 20_000.0, **more: Any) -> Evidence:
    """Four ranks that share experts, with `(step, computed)` loads of their layers; experts take 20 ms."""
    ranks = [
        costs(rank, exposed_communication_us=30_000.0, computing_us={"experts": computing}, **more) for rank in range(4)
    ]
    layers = tuple(LayerLoads(layer=place, step=one, computed=two) for place, (one, two) in enumerate(loads, start=1))
    return evidence(*ranks, facts=RunFacts(layer_loads=layers))


def test_the_tax_of_imbalance_is_the_fullest_ranks_rows_beyond_the_mean_in_each_layer() -> None:
    found = with_run(uneven((1.5, 1.5), (1.04, 1.04)))  # layers of 10 ms: 5 and 0.4
    lines = diagnose(found).lines
    (first,) = [place for place, line in enumerate(lines) if "tax of imbalance" in line.what]
    taxes = lines[first : first + 4]
    assert [line.time_us for line in taxes] == pytest.approx([5_400.0, 4_500.0, 5_400.0, 5_400.0])
    assert "the fullest rank of layer 1 has 1.50 times the mean" in taxes[0].what and "over 1.05 times" in taxes[1].what
    assert gain(found, "rows-within-a-bound") == pytest.approx(4_500.0)
    assert gain(found, "even-experts") == pytest.approx(5_400.0)
    assert gain(with_run(uneven((1.5, 1.5), wait_us=2_000.0)), "rows-within-a-bound") == pytest.approx(2_000.0)


def test_replicas_leave_what_they_do_not_even_out_and_routing_returns_what_whole_steps_show() -> None:
    found = with_run(uneven((1.2, 1.6), (1.3, 1.1)), "dispatch.balance=bounded")
    lines = {line.what: line.time_us for line in diagnose(found).lines}
    (tax,) = [time_us for what, time_us in lines.items() if what.startswith("tax of imbalance")]
    (routing,) = [time_us for what, time_us in lines.items() if "a bias of the router" in what]
    assert (tax, routing) == pytest.approx((7_000.0, 3_000.0))
    assert "rows-within-a-bound" not in rules(found) and not any("returns these, less" in what for what in lines)


def test_even_loads_and_runs_without_shared_experts_have_no_tax() -> None:
    for found in (uneven((1.0, 1.0)), uneven(), uneven((1.5, 1.5), computing=0.0)):
        assert not any("tax" in line.what for line in diagnose(with_run(found)).lines)
        assert not {"even-experts", "rows-within-a-bound"} & {*rules(with_run(found))}


def test_waiting_for_a_rank_whose_host_is_late_is_the_hosts() -> None:
    waits = costs(0, exposed_communication_us=36_000.0, wait_us=30_000.0)
    stalls = costs(1, exposed_communication_us=6_000.0, wait_us=0.0, idle_us=30_000.0)
    late = LateRank(rank=1, times_last=20, caused_wait_us=30_000.0, cause="host", detail="idle 30 ms longer")
    verdict = diagnose(evidence(waits, stalls, late=(late,)))
    assert verdict.bottleneck == "host"
    assert verdict.times.late_host_us == remedy(verdict, "no-host-is-late").gain_us == 15_000.0
    assert "rank 1 (its host)" in verdict.sentence
    slow = diagnose(evidence(waits, stalls, late=(replace(late, cause="compute"),)))
    assert slow.bottleneck == "communication"


def test_each_late_rank_wins_what_others_wait_for_it() -> None:
    ranks = [costs(rank, exposed_communication_us=50_000.0, wait_us=20_000.0) for rank in range(4)]
    late = (
        LateRank(rank=2, times_last=24, caused_wait_us=80_000.0, cause="experts", detail="more rows", share=0.75),
        LateRank(rank=3, times_last=24, caused_wait_us=20_000.0, cause="compute", detail="attention 15 % slower"),
    )
    verdict = diagnose(evidence(*ranks, late=late))
    assert remedy(verdict, "even-experts").gain_us == 12_000.0, "share 0.75 of 16 ms"
    assert remedy(verdict, "no-rank-is-late").gain_us == 4_000.0
    assert "20.0% of the step is waiting" in verdict.sentence
    assert "rank 2 (its experts), rank 3 (its computing)" in verdict.sentence


def test_no_gain_is_larger_than_what_stands_there() -> None:
    found = costs(
        idle_us=21_000.0,
        exposed_communication_us=23_000.0,
        sync_idle_us=9_000.0,
        communication_us={"all-to-all": 13_000.0, "all-reduce": 10_000.0},
        recompute_us=5_000.0,
    )
    remedies = diagnose(evidence(found)).remedies
    loss = {
        "tokens-travel-once": 13_000.0,
        "overlap-if-exposed": 13_000.0,
        "sums-once-for-more-rows": 10_000.0,
        "launches-in-one-call": 21_000.0,
        "larger-passes": 12_000.0,
        "host-never-waits": 9_000.0,
        "selective-before-full": 5_000.0,
    }
    assert {one.rule for one in remedies} == set(loss)
    assert all(0 < one.gain_us <= loss[one.rule] for one in remedies)
    gains = [one.gain_us for one in remedies]
    assert gains == sorted(gains, reverse=True)


def test_dispatch_symmetric_wins_the_copies_that_it_spares() -> None:
    one = remedy(diagnose(with_run(evidence(SENT), 'dispatch.method="all-to-all"')), "tokens-travel-once")
    assert one.change == 'dispatch.method="symmetric"'
    assert one.gain_us == pytest.approx(40_000.0 * (1 - 3.97 / 5.25), rel=0.002)


def test_what_a_run_does_already_is_not_offered() -> None:
    overrides = ("dispatch.method=symmetric", "dispatch.sync_free=2", "graphs.capture=full", "dispatch.overlap=shared")
    found = costs(idle_us=30_000.0, sync_idle_us=9_000.0, exposed_communication_us=40_000.0)
    assert rules(with_run(evidence(found), *overrides)) == ["larger-passes"]


def test_graphs_of_a_run_whose_host_counts_rows_come_with_a_bound() -> None:
    found = evidence(costs(idle_us=50_000.0))
    assert 'graphs.capture="full" dispatch.sync_free=2' in offered(with_run(found, "dispatch.method=all-gather"))
    assert 'graphs.capture="full"' in offered(with_run(found, "dispatch.method=symmetric", "dispatch.sync_free=2"))
    launches = KernelLaunches(kernels=1_000, small_kernels=700, from_graphs=900)
    assert "launches-in-one-call" not in rules(replace(found, launches=launches)), "a graph launched them"
    few = replace(with_run(found, "dispatch.method=symmetric"), launches=KernelLaunches(kernels=400, small_kernels=0))
    per_step = 400 / (few.steps * len(few.ranks))
    assert remedy(diagnose(few), "launches-in-one-call").gain_us == pytest.approx(0.81 * 100 * per_step)


def sent(kind: str, time_us: float) -> RankCosts:
    return costs(exposed_communication_us=time_us, communication_us={kind: time_us})


def test_overlap_is_offered_among_few_ranks_only_where_transfers_are_long() -> None:
    few = ("parallel.expert=4", "training.micro_batch=2")
    short = evidence(sent("all-to-all", STANDS * TOTAL - 1))
    assert "overlap-if-exposed" not in rules(with_run(short, *few, world=4))
    assert "overlap-if-exposed" in rules(with_run(evidence(SENT), *few, world=4))
    assert "overlap-if-exposed" in rules(with_run(short, "training.micro_batch=2")), "8 ranks"


@pytest.mark.parametrize("kind", sorted(TOKENS))
def test_tokens_travel_beside_computing_whichever_library_sends_them(kind: str) -> None:
    one = remedy(diagnose(evidence(sent(kind, 65_000.0))), "overlap-if-exposed")
    assert one.gain_us == OVERLAP_GAINS * TOTAL
    assert kind in one.change and kind in one.what and "exposed dispatch" in one.how
    assert remedy(diagnose(evidence(sent(kind, 9_000.0))), "overlap-if-exposed").gain_us == 9_000.0


@pytest.mark.parametrize("method", ["all-to-all", "symmetric", "hierarchical"])
def test_a_run_of_ours_gets_overlap_as_a_change_of_its_configuration(method: str) -> None:
    kind = {"hierarchical": "all-to-all"}.get(method, method)
    found = with_run(evidence(sent(kind, 65_000.0)), f'dispatch.method="{method}"', "training.micro_batch=2", world=16)
    one = remedy(diagnose(found), "overlap-if-exposed")
    assert one.change.startswith("dispatch.overlap=") and one.gain_us == OVERLAP_GAINS * TOTAL


def test_elementwise_kernels_in_a_row_are_fused_where_they_take_a_tenth_of_the_step() -> None:
    many = {"pointwise_kernels": 900.0, "fusable_us": 25_000.0}
    found = evidence(costs(pointwise_us=35_000.0, **many))
    verdict = diagnose(found)
    one = remedy(verdict, "elementwise-in-one-kernel")
    assert (one.gain_us, "900 elementwise kernels (35% of the step)" in one.what) == (25_000.0, True)
    assert any("900 elementwise kernels" in line.what and line.share == 0.35 for line in verdict.lines)
    assert "elementwise-in-one-kernel" not in rules(with_run(found, "kernels.all=torch")), "our kernels fuse them"
    assert "elementwise-in-one-kernel" not in rules(evidence(costs(pointwise_us=MUCH_POINTWISE * TOTAL - 1, **many)))


def test_a_long_copy_of_the_host_is_named_with_its_place_and_the_time_that_the_device_lacks_work() -> None:
    copy = HostCalls(
        call="hipMemcpyWithStream",
        where="load > aten::copy_",
        count=1,
        longest_us=46_300.0,
        alone_us=45_000.0,
        bytes=3_000_000_000,
    )
    found = evidence(costs(idle_us=50_000.0, host_call_us=45_000.0), host_call=copy, host_call_rank=2)
    verdict = diagnose(found)
    one = remedy(verdict, "copies-ahead")
    assert one.gain_us == 45_000.0
    assert "hipMemcpyWithStream from load > aten::copy_ (once, 46.3 ms, 3.00 GB, on rank 2)" in one.what
    (line,) = [line for line in verdict.lines if "hipMemcpyWithStream" in line.what]
    assert (line.bottleneck, line.time_us) == ("host", 45_000.0)
    often = replace(found, host_call=replace(copy, count=4, bytes=None, where=""))
    one = remedy(diagnose(often), "copies-ahead")
    assert "hipMemcpyWithStream (4 times, the longest 46.3 ms, on rank 2)" in one.what


HELD = PowerFacts(watts=664.0, limit_watts=700.0, clock_mhz=1485.0, limit_mhz=1980.0)


def test_power_that_holds_the_clock_down_is_a_wall() -> None:
    verdict = diagnose(evidence(facts=RunFacts(power=HELD)))
    assert verdict.bottleneck == "power"
    assert "at 1,485 of 1,980 MHz, 664 of 700 W: up to 25.0% of the step" in verdict.sentence
    assert remedy(verdict, "power-holds-the-clock").gain_us == verdict.times.power_us == TOTAL / 4
    assert verdict.times.compute_us == TOTAL * 3 / 4
    assert diagnosis_json(verdict)["wall"] == "power"


@pytest.mark.parametrize("power", [replace(HELD, watts=500.0), replace(HELD, clock_mhz=1980.0)])
def test_a_clock_below_its_highest_is_no_wall_without_power_at_its_limit(power: PowerFacts) -> None:
    verdict = diagnose(evidence(facts=RunFacts(power=power)))
    assert (verdict.bottleneck, verdict.times.power_us) == ("compute", 0.0)
    assert "power-holds-the-clock" not in [one.rule for one in verdict.remedies]
    assert any("of 1,980 MHz" in line.what for line in verdict.lines), "the figures are shown"


def test_each_remedy_says_how_its_gain_is_computed() -> None:
    told = diagnosis_json(diagnose(evidence(SENT)))["remedies"]
    assert told and all(one["how"] for one in told)


def test_each_page_heading_and_result_that_is_the_source_of_a_remedy_exists() -> None:
    sources = [rule.source for rule in RULES]
    pages = [page for source in sources for page in re.findall(r"(\S+\.md)(?:, ([^;(]+))?", source)]
    results = [name for source in sources for name in re.findall(r"[\w-]+\.json", source)]
    assert pages and results
    for path, heading in pages:
        assert f"# {heading.strip()}" in Path(path).read_text(encoding="utf-8"), (path, heading)
    for name in results:
        assert (Path("benchmarks/results") / name).exists(), name


def test_a_full_device_is_not_given_larger_passes() -> None:
    facts = RunFacts(peak_bytes=90_000_000_000, capacity_bytes=141_000_000_000)
    found = evidence(costs(idle_us=50_000.0), facts=facts)
    assert "larger-passes" not in rules(found)
    assert "larger-passes" in rules(replace(found, facts=replace(facts, peak_bytes=20_000_000_000)))  # under half


def test_a_cpu_gets_rows_of_its_data_ranks_and_no_change_of_a_device() -> None:
    found = evidence(costs(idle_us=60_000.0), source="trace", is_cpu=True)
    run = load_run("debug", ("parallel.pipeline=2", "training.micro_batch=2", "training.global_batch=4"))
    found = replace(found, facts=replace(found.facts, run=run, world=2))
    assert [one.change for one in diagnose(found).remedies] == ["training.micro_batch=4"]  # both stages see all rows
    assert diagnose(found).sentence == "host: no operator runs in 60.0% of the step"
    idle = with_run(evidence(costs(idle_us=60_000.0)))
    assert {"launches-in-one-call", "host-never-waits"} & {*rules(idle)} and not {
        *rules(replace(idle, is_cpu=True))
    } - {"larger-passes"}


def test_rows_that_are_fetched_with_nothing_to_compute_are_a_wall_of_their_own() -> None:
    found = evidence(costs(idle_us=5_000.0, data_us=30_000.0, computing_us={}))
    verdict = diagnose(found)
    assert (verdict.bottleneck, remedy(verdict, "rows-ahead").gain_us) == ("data", 30_000.0)
    assert verdict.sentence.startswith("data: rows are fetched in 30.0% of the step")


def test_a_pipeline_wins_by_stages_and_cannot_be_captured() -> None:
    sent = costs(exposed_communication_us=30_000.0, idle_us=30_000.0, communication_us={"send-recv": 30_000.0})
    found = with_run(evidence(sent), "parallel.pipeline=2", "training.global_batch=64", world=16)
    assert gain(found, "stages-when-pipeline") == 15_000.0
    assert "launches-in-one-call" not in rules(found)
    slow = with_run(evidence(costs()), "kernels.all=reference")
    assert (diagnose(slow).bottleneck, rules(slow)) == ("compute", ["kernels-by-measurement"])


def test_full_recomputation_has_a_cheaper_form() -> None:
    (one,) = diagnose(with_run(evidence(costs(recompute_us=28_000.0)), 'recompute.modules=["layer"]')).remedies
    assert (one.rule, one.gain_us) == ("selective-before-full", 28_000.0)
    assert one.change == 'recompute.modules=["norm","expert-activation"]'
    assert "M5" in one.source


SAVED = {"float8.dense=auto float8.experts=auto": 0.1, "float8.dense=auto": -0.1}  # seconds, by the plan


@pytest.mark.parametrize(
    ("spent", "saved", "gain_us"),
    [
        ({}, SAVED, 20_000.0),  # 0.1 of 0.5 s, of 100 ms
        ({"exposed_communication_us": 90_000.0}, SAVED, 10_000.0),  # no more than is computed
        ({"idle_us": 30_000.0}, SAVED, None),
        ({}, {"float8.dense=auto": -0.1}, None),
        ({}, {}, None),
    ],
    ids=["it pays", "little is computed", "the host is late", "it costs", "unknown"],
)
def test_products_in_8_bits_are_offered_only_where_plan_and_evidence_say_that_they_pay(
    spent: dict[str, float], saved: dict[str, float], gain_us: float | None
) -> None:
    found = evidence(costs(**spent), facts=RunFacts(planned_step_seconds=0.5, saved_seconds=saved))
    if gain_us is None:
        assert "eight-bits-where-they-pay" not in rules(found)
    else:
        assert gain(found, "eight-bits-where-they-pay") == pytest.approx(gain_us)


SLOWED = evidence(
    costs(0, idle_us=10_000.0, exposed_communication_us=30_000.0, wait_us=24_000.0),
    costs(1, idle_us=40_000.0, exposed_communication_us=6_000.0, wait_us=0.0),
    late=(LateRank(rank=1, times_last=9, caused_wait_us=24_000.0, cause="host", detail="idle 30 ms longer"),),
    steps=2,
)
"""A host that is late for 37 ms of 100: idle 25, waited for 12."""


def beside(milliseconds: float) -> Evidence:
    return replace(SLOWED, facts=RunFacts(beside_seconds=milliseconds / 1e3))


def test_what_recorded_steps_take_longer_than_those_beside_them_is_no_wall() -> None:
    assert diagnose(SLOWED).bottleneck == "host"
    verdict = diagnose(beside(80.0))
    walls = verdict.times
    assert walls.recording_us == pytest.approx(20_000.0)
    assert walls.host_us == pytest.approx(17_000.0)
    assert verdict.bottleneck == "compute"
    parts = walls.communication_us + walls.host_us + walls.memory_us + walls.compute_us + walls.recording_us
    assert parts == pytest.approx(walls.total_us)
    (line,) = [one for one in verdict.lines if one.what.startswith("taken off")]
    assert (line.bottleneck, line.time_us) == ("host", pytest.approx(20_000.0))


def test_a_late_host_wins_no_more_than_what_is_not_the_recordings() -> None:
    assert gain(SLOWED, "no-host-is-late") == pytest.approx(12_000.0)
    for rule in ("no-host-is-late", "larger-passes"):
        assert gain(beside(80.0), rule) == pytest.approx(gain(SLOWED, rule) * 17 / 37)


def test_recording_costs_what_the_host_costs_at_most_and_nothing_where_steps_are_as_long() -> None:
    assert diagnose(beside(63.0)).times.host_us == 0  # 37 ms are the recording's
    assert rules(beside(63.0)) == []
    assert "of both, 10.0% is the recording's" in diagnose(beside(90.0)).sentence
    assert diagnose(beside(100.0)).times == diagnose(SLOWED).times
    assert diagnose(beside(140.0)).times.recording_us == 0


def test_waits_for_counts_win_the_idle_time_behind_them_and_what_others_wait_for_it() -> None:
    def with_costs(**changes: float) -> Evidence:
        return replace(SLOWED, ranks=tuple(replace(one, **changes) for one in SLOWED.ranks))  # type: ignore[arg-type]

    counted = with_costs(sync_idle_us=20_000.0, counts_idle_us=8_000.0)
    assert gain(counted, "host-never-waits") == pytest.approx(8_000.0 + 12_000.0 * 8 / 40)
    unplaced = with_costs(sync_idle_us=7_000.0)  # six of seven waits are for counts
    assert gain(unplaced, "host-never-waits") == pytest.approx(6_000.0 + 12_000.0 * 6 / 40)
    # Passes in one call wait for no counts either.
    expected = 0.81 * 18_000.0 + 6_000.0 + 12_000.0 * 6 / 40
    assert gain(unplaced, "launches-in-one-call") == pytest.approx(expected)
    assert "host-never-waits" not in rules(with_costs(sync_idle_us=20_000.0, counts_idle_us=0.0))


def test_a_rank_that_is_late_for_two_reasons_is_named_once_with_both() -> None:
    ranks = [costs(rank, exposed_communication_us=50_000.0, wait_us=20_000.0) for rank in range(4)]
    causes = ((2, "host"), (1, "experts"), (2, "experts"))
    late = tuple(LateRank(rank=rank, times_last=9, caused_wait_us=9_000.0, cause=cause) for rank, cause in causes)  # type: ignore[arg-type]
    sentence = diagnose(evidence(*ranks, late=late)).sentence
    assert "late: rank 2 (its host and its experts), rank 1 (its experts)" in sentence


def test_loads_phases_launches_and_sizes_of_memory_are_evidence() -> None:
    facts = RunFacts(peak_bytes=70_500_000_000, capacity_bytes=141_000_000_000)
    launches = KernelLaunches(kernels=12_000, small_kernels=6_000, synchronizations=30)
    times = {"experts": 30_000.0, "attention": 20_000.0, "norm": 1_000.0}
    ranks = (costs(0, computing_us=times), costs(1, computing_us=times))
    found = evidence(*ranks, launches=launches, steps=3, facts=facts, max_over_mean=1.62, missing=("no memory",))
    told = diagnosis_json(diagnose(found))
    lines = {line["what"]: line for line in told["evidence"]}
    assert "a rank's step: 2,000 kernels, 50% under 10 us; waits of the host: 5" in lines
    assert "rows of the fullest rank's experts: 1.62 times the mean" in lines
    assert lines["most memory allocated, 50% of the device"]["bytes"] == 70_500_000_000
    assert {what: line["milliseconds"] for what, line in lines.items() if what.startswith("of it")} == {
        "of it experts, activations and permuting": 30.0,
        "of it attention": 20.0,
    }
    assert (told["wall"], told["missing"]) == ("compute", ["no memory"])
    assert {"change", "gain_us", "rule", "source"} <= set(diagnosis_json(diagnose(evidence(SENT)))["remedies"][0])


GB = 1_000_000_000
CAPACITY = 140 * GB
IDLE = costs(idle_us=50_000.0, sync_idle_us=10_000.0)
SENDING = costs(exposed_communication_us=50_000.0, communication_us={"all-to-all": 50_000.0})


def projection(seconds: float, size: int) -> Any:
    return SimpleNamespace(
        time=SimpleNamespace(step_seconds=seconds),
        memory=SimpleNamespace(total=size),
        over_bytes=size - CAPACITY,
        fits=size <= CAPACITY,
        cluster=SimpleNamespace(devices=8),
    )


def judged(
    monkeypatch: pytest.MonkeyPatch, evidence: Evidence, project: Callable[[Run], tuple[float, int]], **facts: Any
) -> Evidence:
    monkeypatch.setattr(doctor_planned, "project", lambda run, cluster: projection(*project(run)))
    run = evidence.facts.run
    assert run is not None
    planned = projection(*project(run))
    facts = {"world": 8, "planned_bytes": planned.memory.total, "capacity_bytes": CAPACITY} | facts
    facts["planned_step_seconds"] = planned.time.step_seconds
    return with_changes(replace(evidence, facts=replace(evidence.facts, **facts)), planned)


def traced(*overrides: str, rank: RankCosts = IDLE) -> Evidence:
    return evidence(rank, facts=RunFacts(run=run_of(*overrides)))


def offered(evidence: Evidence) -> dict[str, str]:
    return {one.change: one.rule for one in diagnose(evidence).remedies}


def test_a_change_that_does_not_fit_by_the_plan_is_not_offered_and_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def project(run: Run) -> tuple[float, int]:
        rows = run.training.micro_batch
        return 0.2 - 0.01 * rows - 0.001 * run.dispatch.sync_free_stage, 60 * GB * rows

    found = judged(monkeypatch, traced("training.micro_batch=2"), project)
    assert "larger-passes" not in rules(found)
    (line,) = [one for one in diagnose(found).lines if "is not offered" in one.what]
    assert (line.what.split()[0], line.size) == ("training.micro_batch=4", 100 * GB)
    assert "training.micro_batch=2" in offered(judged(monkeypatch, traced("training.micro_batch=1"), project))


def test_a_change_that_comes_down_to_the_same_run_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    start = traced('dispatch.method="all-to-all"', rank=SENDING)
    assert "tokens-travel-once" in rules(replace(start, facts=replace(start.facts, world=8)))
    found = judged(monkeypatch, start, lambda run: (0.1 if run.dispatch.overlap == "none" else 0.09, GB))
    assert "tokens-travel-once" not in rules(found) and "overlap-if-exposed" in rules(found)


def test_another_form_of_a_change_is_offered_where_the_first_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(run: Run) -> tuple[float, int]:
        return 0.1, CAPACITY + (GB if run.graphs.capture == "full" else -GB)  # seconds, bytes

    changes = offered(judged(monkeypatch, traced("dispatch.method=symmetric"), project))
    assert changes.get('graphs.capture="partial"') == "launches-in-one-call"


def test_without_a_trace_no_gain_is_more_than_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    start = replace(traced("training.micro_batch=2"), source="plan")
    found = judged(monkeypatch, start, lambda run: (0.1 - 0.001 * (run.training.micro_batch == 4), GB))
    assert {one.rule: one.gain_us for one in diagnose(found).remedies} == {"larger-passes": pytest.approx(1_000.0)}


def test_a_run_that_has_made_steps_has_room_for_changes_that_need_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    start = traced("training.micro_batch=2")
    found = judged(monkeypatch, start, lambda run: (0.1 / run.training.micro_batch, 150 * GB))
    assert "training.micro_batch=4" in offered(found)


@pytest.mark.parametrize(("world", "is_offered"), [(MANY_COPIES // 2, True), (MANY_COPIES, False), (None, False)])
def test_gradients_are_summed_in_two_bytes_only_where_few_ranks_sum(world: int | None, is_offered: bool) -> None:
    rank = replace(SENDING, communication_us={"reduce-scatter": 50_000.0})
    facts = RunFacts(run=run_of("training.global_batch=256", "parallel.reduce=fp32"), world=world)
    assert ('parallel.reduce="bf16"' in offered(evidence(rank, facts=facts))) == is_offered


def test_what_makes_a_run_fit_comes_first_and_of_that_the_fastest() -> None:
    freed = {"training.micro_batch=1": 12 * GB, 'recompute.modules=["layer"]': 110 * GB, "selective": 26 * GB}
    saved = {"selective": -0.1, 'recompute.modules=["layer"]': -0.9, "training.micro_batch=1": 0.2}
    needs = RunFacts(planned_bytes=165 * GB, capacity_bytes=CAPACITY, freed_bytes=freed, saved_seconds=saved)
    found = evidence(source="plan", facts=replace(needs, has_steps=False))
    verdict = diagnose(found)
    assert verdict.bottleneck == "memory" and "lacks 25.0 GB" in verdict.sentence
    remedies = verdict.remedies
    assert [one.change for one in remedies] == ["selective", 'recompute.modules=["layer"]', "training.micro_batch=1"]
    assert [one.what.split(":")[0] for one in remedies] == ["fits then", "fits then", "not enough alone"]
    assert "selective-before-full" not in [one.rule for one in remedies if "layer" in one.change]
    assert diagnose(replace(found, facts=needs)).bottleneck == "compute", "a run that has made steps fits"


def test_a_trace_of_another_program_gets_words_and_no_fields_of_ours() -> None:
    both = replace(IDLE, compute_us=0.0, exposed_communication_us=50_000.0, communication_us={"all-to-all": 50_000.0})
    found = offered(evidence(both))
    assert {"launches-in-one-call", "larger-passes", "tokens-travel-once", "host-never-waits"} <= set(found.values())
    assert not [change for change in found if "=" in change or "." in change]
    assert "larger-passes" not in rules(evidence(IDLE, trains=False)), "it computes no gradients"


def test_a_trace_without_products_of_experts_has_no_tokens_that_travel() -> None:
    for rank in (IDLE, SENDING):
        found = rules(evidence(replace(rank, computing_us={})))
        assert not {"tokens-travel-once", "overlap-if-exposed", "host-never-waits"} & set(found)


def test_the_part_of_exposed_communication_that_counts_for_the_host_is_told() -> None:
    waits = replace(SENDING, wait_us=40_000.0)
    late = (LateRank(rank=1, times_last=9, caused_wait_us=40_000.0, cause="host"),)
    verdict = diagnose(evidence(waits, late=late))
    (line,) = [one for one in verdict.lines if "counts as the host's" in one.what]
    (exposed,) = [one for one in verdict.lines if one.what.startswith("exposed communication")]
    assert exposed.time_us is not None and line.time_us is not None
    assert exposed.time_us - line.time_us == pytest.approx(verdict.times.communication_us)
