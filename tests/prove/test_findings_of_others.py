"""Errors that users of other trainers found when options met, each a test by name.

The tenth, expert biases behind captured routers, is in tests/distributed/test_captured_parts.py and, on a GPU, in
tests/train/test_capture.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.prove.choices import first_flip
from penstock.prove.composition import composition_of
from penstock.prove.play import BOUNDS, put_together
from penstock.prove.proof import Prover
from penstock.prove.ranks import Played
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.prove.pool_ranks import PoolRanks

SMALL = ("model.layers=2", "training.global_batch=4")
Equals = Callable[..., None]


@pytest.fixture
def play(ranks: Pool, tmp_path: Path) -> Callable[..., list[Played]]:
    """What the ranks of a composition gave."""
    pool, prover = PoolRanks(ranks), Prover(PoolRanks(ranks), tmp_path)
    return lambda count, *words: pool.play(count, prover.part(composition_of(count, SMALL + words)))


@pytest.fixture
def equals(ranks: Pool, tmp_path: Path) -> Equals:
    """Check that a composition equals one process, and that the option of the finding changes its figures."""
    prover = Prover(PoolRanks(ranks), tmp_path)

    def check(count: int, option: str, *words: str) -> None:
        verdict = prover.judge(composition_of(count, (*SMALL, *words, option)))
        assert verdict.kind == "equal", f"{verdict.text}\n{verdict.composition.command}"
        with_it, without = (
            PoolRanks(ranks).play(1, prover.part(composition_of(1, (*SMALL, *alone)))) for alone in ([option], [])
        )
        one, other = (put_together([(played[0].trace, played[0].end)]) for played in (with_it, without))
        assert abs(one.norms[0] - other.norms[0]) > 10 * BOUNDS["gradient norm"] * other.norms[0], "the option is idle"

    return check


def test_gradients_of_experts_are_scaled_once_under_expert_and_expert_tensor_parallelism(equals: Equals) -> None:
    layout = ("parallel.expert=2", "parallel.expert_tensor=2", "parallel.shard=full")
    equals(4, "model.moe.router.routed_scaling_factor=4.0", *layout)


def test_multi_token_prediction_shifts_across_context_parallel_chunks(equals: Equals) -> None:
    equals(2, "model.mtp_layers=2", "parallel.context=2", "parallel.context_method=all-gather")


def test_the_z_losses_are_those_of_the_whole_vocabulary_and_all_tokens_over_tensor_ranks(equals: Equals) -> None:
    equals(2, "training.z_loss_coef=0.1", "parallel.tensor=2", "model.moe.balance.z_loss_coef=0.1")


def test_a_shared_expert_and_its_gate_get_gradients_of_all_positions_of_sequence_parallel_ranks(equals: Equals) -> None:
    equals(2, "model.moe.shared_expert_gate=true", "parallel.tensor=2", "parallel.expert=2")


def test_global_batch_balance_counts_all_tokens_of_context_ranks_once(equals: Equals) -> None:
    coefficient = "model.moe.balance.aux_loss_coef=1.0"
    equals(2, coefficient, "model.moe.balance.aux_loss=global-batch", "parallel.context=2", "parallel.expert=2")


def test_tied_embeddings_sum_the_gradients_of_both_ends_of_a_pipeline(equals: Equals) -> None:
    equals(2, "model.tie_word_embeddings=true", "parallel.pipeline=2", "pipeline.schedule=zb-1f1b")


def test_the_auxiliary_loss_is_counted_once_when_its_layer_is_recomputed(equals: Equals) -> None:
    equals(2, "model.moe.balance.aux_loss_coef=1.0", "recompute.modules=layer", "parallel.expert=2")


def test_padding_rows_are_in_no_count_of_loads(play: Callable[..., list[Played]]) -> None:
    capacity = ("model.moe.balance.capacity_factor=1.0", "model.moe.balance.aux_loss_coef=1.0")
    (alone,) = play(1, *capacity)
    padded = play(2, *capacity, "model.moe.balance.pad_to_capacity=true", "parallel.expert=2")
    assert alone.trace.balance[1] > 0, "slots are dropped, and padding takes the places of others"
    for one in padded:
        for figure in ("losses", "balance", "norms"):
            found, wanted = (torch.tensor(vars(part.trace)[figure]) for part in (one, alone))
            assert_close(found, wanted, tolerance=2e-5, what=figure)


def test_ties_of_the_top_k_go_to_the_same_experts_on_every_layout(play: Callable[..., list[Played]]) -> None:
    nothing = "model.initializer_range=0"  # all scores are equal, for every token
    (alone,) = play(1, nothing)
    assert all(float(one.margins_T.max()) == 0 for (step, _), one in alone.choices.items() if step == 0)
    for layout in (("parallel.tensor=2", "parallel.expert=2"), ("parallel.context=2",), ("parallel.shard=full",)):
        assert first_flip([one.choices for one in play(2, nothing, *layout)], alone.choices) is None
