"""Parts are replayed between transfers whose sizes the host reads: ranks that share experts train as eager ones do."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from penstock.train.capture import CapturedParts
from tests.distributed.one_loss import Saved, StepFigures, follow, put_together, saved_by, start_session
from tests.distributed.pool import Pool
from tests.parallel.recorded_graph import Graphs, SameAddresses

SHARED = ("parallel.expert=2", "dispatch.method=all-to-all", "dispatch.sync_free=0")
OVERLAPPED = (*SHARED, "dispatch.overlap=shared")
BALANCED = (*SHARED, "dispatch.balance=exact")
IN_PARTS = ("parallel.expert_tensor=2", "dispatch.method=all-to-all", "parallel.expert=1")
Seen = tuple[StepFigures, Saved, tuple[str, ...], int]


def play(overrides: tuple[str, ...], replays: bool, fails_on: int = -1, layers: int = 3) -> Seen:
    """Train on this rank, with parts or eager; what it saw, would save and would tell the user, and captures.

    The rank `fails_on` finds no memory for its fourth graph. `layers` include the one that predicts further.
    """
    session = start_session((*overrides, f"model.layers={layers - 1}"))
    graphs = Graphs(layers) if fails_on == -1 else SameAddresses(fails_at=3 if dist.get_rank() == fails_on else None)
    parts = CapturedParts(is_asked_for=False, begin_pool=graphs.begin)
    if replays:
        session = replace(session, rule=replace(session.rule, passes=parts))
    seen = follow(session)
    session.state.batches.close()
    return seen, saved_by(session), parts.take_notices(), graphs.captures


def whole(results: list[Seen]) -> StepFigures:
    return put_together([one[:2] for one in results])


@pytest.mark.parametrize(
    "overrides",
    [
        *(SHARED, BALANCED),
        *(pytest.param(OVERLAPPED, marks=pytest.mark.slow), pytest.param(IN_PARTS, marks=pytest.mark.slow)),
    ],
    ids=["rows", "replicas", "beside the shared expert", "ETP"],
)
def test_parts_give_the_bits_of_eager_layers_where_the_host_reads_row_counts(
    overrides: tuple[str, ...], ranks: Pool
) -> None:
    expected, results = whole(ranks.run(2, play, overrides, False)), ranks.run(2, play, overrides, True)
    found = whole(results)
    assert (found.losses, found.norms, found.held_out) == (expected.losses, expected.norms, expected.held_out)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert [captures for _, _, _, captures in results] == [2 * 3] * 2  # forward and backward of each layer
    biases = [tensor for name, tensor in found.tensors.items() if name.endswith("expert_bias_E")]
    assert biases and all(bias.any() for bias in biases), "the expert bias moves behind captured routers"


def test_a_rank_without_memory_lets_all_ranks_stay_eager_and_none_waits(ranks: Pool) -> None:
    expected, results = whole(ranks.run(2, play, SHARED, False, -1, 5)), ranks.run(2, play, SHARED, True, 1, 5)
    assert whole(results).losses == expected.losses
    told = "graphs: layers stay eager, there is no memory for a part (tried to allocate 2 GiB)"
    assert [notices for _, _, notices, _ in results] == [(told,)] * 2
    assert [captures for _, _, _, captures in results] == [2 * 5, 4 + 3]
