"""Climbing, with trials that are made up: what each step stands on, and what its gain is called."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_run
from penstock.tune.ladder import LadderOptions, Outcome, balancing, climb, gains, loss_gap
from penstock.tune.ladder_steps import LADDER, LadderStep
from penstock.tune.trial import Failure, Figures, Trial
from tests.tune.trials import figures

STEPS = (
    LadderStep(name="ground", change=("dispatch.sync_free=0",)),
    LadderStep(name="one", change=("dispatch.sync_free=1",)),
    LadderStep(name="two", change=("kernels.norm=torch",)),
    LadderStep(name="larger", micro_batch_times=2),
    LadderStep(name="top", change=("kernels.rope=reference",)),
)

OWN = ("training.micro_batch=1",)


class Bench:
    """Every trial runs 100 tokens/s faster than the last, but for those that fail or have a speed of their own."""

    def __init__(self, *failing: str, speeds: dict[str, float] | None = None) -> None:
        self.failing = failing
        self.speeds = speeds or {}
        self.seen: dict[str, Trial] = {}

    def __call__(self, trial: Trial) -> Figures | Failure:
        self.seen[trial.name] = trial
        if trial.name in self.failing:
            return Failure(kind="failed", reason="no memory", seconds=1.0)
        return figures(self.speeds.get(trial.name, 100.0 * len(self.seen)))


def ground(processes: int = 1, *, has_gpu: bool = False, own: tuple[str, ...] = OWN) -> LadderOptions:
    return LadderOptions(
        target="debug",
        overrides=own,
        processes=processes,
        warm_up=1,
        folder=Path("runs/ladder-debug"),
        most_seconds=0.0,
        has_gpu=has_gpu,
    )


def climbed(
    bench: Bench, steps: Sequence[LadderStep] = STEPS, *, wanted: Sequence[str] = (), **changes: int
) -> list[Outcome]:
    names = frozenset(wanted or [step.name for step in steps])
    return list(climb(steps, names, ground(**changes), bench))


def test_every_step_is_the_one_below_and_a_change() -> None:
    bench = Bench()
    outcomes = climbed(bench)
    assert [outcome.state for outcome in outcomes] == ["ran"] * 5
    held: list[str] = [*OWN]
    for step, change in zip(
        STEPS, [*(r.change for r in STEPS[:3]), ("training.micro_batch=2",), STEPS[4].change], strict=True
    ):
        held += change
        assert bench.seen[step.name].overrides == tuple(held)


def test_what_changed_is_told_field_by_field() -> None:
    changed = [outcome.changed for outcome in climbed(Bench())]
    assert changed[0] == ("dispatch.sync_free=0",)
    assert changed[1:4] == [("dispatch.sync_free=1",), ("kernels.norm=torch",), ("training.micro_batch=2",)]


def test_after_a_failure_the_ladder_goes_on_from_the_last_step_that_ran() -> None:
    bench = Bench("one")
    outcomes = climbed(bench)
    assert [(outcome.state, outcome.reason) for outcome in outcomes[:3]] == [
        ("ran", ""),
        ("failed", "no memory"),
        ("ran", ""),
    ]
    assert "dispatch.sync_free=1" not in bench.seen["two"].overrides
    assert outcomes[2].changed == ("kernels.norm=torch",)


def test_a_larger_micro_batch_that_fails_is_forgotten() -> None:
    bench = Bench("larger")
    climbed(bench)
    assert load_run("debug", bench.seen["top"].overrides).training.micro_batch == 1


def test_what_is_slower_is_told_and_left_out_of_later_steps() -> None:
    bench = Bench(speeds={"one": 70.0, "two": 99.0, "larger": 200.0})
    outcomes = climbed(bench, STEPS[:4])
    assert [outcome.state for outcome in outcomes] == ["ran", "slower", "ran", "ran"], "one in a hundred is noise"
    assert "dispatch.sync_free=1" not in bench.seen["two"].overrides
    assert outcomes[2].changed == ("kernels.norm=torch",)
    two, larger = gains(outcomes)[2:]
    assert two is not None and larger is not None
    assert (two.before, larger.by_optimization, larger.first) == pytest.approx((0.99, 0.99, 2.0))


def test_what_is_slower_by_less_than_steps_differ_is_not_told_apart() -> None:
    bench = Bench(speeds={"one": 85.0, "two": 60.0})
    states = [outcome.state for outcome in climbed(bench, STEPS[:3])]
    assert states == ["ran", "ran", "slower"], (
        "the slowest step of the first step took a quarter longer than the middle one"
    )


@pytest.mark.parametrize(
    ("twice", "reason"),
    [
        (0, "slower than without it; later steps go without it"),
        (2, "slower than without it, 2 of 3 timed training steps were repeated; later steps go without it"),
    ],
)
def test_what_is_slower_because_steps_were_made_twice_says_how_many(twice: int, reason: str) -> None:
    def measure(trial: Trial) -> Figures:
        return figures(70.0, repeated_steps=twice) if trial.name == "one" else figures(100.0)

    _, one = climb(STEPS[:2], frozenset({"ground", "one"}), ground(), measure)
    assert (one.state, one.reason) == ("slower", reason)


def test_the_ground_stays_even_if_it_fails() -> None:
    bench = Bench("ground")
    outcomes = climbed(bench, (LadderStep(name="ground", change=("kernels.norm=reference",)), STEPS[1]))
    assert "kernels.norm=reference" in bench.seen["one"].overrides
    assert outcomes[1].figures is not None
    assert gains(outcomes)[1] is not None


def test_a_step_that_is_not_wanted_is_not_measured_and_stays_in_those_above_it() -> None:
    bench = Bench()
    outcomes = climbed(bench, wanted=["ground", "two"])
    assert [outcome.step.name for outcome in outcomes] == ["ground", "two"] == list(bench.seen)
    assert "dispatch.sync_free=1" in bench.seen["two"].overrides
    assert set(outcomes[1].changed) == {"dispatch.sync_free=1", "kernels.norm=torch"}


def test_what_the_rules_refuse_is_a_row_and_starts_nothing() -> None:
    bench = Bench()
    steps = (
        STEPS[0],
        LadderStep(name="wrong", change=("kernels.norm=magic",)),
        LadderStep(name="huge", micro_batch_times=64),
        STEPS[2],
    )
    outcomes = climbed(bench, steps)
    assert [outcome.state for outcome in outcomes] == ["ran", "refused", "refused", "ran"]
    assert "kernels.norm has an unknown value" in outcomes[1].reason
    assert "training.global_batch must be a multiple" in outcomes[2].reason
    assert list(bench.seen) == ["ground", "two"]


def test_a_step_that_means_nothing_here_is_left_out_with_the_reason() -> None:
    outcomes = climbed(Bench(), (STEPS[0], LadderStep(name="graphs", needs=("gpu",)), STEPS[2]))
    assert (outcomes[1].state, outcomes[1].reason, outcomes[1].overrides) == ("skipped", "there is no GPU", ())


def test_our_ladder_can_be_climbed_on_a_laptop_and_on_four_gpus() -> None:
    own = ("training.micro_batch=2", "training.global_batch=16", "parallel.expert=2")
    on_cpu = list(climb(LADDER, frozenset(r.name for r in LADDER), ground(2, own=own), Bench()))
    on_gpus = list(climb(LADDER, frozenset(r.name for r in LADDER), ground(4, has_gpu=True, own=own), Bench()))
    left_out = {outcome.step.name for outcome in on_cpu if outcome.state != "ran"}
    assert left_out == {step.name for step in LADDER if "gpu" in step.needs}
    assert {outcome.state for outcome in on_gpus} == {"ran"}


def test_a_dense_model_climbs_what_is_left() -> None:
    own = ("model.moe=none", "model.dense_layers=4", "training.micro_batch=1")
    outcomes = list(climb(LADDER, frozenset(r.name for r in LADDER), ground(own=own), Bench()))
    assert [o.step.name for o in outcomes if o.state == "ran"] == ["baseline", "fused", "chunked-loss", "larger"]


@given(
    st.lists(
        st.tuples(st.booleans(), st.one_of(st.none(), st.floats(min_value=1.0, max_value=1e6))), min_size=1, max_size=8
    )
)
def test_the_gains_of_both_kinds_make_up_the_gain_over_the_first(steps: list[tuple[bool, float | None]]) -> None:
    outcomes = [
        Outcome(
            step=LadderStep(name=f"r{place}", micro_batch_times=2 if is_size else 1),
            state="failed" if speed is None else "ran",
            figures=None if speed is None else figures(speed),
        )
        for place, (is_size, speed) in enumerate(steps)
    ]
    found = gains(outcomes)
    assert [gain is None for gain in found] == [speed is None for _, speed in steps]
    ran = [gain for gain in found if gain is not None]
    for gain in ran:
        assert gain.by_optimization * gain.by_size == pytest.approx(gain.first)
    if ran:
        assert (ran[0].before, ran[0].first, ran[0].by_optimization, ran[0].by_size) == (1.0, 1.0, 1.0, 1.0)


def test_the_gain_of_a_larger_micro_batch_is_kept_apart() -> None:
    outcomes = [
        Outcome(step=LadderStep(name="a"), state="ran", figures=figures(100.0)),
        Outcome(step=LadderStep(name="b"), state="ran", figures=figures(200.0)),
        Outcome(step=LadderStep(name="c"), state="failed"),
        Outcome(step=LadderStep(name="d", micro_batch_times=2), state="ran", figures=figures(300.0, [6.0, 5.0, 4.4])),
    ]
    *_, top = gains(outcomes)
    assert top is not None
    assert (top.before, top.first, top.by_optimization, top.by_size) == (1.5, 3.0, 2.0, 1.5)
    assert top.loss_gap == pytest.approx(0.1)


def test_the_gap_of_losses_is_that_of_the_worst_step() -> None:
    assert loss_gap([4.0, 2.2, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.moe=none", "model.dense_layers=4"], "no experts"),
        (["model.moe.balance.force_load_balance=true"], "FORCED EVEN ROUTING, BENCHMARK ONLY"),
        ([], "natural routing, auxiliary loss 0.0001 by sequence, expert bias"),
        (
            [
                "model.moe.balance.aux_loss=none",
                "model.moe.balance.aux_loss_coef=0",
                "model.moe.balance.capacity_factor=1.5",
                "model.moe.router.expert_bias=false",
            ],
            "natural routing, tokens beyond capacity 1.5 dropped",
        ),
    ],
)
def test_the_balancing_of_a_run_is_said_in_words(overrides: list[str], told: str) -> None:
    assert balancing(load_run("debug", overrides)) == told
