"""Climbing ladders with made-up trials: what each step stands on, and its gain."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_run
from penstock.tune.ladder import LadderStep, Outcome, balancing, climb, gains, loss_gap, our_ladder
from penstock.tune.trial import Failure, Figures, Trial

STEPS = (
    LadderStep(name="ground", change=("dispatch.sync_free=0",)),
    LadderStep(name="one", change=("dispatch.sync_free=1",)),
    LadderStep(name="two", change=("kernels.norm=torch",)),
    LadderStep(name="larger", micro_batch_times=2),
    LadderStep(name="top", change=("kernels.rope=reference",)),
)

OWN = ("training.micro_batch=1",)  # overrides of the user, before those of steps
BROKEN = Failure(kind="failed", reason="no memory", seconds=1.0)


class Bench:
    """Every trial runs 100 tokens/s faster than the last, but for those that have an end or a speed of their own."""

    def __init__(self, speeds: dict[str, float] | None = None, **ends: Failure | Figures) -> None:
        self.ends = {name.replace("_", "-"): end for name, end in ends.items()}
        self.ends |= {name: figures(speed) for name, speed in (speeds or {}).items()}
        self.seen: dict[str, Trial] = {}

    def __call__(self, trial: Trial) -> Figures | Failure:
        assert trial.name not in self.seen, "a folder holds one run"
        self.seen[trial.name] = trial
        return self.ends.get(trial.name, figures(100.0 * len(self.seen)))


def base(*own: str, processes: int = 1) -> Trial:
    return Trial(
        name="", target="debug", overrides=own or OWN, processes=processes, warm_up=1, folder=Path("runs/ladder-debug")
    )


def climbed(
    bench: Bench,
    steps: Sequence[LadderStep] = STEPS,
    *,
    wanted: Sequence[str] = (),
    options: Trial | None = None,
    has_gpu: bool = False,
) -> list[Outcome]:
    names = frozenset(wanted or [step.name for step in steps])
    return list(climb(steps, names, options or base(), bench, has_gpu=has_gpu))


def test_every_step_is_the_one_below_and_a_change() -> None:
    bench = Bench()
    outcomes = climbed(bench)
    assert [outcome.state for outcome in outcomes] == ["ran"] * 5
    held: list[str] = [*OWN]
    for step, outcome in zip(STEPS, outcomes, strict=True):
        change = step.change or ("training.micro_batch=2",)
        held += change
        assert bench.seen[step.name].overrides == tuple(held)
        assert outcome.changed == change


def test_after_a_failure_the_ladder_goes_on_from_the_last_step_that_ran() -> None:
    bench = Bench(one=BROKEN, larger=BROKEN)
    outcomes = climbed(bench)
    ends = [(outcome.state, outcome.reason) for outcome in outcomes[:3]]
    assert ends == [("ran", ""), ("failed", "no memory"), ("ran", "")]
    assert "dispatch.sync_free=1" not in bench.seen["two"].overrides
    assert outcomes[2].changed == ("kernels.norm=torch",)
    assert load_run("debug", bench.seen["top"].overrides).training.micro_batch == 1


def test_what_is_slower_is_told_and_left_out_of_later_steps() -> None:
    # The slowest step of the first step took a quarter longer than the middle one: less than that is noise.
    states = [outcome.state for outcome in climbed(Bench({"one": 85.0, "two": 60.0}), STEPS[:3])]
    assert states == ["ran", "ran", "slower"]
    bench = Bench({"one": 70.0, "two": 99.0, "larger": 200.0})
    outcomes = climbed(bench, STEPS[:4])
    assert [outcome.state for outcome in outcomes] == ["ran", "slower", "ran", "ran"], "one in a hundred is noise"
    assert "dispatch.sync_free=1" not in bench.seen["two"].overrides
    assert outcomes[2].changed == ("kernels.norm=torch",)
    two, larger = gains(outcomes)[2:]
    assert two is not None and larger is not None
    assert (two.before, larger.by_optimization, larger.first) == pytest.approx((0.99, 0.99, 2.0))


@pytest.mark.parametrize(("twice", "because"), [(0, ""), (2, ", 2 of 3 timed training steps were repeated")])
def test_what_is_slower_because_steps_were_made_twice_says_how_many(twice: int, because: str) -> None:
    _, one = climbed(Bench(one=figures(70.0, repeated_steps=twice)), STEPS[:2])
    assert (one.state, one.reason) == ("slower", f"slower than without it{because}; later steps go without it")


def test_the_ground_stays_even_if_it_fails() -> None:
    bench = Bench(ground=BROKEN)
    outcomes = climbed(bench, (LadderStep(name="ground", change=("kernels.norm=reference",)), STEPS[1]))
    assert "kernels.norm=reference" in bench.seen["one"].overrides
    assert outcomes[1].figures is not None
    assert gains(outcomes)[1] is not None


def test_a_step_that_is_not_wanted_is_not_measured_and_stays_in_those_above_it() -> None:
    bench = Bench()
    outcomes = climbed(bench, wanted=["ground", "two"])  # --only
    assert [outcome.step.name for outcome in outcomes] == ["ground", "two"] == list(bench.seen)
    assert "dispatch.sync_free=1" in bench.seen["two"].overrides
    assert set(outcomes[1].changed) == {"dispatch.sync_free=1", "kernels.norm=torch"}


def test_what_the_rules_refuse_is_a_row_and_starts_nothing() -> None:
    bench = Bench()
    steps = (
        STEPS[0],
        LadderStep(name="wrong", change=("kernels.norm=magic",)),
        LadderStep(name="huge", micro_batch_times=64),  # more rows than the global batch has
        STEPS[2],
    )
    outcomes = climbed(bench, steps)
    assert [outcome.state for outcome in outcomes] == ["ran", "refused", "refused", "ran"]
    assert "kernels.norm has an unknown value" in outcomes[1].reason
    assert "training.global_batch must be a multiple" in outcomes[2].reason
    assert list(bench.seen) == ["ground", "two"]


def test_a_step_that_means_nothing_here_is_left_out_with_the_reason() -> None:
    _, graphs, _ = climbed(Bench(), (STEPS[0], LadderStep(name="graphs", needs=("gpu",)), STEPS[2]))
    assert (graphs.state, graphs.reason, graphs.overrides) == ("skipped", "there is no GPU", ())


def test_our_ladder_can_be_climbed_on_a_laptop_and_on_four_gpus() -> None:
    own = ("training.micro_batch=2", "training.global_batch=16", "parallel.expert=2")
    on_cpu = climbed(Bench(), our_ladder(), options=base(*own, processes=2))
    on_gpus = climbed(Bench(), our_ladder(), options=base(*own, processes=4), has_gpu=True)
    left_out = {outcome.step.name for outcome in on_cpu if outcome.state != "ran"}
    assert left_out == {step.name for step in our_ladder() if "gpu" in step.needs}
    assert {outcome.state for outcome in on_gpus} == {"ran"}


def test_a_dense_model_climbs_what_is_left() -> None:
    own = ("model.moe=none", "model.dense_layers=4", "training.micro_batch=1")
    ran = [one.step.name for one in climbed(Bench(), our_ladder(), options=base(*own)) if one.state == "ran"]
    assert ran == ["baseline", "fused", "chunked-loss", "larger"]


def outcome(speed: float | None, micro_batch_times: int = 1) -> Outcome:
    """Of a step that ran at a speed or failed."""
    step = LadderStep(name="a", micro_batch_times=micro_batch_times)
    return Outcome(step=step, state="ran" if speed else "failed", figures=figures(speed) if speed else None)


SPEEDS = st.none() | st.floats(min_value=1.0, max_value=1e6)


@given(st.lists(st.tuples(st.booleans(), SPEEDS), min_size=1, max_size=8))
def test_the_gains_of_both_kinds_make_up_the_gain_over_the_first(steps: list[tuple[bool, float | None]]) -> None:
    found = gains([outcome(speed, micro_batch_times=2 if is_size else 1) for is_size, speed in steps])
    assert [gain is None for gain in found] == [speed is None for _, speed in steps]
    ran = [gain for gain in found if gain is not None]
    for gain in ran:
        assert gain.by_optimization * gain.by_size == pytest.approx(gain.first)
    if ran:
        assert (ran[0].before, ran[0].first, ran[0].by_optimization, ran[0].by_size) == (1.0, 1.0, 1.0, 1.0)


def test_the_gain_of_a_larger_micro_batch_is_kept_apart() -> None:
    last = Outcome(step=STEPS[3], state="ran", figures=figures(300.0, [6.0, 5.0, 4.4]))
    *_, top = gains([outcome(100.0), outcome(200.0), outcome(None), last])
    assert top is not None
    assert (top.before, top.first, top.by_optimization, top.by_size) == (1.5, 3.0, 2.0, 1.5)
    assert top.loss_gap == pytest.approx(0.1)
    assert loss_gap([4.0, 2.2, 1.0], [4.0, 2.0, 1.0]) == pytest.approx(0.1), "of the worst step"


DROPS = [f"model.moe.balance.{word}" for word in ("aux_loss=none", "aux_loss_coef=0", "capacity_factor=1.5")]
DROPS += ["model.moe.router.expert_bias=false"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.moe=none", "model.dense_layers=4"], "no experts"),
        (["model.moe.balance.force_load_balance=true"], "FORCED EVEN ROUTING, BENCHMARK ONLY"),
        ([], "natural routing, auxiliary loss 0.0001 by sequence, expert bias"),
        (DROPS, "natural routing, tokens beyond capacity 1.5 dropped"),
    ],
)
def test_the_balancing_of_a_run_is_said_in_words(overrides: list[str], told: str) -> None:
    assert balancing(load_run("debug", overrides)) == told


def figures(speed: float, losses: Sequence[float] = (6.0, 5.0, 4.0), **changes: object) -> Figures:
    """A median step of 0.1 s; the slowest takes a quarter longer."""
    times = {"step_seconds": (0.1, 0.1, 0.125), "step_seconds_median": 0.1, "step_seconds_p99": 0.12}
    sizes = {
        "model_flops_utilization": 0.25,
        "power_watts": None,
        "expert_load_max_over_mean": 1.5,
        "peak_memory_bytes": 3 * 2**30,
    }
    rest = {"step_seconds_highest": 0.125, "losses": tuple(losses), "repeated_steps": 0, "seconds": 2.0}
    return Figures(tokens_per_second_per_device=speed, **(times | sizes | rest | changes))  # type: ignore[arg-type]
