"""A layout in words, laid over a run."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.plan.asked_layout import parse_layout, rows_to_share, with_layout, with_overrides
from penstock.plan.projection import layout_of

V3 = load_run("deepseek-v3")


def test_every_choice_comes_out_as_it_went_in() -> None:
    sizes = "pp=4,vpp=2,ep=8,etp=1,cp=2,tp=2,dp=4,edp=2,micro_batch=2"
    choices = "schedule=zb-v,recompute=norm+moe,sync_free_stage=1,dispatcher=hierarchical,shard=full"
    asked = parse_layout(f"{sizes},{choices}")
    run = with_layout(V3, asked, 64)
    found = asdict(layout_of(run, grid_of(run, 64), run.dispatch.method, run.parallel.shard))
    assert {name: f"{value}" for name, value in found.items()} == asked


def test_parts_without_a_name_stay() -> None:
    run = with_layout(V3, parse_layout("ep=8"), 64)
    assert run == V3.model_copy(update={"parallel": V3.parallel.model_copy(update={"expert": 8})})
    assert with_layout(V3, {"dispatcher": "local"}, 1).dispatch.method == "auto"


@pytest.mark.parametrize(
    ("words", "schedule", "stages"),
    [
        ("pp=4,vpp=4", "interleaved", 4),
        ("pp=4", "1f1b", 1),
        ("pp=4,schedule=zb-v", "zb-v", 2),
        ("pp=4,schedule=interleaved", "interleaved", 2),
        ("pp=4,schedule=gpipe,vpp=3", "gpipe", 3),
        ("pp=4,schedule=1f1b,vpp=3", "1f1b", 3),  # Both are named; a rule refuses them.
    ],
)
def test_schedule_and_stages_that_are_not_both_said_are_made_to_fit(words: str, schedule: str, stages: int) -> None:
    pipeline = with_layout(V3, parse_layout(words), 64).pipeline
    assert (pipeline.schedule, pipeline.stages_per_rank) == (schedule, stages)


def test_stages_of_another_pipeline_lose_their_division() -> None:
    divided = with_overrides(V3, ["parallel.pipeline=2", "pipeline.layout=Et*31|t*30,mL"], 2)
    assert with_layout(divided, {"ep": "2"}, 2).pipeline.layout == "Et*31|t*30,mL"
    assert with_layout(divided, {"pp": "4"}, 4).pipeline.layout == ""


def test_another_recomputation_begins_with_all_layers() -> None:
    some = with_overrides(V3, ["recompute.modules=moe", "recompute.layers=3"], 1)
    assert with_layout(some, {"recompute": "none"}, 1).recompute == V3.recompute
    assert with_layout(some, {"recompute": "norm"}, 1).recompute.layers == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("pp", "got 'pp'"),
        ("pp=", "got 'pp='"),
        ("", "got ''"),
        ("eq=8", "a layout has no such part; got eq"),
        ("micro_bath=8", "did you mean micro_batch"),
        ("ep=x", "parallel.expert has the wrong type"),
        ("ep=0", "parallel.expert is out of range"),
        ("schedule=fast", "pipeline.schedule has an unknown value"),
        ("pp=4,dp=7", "dp follows from the other sizes; got 7; allowed: 16"),
    ],
)
def test_a_wrong_word_is_told(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_layout(V3, parse_layout(words), 64)
    assert told in str(error.value)


@given(
    data=st.integers(1, 64),
    micro_batch=st.integers(1, 8),
    tokens=st.integers(1, 10**9),
    length=st.sampled_from([512, 4096, 131072]),
)
def test_a_batch_of_about_so_many_tokens_is_one_that_ranks_can_share(
    data: int, micro_batch: int, tokens: int, length: int
) -> None:
    sizes = [f"training.micro_batch={micro_batch}", f"training.sequence_length={length}", "parallel.pipeline=2"]
    batch = with_overrides(V3, sizes, 2 * data, tokens).training.global_batch
    unit = data * micro_batch
    assert batch % unit == 0
    assert abs(batch * length - tokens) <= unit * length / 2 or batch == unit


@pytest.mark.parametrize(
    ("rows", "world", "shared"), [(15000, 512, 14848), (1000, 768, 768), (100, 512, 128), (0.3, 512, 1), (5, 1, 5)]
)
def test_a_batch_that_is_sought_for_suits_many_numbers_of_ranks(rows: float, world: int, shared: int) -> None:
    assert rows_to_share(rows, world) == shared
