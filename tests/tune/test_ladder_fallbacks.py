"""What a step gives up to run at all: which fallbacks are tried, in which order, after what, and what stays of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_run
from penstock.tune.ladder import LadderOptions, Outcome, climb, gains
from penstock.tune.ladder_steps import LADDER, LadderChange, LadderStep
from penstock.tune.trial import Failure, Figures, Trial
from tests.tune.trials import figures

NO_MEMORY = Failure(kind="refused", reason="the GPU is out of memory; got CUDA out of memory", seconds=3.0)
NO_KERNEL = Failure(kind="refused", reason="a kernel cannot be had", seconds=3.0, had_begun=False)
CRASH = Failure(kind="failed", reason="RuntimeError: an illegal memory access", seconds=3.0)
NOT_FINITE = Failure(kind="refused", reason="the loss is NaN", seconds=3.0)

GROUND = LadderStep(name="ground", change=("dispatch.sync_free=3", "kernels.norm=reference"))
LARGER = LadderStep(
    name="larger",
    micro_batch_times=2,
    fallbacks={
        "less": LadderChange(change=("dispatch.sync_free=2",)),
        "least": LadderChange(change=("dispatch.sync_free=1",)),
    },
)
TOP = LadderStep(name="top", change=("kernels.rope=reference",))


class Bench:
    """Every trial runs 100 tokens/s faster than the last, but for those that have an end of their own."""

    def __init__(self, **ends: Failure | Figures) -> None:
        self.ends = {name.replace("_", "-"): end for name, end in ends.items()}
        self.seen: dict[str, Trial] = {}

    def __call__(self, trial: Trial) -> Figures | Failure:
        assert trial.name not in self.seen, "a folder holds one run"
        self.seen[trial.name] = trial
        return self.ends.get(trial.name, figures(100.0 * len(self.seen)))


def climbed(
    bench: Bench, steps: Sequence[LadderStep], *own: str, has_gpu: bool = False, wanted: Sequence[str] = ()
) -> dict[str, Outcome]:
    ground = LadderOptions(
        target="debug",
        overrides=("training.micro_batch=1", "training.global_batch=16", *own),
        processes=2,
        warm_up=1,
        folder=Path("runs/ladder-debug"),
        most_seconds=0.0,
        has_gpu=has_gpu,
    )
    names = frozenset(wanted or [step.name for step in steps])
    return {outcome.step.name: outcome for outcome in climb(steps, names, ground, bench)}


@pytest.mark.parametrize("end", [NO_MEMORY, NO_KERNEL])
def test_what_finds_no_memory_or_is_refused_before_its_first_step_is_tried_with_each_fallback_in_turn(
    end: Failure,
) -> None:
    bench = Bench(larger=end, larger_less=NO_MEMORY)
    larger = climbed(bench, (GROUND, LARGER, TOP))["larger"]
    assert list(bench.seen) == ["ground", "larger", "larger-less", "larger-least", "top"]
    assert (larger.state, larger.trial, larger.fallback) == ("ran", "larger-least", ("dispatch.sync_free=1",))
    assert [(one.trial, one.change, one.reason) for one in larger.tried] == [
        ("larger", ("training.micro_batch=2",), end.reason),
        ("larger-less", ("training.micro_batch=2", "dispatch.sync_free=2"), NO_MEMORY.reason),
    ]
    assert set(larger.changed) == {"training.micro_batch=2", "dispatch.sync_free=1"}


def test_the_first_form_that_runs_is_the_last_that_is_tried() -> None:
    bench = Bench(larger=NO_MEMORY)
    assert climbed(bench, (GROUND, LARGER))["larger"].trial == "larger-less"
    assert list(bench.seen) == ["ground", "larger", "larger-less"]


def test_later_steps_stand_on_the_form_that_ran() -> None:
    bench = Bench(larger=NO_MEMORY)
    climbed(bench, (GROUND, LARGER, TOP))
    top = load_run("debug", bench.seen["top"].overrides)
    assert (top.training.micro_batch, top.dispatch.sync_free) == (2, 2)


def test_a_form_that_runs_slowly_is_left_out_of_later_steps_with_its_fallback_and_no_other_is_tried() -> None:
    bench = Bench(larger=NO_MEMORY, larger_less=figures(50.0))
    assert climbed(bench, (GROUND, LARGER, TOP))["larger"].state == "slower"
    assert list(bench.seen) == ["ground", "larger", "larger-less", "top"]
    top = load_run("debug", bench.seen["top"].overrides)
    assert (top.training.micro_batch, top.dispatch.sync_free) == (1, 3)


@pytest.mark.parametrize("end", [CRASH, NOT_FINITE])
def test_what_breaks_does_not_hide_behind_a_fallback(end: Failure) -> None:
    bench = Bench(larger=end)
    larger = climbed(bench, (GROUND, LARGER))["larger"]
    assert list(bench.seen) == ["ground", "larger"]
    assert (larger.state, larger.reason, larger.tried) == (end.kind, end.reason, ())


def test_a_fallback_that_breaks_is_what_became_of_the_step_and_ends_the_search() -> None:
    bench = Bench(larger=NO_MEMORY, larger_less=CRASH)
    larger = climbed(bench, (GROUND, LARGER))["larger"]
    assert list(bench.seen) == ["ground", "larger", "larger-less"]
    assert (larger.state, larger.reason, larger.trial) == ("failed", CRASH.reason, "larger-less")
    assert [one.trial for one in larger.others] == ["larger"]


def test_if_no_form_runs_the_step_is_told_as_it_is_and_later_ones_go_without_it() -> None:
    bench = Bench(larger=NO_MEMORY, larger_less=NO_KERNEL, larger_least=NO_MEMORY)
    larger = climbed(bench, (GROUND, LARGER, TOP))["larger"]
    assert (larger.state, larger.reason, larger.trial) == ("refused", NO_MEMORY.reason, "larger")
    assert [one.trial for one in larger.tried] == ["larger", "larger-less", "larger-least"]
    assert [one.trial for one in larger.others] == ["larger-less", "larger-least"]
    top = load_run("debug", bench.seen["top"].overrides)
    assert (top.training.micro_batch, top.dispatch.sync_free) == (1, 3)


def test_a_fallback_without_meaning_is_left_out() -> None:
    fallbacks = {
        "same": LadderChange(change=("dispatch.sync_free=3",)),
        "needy": LadderChange(change=("dispatch.sync_free=1",), needs=("gpu",)),
        "less": LadderChange(change=("dispatch.sync_free=2",)),
        "again": LadderChange(change=("dispatch.sync_free=2", "kernels.norm=reference")),
        "back": LadderChange(change=("dispatch.sync_free=3", "kernels.rope=auto")),
    }
    bench = Bench(faster=NO_MEMORY, faster_less=NO_MEMORY)
    step = LadderStep(name="faster", change=("kernels.rope=reference",), fallbacks=fallbacks)
    assert climbed(bench, (GROUND, step))["faster"].state == "refused"
    assert list(bench.seen) == ["ground", "faster", "faster-less"], "`back` is the step below once more"


def test_a_fallback_that_is_misspelled_says_so() -> None:
    step = LARGER.model_copy(update={"fallbacks": {"less": LadderChange(change=("dispatch.sync_fre=2",))}})
    bench = Bench(larger=NO_MEMORY)
    told = [one.reason for one in climbed(bench, (GROUND, step))["larger"].others]
    assert len(told) == 1
    assert "did you mean dispatch.sync_free?" in told[0]
    assert list(bench.seen) == ["ground", "larger"]


def test_a_refusal_that_no_fallback_mends_is_told_once_and_starts_nothing() -> None:
    bench = Bench()
    huge = climbed(bench, (GROUND, LARGER.model_copy(update={"micro_batch_times": 64})))["larger"]
    assert "training.global_batch must be a multiple" in huge.reason
    assert [one.trial for one in huge.tried] == ["larger"]
    assert huge.others == ()
    assert list(bench.seen) == ["ground"]


def test_a_step_that_is_not_measured_stays_in_the_first_form_that_the_configuration_allows() -> None:
    refused = LadderStep(
        name="wrong",
        change=("kernels.norm=magic",),
        fallbacks={"right": LadderChange(change=("kernels.norm=torch",))},
    )
    bench = Bench()
    climbed(bench, (GROUND, refused, TOP), wanted=["ground", "top"])
    assert load_run("debug", bench.seen["top"].overrides).kernels.norm == "torch"


@given(st.integers(min_value=0, max_value=4), st.integers(min_value=0, max_value=4))
def test_as_many_forms_are_tried_as_fail_before_one_runs(fallbacks: int, failing: int) -> None:
    names = ["larger", *(f"larger-{place}" for place in range(fallbacks))]
    changes = {f"{place}": LadderChange(change=(f"seed={place + 1}",)) for place in range(fallbacks)}
    bench = Bench(**dict.fromkeys(names[:failing], NO_MEMORY))
    larger = climbed(bench, (GROUND, LARGER.model_copy(update={"fallbacks": changes})))["larger"]
    assert list(bench.seen) == ["ground", *names[: failing + 1]]
    assert [one.trial for one in larger.tried] == names[:failing]
    assert larger.state == ("ran" if failing < len(names) else "refused")


def test_the_gain_of_a_larger_micro_batch_with_a_fallback_is_counted_as_that_of_its_size() -> None:
    outcomes = climbed(Bench(larger=NO_MEMORY, larger_less=figures(150.0)), (GROUND, LARGER))
    _, gain = gains(list(outcomes.values()))
    assert gain is not None
    assert (gain.before, gain.by_size, gain.by_optimization, gain.first) == (1.5, 1.5, 1.0, 1.5)


# ------------------------------------------------------------------------------------------------------ our ladder

ON_FOUR = ("parallel.expert=2", "training.micro_batch=2")


def ours(name: str) -> LadderStep:
    return next(step for step in LADDER if step.name == name)


def test_halves_are_measured_without_graphs_where_parts_are_captured() -> None:
    ground = LadderStep(name="ground", change=("graphs.capture=partial", "dispatch.overlap=none"))
    bench = Bench()
    halves = climbed(bench, (ground, ours("overlap-halves")), *ON_FOUR, has_gpu=True)["overlap-halves"]
    assert list(bench.seen) == ["ground", "overlap-halves-eager"]
    assert (halves.state, set(halves.changed)) == ("ran", {"dispatch.overlap=halves", "graphs.capture=none"})
    assert [(one.change, one.seconds) for one in halves.tried] == [(("dispatch.overlap=halves",), 0.0)]
    assert "has two passes under way" in halves.tried[0].reason


@pytest.mark.parametrize(
    ("below", "forms"),
    [
        (
            ("dispatch.sync_free=3", "graphs.capture=partial"),
            [(3, "partial"), (2, "partial"), (2, "none"), (1, "none")],
        ),
        (("dispatch.sync_free=2", "graphs.capture=partial"), [(2, "partial"), (2, "none"), (1, "none")]),
        (("dispatch.sync_free=3", "graphs.capture=none"), [(3, "none"), (2, "none"), (1, "none")]),
        (("dispatch.sync_free=1", "graphs.capture=partial"), [(1, "partial"), (1, "none")]),
        (("dispatch.sync_free=1", "graphs.capture=none"), [(1, "none")]),
        (("model.moe=none", "model.dense_layers=4", "graphs.capture=partial"), [(0, "partial"), (0, "none")]),
    ],
)
def test_a_larger_micro_batch_gives_up_room_for_rows_and_then_graphs_but_nothing_that_takes_no_memory(
    below: tuple[str, ...], forms: list[tuple[int, str]]
) -> None:
    class Full(Bench):
        def __call__(self, trial: Trial) -> Figures | Failure:
            super().__call__(trial)
            return NO_MEMORY if trial.name.startswith("larger") else figures(1.0)

    bench = Full()
    own = ("training.micro_batch=1",) if "model.moe=none" in below else ON_FOUR
    climbed(bench, (LadderStep(name="ground", change=below), ours("larger")), *own, has_gpu=True)
    runs = [load_run("debug", trial.overrides) for trial in list(bench.seen.values())[1:]]
    assert [(run.dispatch.sync_free, run.graphs.capture) for run in runs] == forms
    assert {run.training.micro_batch for run in runs} == {2 if "model.moe=none" in below else 4}
