"""Ladders as data: what a file may say, what is left out, and which gains would have two causes."""

from pathlib import Path

import pytest

from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.schema import find
from penstock.tune.ladder import LadderStep, chosen, load_ladder_steps, our_ladder, why_skipped

DENSE = ["model.moe=none", "model.dense_layers=4"]  # overrides of debug


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_ladder_is_valid_and_its_first_step_sets_the_fields_that_later_ones_change() -> None:
    first, *others = our_ladder()
    assert [field for step in our_ladder() for field in step.fields if not find(Run, field)] == []
    assert {field for step in others for field in step.fields} <= set(first.fields)


def test_a_step_in_a_file_is_read(tmp_path: Path) -> None:
    text = """
        [[step]]
        name = "a"
        change = ["seed=1"]
        [[step]]
        name = "larger"
        needs = ["gpu"]
        micro_batch_times = 2
    """
    plain, step = load_ladder_steps(write(tmp_path, text))
    assert plain == LadderStep(name="a", change=("seed=1",))
    assert (step.is_size, step.needs) == (True, ("gpu",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no ladder"),
        ("[[step]", "is not TOML"),
        ('[other]\nx = 1\n[[step]]\nname = "a"', "got other"),
        ("step = []", "has no step"),
        ('[[step]]\nname = "a"\nchnge = ["seed=1"]', "step 1: chnge is an unknown key; fix: did you mean change?"),
        ('[[step]]\nchange = ["seed=1"]', "step 1: name is missing"),
        ('[[step]]\nname = "a/b"', "letters, digits"),
        ('[[step]]\nname = "a"\nneeds = ["luck"]', "got luck; allowed: experts"),
        ('[[step]]\nname = "a"\n[[step]]\nname = "b"\nchange = ["seed=1"]\nmicro_batch_times = 2', "two causes"),
        ('[[step]]\nname = "a"\n[step.fallbacks.b]\nchange = ["seed=1"]', "step 1: fallbacks were removed; fix: make"),
        ('[[step]]\nname = "a"\n[[step]]\nname = "a"', "two steps are called a"),
        ('[[step]]\nname = "a"\n[[step]]\nname = "b"\nchange = ["training.micro_batch=2", "seed=1"]', "two causes"),
    ],
)
def test_what_is_no_ladder_is_refused_with_a_reason(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(PenstockError) as raised:
        load_ladder_steps(write(tmp_path, text))
    assert told in str(raised.value)
    with pytest.raises(PenstockError, match="cannot read"):
        load_ladder_steps(tmp_path / "gone.toml")


STEPS = (
    LadderStep(name="ground"),
    LadderStep(name="faster", change=("seed=1",)),
    LadderStep(name="larger", micro_batch_times=2),
    LadderStep(name="top", change=("seed=2",)),
)


def test_some_steps_may_be_named_but_none_hides_in_the_gain_of_another_kind() -> None:
    assert chosen(STEPS, ()) == {"ground", "faster", "larger", "top"}
    for names in (("ground", "faster"), ("larger",), ("faster", "larger", "top"), ("top",)):
        assert chosen(STEPS, names) == set(names)
    for names, refusal in (
        (("ground", "larger"), "name faster as well"),
        (("faster", "top"), "name larger as well"),
        (("fastest",), "got fastest; allowed: ground, faster"),
    ):
        with pytest.raises(PenstockError, match=refusal):
            chosen(STEPS, names)


@pytest.mark.parametrize(
    ("needs", "overrides", "has_gpu", "reason"),
    [
        (("experts",), DENSE, True, "the model has no experts"),
        (("shared-expert",), ["model.moe.shared_expert_intermediate_size=0"], True, "no shared expert"),
        (("sharing",), [], True, "each rank holds all experts"),
        (("gpu",), [], False, "there is no GPU"),
        (("experts", "shared-expert", "sharing", "gpu"), ["parallel.expert=2"], True, ""),
    ],
)
def test_a_step_without_meaning_is_left_out(
    needs: tuple[str, ...], overrides: list[str], has_gpu: bool, reason: str
) -> None:
    told = why_skipped(LadderStep(name="a", needs=needs), load_run("debug", overrides), has_gpu)
    assert reason in told
    assert bool(reason) == bool(told)
    unknown = LadderStep(name="a", change=("oven.heat=3",))
    assert why_skipped(unknown, load_run("debug"), has_gpu=True) == "this version has no oven.heat"
