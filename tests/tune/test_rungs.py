"""Ladders as data: what a file may say, what is left out, and which gains would have two causes."""

from pathlib import Path

import pytest

from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.schema import find
from penstock.tune.rungs import LADDER, Change, LadderStep, checked, chosen, load_rungs, why_skipped

DENSE = ["model.moe=none", "model.dense_layers=4"]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_ladder_is_one_and_every_knob_of_it_is_known() -> None:
    assert checked(LADDER) == LADDER
    changes = [change for rung in LADDER for change in (rung, *rung.fallbacks.values())]
    assert [field for change in changes for field in change.fields if not find(Run, field)] == []


def test_the_first_rung_sets_what_later_ones_change() -> None:
    first, *others = LADDER
    changes = [change for rung in others for change in (rung, *rung.fallbacks.values())]
    assert {field for change in changes for field in change.fields} <= set(first.fields)


def test_a_file_holds_a_ladder(tmp_path: Path) -> None:
    text = '[[rung]]\nname = "a"\nchange = ["seed=1"]\n\n[[rung]]\nname = "b"\nmicro_batch_times = 2\nneeds = ["gpu"]\n'
    plain, larger = load_rungs(write(tmp_path, text))
    assert plain == LadderStep(name="a", change=("seed=1",))
    assert (larger.is_size, larger.needs) == (True, ("gpu",))


def test_a_rung_in_a_file_has_its_fallbacks_in_their_order(tmp_path: Path) -> None:
    text = """
        [[rung]]
        name = "larger"
        micro_batch_times = 2
        [rung.fallbacks.second-best]
        change = ["dispatch.sync_free=2"]
        needs = ["experts"]
        [rung.fallbacks.eager]
        change = ["graphs.capture=none"]
    """
    (rung,) = load_rungs(write(tmp_path, text))
    assert list(rung.fallbacks.items()) == [
        ("second-best", Change(change=("dispatch.sync_free=2",), needs=("experts",))),
        ("eager", Change(change=("graphs.capture=none",))),
    ]
    assert [rung.trial_name(name) for name in ("", *rung.fallbacks)] == ["larger", "larger-second-best", "larger-eager"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no ladder"),
        ("rung = 3", "is no ladder"),
        ("[[rung]", "is not TOML"),
        ('[other]\nx = 1\n[[rung]]\nname = "a"', "got other"),
        ("rung = []", "has no rung"),
        ('[[rung]]\nname = "a"\nchnge = ["seed=1"]', "rung 1: chnge is an unknown key; fix: did you mean change?"),
        ('[[rung]]\nchange = ["seed=1"]', "rung 1: name is missing"),
        ('[[rung]]\nname = "a/b"', "letters, digits"),
        ('[[rung]]\nname = "a"\n[[rung]]\nname = "a"', "two rungs are called a"),
        ('[[rung]]\nname = "a"\nneeds = ["luck"]', "got luck; allowed: experts"),
        ('[[rung]]\nname = "a"\n[[rung]]\nname = "b"\nchange = ["seed=1"]\nmicro_batch_times = 2', "two causes"),
        ('[[rung]]\nname = "a"\n[rung.fallbacks.b]\nchnge = ["seed=1"]', "rung 1: fallbacks.b.chnge is an unknown key"),
        ('[[rung]]\nname = "a"\n[rung.fallbacks.b]\nneeds = ["luck"]', "rung a-b needs what nobody knows; got luck"),
        ('[[rung]]\nname = "a"\n[rung.fallbacks.b]\n[[rung]]\nname = "a-b"', "two rungs are called a-b"),
        ('[[rung]]\nname = "a"\n[rung.fallbacks."b/c"]', "letters, digits"),
        ('[[rung]]\nname = "a"\n[rung.fallbacks.b]\nchange = ["training.micro_batch=1"]', "make a rung of it"),
        ('[[rung]]\nname = "a"\n[[rung]]\nname = "b"\nchange = ["training.micro_batch=2", "seed=1"]', "two causes"),
    ],
)
def test_what_is_no_ladder_is_refused_with_a_reason(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(PenstockError) as raised:
        load_rungs(write(tmp_path, text))
    assert told in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="cannot read"):
        load_rungs(tmp_path / "gone.toml")


RUNGS = (
    LadderStep(name="ground"),
    LadderStep(name="faster", change=("seed=1",)),
    LadderStep(name="larger", micro_batch_times=2),
    LadderStep(name="top", change=("seed=2",)),
)


def test_all_rungs_are_wanted_if_none_is_named() -> None:
    assert chosen(RUNGS, ()) == {"ground", "faster", "larger", "top"}


@pytest.mark.parametrize("names", [("ground", "faster"), ("larger",), ("faster", "larger", "top"), ("top",)])
def test_some_rungs_may_be_named(names: tuple[str, ...]) -> None:
    assert chosen(RUNGS, names) == set(names)


@pytest.mark.parametrize(("names", "missing"), [(("ground", "larger"), "faster"), (("faster", "top"), "larger")])
def test_a_rung_must_not_hide_in_the_gain_of_another_kind(names: tuple[str, ...], missing: str) -> None:
    with pytest.raises(PenstockError, match=f"name {missing} as well"):
        chosen(RUNGS, names)


def test_a_name_that_no_rung_has_is_refused() -> None:
    with pytest.raises(PenstockError, match="got fastest; allowed: ground, faster"):
        chosen(RUNGS, ("fastest",))


@pytest.mark.parametrize(
    ("rung", "overrides", "has_gpu", "reason"),
    [
        (LadderStep(name="a", change=("oven.heat=3",)), [], True, "this version has no oven.heat"),
        (LadderStep(name="a", needs=("experts",)), DENSE, True, "the model has no experts"),
        (
            LadderStep(name="a", needs=("shared-expert",)),
            ["model.moe.shared_expert_intermediate_size=0"],
            True,
            "no shared expert",
        ),
        (LadderStep(name="a", needs=("sharing",)), [], True, "each rank holds all experts"),
        (LadderStep(name="a", needs=("gpu",)), [], False, "there is no GPU"),
        (LadderStep(name="a", needs=("static-rows",)), ["dispatch.sync_free=1"], True, "no buffer has room"),
        (LadderStep(name="a", needs=("static-rows",)), [*DENSE, "dispatch.sync_free=3"], True, "no buffer has room"),
        (LadderStep(name="a", needs=("counted-rows",)), ["dispatch.sync_free=2"], True, "buffers have room"),
        (LadderStep(name="a", needs=("experts", "shared-expert", "sharing", "gpu")), ["parallel.expert=2"], True, ""),
    ],
)
def test_a_rung_without_meaning_is_left_out(rung: LadderStep, overrides: list[str], has_gpu: bool, reason: str) -> None:
    told = why_skipped(rung, load_run("debug", overrides), has_gpu)
    assert reason in told
    assert bool(reason) == bool(told)
