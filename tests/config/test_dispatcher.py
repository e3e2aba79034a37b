"""The dispatcher that a run gets, as a table of facts."""

from typing import Any

import pytest

from penstock.config.dispatcher import (
    MOST_PEERS,
    PEER_ROW_MULTIPLE,
    DispatcherChoice,
    DispatchFacts,
    choose_dispatcher,
    ranks_on_a_node,
)
from penstock.kernels.symmetric import MOST_RANKS, ROW_MULTIPLE

SEVERAL_NODES: dict[str, Any] = {"ranks": 8, "node_ranks": 4}
ONE_NODE: dict[str, Any] = {"ranks": 8, "node_ranks": 8}
NO_PEERS: dict[str, Any] = {"obstacle": "no Triton"}


def _choice(method: str, stage: int, **facts: Any) -> DispatcherChoice:
    return choose_dispatcher(DispatchFacts(method=method, sync_free=stage, **facts))


@pytest.mark.parametrize(
    ("method", "stage", "facts", "name", "inner"),
    [
        ("auto", 0, {"ranks": 1, "node_ranks": 1}, "local", None),  # one rank holds all experts
        ("symmetric", 0, {"ranks": 1, "node_ranks": 1}, "local", None),
        ("auto", 3, {**ONE_NODE, "pads": True}, "padded", None),  # padding comes before all else
        ("all-to-all", 2, {"ranks": 1, "node_ranks": 1, "pads": True}, "padded", None),
        ("auto", 0, ONE_NODE, "symmetric", None),
        ("hierarchical", 0, ONE_NODE, "symmetric", None),  # one node has no nodes to cross
        ("symmetric", 2, ONE_NODE, "symmetric", None),
        ("all-to-all", 0, ONE_NODE, "all-to-all", None),
        ("all-gather", 0, ONE_NODE, "all-gather", None),
        ("auto", 1, {**ONE_NODE, **NO_PEERS}, "all-to-all", None),
        ("auto", 2, {**ONE_NODE, **NO_PEERS}, "all-gather", None),
        ("hierarchical", 3, {**ONE_NODE, **NO_PEERS}, "all-gather", None),
        ("auto", 0, {**ONE_NODE, "row_bytes": 4104}, "all-to-all", None),  # no multiple of 16 bytes
        ("auto", 0, {"ranks": 32, "node_ranks": 32}, "all-to-all", None),  # more than 31 peers
        ("auto", 0, SEVERAL_NODES, "hierarchical", "symmetric"),
        ("hierarchical", 0, SEVERAL_NODES, "hierarchical", "symmetric"),
        ("auto", 1, {**SEVERAL_NODES, **NO_PEERS}, "hierarchical", "all-to-all"),
        ("auto", 2, {**SEVERAL_NODES, **NO_PEERS}, "hierarchical", "all-gather"),
        ("all-to-all", 0, SEVERAL_NODES, "all-to-all", None),
        ("all-gather", 2, SEVERAL_NODES, "all-gather", None),
        ("auto", 0, {"ranks": 8, "node_ranks": 1}, "all-to-all", None),  # every rank on a node of its own
        ("auto", 2, {"ranks": 8, "node_ranks": 1}, "all-gather", None),
        ("hierarchical", 0, {"ranks": 8, "node_ranks": 1}, "hierarchical", "all-to-all"),
        # A node would hold parts of experts.
        ("auto", 0, {"ranks": 12, "node_ranks": 4, "expert_tensor": 3}, "all-to-all", None),
        # Halves of the same experts.
        ("auto", 0, {"ranks": 16, "node_ranks": 4, "expert_tensor": 8}, "hierarchical", "symmetric"),
    ],
)
def test_every_combination_of_facts_has_one_dispatcher(
    method: str, stage: int, facts: dict[str, Any], name: str, inner: str | None
) -> None:
    choice = _choice(method, stage, **facts)
    assert (choice.name, choice.inner, choice.refusal) == (name, inner, None)
    assert choice.writes_to_peers == ("symmetric" in (name, inner))


@pytest.mark.parametrize(
    ("method", "facts", "reason"),
    [
        ("symmetric", {**ONE_NODE, **NO_PEERS}, "no Triton"),
        ("symmetric", {"ranks": 8, "node_ranks": 1}, "one rank on each node"),
        ("symmetric", SEVERAL_NODES, "8 ranks on several nodes, 4 on each"),
        ("symmetric", {"ranks": 32, "node_ranks": 32}, "32 ranks on a node, and 31 are the most"),
        ("symmetric", {**ONE_NODE, "row_bytes": 4104}, "rows of 4104 bytes, no multiple of 16 (model.hidden_size)"),
        (
            "hierarchical",
            {"ranks": 12, "node_ranks": 4, "expert_tensor": 3},
            "4 ranks on a node and parallel.expert_tensor 3",
        ),
    ],
)
def test_a_method_that_cannot_be_had_is_refused_only_where_it_was_asked_for(
    method: str, facts: dict[str, Any], reason: str
) -> None:
    refusal = _choice(method, 0, **facts).refusal
    assert refusal is not None and refusal.got == reason
    assert refusal.field == f"dispatch.method={method}" and "dispatch.method=auto" in str(refusal.fix)
    automatic = _choice("auto", 0, **facts)
    assert automatic.refusal is None
    if method == "symmetric" and automatic.name != "hierarchical":  # which has peers inside each node
        assert automatic.obstacle == reason


@pytest.mark.parametrize(
    ("ranks", "node", "together"), [(4, 8, 4), (8, 8, 8), (16, 8, 8), (12, 8, 1), (6, 8, 1), (2, 1, 1)]
)
def test_a_group_counts_as_one_rank_a_node_where_nodes_hold_unequal_parts(ranks: int, node: int, together: int) -> None:
    assert ranks_on_a_node(ranks, node) == together


def test_limits_are_those_of_the_kernels() -> None:
    assert (MOST_PEERS, PEER_ROW_MULTIPLE) == (MOST_RANKS, ROW_MULTIPLE)
