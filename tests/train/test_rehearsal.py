"""One rank of a large world, built without memory by the code of a real run."""

import pytest

from penstock.base.errors import ConfigError
from penstock.config.load import load_run
from penstock.train.rehearsal import Rehearsal, rehearse

V3 = ("parallel.pipeline=16", "parallel.tensor=2", "parallel.expert=32")


def of(*overrides: str, world: int, rank: int = 0, preset: str = "deepseek-v2-lite") -> Rehearsal:
    return rehearse(load_run(preset, overrides), world=world, rank=rank)


def test_a_rank_of_a_thousand_knows_its_groups_and_its_stage() -> None:
    rehearsal = of(*V3, world=1024, rank=517, preset="deepseek-v3")
    axes = rehearsal.model.axes
    assert axes.tensor.ranks == (516, 517) and axes.tensor.rank == 1
    assert axes.expert.ranks == tuple(range(512, 544))
    assert list(rehearsal.stages) == [8]
    assert rehearsal.model.pipeline is not None and rehearsal.model.pipeline.schedule.ranks == 16
    assert all(parameter.is_meta for _, parameter in rehearsal.model.named_parameters())


def test_the_stages_of_all_ranks_together_are_the_model() -> None:
    whole = of(world=1)
    parts = [of("parallel.pipeline=4", world=4, rank=rank) for rank in range(4)]
    assert sum(part.dense for part in parts) == whole.dense
    assert sum(part.expert for part in parts) == whole.expert


def test_experts_are_divided_and_the_optimizer_of_dense_matrices_too() -> None:
    alone, shared = of(world=1), of("parallel.expert=4", world=4)
    assert shared.expert == alone.expert // 4 and shared.dense == alone.dense
    # Master and two moments of 4 bytes, for the experts that are here and a quarter of everything else.
    assert shared.optimizer_bytes == pytest.approx(12 * (shared.expert + shared.dense / 4), rel=1e-3)
    assert shared.gradient_bytes == 4 * (shared.expert + shared.dense)


@pytest.mark.parametrize("rank", [0, 3])
def test_fsdp_divides_weights_and_gradients_among_the_ranks(rank: int) -> None:
    alone, sharded = of(world=1), of("parallel.shard=full", world=8, rank=rank)
    assert sharded.weight_bytes == pytest.approx(4 * (alone.dense + alone.expert) / 8, rel=0.01)
    assert sharded.gradient_bytes == pytest.approx(sharded.weight_bytes, rel=0.01)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel"):
        of("parallel.pipeline=3", world=4)


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rank is not a rank of --fake-world; got 4; allowed: 0 to 3"):
        of(world=4, rank=4)
