"""Models in 8 bits on several ranks see the losses of one."""

from functools import cache

import pytest

from tests.closeness import assert_close
from tests.distributed.case import GQA, layout, pipeline
from tests.distributed.one_loss import Trace, trace
from tests.distributed.pool import Pool

SMALL = ("model.layers=2", "training.micro_batch=4", "evaluation.rows=4", "float8.dense=blockwise")

CASES = {
    "EP 2": layout("expert=2"),
    "FSDP": layout("shard=full"),
    "FSDP, weights gathered in 8 bits": layout("shard=full", "float8.gather=true"),
    "TP 2": layout("tensor=2"),
    "TP 2, grouped queries": layout("tensor=2"),
    "FSDP, squares of grouped queries": layout("shard=full", "float8.gather=true"),
    "PP 2, weight gradients put off": (*pipeline("zb-1f1b", 2), "training.micro_batch=2"),
}


@cache
def alone(ranks: Pool, model: tuple[str, ...]) -> Trace:
    return trace(ranks, 1, model, 2)


@pytest.mark.often("TP 2", "FSDP, weights gathered in 8 bits", "PP 2, weight gradients put off")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_see_the_losses_of_one(case: str, ranks: Pool) -> None:
    model = (*SMALL, *((*GQA, "float8.dense=blockwise-square") if "grouped" in case else ()))
    expected, found = alone(ranks, model), trace(ranks, 2, (*model, *CASES[case]), 2)
    # A number next to a tie may go to its other side.
    assert_close(found.losses, expected.losses, what="losses")
    assert_close(found.norms, expected.norms, tolerance=1e-4, what="norms")
