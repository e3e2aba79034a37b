"""Runs and numbers of ranks that fit each other, and those that do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.fit import context_method, grid_of, micro_batches, shard, smallest_world, stage_count
from penstock.config.presets.registry import PRESETS
from penstock.layout.grid import Grid
from tests.config.small import unchecked_run

FOLDED = ("parallel.tensor=2", "parallel.expert=4", "training.global_batch=64")
GROUPED = ("model.attention.kind=gqa", "model.attention.heads=8", "model.attention.head_dim=32")
DUALPIPE = (
    "training.micro_batch=8",
    "parallel.pipeline=4",
    "pipeline.stages_per_rank=2",
    "pipeline.schedule=dualpipe-v",
)

REFUSED = {
    ("alone", 1, ("parallel.pipeline=2", "parallel.expert=2")): (  # the expert view is larger: 2 x 2 ranks
        "parallel needs more ranks: the larger of pipeline 2 x tensor 1 x context 1 = 2 and "
        "pipeline 2 x expert 2 x expert_tensor 1 = 4; got 1 rank; allowed: a multiple of 4; "
        "fix: start 4 processes: --processes 4; --fake-world 4 shows one of them and starts none"
    ),
    ("too few for both views", 5, ("parallel.tensor=2", "parallel.expert=3")): (  # lcm(2, 3) = 6
        "parallel needs more ranks: the least common multiple of pipeline 1 x tensor 2 x context 1 = 2 and "
        "pipeline 1 x expert 3 x expert_tensor 1 = 3; got 5 ranks; allowed: a multiple of 6; "
        "fix: start 6 processes: --processes 6; --fake-world 6 shows one of them and starts none"
    ),
    ("dense view", 8, ("parallel.tensor=3", "parallel.context=2")): (
        "parallel does not divide the ranks: pipeline 1 x tensor 3 x context 2 = 6; got 8 ranks; "
        "allowed: a multiple of 6; fix: run on 6 or 12 ranks, or change these sizes"
    ),
    ("expert view", 6, ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2")): (
        "parallel does not divide the ranks: pipeline 1 x expert 2 x expert_tensor 2 = 4; got 6 ranks; "
        "allowed: a multiple of 4; fix: run on 4 or 8 ranks, or change these sizes"
    ),
    ("recording", 4, ("profile.start=3", "profile.ranks=[4, 7]")): (
        "profile.ranks names no rank of this run; got 4, 7; allowed: 0 to 3"
    ),
    ("batch", 4, ("training.global_batch=24",)): (  # 24 rows are no multiple of 4 x 4
        "training.global_batch must be a multiple of training.micro_batch x data-parallel ranks (4 x 4); "
        "got 24 on 4 ranks; fix: set training.global_batch to 16 or 32, or training.micro_batch to 2"
    ),
    ("small batch", 4, ()): (  # 8 rows: no multiple below them
        "training.global_batch must be a multiple of training.micro_batch x data-parallel ranks (4 x 4); "
        "got 8 on 4 ranks; fix: set training.global_batch to 16, or training.micro_batch to 2"
    ),
    ("micro-batches", 8, (*DUALPIPE, "training.global_batch=112")): (  # 112 / (8 x 2) = 7, and 4 ranks need 2 each
        "pipeline.schedule dualpipe-v on 4 pipeline ranks has too few micro-batches; got 7; allowed: 8 or more; "
        "fix: set training.global_batch=128, or pipeline.schedule=zb-v"
    ),
    ("shards of dense matrices", 8, ("training.global_batch=32", "parallel.shard_size=3")): (
        "parallel.shard_size must divide the ranks that hold the same dense matrices (8); got 3 on 8 ranks; "
        "allowed: 1, 2, 4, 8, or 0 for all"
    ),
    # 12 / 2 hold an expert.
    ("shards of experts", 12, ("training.global_batch=48", "parallel.expert=2", "parallel.shard_size=4")): (
        "parallel.shard_size must divide the ranks that hold the same experts (6); got 4 on 12 ranks; "
        "allowed: 1, 2, 3, 6, or 0 for all"
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_ranks_that_do_not_fit_are_refused(case: tuple[str, int, tuple[str, ...]]) -> None:
    _, world, overrides = case
    with pytest.raises(ConfigError) as raised:
        grid_of(unchecked_run(overrides), world)
    assert str(raised.value) == REFUSED[case]


def test_every_preset_fits_one_rank() -> None:
    assert [name for name, make in PRESETS.items() if grid_of(make(), 1) != Grid()] == []


def test_a_grid_has_the_sizes_of_the_run() -> None:
    overrides = ("parallel.pipeline=2", "parallel.context=2", "parallel.expert_tensor=2", "parallel.expert=2")
    grid = grid_of(unchecked_run((*overrides, "training.global_batch=16")), 16)
    assert grid == Grid(world=16, pipeline=2, context=2, expert=2, expert_tensor=2)
    assert (grid.data, grid.expert_data) == (4, 2)  # 16 / (2 x 2), 16 / (2 x 2 x 2)


def test_micro_batches_are_those_of_one_rank() -> None:
    run = unchecked_run(FOLDED)
    assert micro_batches(run, grid_of(run, 8)) == 4  # 64 rows / (4 x 4 data-parallel ranks)
    assert micro_batches(run, grid_of(run, 32)) == 1  # 64 / (4 x 16)
    assert micro_batches(unchecked_run(()), Grid()) == 2


@pytest.mark.parametrize("size", [0, 2, 4, 8, 100])  # 0 and 100 mean all ranks
def test_shards_divide_or_are_more_than_there_are(size: int) -> None:
    run = unchecked_run(("training.global_batch=32", "parallel.expert=2", f"parallel.shard_size={size}"))
    assert grid_of(run, 8).expert_data == 4


@given(
    tensor=st.integers(1, 4),
    context=st.integers(1, 4),
    pipeline=st.integers(1, 4),
    expert=st.integers(1, 4),
    expert_tensor=st.integers(1, 4),
)
def test_the_smallest_world_is_the_smallest_that_fits(
    tensor: int, context: int, pipeline: int, expert: int, expert_tensor: int
) -> None:
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}
    overrides = [f"parallel.{name}={size}" for name, size in (sizes | {"expert_tensor": expert_tensor}).items()]
    run = unchecked_run((*overrides, "training.micro_batch=1", "training.global_batch=144"))
    least = smallest_world(run)
    assert least >= pipeline * max(tensor * context, expert * expert_tensor)
    assert grid_of(run, least).world == least
    for world in range(1, least):
        with pytest.raises(ConfigError, match="parallel needs more ranks"):
            grid_of(run, world)


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        (("parallel.context=4",), "ulysses"),  # 4 heads
        (("parallel.context=8",), "all-gather"),  # 4 heads cannot be shared by 8
        (("parallel.context=2", "parallel.tensor=4"), "all-gather"),
        (("parallel.context=2", "parallel.context_method=all-gather"), "all-gather"),
        ((*GROUPED, "model.attention.kv_heads=4", "parallel.context=4"), "ulysses"),
        ((*GROUPED, "model.attention.kv_heads=2", "parallel.context=4"), "all-gather"),
    ],
)
def test_ranks_exchange_heads_where_all_heads_divide(overrides: tuple[str, ...], method: str) -> None:
    assert context_method(unchecked_run(overrides)) == method


def test_settled_values_of_a_run() -> None:
    # Without a pipeline the stages are not read.
    assert stage_count(unchecked_run(("pipeline.stages_per_rank=2",))) == 1
    assert stage_count(unchecked_run(("pipeline.stages_per_rank=2", "parallel.pipeline=4"))) == 8
    run = unchecked_run((*DUALPIPE, "training.global_batch=128"))
    assert micro_batches(run, grid_of(run, 8)) == 8, "a schedule may have just enough micro-batches"
    assert shard(unchecked_run(())) == "optimizer"
    assert shard(unchecked_run(("parallel.shard=full",))) == "full"
