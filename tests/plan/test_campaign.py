"""Days, cost, energy and lost time of a whole training run."""

import random
from math import expm1

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.base.numbers import amount
from penstock.config.run import Run
from penstock.plan.campaign import HOUR, WRITE_SECONDS, Campaign, Failures, campaign_json, interruptions, plan_campaign
from penstock.plan.phases import TrainingPhase, phases_of
from penstock.plan.projection import Plan
from tests.cli.made_plans import CLUSTER, projection, run_of


def plan_of(run: Run, tokens: float | None) -> Plan:
    rows = run.training.global_batch if tokens is None else round(tokens / run.training.sequence_length)
    changed = run.model_copy(update={"training": run.training.model_copy(update={"global_batch": rows})})
    return Plan(model=run.name, cluster=CLUSTER, candidates=(projection(changed, step=2.0),), refused=(), considered=1)


@pytest.mark.parametrize(
    ("text", "number"), [("500M", 5e8), ("14.8T", 14.8e12), ("4_096", 4096), ("32K", 32e3), ("2X", None), ("", None)]
)
def test_an_amount_is_read_with_its_unit(text: str, number: float | None) -> None:
    assert amount(text) == (pytest.approx(number) if number is not None else None)


def test_a_ramp_comes_first_and_longer_rows_last() -> None:
    assert phases_of("1B", "1M:100M,2M:300M", "32k:50M") == (
        TrainingPhase(tokens=100e6, batch_tokens=1e6),
        TrainingPhase(tokens=300e6, batch_tokens=2e6),
        TrainingPhase(tokens=600e6),
        TrainingPhase(tokens=50e6, sequence_length=32768),
    )
    assert phases_of(None, None, None) == ()


@pytest.mark.parametrize(("text", "positions"), [("64k", 65_536), ("96K", 98_304), ("128k", 131_072), ("5000", 5000)])
def test_positions_of_a_stage_are_counted_in_1024s(text: str, positions: int) -> None:
    (phase,) = phases_of(None, None, f"{text}:1B")
    assert phase.sequence_length == positions


@pytest.mark.parametrize(
    ("tokens", "ramp", "stages"), [("2X", None, None), ("1B", "1M:2B", None), ("1B", None, "32k"), ("0", None, None)]
)
def test_phases_that_cannot_be_read_are_refused(tokens: str, ramp: str | None, stages: str | None) -> None:
    with pytest.raises(ConfigError):
        phases_of(tokens, ramp, stages)


def test_devices_that_fail_faster_than_they_restart_are_refused() -> None:
    assert 0 < interruptions(Failures(mtbf_seconds=3 * HOUR), 64, 1.0).goodput < 0.05
    with pytest.raises(ConfigError, match=r"4,096 devices would fail every 3 s.*got 3 hours"):
        interruptions(Failures(mtbf_seconds=3 * HOUR), 4096, 1.0)


def test_hours_cost_and_energy_follow_from_the_steps() -> None:
    run = run_of()
    steps = 1000
    (one,) = plan_campaign(run, [TrainingPhase(tokens=steps * run.tokens_per_step)], plan_of)
    campaign = Campaign(cluster=CLUSTER, phases=(one,), price=2.0, watts=500.0)
    assert (one.steps, one.seconds) == (steps, 2.0 * steps)
    assert one.device_hours == pytest.approx(16 * 2000 / HOUR)
    assert campaign.cost(one) == pytest.approx(2 * one.device_hours)
    assert campaign.energy_joules(one) == pytest.approx(16 * 2000 * 500)
    assert campaign_json(campaign)["phases"][0]["interruptions"] is None


def test_longer_rows_keep_about_the_tokens_of_a_step() -> None:
    run = run_of("training.sequence_length=128", "training.global_batch=256")
    (one,) = plan_campaign(run, [TrainingPhase(tokens=1e6, sequence_length=512)], plan_of)
    assert one.projection.run.training.sequence_length == 512
    assert one.projection.run.tokens_per_step == run.tokens_per_step
    ramp, rest = plan_campaign(
        run, [TrainingPhase(tokens=1e6, batch_tokens=4096), TrainingPhase(tokens=1e6)], plan_of, step_tokens=16384
    )
    assert [cost.projection.run.tokens_per_step for cost in (ramp, rest)] == [4096, 16384]


def test_the_goodput_is_that_of_a_simulated_run_with_random_failures() -> None:
    failures, save = Failures(mtbf_seconds=16 * 4 * HOUR), 20.0
    found = interruptions(failures, 16, save)
    draw = random.Random(0)
    spent = work = 0.0
    while work < 4000 * found.between_seconds:
        # One interval and its save, repeated from the last checkpoint after each failure.
        fails_after = draw.expovariate(1 / found.between_seconds)
        if fails_after >= found.interval_seconds + save:
            spent, work = spent + found.interval_seconds + save, work + found.interval_seconds
            continue
        spent += fails_after
        # Another failure may come during the restart, which then begins again.
        while (again := draw.expovariate(1 / found.between_seconds)) < failures.restart_seconds:
            spent += again
        spent += failures.restart_seconds
    assert work / spent == pytest.approx(found.goodput, rel=0.01)


@given(save=st.floats(0.1, 300), hours=st.floats(1e3, 1e6), devices=st.integers(1, 4096))
def test_no_other_interval_has_a_better_goodput(save: float, hours: float, devices: int) -> None:
    found = interruptions(Failures(mtbf_seconds=hours * HOUR), devices, save)

    def lost(interval: float) -> float:
        return expm1((interval + save) / found.between_seconds) / interval

    others = [found.interval_seconds * factor for factor in (0.5, 0.8, 1.25, 2.0)]
    best = lost(found.interval_seconds)
    assert all(best <= lost(one) * 1.001 for one in others if one >= WRITE_SECONDS)
    assert 0 < found.goodput < 1
