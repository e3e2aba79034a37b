"""The dispatcher that a run gets, from plain facts. Runs, plans and rules all decide by `choose_dispatcher`.

padded          every expert is given its capacity
local           one rank holds all experts
hierarchical    asked for, or with auto where several ranks of each of several nodes share the experts;
one of the following then spreads tokens inside the node
symmetric       asked for or allowed by the method, and the GPUs of the node can write to each other's memory
all-gather      asked for, or the host must not read row counts
all-to-all      otherwise
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.parallel import NamedDispatcher
from penstock.config.problem import Problem
from penstock.config.run import Run
from penstock.layout.grid import divides_into

DispatcherName = Literal["local", "padded", NamedDispatcher]

# Both are also in penstock/kernels/symmetric.py, whose import needs Triton.
MOST_PEERS = 31  # ranks that can write to each other's memory
PEER_ROW_MULTIPLE = 16  # bytes that a row written to another GPU must be a multiple of


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchFacts:
    """All that the choice depends on."""

    method: str
    sync_free: int = 0
    pads: bool = False
    ranks: int  # that share the experts of a layer, EP x ETP
    node_ranks: int  # those of them on one node; 1 where nodes hold unequal parts (`ranks_on_a_node`)
    expert_tensor: int = 1  # ranks that share each expert
    row_bytes: int = 0  # of a token in the compute dtype; 0 where the caller has checked it
    obstacle: str = ""  # reason why this machine's GPUs cannot write to each other's memory; empty if they can


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherChoice:
    """The dispatcher of a run, and why it is not another."""

    name: DispatcherName
    inner: DispatcherName | None = None  # the one inside each node, with hierarchical
    obstacle: str = ""  # reason why tokens are not written to other GPUs' memory, where the method would allow it
    refusal: Problem | None = None  # why the method asked for by name cannot be had; `name` is the nearest that can

    @property
    def writes_to_peers(self) -> bool:
        """Whether tokens go through memory that the GPUs of a node map."""
        return "symmetric" in (self.name, self.inner)


def choose_dispatcher(facts: DispatchFacts) -> DispatcherChoice:
    """The dispatcher of every MoE layer of a run."""
    if facts.pads:
        return DispatcherChoice(name="padded")
    if facts.ranks == 1:
        return DispatcherChoice(name="local")
    # First whether tokens go to nodes, then the way inside a node (or among all ranks).
    crosses, refusal = _crosses_nodes(facts)
    may_write = facts.method in ("auto", "symmetric", "hierarchical")  # to memory that other GPUs map
    obstacle = _obstacle(facts, crosses) if may_write else ""
    counts_stay = facts.sync_free >= COUNTS_STAY and facts.method != "all-to-all"
    flat: DispatcherName = "all-gather" if counts_stay or facts.method == "all-gather" else "all-to-all"
    if may_write and not obstacle:
        flat = "symmetric"
    if facts.method == "symmetric" and obstacle:
        refusal = Problem(
            "dispatch.method=symmetric", "cannot be had", got=obstacle, fix="set dispatch.method=auto, or all-to-all"
        )
    if crosses:
        return DispatcherChoice(name="hierarchical", inner=flat, obstacle=obstacle, refusal=refusal)
    return DispatcherChoice(name=flat, obstacle=obstacle, refusal=refusal)


def dispatch_facts(run: Run, node_ranks: int, obstacle: str = "") -> DispatchFacts:
    """The facts of a run; `node_ranks` and `obstacle` as in `DispatchFacts`."""
    parallel, moe = run.parallel, run.model.moe
    return DispatchFacts(
        method=run.dispatch.method,
        sync_free=run.dispatch.sync_free,
        pads=moe is not None and moe.balance.pad_to_capacity,
        ranks=parallel.expert * parallel.expert_tensor,
        node_ranks=node_ranks,
        expert_tensor=parallel.expert_tensor,
        row_bytes=plain_row_bytes(run),  # in 16 or 32 bits, also if rows travel in 8
        obstacle=obstacle,
    )


def plain_row_bytes(run: Run) -> int:
    """Bytes of a token in the compute dtype."""
    return run.model.hidden_size * (2 if run.training.precision == "bf16" else 4)


def ranks_on_a_node(ranks: int, node_devices: int) -> int:
    """Ranks of each group of `ranks` neighbours that share a node; 1 if some group is divided unequally."""
    # `penstock.parallel.axes` finds the same from the ranks themselves.
    if node_devices % ranks == 0:  # whole groups fit into a node
        return ranks
    return node_devices if ranks % node_devices == 0 else 1


def _crosses_nodes(facts: DispatchFacts) -> tuple[bool, Problem | None]:
    """Whether tokens go to other nodes first and to ranks there, and why not if that was asked for by name."""
    # All on one node, or asked for flat.
    if facts.node_ranks == facts.ranks or facts.method not in ("auto", "hierarchical"):
        return False, None
    # Each node: whole experts, or equal parts.
    divides = divides_into(facts.ranks, facts.expert_tensor, facts.node_ranks)
    if facts.method == "auto":
        return facts.node_ranks > 1 and divides, None
    if divides:
        return True, None
    return False, Problem(
        "dispatch.method=hierarchical",
        "needs nodes that hold whole experts, or equal parts of the same experts",
        got=f"{facts.node_ranks} ranks on a node and parallel.expert_tensor {facts.expert_tensor}",
        fix="set dispatch.method=auto",
    )


def _obstacle(facts: DispatchFacts, crosses: bool) -> str:
    """Reason why tokens cannot be written to the memory of the other GPUs; empty if they can."""
    if facts.obstacle:
        return facts.obstacle
    if facts.node_ranks == 1:
        return "one rank on each node"
    if facts.node_ranks < facts.ranks and not crosses:  # peers beyond the node cannot be mapped
        return f"{facts.ranks} ranks on several nodes, {facts.node_ranks} on each"
    if facts.node_ranks > MOST_PEERS:
        return f"{facts.node_ranks} ranks on a node, and {MOST_PEERS} are the most"
    if facts.row_bytes % PEER_ROW_MULTIPLE:
        return f"rows of {facts.row_bytes} bytes, no multiple of {PEER_ROW_MULTIPLE} (model.hidden_size)"
    return ""
