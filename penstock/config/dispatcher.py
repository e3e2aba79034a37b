"""The dispatcher that a run gets, from plain facts, and the rules of `dispatch`.

Runs, plans and rules all decide by `choose_dispatcher`:

padded          every expert is given its capacity
local           one rank holds all experts
hierarchical    asked for, or with auto where several ranks of each of several nodes share the experts;
one of the following then spreads tokens inside the node
symmetric       asked for or allowed by the method, and the GPUs of the node can write to each other's memory
all-gather      asked for, or the host must not read row counts
all-to-all      otherwise

The docstring of a rule is the rule as users read it. The rule that kernels must never wait at a stage of
`dispatch.sync_free` depends on the device and is applied where kernels are chosen (`penstock.models.kernels`).
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.fit import LayoutSizes, rule_of_sizes
from penstock.config.parallel import NamedDispatcher
from penstock.config.run import Run
from penstock.config.schema import Problem
from penstock.layout.grid import divides_into

STAGES = 4  # values of `dispatch.sync_free`, from 0
COUNTS_STAY = 2  # the first value of `dispatch.sync_free` at which row counts stay on the device

# Schedules that run a forward pass beside the backward pass of another micro-batch.
OVERLAPPING_SCHEDULES = ("interleaved", "dualpipe-v")


@rule_of_sizes
def sent_rows_are_counted_by_the_host(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.method` all-to-all goes with `dispatch.sync_free` 0 or 1, and with any value if it sends padding.

    The host must know how many rows to send and receive. Padding is `model.moe.balance.pad_to_capacity`.
    """
    # Padding has static shapes.
    if sizes.dispatcher != "all-to-all" or sizes.sync_free < COUNTS_STAY or sizes.model.pads:
        return None
    return Problem.from_line(
        "dispatch.sync_free cannot be had with dispatch.method all-to-all, whose row counts the host reads; "
        f"got {sizes.sync_free}; allowed: 0, 1; fix: set dispatch.method=auto"
    )


@rule_of_sizes
def padded_rows_are_sent(sizes: LayoutSizes) -> Problem | None:
    """`model.moe.balance.pad_to_capacity` goes with `dispatch.method` auto or all-to-all.

    It sends the capacity of every expert, so its shapes are static already.
    """
    # A plan says local if a rank has all experts.
    if sizes.dispatcher in ("auto", "all-to-all", "local") or not sizes.model.pads:
        return None
    return Problem.from_line(
        f"dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got {sizes.dispatcher}; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false"
    )


@rule_of_sizes
def tokens_travel_to_experts(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` needs `model.moe`, and `model.moe.shared_expert_intermediate_size` if it is shared."""
    overlap, model = sizes.overlap, sizes.model
    if overlap == "none" or (model.experts and (overlap != "shared" or model.shared_width)):
        return None
    missing = "a shared expert (model.moe.shared_expert_intermediate_size)" if model.experts else "model.moe"
    return Problem(
        "dispatch.overlap", f"needs {missing}, which the model lacks", got=overlap, fix="set dispatch.overlap=none"
    )


@rule_of_sizes
def travels_happen_once(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` does not go with moe or layer in `recompute.modules` or `offload.activations`.

    They include the dispatch, which would run again.
    """
    if sizes.overlap == "none":
        return None
    for field, names in (("recompute.modules", sizes.recompute), ("offload.activations", sizes.offloaded)):
        for name in names:
            if name in ("moe", "layer"):  # parts that include the dispatch
                return Problem.from_line(
                    f"{field} names {name}, which does not go with dispatch.overlap {sizes.overlap}; "
                    f"fix: name parts of a {name}, such as attention, or set dispatch.overlap=none"
                )
    return None


@rule_of_sizes
def pieces_have_their_weights(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` passes does not go with `parallel.shard` full.

    Other work runs between the pieces of a layer, so gathered weights of both would be held.
    """
    if sizes.overlap != "passes" or sizes.shard != "full":
        return None
    return Problem.from_line(
        "parallel.shard full does not go with dispatch.overlap passes; got full; "
        "allowed: auto, none, optimizer; fix: set parallel.shard=optimizer, or dispatch.overlap=shared"
    )


@rule_of_sizes
def passes_stand_beside_each_other(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` passes needs `parallel.pipeline` above 1 and `pipeline.schedule` interleaved or dualpipe-v."""
    if sizes.overlap != "passes" or (sizes.pp > 1 and sizes.schedule in OVERLAPPING_SCHEDULES):
        return None
    got = "parallel.pipeline 1" if sizes.pp == 1 else f"pipeline.schedule {sizes.schedule} on {sizes.pp} ranks"
    return Problem.from_line(
        f"dispatch.overlap passes needs a pipeline whose schedule has forward and backward passes side by side; "
        f"got {got}; allowed: {', '.join(OVERLAPPING_SCHEDULES)} on 2 or more; "
        f"fix: set {'dispatch.overlap=shared' if sizes.pp == 1 else 'pipeline.schedule=interleaved'}"
    )


def replicas_can_be_sent(run: Run) -> Problem | None:
    """`dispatch.balance` does not go with `model.moe.balance.pad_to_capacity`, which gives all ranks equal rows.

    Nor with `dispatch.method` hierarchical, because the weights of a replica take longer between nodes than the rows
    that it saves, nor with `float8.gather` if `float8.experts` is not none: then no rank has an expert's weights in 16
    bits, in which they are sent.
    """
    moe, none = run.model.moe, "dispatch.balance=none"
    if not balances(run):
        return None
    if moe is not None and moe.balance.pad_to_capacity:
        what, fix = "evens out rows, and model.moe.balance.pad_to_capacity gives every expert the same number", none
    elif run.dispatch.method == "hierarchical":
        what = "copies experts between GPUs of one node, and dispatch.method hierarchical is for several"
        fix = f"parallel.expert to the GPUs of one node and dispatch.method=auto, or {none}"
    elif run.float8.gather and run.float8.experts != "none":
        what = "sends weights in 16 bits, and float8.gather has those of experts in 8 bits only"
        fix = f"float8.gather=false, or {none}"
    else:
        return None
    return Problem("dispatch.balance", what, got=run.dispatch.balance, allowed="none", fix=f"set {fix}")


def balances(run: Run) -> bool:
    """Whether ranks hold replicas of each other's experts."""
    return run.dispatch.balance != "none" and run.parallel.expert > 1


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
        sync_free=run.dispatch.sync_free_stage,
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
