"""Layouts of a run on fewer ranks: the experts' ranks and data parallelism shrink, nothing else."""

import pytest

from penstock.config.fit import grid_of, micro_batches
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.parallel.launch.local import on_ranks, possible_ranks


def run(*overrides: str) -> Run:
    return load_run("debug", ["training.micro_batch=1", "training.global_batch=8", *overrides])


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        (("elastic.min=1", "parallel.expert=4"), {8: 4, 4: 4, 2: 2, 1: 1}),
        (("elastic.min=2", "parallel.expert=4"), {8: 4, 4: 4, 2: 2}),
        (("elastic.min=2", "parallel.expert=2"), {8: 2, 4: 2, 2: 2}),
        (("elastic.min=2", "parallel.expert=4", "parallel.context=2"), {8: 4, 4: 4, 2: 2}),
        (("elastic.min=2", "parallel.expert=4", "parallel.shard_size=4"), {8: 4, 4: 4, 2: 2}),
        (("elastic.min=4", "parallel.pipeline=2", "parallel.context=2"), {8: 1, 4: 1}),
    ],
)
def test_experts_are_divided_over_as_many_ranks_as_the_run_wants_or_there_are(
    overrides: tuple[str, ...], layouts: dict[int, int]
) -> None:
    wanted = run(*overrides)
    assert {ranks: on_ranks(wanted, ranks).parallel.expert for ranks in possible_ranks(wanted, 8)} == layouts
    for ranks in layouts:
        fitted = on_ranks(wanted, ranks)
        expert = fitted.parallel.expert
        assert fitted.model_copy(update={"parallel": wanted.parallel}) == wanted
        assert fitted.parallel == wanted.parallel.model_copy(update={"expert": expert})
        grid = grid_of(fitted, ranks)
        assert micro_batches(fitted, grid) * grid.data * wanted.training.micro_batch == wanted.training.global_batch


def test_a_run_that_is_not_elastic_keeps_its_layout() -> None:
    rigid = run("parallel.expert=4")
    assert possible_ranks(rigid, 8) == (8, 4)
    assert on_ranks(rigid, 2) is rigid
